"""What the server of Atropos's contract takes in and gives out, beside the original server in the same call.

Both are processes of their own, asked over the loopback address by one client that has all its bodies ready, as an
environment sends them (gzip). Rounds alternate, so that a busy machine slows both. Keys of the report: `sequences`,
`tokens`, `connections`, `groups` (of a round), `body_bytes` and `packed_bytes` of a group, and for `asyncrl` and, where
it was asked, `original`: `groups_per_second` of each round, `cpu_seconds_per_group` that the server took for them, and
`batch_seconds` of each batch of 64 sequences. `ratios` holds the medians' quotients, each above 1 where asyncrl is
ahead, and `goals` whether the promised one is kept. Where others keep the machine busy, the seconds of CPU say more.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h11
import trio
from rich.table import Table

from asyncrl.bench.goals import Goal
from asyncrl.children import last_lines, start_child
from asyncrl.errors import ConfigError, EnvironmentFault

GOAL = Goal(name="groups_per_second", words="times the original server's groups a second", limit=3.0, is_least=True)
_START_S = 60.0  # for a server to answer
_BATCH = 64  # sequences
_VOCABULARY = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposBench:
    """How much is posted."""

    sequences: int = 8
    """Of a group."""
    tokens: int = 2048
    """Of a sequence."""
    groups: int = 48
    """Of a round; whole batches of 64 sequences are taken out again."""
    connections: int = 4
    rounds: int = 3
    against: str = ""
    """A Python that has atroposlib 0.4.0; empty measures asyncrl's server alone."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        for name in ("sequences", "tokens", "groups", "connections", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be >= 1, got {getattr(self, name)}")
        if self.sequences > _BATCH:
            raise ConfigError(f"--sequences must be at most {_BATCH}, the batch's, got {self.sequences}")
        if self.against and not Path(self.against).is_file():
            raise ConfigError(f"--against: there is no Python {self.against}")


@dataclass(slots=True)
class _Figures:
    groups_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_group: list[float] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)


def bench_atropos(bench: AtroposBench) -> dict[str, Any]:
    """Return the report. Raises: EnvironmentFault where a server does not start, with its last lines."""
    return trio.run(_bench, bench)


async def _bench(bench: AtroposBench) -> dict[str, Any]:
    rng = random.Random(0)
    bodies = [_body(bench, rng) for _ in range(bench.groups * bench.rounds)]
    packed = [gzip.compress(body) for body in bodies]
    figures = {"asyncrl": _Figures()}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        ours = [sys.executable, "-m", "asyncrl", "serve", "atropos", "--directory", f"{scratch}/queue", "--port"]
        theirs = [bench.against, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port"]
        async with _server("asyncrl", ours, Path(scratch)) as our_server:
            if bench.against:
                figures["original"] = _Figures()
                async with _server("original", theirs, Path(scratch)) as their_server:
                    await _rounds(bench, packed, figures, {"asyncrl": our_server, "original": their_server})
            else:
                await _rounds(bench, packed, figures, {"asyncrl": our_server})
    report: dict[str, Any] = {
        "sequences": bench.sequences,
        "tokens": bench.tokens,
        "connections": bench.connections,
        "groups": bench.groups,
        "body_bytes": statistics.median(map(len, bodies)),
        "packed_bytes": statistics.median(map(len, packed)),
        **{name: asdict(found) for name, found in figures.items()},
    }
    if bench.against:
        ours_found, theirs_found = figures["asyncrl"], figures["original"]
        report["ratios"] = {
            "groups_per_second": _ratio(ours_found.groups_per_second, theirs_found.groups_per_second),
            "cpu_per_group": _ratio(theirs_found.cpu_seconds_per_group, ours_found.cpu_seconds_per_group),
            "batch_seconds": _ratio(theirs_found.batch_seconds, ours_found.batch_seconds),
        }
        report["goals"] = [GOAL.report(report["ratios"][GOAL.name])]
    return report


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(above) / statistics.median(below) if above and below else float("nan")


async def _rounds(
    bench: AtroposBench, packed: Sequence[bytes], figures: dict[str, _Figures], servers: dict[str, _Server]
) -> None:
    said = {
        "wandb_group": "", "wandb_project": "", "batch_size": _BATCH, "max_token_len": 0, "checkpoint_dir": "",
        "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1,
    }  # fmt: skip
    environment = {"max_token_length": bench.tokens, "desired_name": "bench", "weight": 1.0}
    for server in servers.values():
        async with _Client.opened(server.port) as client:
            await client.ask("POST", "/register", json.dumps(said).encode())
            await client.ask("GET", "/batch")
            joining = {**environment, "group_size": bench.sequences}
            await client.ask("POST", "/register-env", json.dumps(joining).encode())
    for number in range(bench.rounds):
        bodies = packed[number * bench.groups : (number + 1) * bench.groups]
        for name, server in servers.items():
            await _round(bench, bodies, server, figures[name])


async def _round(bench: AtroposBench, bodies: Sequence[bytes], server: _Server, figures: _Figures) -> None:
    """Post a round's groups, then take the batches that they make."""
    left = iter(bodies)

    async def post() -> None:
        async with _Client.opened(server.port) as client:
            for body in left:
                await client.ask("POST", "/scored_data", body, packed=True)

    started, cpu = time.perf_counter(), server.cpu_seconds()
    async with trio.open_nursery() as nursery:
        for _ in range(bench.connections):
            nursery.start_soon(post)
    figures.groups_per_second.append(len(bodies) / (time.perf_counter() - started))
    figures.cpu_seconds_per_group.append((server.cpu_seconds() - cpu) / len(bodies))
    async with _Client.opened(server.port) as client:
        while True:
            started = time.perf_counter()
            answer = await client.ask("GET", "/batch")
            seconds = time.perf_counter() - started
            if answer[:20].replace(b" ", b"").startswith(b'{"batch":null'):
                return
            figures.batch_seconds.append(seconds)


@dataclass(frozen=True, slots=True)
class _Server:
    port: int
    pid: int
    """Of its keeper, whose child it is."""

    def cpu_seconds(self) -> float:
        """Return what all processes below the keeper have burnt."""
        found, ticks = [self.pid], 0
        while found:
            pid = found.pop()
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="ascii").split())
            numbers = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(numbers[11]) + int(numbers[12])
        return ticks / os.sysconf("SC_CLK_TCK")


