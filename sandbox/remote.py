"""Sandboxes on other machines, over HTTP: the client of `server.py`.

The session's stream is the lease: when this program ends, however that comes, its connection closes and the server
closes everything it had open. When a server is lost, commands in its sandboxes are failures of infrastructure, new
sandboxes are opened on the others, and it is asked again and again until it is back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import trio

from asyncrl.errors import ConfigError, SandboxError, UnsafeFilesError
from asyncrl.protocols import BackendStatistics, SandboxLimits, Snapshot
from asyncrl.sandbox import messages
from asyncrl.sandbox.access import read_token
from asyncrl.sandbox.calls import CalledSandbox, Closable, Reply, os_errors_as_sandbox_errors, without_group
from asyncrl.sandbox.server import HEARTBEAT_S
from asyncrl.sandbox.settings import SandboxSettings

_CLOSE_GRACE_S = 30.0
_REPLY_GRACE_S = 60.0  # beyond a command's own limit: waiting for its turn, and the network
_SILENCE_S = 4 * HEARTBEAT_S  # after which a server counts as lost
_ASK_AGAIN_S = 1.0
_WAIT_FOR_SERVER_S = 60.0  # that an opening waits where no server answers
STRONG_WALLS = ("bubblewrap", "container", "container-runsc")
"""Any other that a server names has to be allowed."""


FindServer = Callable[[], Awaitable[str]]
"""Returns the URL of a server once it is known; asked again whenever the server was lost."""


class _Busy(SandboxError):  # noqa: N818 - an answer more than an error
    """The server has no place, and enough who wait for one."""


class _Server:
    """One server, and our session there."""

    def __init__(self, find: FindServer, token: str) -> None:
        self.url = ""
        """Where it was found last."""
        self._find = find
        self.session: str | None = None
        self.hello: dict[str, Any] = {}
        self.lost_because = "it has not answered yet"
        self.num_open = 0
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(_SILENCE_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def listen(self, when_live: Callable[[], None]) -> None:
        """Hold one session until the server is lost, calling `when_live` once there is one. Raises SandboxError."""
        self.url = await self._find()
        try:
            self._client.base_url = self.url
            async with self._client.stream("GET", "/v1/session") as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:200]
                    raise SandboxError(f"the sandbox server {self.url} answered {response.status_code}: {text}")
                async for line in response.aiter_lines():
                    if self.session is None:
                        self.hello = json.loads(line)
                        self.session = self.hello["session"]
                        when_live()
            raise SandboxError(f"the sandbox server {self.url} ended the session")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"the sandbox server {self.url} cannot be reached: {_said(error)}") from None
        finally:
            self.session = None

    async def request(self, operation: str, blobs: Sequence[bytes] = (), *, timeout_s: float, **header: Any) -> Reply:
        """Return the server's answer. Raises SandboxError, what the answer says, or _Busy."""
        if self.session is None:
            raise SandboxError(f"the sandbox server {self.url} is lost: {self.lost_because}")
        try:
            response = await self._client.post(
                f"/v1/{operation}",
                content=messages.encode(header, blobs),
                headers={"asyncrl-session": self.session},
                timeout=httpx.Timeout(timeout_s, pool=None),
            )
        except httpx.HTTPError as error:
            raise SandboxError(f"the sandbox server {self.url} did not answer: {_said(error)}") from None
        if response.status_code == 503:
            raise _Busy(response.text)
        if response.status_code != 200:
            raise SandboxError(f"the sandbox server {self.url} answered {response.status_code}: {response.text[:200]}")
        reply = messages.decode(response.content)
        match reply[0]:
            case {"error": "unsafe", "message": message}:
                raise UnsafeFilesError(message)
            case {"error": "sandbox", "message": message}:
                raise SandboxError(message)
            case {"error": "config", "message": message}:
                raise ConfigError(f"the sandbox server {self.url}: {message}")
            case {"error": "os", "errno": number, "message": message}:
                raise OSError(number, message)  # the constructor chooses FileNotFoundError and its like by the number
        return reply


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


