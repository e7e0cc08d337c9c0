"""The sandbox protocol over HTTP: an ASGI application over any backend. `remote.py` is the client.

`GET /v1/session` is answered by a stream that goes on as long as the client listens: its first line names the session,
the wall and Python; an empty line follows every few seconds. When the stream breaks, however that came, all sandboxes
and snapshots of the session are closed. `POST /v1/OPERATION` takes and returns one frame (see messages.py) and names
its session. A web framework was rejected: there are two routes, and both bodies are frames.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from asyncrl.errors import ConfigError, SandboxError, UnsafeFilesError
from asyncrl.protocols import ExecResult, Sandbox, SandboxBackend, SandboxLimits, Snapshot
from asyncrl.sandbox import messages

HEARTBEAT_S = 5.0
_OPEN_WAIT_S = 20.0  # that an opening waits for a place before the client is told to ask again
_CLOSE_GRACE_S = 30.0
_MAX_BODY_BYTES = 2**28
_RETRY_AFTER_S = 1

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_Answer = tuple[dict[str, Any], list[bytes]]


class _RefusedError(Exception):
    """A request that is answered by an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Session:
    """What one client has open."""

    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)

    async def aclose(self) -> None:
        for holder in (self.sandboxes, self.snapshots):
            async with trio.open_nursery() as nursery:
                for one in holder.values():
                    nursery.start_soon(one.aclose)
            holder.clear()


