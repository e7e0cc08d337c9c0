"""What a tool call does in an agent's sandbox, and what the agent is shown of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.coding.places import exported
from asyncrl.coding.tools import ToolCall
from asyncrl.errors import SandboxError, UnsafeFilesError
from asyncrl.protocols import ExecResult, Outcome, Sandbox

_BYTES_PER_CHARACTER = 4  # of UTF-8 at most: this many bytes kept of either end hold every character that is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came of one call."""

    shown: str
    """What the agent reads."""
    done: bool = True
    """False where the tool could not do what was asked; a command that fails has still been run."""
    command: ExecResult | None = None
    """How the command ended, where one was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUser:
    """Carries out an agent's calls in its sandbox."""

    sandbox: Sandbox
    variables: Mapping[str, str]
    """Environment variables of the shell besides the sandbox's own."""
    shown_characters: int
    """Of an output, its first and last half; what lies between is left out, and its absence stated."""

    async def use(self, call: ToolCall, *, wall_s: float) -> ToolResult:
        """Return what a call of any tool but `submit` did; a command may take `wall_s` seconds.

        Raises: SandboxError where the sandbox failed, which is not the agent's doing.
        """
        if call.name == "run":
            return await self._run(call.arguments["command"], wall_s)
        path = call.arguments["path"]
        try:
            if call.name == "read":
                return ToolResult(
                    shown=shorten(_text(await self.sandbox.read(path)), self.shown_characters) or "(the file is empty)"
                )
            if call.name == "write":
                data = call.arguments["content"].encode()
                await self.sandbox.write(path, data)
                return ToolResult(shown=f"wrote {len(data)} bytes to {path}")
            return await self._edit(path, call.arguments["old"].encode(), call.arguments["new"].encode())
        except UnsafeFilesError as error:
            return _refused(str(error))
        except FileNotFoundError:
            return _refused(f"there is no file {path!r}")
        except OSError as error:  # a directory, a full disk, a name that is too long
            return _refused(f"{path!r}: {os.strerror(error.errno) if error.errno else error}")

    async def _run(self, command: str, wall_s: float) -> ToolResult:
        keep = _BYTES_PER_CHARACTER * self.shown_characters
        result = await self.sandbox.shell(self._prelude() + command, wall_s=wall_s, kept_output_bytes=keep)
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise SandboxError(f"a command could not be run: {result.detail}")
        if result.outcome is Outcome.OK:
            ended = f"exit code {result.exit_code}"
        elif result.outcome is Outcome.WALL:
            ended = f"ended after {wall_s:g} s"
        else:
            ended = f"ended by the limit on {result.outcome}"
        if result.detail:
            ended += f" ({result.detail})"
        output = shorten(_text(result.stdout + result.stderr), self.shown_characters, num_bytes=result.output_bytes)
        return ToolResult(shown=f"{ended}\n{output}" if output else ended, command=result)

    async def _edit(self, path: str, old: bytes, new: bytes) -> ToolResult:
        data = await self.sandbox.read(path)
        place = data.find(old)
        if place < 0:
            return _refused(f"the old text is not in {path!r}")
        if data.find(old, place + 1) >= 0:
            return _refused(f"the old text is in {path!r} more than once")
        await self.sandbox.write(path, data[:place] + new + data[place + len(old) :])
        return ToolResult(shown=f"edited {path}")

    def _prelude(self) -> str:
        """Return shell text that sets the variables once in each shell, and leaves them to the agent from then on."""
        if not self.variables:
            return ""
        return f'[ -n "${{ASYNCRL_SHELL-}}" ] || {{ ASYNCRL_SHELL=1\n{exported(self.variables)}}}; '


def shorten(text: str, shown_characters: int, *, num_bytes: int | None = None) -> str:
    """Return head and tail of a text that is too long, with what is left out stated."""
    if len(text) <= shown_characters:
        return text
    half = shown_characters // 2
    whole = f"{num_bytes} bytes" if num_bytes is not None else f"{len(text)} characters"
    tail = text[len(text) - (shown_characters - half) :]
    return f"{text[:half]}\n[... the middle is left out; {whole} in all ...]\n{tail}"


def _text(data: bytes) -> str:
    r"""Return bytes as text; those that are not UTF-8 are shown as \xNN."""
    return data.decode(errors="backslashreplace")


def _refused(reason: str) -> ToolResult:
    return ToolResult(shown=f"error: {reason}", done=False)