class RemoteSnapshot(Closable):
    """Files that are kept at the servers where they are needed."""

    def __init__(self, num_bytes: int, num_files: int, snapshot_id: str) -> None:
        self.snapshot_id = snapshot_id
        self.num_bytes = num_bytes
        self.num_files = num_files
        self.at: dict[_Server, tuple[str | None, str]] = {}
        """Server -> (session, name there)."""
        self.files: tuple[Mapping[str, bytes], list[str]] | None = None
        """Files and which of them may be run, where they are known here and can be brought to a further server."""
        self._lock = trio.Lock()
        self._closed = False

    async def name_at(self, server: _Server) -> str:
        """Return its name at `server`, where it is brought first if need be. Raises SandboxError."""
        async with self._lock:
            if self._closed:
                raise SandboxError(f"the snapshot {self.snapshot_id} is closed")
            session, name = self.at.get(server, (None, ""))
            if session is None or session != server.session:
                if self.files is None:
                    raise SandboxError(f"the snapshot {self.snapshot_id} is not at {server.url}")
                files, executable = self.files
                session = server.session
                reply, _ = await server.request(
                    "prepare", list(files.values()), timeout_s=_REPLY_GRACE_S, paths=list(files), executable=executable
                )
                name = reply["snapshot"]
                self.at[server] = session, name
            return name

    async def aclose(self) -> None:
        """Give the files up everywhere."""
        if self._closed:
            return
        self._closed = True
        with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
            for server, (session, name) in self.at.items():
                if session == server.session:
                    with suppress(SandboxError):
                        await server.request("release", timeout_s=_CLOSE_GRACE_S, snapshot=name)


