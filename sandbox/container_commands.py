"""Commands in a waiting container, by `podman exec` or `docker exec`."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import trio

from asyncrl.errors import SandboxError
from asyncrl.protocols import ExecResult, Outcome
from asyncrl.sandbox import cgroups
from asyncrl.sandbox.commands import Box, Stream, as_signal, let_in, outcome
from asyncrl.sandbox.engine import Engine
from asyncrl.sandbox.results import cannot_run

_READ_BYTES = 65536
_KILL_ROUNDS = 100
_STARTED = 'printf %s "$0" >&2; exec "$@"'  # tells a command that has begun from an engine that failed
# 8 and 9 are where the ends of commands are told, wherever the agent sends its own output
_SHELL = "exec 8>&1 9>&2; if command -v bash >/dev/null; then exec bash --noprofile --norc -s; else exec sh -s; fi"


class Holder:
    """A container that waits, and what runs in it."""

    def __init__(self, engine: Engine, name: str, pid: int) -> None:
        """`pid` is its first process, as it is seen from here."""
        self.name = name
        self.engine = engine
        self.is_over = False
        """Whether it is to be removed: its shell has ended, or a limit has ended everything in it."""
        self.shell: trio.Process | None = None
        self.left = (b"", b"")
        """What was read from the shell's streams beyond the end of its last command."""
        self._scope: trio.CancelScope | None = None
        self.was_stopped = False
        self.group = _group_of(pid)
        self._kept = {pid, *_children_of(pid)}

    def counters(self) -> cgroups.Counters:
        """Return what was counted so far; nothing where the engine's groups are out of sight."""
        return cgroups.Counters() if self.group is None else self.group.counters()

    def stop(self) -> None:
        """End the command that runs, as its owner's wish."""
        self.was_stopped = True
        if self._scope is not None:
            self._scope.cancel()

    def running(self) -> trio.CancelScope:
        """Return a new scope for a command, which `stop` cancels."""
        self.was_stopped = False
        self._scope = trio.CancelScope()
        return self._scope

    async def end_strays(self) -> None:
        """Kill every process of the container but those that wait. Raises SandboxError."""
        if self.group is None or self.engine.is_gvisor:
            await self.engine.call("exec", self.name, "/bin/sh", "-c", "kill -9 -1 2>/dev/null; true")
            return
        for _ in range(_KILL_ROUNDS):
            strays = [pid for pid in self._processes() if pid not in self._kept]
            if not strays:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that they do not outrun it by forking
                for pid in strays:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
            await trio.sleep(0.002)
        raise SandboxError(f"processes of the container {self.name} could not be killed")

    def _processes(self) -> list[int]:
        assert self.group is not None
        found: list[int] = []
        for path, _, files in os.walk(self.group.pids):
            if "cgroup.procs" in files:
                with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as file:
                    found += map(int, file.read().split())
        return found

    async def aclose(self) -> None:
        """Remove the container and all that runs in it. Raises SandboxError."""
        try:
            await self.engine.call("rm", "--force", "--volumes", self.name)
        finally:
            if self.shell is not None:
                if self.shell.returncode is None:
                    self.shell.kill()
                    await self.shell.wait()
                await close_streams(self.shell)


def _group_of(pid: int) -> cgroups.Group | None:
    try:
        with (
            open("/proc/self/mountinfo", encoding="utf-8") as mountinfo,
            open(f"/proc/{pid}/cgroup", encoding="utf-8") as membership,
        ):
            own = cgroups.own_groups(mountinfo.read(), membership.read())
    except OSError:
        return None
    unified = own.get("unified")
    if all(name in own for name in cgroups.CONTROLLERS):
        return cgroups.Group(version=1, memory=own["memory"], pids=own["pids"], unified=unified)
    return None if unified is None else cgroups.Group(version=2, memory=unified, pids=unified, unified=unified)


def _children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