class SandboxServer:
    """An ASGI application that serves one backend to clients that know the token."""

    def __init__(self, backend: SandboxBackend, *, token: str, max_waiting: int = 64) -> None:
        """At most `max_waiting` requests wait for a place; others are told at once to come back."""
        self._backend = backend
        self._token = token.encode()
        self._max_waiting = max_waiting
        self._sessions: dict[str, _Session] = {}
        self._num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # which tells the HTTP server that only HTTP is spoken
        try:
            headers = dict(scope["headers"])
            if not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._token):
                raise _RefusedError(401, "the token is missing or wrong")
            match scope["method"], scope["path"]:
                case "GET", "/v1/session":
                    await self._serve_session(receive, send)
                case "POST", path if path.startswith("/v1/"):
                    session = self._sessions.get(headers.get(b"asyncrl-session", b"").decode(errors="replace"))
                    await self._serve_operation(session, path.removeprefix("/v1/"), receive, send)
                case _:
                    raise _RefusedError(404, "there are GET /v1/session and POST /v1/OPERATION")
        except _RefusedError as refused:
            await _respond(send, refused.status, str(refused).encode())

    # --- sessions ---------------------------------------------------------------------------------------------

    async def _serve_session(self, receive: Receive, send: Send) -> None:
        name = secrets.token_hex(16)
        session = self._sessions[name] = _Session()
        hello = {"session": name, "wall": self._backend.wall, "python": self._backend.python}
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(hello).encode() + b"\n", "more_body": True})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                while True:
                    await trio.sleep(HEARTBEAT_S)
                    await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        finally:
            del self._sessions[name]
            with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
                await session.aclose()

    # --- operations -------------------------------------------------------------------------------------------

    async def _serve_operation(self, session: _Session | None, name: str, receive: Receive, send: Send) -> None:
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise _RefusedError(404, f"there is no operation {name!r}")
        if session is None:
            raise _RefusedError(410, "the session is over, and its sandboxes with it")
        frame = await _read_body(receive)
        try:
            if messages.frame_bytes(frame) != len(frame):
                raise ValueError("the body is no frame")
            header, blobs = messages.decode(frame)
        except ValueError as error:
            raise _RefusedError(400, str(error)) from None
        answer: _Answer | None = None
        refused: _RefusedError | None = None
        async with trio.open_nursery() as nursery:
            # a client that goes away has cancelled: its command must not go on
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            try:
                answer = await self._answer(operation, session, header, blobs)
            except _RefusedError as error:  # here, and not in a group of exceptions
                refused = error
            nursery.cancel_scope.cancel()
        if refused is not None:
            raise refused
        if answer is not None:
            await _respond(send, 200, messages.encode(*answer))

    async def _answer(
        self, operation: _Operation, session: _Session, header: dict[str, Any], blobs: list[bytes]
    ) -> _Answer:
        try:
            return await operation(self, session, header, blobs)
        except UnsafeFilesError as error:
            return {"error": "unsafe", "message": str(error)}, []
        except SandboxError as error:
            return {"error": "sandbox", "message": str(error)}, []
        except ConfigError as error:
            return {"error": "config", "message": str(error)}, []
        except OSError as error:
            return {"error": "os", "errno": error.errno or 0, "message": error.strerror or str(error)}, []
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _RefusedError(400, f"{type(error).__name__}: {error}") from None

    async def in_a_place(self, session: _Session, name: str, opening: Callable[[], Awaitable[Sandbox]]) -> _Answer:
        """Keep what `opening` opens under `name`, as soon as there is a place. Raises _RefusedError where none is."""
        if self._num_waiting >= self._max_waiting:
            raise _RefusedError(503, f"{self._num_waiting} requests wait for a sandbox already")
        self._num_waiting += 1
        sandbox = None
        try:
            with trio.move_on_after(_OPEN_WAIT_S):
                sandbox = await opening()
        finally:
            self._num_waiting -= 1
        if sandbox is None:
            raise _RefusedError(503, "no sandbox became free")
        if not any(session is one for one in self._sessions.values()):
            await sandbox.aclose()
            raise _RefusedError(410, "the session is over, and its sandboxes with it")
        session.sandboxes[name] = sandbox
        return {}, []

    async def open(self, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
        """Open a sandbox."""
        files: Mapping[str, bytes] | Snapshot = dict(zip(header["paths"], blobs, strict=True))
        if header["snapshot"] is not None:
            files = _snapshot(session, header["snapshot"])
        places = {path: None if name is None else _snapshot(session, name) for path, name in header["places"].items()}
        limits = SandboxLimits(**header["limits"])
        work, image = header["work"], header["image"]
        return await self.in_a_place(
            session,
            header["new"],
            lambda: self._backend.open(files, limits=limits, work=work, places=places, image=image),
        )

    async def prepare(self, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
        """Prepare a task's files."""
        files = dict(zip(header["paths"], blobs, strict=True))
        return _keep(session, await self._backend.prepare(files, executable=header["executable"]))


_Operation = Callable[[SandboxServer, _Session, dict[str, Any], list[bytes]], Awaitable[_Answer]]


def _keep(session: _Session, snapshot: Snapshot) -> _Answer:
    name = secrets.token_hex(8)
    session.snapshots[name] = snapshot
    return {"snapshot": name, "num_bytes": snapshot.num_bytes, "num_files": snapshot.num_files}, []


def _snapshot(session: _Session, name: str) -> Snapshot:
    try:
        return session.snapshots[name]
    except KeyError:
        raise SandboxError(f"the snapshot {name} is closed") from None


def _sandbox(session: _Session, header: dict[str, Any]) -> Sandbox:
    try:
        return session.sandboxes[header["sandbox"]]
    except KeyError:
        raise SandboxError(f"the sandbox {header['sandbox']} is closed") from None


def _result(result: ExecResult) -> _Answer:
    header = asdict(result)
    return header, [header.pop("stdout"), header.pop("stderr")]


async def _exec(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    result = await _sandbox(session, header).exec(header["argv"], stdin=blobs[0], **header["caps"])
    return _result(result)


async def _shell(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    return _result(await _sandbox(session, header).shell(header["text"], **header["caps"]))


async def _read(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    return {}, [await _sandbox(session, header).read(header["path"], max_bytes=header["max_bytes"])]


async def _write(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    await _sandbox(session, header).write(header["path"], blobs[0], executable=header["executable"])
    return {}, []


async def _list(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    return {"names": list(await _sandbox(session, header).list(header["path"]))}, []


async def _walk(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    entries = await _sandbox(session, header).walk(header["path"], max_entries=header["max_entries"])
    return {"entries": [(entry.path, entry.kind, entry.num_bytes) for entry in entries]}, []


async def _make_snapshot(
    server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]
) -> _Answer:
    return _keep(session, await _sandbox(session, header).snapshot())


async def _fork(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    return await server.in_a_place(session, header["new"], _sandbox(session, header).fork)


async def _kill(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    await _sandbox(session, header).kill()
    return {}, []


async def _close(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    sandbox = session.sandboxes.pop(header["sandbox"], None)
    if sandbox is not None:
        await sandbox.aclose()
    return {}, []


async def _release(server: SandboxServer, session: _Session, header: dict[str, Any], blobs: list[bytes]) -> _Answer:
    snapshot = session.snapshots.pop(header["snapshot"], None)
    if snapshot is not None:
        await snapshot.aclose()
    return {}, []


_OPERATIONS: Mapping[str, _Operation] = {
    "open": SandboxServer.open, "prepare": SandboxServer.prepare, "exec": _exec, "shell": _shell, "read": _read,
    "write": _write, "list": _list, "walk": _walk, "snapshot": _make_snapshot, "fork": _fork, "kill": _kill,
    "close": _close, "release": _release,
}  # fmt: skip


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _RefusedError(400, "the request broke off")
        body += event.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise _RefusedError(413, f"a request may have {_MAX_BODY_BYTES} bytes")
        if not event.get("more_body", False):
            return bytes(body)


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"%d" % _RETRY_AFTER_S))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