class RemoteSandbox(CalledSandbox):
    """A sandbox at a server."""

    def __init__(
        self, backend: RemoteBackend, server: _Server, name: str, sandbox_id: str, limits: SandboxLimits
    ) -> None:
        super().__init__(limits, reply_grace_s=_REPLY_GRACE_S, close_grace_s=_CLOSE_GRACE_S)
        self.sandbox_id = sandbox_id
        self.wall = f"remote:{server.hello['wall']}"
        self._backend = backend
        self._server = server
        self._session = server.session
        self._name = name

    async def _request(self, operation: str, blobs: Sequence[bytes], *, timeout_s: float, **header: Any) -> Reply:
        if self._server.session != self._session:
            raise SandboxError(f"the sandbox is closed: its server {self._server.url} was lost")
        return await self._server.request(operation, blobs, timeout_s=timeout_s, sandbox=self._name, **header)

    async def snapshot(self) -> RemoteSnapshot:
        """Return the working directory as it is now, kept at the same server."""
        async with self._lock:
            reply, _ = await self._ask("snapshot")
        made = RemoteSnapshot(reply["num_bytes"], reply["num_files"], self._backend.new_name("snapshot"))
        made.at[self._server] = self._session, reply["snapshot"]
        return made

    async def fork(self) -> RemoteSandbox:
        """Return a new sandbox at the same server, over a copy of what was changed here."""
        async with self._lock:
            return await self._backend.new_sandbox([self._server], self._limits, self._ask_for_fork)

    async def _ask_for_fork(self, server: _Server, name: str) -> Reply:
        return await self._ask("fork", new=name)

    async def aclose(self) -> None:
        """End every process and remove every trace. A server that was lost has done so already."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._end("close")
        finally:
            self._backend.give_back(self._server, self.sandbox_id)


class RemoteBackend:
    """Sandboxes of several servers."""

    def __init__(self, servers: Sequence[_Server], max_open: int) -> None:
        self._servers = servers
        self._slots = trio.CapacityLimiter(max_open)
        self._num_names = 0
        self._num_opened = 0
        self._back = trio.Event()
        self.wall = "remote"
        self.python: tuple[str, ...] = ()

    def statistics(self) -> BackendStatistics:
        """Return the present counts."""
        slots = self._slots.statistics()
        return BackendStatistics(open=slots.borrowed_tokens, opened=self._num_opened, waiting=slots.tasks_waiting)

    def new_name(self, kind: str) -> str:
        """Return a name that no other has."""
        self._num_names += 1
        return f"{kind}-{self._num_names}"

    async def prepare(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> RemoteSnapshot:
        """Return a task's files, kept at one server, and brought to others as sandboxes are opened there."""
        snapshot = RemoteSnapshot(0, 0, self.new_name("snapshot"))
        snapshot.files = dict(files), list(executable)
        server = (await self._wait_live(self._servers))[0]
        reply, _ = await server.request(
            "prepare", list(files.values()), timeout_s=_REPLY_GRACE_S, paths=list(files), executable=list(executable)
        )
        snapshot.num_bytes, snapshot.num_files = reply["num_bytes"], reply["num_files"]
        snapshot.at[server] = server.session, reply["snapshot"]
        return snapshot

    async def open(
        self,
        files: Mapping[str, bytes] | Snapshot,
        *,
        limits: SandboxLimits,
        work: str = "/task",
        places: Mapping[str, Snapshot | None] = MappingProxyType({}),
        image: str = "",
    ) -> RemoteSandbox:
        """Return a new sandbox at the server with the fewest of ours. Raises SandboxError."""
        snapshots = [one for one in (files, *places.values()) if isinstance(one, RemoteSnapshot)]
        bound = [set(one.at) for one in snapshots if one.files is None]
        servers = [server for server in self._servers if all(server in at for at in bound)]
        written = files if isinstance(files, Mapping) else {}

        async def ask(server: _Server, name: str) -> Reply:
            names: dict[str, str | None] = {}
            for path, place in places.items():
                names[path] = None if place is None else await _here(place).name_at(server)
            return await server.request(
                "open",
                list(written.values()),
                timeout_s=_REPLY_GRACE_S,
                new=name,
                paths=list(written),
                snapshot=None if isinstance(files, Mapping) else await _here(files).name_at(server),
                places=names,
                work=work,
                limits=asdict(limits),
                image=image,
            )

        return await self.new_sandbox(servers, limits, ask)

    async def new_sandbox(
        self, servers: Sequence[_Server], limits: SandboxLimits, ask: Callable[[_Server, str], Awaitable[Reply]]
    ) -> RemoteSandbox:
        """Return what `ask(server, name)` opens, asking again and again where all servers are busy.

        Raises: SandboxError.
        """
        self._num_opened += 1
        sandbox_id = self.new_name("box")
        await self._slots.acquire_on_behalf_of(sandbox_id)
        with os_errors_as_sandbox_errors("no sandbox could be opened"), ExitStack() as undo:
            undo.callback(self._slots.release_on_behalf_of, sandbox_id)
            while True:
                for server in sorted(await self._wait_live(servers), key=lambda one: one.num_open):
                    name = secrets.token_hex(8)
                    if await self._is_opened(server, name, ask):
                        undo.pop_all()
                        return RemoteSandbox(self, server, name, sandbox_id, limits)
                await trio.sleep(_ASK_AGAIN_S)

    async def _is_opened(self, server: _Server, name: str, ask: Callable[[_Server, str], Awaitable[Reply]]) -> bool:
        """Return whether `ask` opened a sandbox at `server`; False where that is busy. Raises what it raises."""
        server.num_open += 1
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._let_go, server, name)
            try:
                await ask(server, name)
            except _Busy:
                undo.pop_all()
                server.num_open -= 1
                return False
            undo.pop_all()
        return True

    async def _let_go(self, server: _Server, name: str) -> None:
        """Close what may have been opened, its answer lost."""
        server.num_open -= 1
        with trio.move_on_after(_CLOSE_GRACE_S, shield=True), suppress(SandboxError):
            await server.request("close", timeout_s=_CLOSE_GRACE_S, sandbox=name)

    def give_back(self, server: _Server, sandbox_id: str) -> None:
        """Count a sandbox as closed."""
        server.num_open -= 1
        self._slots.release_on_behalf_of(sandbox_id)

    async def _wait_live(self, servers: Sequence[_Server]) -> list[_Server]:
        """Return those of `servers` that answer. Raises SandboxError where none does for a while."""
        with trio.move_on_after(_WAIT_FOR_SERVER_S):
            while True:
                live = [server for server in servers if server.session is not None]
                if live:
                    return live
                await self._back.wait()
        raise SandboxError("; ".join(server.lost_because for server in servers) or "no server has this snapshot")

    async def keep(self, server: _Server, *, task_status: trio.TaskStatus[None]) -> None:
        """Hold a session with `server`, a new one whenever one is lost. Raises SandboxError where the first fails."""
        has_answered = False

        def answered() -> None:
            nonlocal has_answered
            if not has_answered:
                task_status.started()
            has_answered = True
            self._back.set()
            self._back = trio.Event()

        while True:
            try:
                await server.listen(answered)
            except SandboxError as error:
                server.lost_because = str(error)
                if not has_answered:
                    raise
            await trio.sleep(_ASK_AGAIN_S)

    def settle(self, *, allow_weaker: bool) -> None:
        """Take over what the servers said of themselves. Raises SandboxError where they do not go together."""
        said = {server.url: (server.hello["wall"], tuple(server.hello["python"])) for server in self._servers}
        if len(set(said.values())) != 1:
            raise SandboxError(f"the sandbox servers must have one wall and one Python, they have {said}")
        ((wall, python),) = set(said.values())
        if wall not in STRONG_WALLS and not allow_weaker:
            raise SandboxError(
                f"the sandbox servers' wall is {wall!r}, a weaker one; to take it set allow_weaker = true in [sandbox]"
            )
        self.wall, self.python = f"remote:{wall}", python