async def run_command(holder: Holder, box: Box, argv: Sequence[str], stdin: bytes, caps: dict[str, Any]) -> ExecResult:
    """Run one command to its end, its stray children included. Raises SandboxError."""
    began = trio.current_time()
    before = holder.counters()
    mark = secrets.token_hex(16).encode()
    outputs = Stream(caps["kept_output_bytes"]), Stream(caps["kept_output_bytes"])
    words = holder.engine.command("exec", "--interactive", holder.name, "/bin/sh", "-c", _STARTED, mark.decode())
    let_in(box)
    try:
        process = await _open([*words, *argv])
    except OSError as error:
        if error.errno == errno.E2BIG:
            return cannot_run(str(error))
        raise SandboxError(f"`{words[0]}` cannot be run: {error.strerror}") from None
    reading = _Reading(process, outputs, caps["output_bytes"], mark)
    try:
        with holder.running(), trio.move_on_after(caps["wall_s"]) as deadline:
            await reading.until_end(stdin)
        ended_by = _ended_by(holder, deadline, is_too_much=reading.is_too_much)
    finally:
        with trio.CancelScope(shield=True):
            await holder.end_strays()
            if process.returncode is None:
                with trio.move_on_after(2.0):  # it ends by itself once what it waits for is gone
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await close_streams(process)
    code = as_signal(process.returncode or 0) if reading.has_started else None
    return _result(holder, box, outputs, before, ended_by, code, began)


class _Reading:
    """Takes a process's two streams, up to a bound."""

    def __init__(self, process: trio.Process, outputs: tuple[Stream, Stream], most: int, mark: bytes) -> None:
        self._process = process
        self._outputs = outputs
        self._most = most
        self._mark = mark
        self._head = b""
        self.has_started = False
        self.is_too_much = False

    async def until_end(self, stdin: bytes) -> None:
        """Return when the process has ended and its streams too, or when there was too much."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed, stdin)
            async with trio.open_nursery() as readers:
                readers.start_soon(self._take, self._process.stdout, 0, nursery.cancel_scope)
                readers.start_soon(self._take, self._process.stderr, 1, nursery.cancel_scope)
            await self._process.wait()
            nursery.cancel_scope.cancel()

    async def _feed(self, stdin: bytes) -> None:
        assert self._process.stdin is not None
        async with self._process.stdin as stream:
            try:
                await stream.send_all(stdin)
            except trio.BrokenResourceError:
                return  # nobody reads it

    async def _take(self, stream: Any, index: int, scope: trio.CancelScope) -> None:
        while data := await stream.receive_some(_READ_BYTES):
            self._add(index, bytes(data))
            if sum(one.total for one in self._outputs) > self._most:
                self.is_too_much = True
                scope.cancel()
        if index == 1 and not self.has_started:
            self._outputs[1].add(self._head)

    def _add(self, index: int, data: bytes) -> None:
        if index == 1 and not self.has_started:
            self._head += data
            before, found, data = self._head.partition(self._mark)
            if not found:
                return
            self.has_started = True
            data = before + data
        self._outputs[index].add(data)


async def run_in_shell(holder: Holder, box: Box, text: str, caps: dict[str, Any]) -> ExecResult:
    """Run text in the container's shell, which is started where there is none. Raises SandboxError."""
    began = trio.current_time()
    before = holder.counters()
    if holder.shell is None:
        words = holder.engine.command("exec", "--interactive", holder.name, "/bin/sh", "-c", _SHELL)
        let_in(box)
        try:
            holder.shell = await _open(words)
        except OSError as error:
            raise SandboxError(f"`{words[0]}` cannot be run: {error.strerror}") from None
    mark = secrets.token_hex(16)
    told = f"printf '%s %s;' {mark} \"$?\" >&8; printf '%s 0;' {mark} >&9"
    line = f"eval {shlex.quote(text)} </dev/null 8>&- 9>&-\n{told}\n"
    outputs = Stream(caps["kept_output_bytes"]), Stream(caps["kept_output_bytes"])
    conversation = _Conversation(holder, outputs, caps["output_bytes"], mark.encode())
    finished = False
    try:
        with holder.running(), trio.move_on_after(caps["wall_s"]) as deadline:
            await conversation.until_told(os.fsencode(line))
            finished = not conversation.is_too_much
        ended_by = _ended_by(holder, deadline, is_too_much=conversation.is_too_much)
    finally:
        holder.is_over = holder.is_over or not finished or conversation.code is None
        if holder.is_over:
            with trio.CancelScope(shield=True):
                await holder.end_strays()
    code = conversation.code
    if code is None and ended_by is None:  # it has exited
        code = await holder.shell.wait()
    return _result(holder, box, outputs, before, ended_by, None if code is None else as_signal(code), began)


