"""Requests from the trio program to its launcher, and their replies."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from asyncrl.errors import SandboxError, UnsafeFilesError
from asyncrl.sandbox import messages
from asyncrl.sandbox.calls import Reply

_READ_BYTES = 65536
NO_NAMESPACES = (
    "user namespaces are not to be had: allow them (kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0; "
    "on Ubuntu 23.10 and later kernel.apparmor_restrict_unprivileged_userns=0; in a container, its seccomp profile)"
)


def _error(reply: Mapping[str, Any]) -> Exception:
    message = reply["message"]
    match reply["error"]:
        case "os" if reply["errno"] == errno.ENOENT:
            return FileNotFoundError(errno.ENOENT, message)
        case "os":
            return OSError(reply["errno"], message)
        case "cgroups":
            return SandboxError(
                f"{message}; or set allow_weaker = true in [sandbox] to run with limits per process only"
            )
        case "namespaces":
            return SandboxError(f"{NO_NAMESPACES}; the system said: {message}")
        case "unsafe":
            return UnsafeFilesError(message)
        case "request":
            return ValueError(message)
        case _:
            return SandboxError(message)


class Channel:
    """Requests to the launcher and their replies, which may come in any order."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        # no buffer: a frame is taken by the writer whole, so that cancelling its sender never leaves half a frame
        self._frames, self._frames_taken = trio.open_memory_channel[bytes](0)
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[trio.Event, list[Reply]]] = {}
        self._ended = False

    async def serve_sends(self) -> None:
        """Write requests until the launcher is gone."""
        try:
            async for frame in self._frames_taken:
                await self._stream.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end()

    async def serve_replies(self) -> None:
        """Deliver replies until the launcher has closed its end."""
        buffer = bytearray()
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                buffer += data
                while (length := messages.frame_bytes(buffer)) is not None and len(buffer) >= length:
                    header, blobs = messages.decode(buffer[:length])
                    del buffer[:length]
                    entry = self._pending.pop(header.pop("id"), None)
                    if entry is not None:  # else its caller was cancelled
                        entry[1].append((header, blobs))
                        entry[0].set()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._frames_taken.close()
        for event, _ in self._pending.values():
            event.set()

    async def request(self, operation: str, blobs: Sequence[bytes] = (), *, timeout_s: float, **header: Any) -> Reply:
        """Return the launcher's reply.

        Raises: SandboxError when it did not answer in time or is gone, and what the reply says.
        """
        number = next(self._numbers)
        event = trio.Event()
        answer: list[Reply] = []
        if self._ended:
            raise SandboxError("the launcher of the sandboxes is gone")
        self._pending[number] = event, answer
        try:
            with trio.fail_after(timeout_s):
                await self._frames.send(messages.encode({"op": operation, "id": number, **header}, blobs))
                await event.wait()
        except trio.TooSlowError:
            raise SandboxError(f"the launcher did not answer {operation!r} within {timeout_s:.0f} s") from None
        except trio.BrokenResourceError:
            raise SandboxError("the launcher of the sandboxes is gone") from None
        finally:
            self._pending.pop(number, None)
        if not answer:
            raise SandboxError("the launcher of the sandboxes died")
        if "error" in answer[0][0]:
            raise _error(answer[0][0])
        return answer[0]