@asynccontextmanager
async def open_remote(settings: SandboxSettings, *, directory: Path) -> AsyncIterator[RemoteBackend]:
    """Begin a session with every server of `settings.urls`, and yield their sandboxes; leaving closes all.

    Raises: ConfigError for the token's file, SandboxError where a server does not answer.
    """
    token = read_token(settings.token_file)
    opening = open_servers(dict.fromkeys(settings.urls, token), settings)
    async with opening as backend:
        yield backend


def open_servers(tokens: Mapping[str, str], settings: SandboxSettings) -> AbstractAsyncContextManager[RemoteBackend]:
    """Return what begins a session with every server, by URL and token, and yields their sandboxes.

    Raises: SandboxError where a server does not answer.
    """
    return _open([_Server(_at(url), token) for url, token in tokens.items()], settings)


def _at(url: str) -> FindServer:
    async def find() -> str:
        return url

    return find


def open_remote_at(
    places: Sequence[FindServer], settings: SandboxSettings, *, token: str
) -> AbstractAsyncContextManager[RemoteBackend]:
    """Return what begins a session with a server at each of `places`, which may move, and yields their sandboxes.

    Raises: SandboxError where a server does not answer.
    """
    return _open([_Server(find, token) for find in places], settings)


@asynccontextmanager
async def _open(servers: Sequence[_Server], settings: SandboxSettings) -> AsyncIterator[RemoteBackend]:
    backend = RemoteBackend(servers, settings.max_open)
    try:
        with without_group():
            async with trio.open_nursery() as nursery:  # holds only the tasks that listen
                with trio.fail_after(_SILENCE_S):
                    for server in servers:
                        await nursery.start(backend.keep, server)
                backend.settle(allow_weaker=settings.allow_weaker)
                yield backend
                nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
            for server in servers:
                await server.aclose()


def _here(snapshot: Snapshot) -> RemoteSnapshot:
    if not isinstance(snapshot, RemoteSnapshot):
        raise SandboxError("the snapshot is another backend's")
    return snapshot