class _Conversation:
    """One command to the shell, and its two streams up to where each says that it is over."""

    def __init__(self, holder: Holder, outputs: tuple[Stream, Stream], most: int, mark: bytes) -> None:
        self._holder = holder
        self._outputs = outputs
        self._most = most
        self._mark = mark
        self.is_too_much = False
        self.code: int | None = None

    async def until_told(self, line: bytes) -> None:
        """Return when the end was told, the shell has exited, or there was too much."""
        shell = self._holder.shell
        assert shell is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say, line)
            async with trio.open_nursery() as readers:
                readers.start_soon(self._take, shell.stdout, 0, nursery.cancel_scope)
                readers.start_soon(self._take, shell.stderr, 1, nursery.cancel_scope)
            nursery.cancel_scope.cancel()

    async def _say(self, line: bytes) -> None:
        assert self._holder.shell is not None
        assert self._holder.shell.stdin is not None
        try:
            await self._holder.shell.stdin.send_all(line)
        except trio.BrokenResourceError:
            return  # it has exited, as its streams will tell

    async def _take(self, stream: Any, index: int, scope: trio.CancelScope) -> None:
        held = self._holder.left[index]
        while True:
            before, found, after = held.partition(self._mark + b" ")
            if found and b";" in after:
                number, _, rest = after.partition(b";")
                self._add(index, before, scope)
                self._keep(index, rest)
                if index == 0:
                    self.code = int(number) if number.isdigit() else 1
                return
            if not found:  # all but what may be the beginning of a mark
                sure = max(0, len(held) - len(self._mark))
                self._add(index, held[:sure], scope)
                held = held[sure:]
            data = await stream.receive_some(_READ_BYTES)
            if not data:
                self._add(index, held, scope)
                self._keep(index, b"")
                return
            held += bytes(data)

    def _add(self, index: int, data: bytes, scope: trio.CancelScope) -> None:
        self._outputs[index].add(data)
        if sum(one.total for one in self._outputs) > self._most:
            self.is_too_much = True
            scope.cancel()

    def _keep(self, index: int, rest: bytes) -> None:
        first, second = self._holder.left
        self._holder.left = (rest, second) if index == 0 else (first, rest)


def _ended_by(holder: Holder, deadline: trio.CancelScope, *, is_too_much: bool) -> str | None:
    """Return what ended a command before it did so itself, as `outcome` takes it."""
    if is_too_much:
        return "output"
    if holder.was_stopped:
        return "closed"
    return "wall" if deadline.cancelled_caught else None


async def close_streams(process: trio.Process) -> None:
    """Close our ends of a process's pipes."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            await stream.aclose()


async def _open(words: Sequence[str]) -> trio.Process:
    pipe = subprocess.PIPE
    return await trio.lowlevel.open_process(words, stdin=pipe, stdout=pipe, stderr=pipe)


def _result(
    holder: Holder, box: Box, outputs: tuple[Stream, Stream], before: cgroups.Counters, ended_by: str | None,
    code: int | None, began: float,
) -> ExecResult:  # fmt: skip
    (stdout, cut), (stderr, cut_too) = outputs[0].result(), outputs[1].result()
    after = holder.counters()
    ended, detail = outcome(
        ended_by=ended_by, before=before, after=after, code=code, limits=box.limits, disk=box.path,
        unstarted=stderr.decode(errors="replace").strip(),
    )  # fmt: skip
    return ExecResult(
        outcome=Outcome(ended),
        exit_code=None if ended_by is not None or ended == "infrastructure" else code,
        stdout=stdout,
        stderr=stderr,
        truncated=cut or cut_too,
        output_bytes=sum(one.total for one in outputs),
        seconds=trio.current_time() - began,
        peak_memory_bytes=after.peak_memory_bytes,
        peak_pids=after.peak_pids,
        detail=detail,
    )