class _Client:
    """One connection: one request after the other."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._h11 = h11.Connection(h11.CLIENT)

    @staticmethod
    @asynccontextmanager
    async def opened(port: int) -> AsyncIterator[_Client]:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            yield _Client(stream)

    async def ask(self, method: str, path: str, body: bytes = b"", *, packed: bool = False) -> bytes:
        """Return the body of an answer, which must be 200."""
        headers = [("Host", "bench"), ("Content-Length", str(len(body))), ("Content-Type", "application/json")]
        headers += [("Content-Encoding", "gzip")] if packed else []
        for event in (h11.Request(method=method, target=path, headers=headers), h11.Data(data=body)):
            await self._stream.send_all(self._h11.send(event) or b"")
        await self._stream.send_all(self._h11.send(h11.EndOfMessage()) or b"")
        found = b"".join([part async for part in self._parts()])
        self._h11.start_next_cycle()
        return found

    async def _parts(self) -> AsyncIterator[bytes]:
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                self._h11.receive_data(await self._stream.receive_some(2**20))
            elif isinstance(event, h11.Response):
                if event.status_code != 200:
                    raise EnvironmentFault(f"the server answered {event.status_code}")
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return


@asynccontextmanager
async def _server(name: str, argv: Sequence[str], directory: Path) -> AsyncIterator[_Server]:
    """Start a server on a free port, and yield it when it answers. Raises: EnvironmentFault."""
    log = directory / f"{name}.log"
    with _free_port() as port:
        pass
    async with (
        start_child(name, [*argv, str(port)], log_path=log, grace_s=5.0) as child,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(child.fail_on_exit, EnvironmentFault)
        with trio.move_on_after(_START_S) as patience:
            while not await _answers(port):  # noqa: ASYNC110 - another process says nothing when it begins to listen
                await trio.sleep(0.1)
        if patience.cancelled_caught:
            raise EnvironmentFault(f"the {name} server did not answer in {_START_S:g} s: {last_lines(log, 5)}")
        yield _Server(port, child.pid)
        nursery.cancel_scope.cancel()


async def _answers(port: int) -> bool:
    try:
        async with _Client.opened(port) as client:
            await client.ask("GET", "/info")
    except OSError:
        return False
    return True


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


def _body(bench: AtroposBench, rng: random.Random) -> bytes:
    """Return a group as an environment of Atropos writes it."""
    tokens = [[rng.randrange(_VOCABULARY) for _ in range(bench.tokens)] for _ in range(bench.sequences)]
    start = bench.tokens // 4
    group = {
        "tokens": tokens,
        "masks": [[-100] * start + row[start:] for row in tokens],
        "scores": [rng.random() for _ in tokens],
        "inference_logprobs": [[1.0] * start + [-rng.random() for _ in row[start:]] for row in tokens],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": None,
        "env_id": 0,
    }
    return json.dumps(group).encode()


def table(report: dict[str, Any]) -> Table:
    """Return what a person wants to see of a report."""
    title = f"groups of {report['sequences']} x {report['tokens']} tokens, {report['packed_bytes'] / 1e3:.0f} kB packed"
    shown = Table(title=title)
    for column in ("server", "groups a second", "ms of CPU a group", "seconds a batch"):
        shown.add_column(column)
    for name in ("asyncrl", "original"):
        if name in report:
            waits = report[name]["batch_seconds"]
            batch = f"{statistics.median(waits):.3f}" if waits else "none"
            speed = statistics.median(report[name]["groups_per_second"])
            cpu = statistics.median(report[name]["cpu_seconds_per_group"])
            shown.add_row(name, f"{speed:.1f}", f"{1000 * cpu:.1f}", batch)
    return shown
