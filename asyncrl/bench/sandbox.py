"""What sandboxes cost, beside plain child processes in the same call.

Keys of the report, times in milliseconds (median and 95th percentile):

    wall                        which wall was measured
    bare.true, bare.python      a plain child process: /bin/true, and Python doing nothing
    cold.true, cold.python      the same in a new sandbox each: opened, run, closed
    cold.*.above_bare_ms        difference of the medians
    cold.*.times_bare           ratio of the medians
    one_shot                    /bin/true in an open sandbox, as a command of its own
    shell                       /bin/true in an open sandbox's shell
    fork                        of a sandbox over a task of 20 files, one of which was changed
    prepared                    opening a sandbox over a prepared task of 20 files
    judge                       one verdict of four calls by the JSON judge, in a sandbox of its own
    starts[]                    workers, and commands in new sandboxes per second by all of them
    together                    sandboxes open at once with a shell in each, and the bytes that they take
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.table import Table

from asyncrl.protocols import Outcome, Sandbox, SandboxBackend, SandboxLimits
from asyncrl.sandbox import Call, SandboxSettings, open_backend, run_calls

_WORKERS = 1, 2, 8, 32
_FILES = {f"package/module_{number}.py": b"x = 1\n" * 100 for number in range(20)}
_SOURCE = "def add(a, b):\n    return a + b\n"
_CALLS = [Call(arguments=(number, 1), expected=number + 1) for number in range(4)]
_LIMITS = SandboxLimits(memory_bytes=64 * 2**20)


def bench_sandbox(settings: SandboxSettings, *, rounds: int, together: int) -> dict[str, Any]:
    """Return the figures. Raises SandboxError, ConfigError."""
    return trio.run(partial(_bench, settings, rounds=rounds, together=together))


async def _bench(settings: SandboxSettings, *, rounds: int, together: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as directory:
        async with open_backend(settings, directory=directory) as backend:
            quiet = [*backend.python, "-c", "pass"]
            report: dict[str, Any] = {"wall": backend.wall, "bare": {}, "cold": {}}
            for name, argv in (("true", ["/bin/true"]), ("python", quiet)):
                bare, cold = await _in_turn(
                    partial(_bare, argv), partial(_cold, backend, argv), rounds=rounds
                )  # so that what else runs on the machine meets both
                report["bare"][name] = bare
                report["cold"][name] = {
                    **cold,
                    "above_bare_ms": cold["median_ms"] - bare["median_ms"],
                    "times_bare": cold["median_ms"] / bare["median_ms"],
                }
            report |= await _open_sandbox(backend, rounds)
            report["judge"] = await _timed(partial(run_calls, backend, _SOURCE, "add", _CALLS, limits=_LIMITS), rounds)
            report["starts"] = [await _starts(backend, workers, rounds) for workers in _WORKERS]
            report["together"] = await _together(backend, together, Path(directory))
            return report


Action = Callable[[], Awaitable[object]]


async def _timed(action: Action, rounds: int) -> dict[str, float]:
    (found,) = await _in_turn(action, rounds=rounds)
    return found


async def _in_turn(*actions: Action, rounds: int) -> list[dict[str, float]]:
    """Return median and 95th percentile of each action's time, taken in turn; the first of each is not counted."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds + 1):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            await action()
            taken.append(1000 * (time.perf_counter() - start))
    return [_summary(taken[1:]) for taken in times]


def _summary(times_ms: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(times_ms), "p95_ms": sorted(times_ms)[int(0.95 * len(times_ms))]}


async def _bare(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)  # noqa: ASYNC221 - it is measured


async def _cold(backend: SandboxBackend, argv: Sequence[str]) -> None:
    async with await backend.open({}, limits=_LIMITS) as sandbox:
        await _run(sandbox, argv)


async def _run(sandbox: Sandbox, argv: Sequence[str]) -> None:
    result = await sandbox.exec(argv)
    assert (result.outcome, result.exit_code) == (Outcome.OK, 0), result


async def _shell(sandbox: Sandbox) -> None:
    result = await sandbox.shell("/bin/true")
    assert (result.outcome, result.exit_code) == (Outcome.OK, 0), result


async def _open_sandbox(backend: SandboxBackend, rounds: int) -> dict[str, Any]:
    """Return what happens in a sandbox that is open, and beside it."""
    opened: list[Sandbox] = []

    async def fork() -> None:
        opened.append(await sandbox.fork())

    async def over_prepared() -> None:
        opened.append(await backend.open(task, limits=_LIMITS))

    async def closing(action: Action) -> dict[str, float]:
        """Time an action that opens, and close what it opened outside of the time."""
        taken = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            await action()
            taken.append(1000 * (time.perf_counter() - start))
            await opened.pop().aclose()
        return _summary(taken[1:])

    async with await backend.prepare(_FILES) as task, await backend.open(task, limits=_LIMITS) as sandbox:
        one_shot, shell = await _in_turn(partial(_run, sandbox, ["/bin/true"]), partial(_shell, sandbox), rounds=rounds)
        await sandbox.write("package/module_0.py", b"x = 2\n")
        return {
            "one_shot": one_shot,
            "shell": shell,
            "fork": await closing(fork),
            "prepared": await closing(over_prepared),
        }


async def _starts(backend: SandboxBackend, workers: int, rounds: int) -> dict[str, Any]:
    """Return how many new sandboxes run /bin/true per second, by that many workers."""
    left = max(rounds, 2 * workers)
    total = left

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await _cold(backend, ["/bin/true"])

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(work)
    return {"workers": workers, "per_second": total / (time.perf_counter() - start)}


async def _together(backend: SandboxBackend, count: int, directory: Path) -> dict[str, Any]:
    """Return the memory of sandboxes that are open together, by their groups' count; None where there are none."""
    opened: list[Sandbox] = []

    async def open_one() -> None:
        sandbox = await backend.open(task, limits=_LIMITS)
        opened.append(sandbox)
        await _shell(sandbox)

    async with await backend.prepare(_FILES) as task:
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(open_one)
            groups = [_group_bytes(path) for path in (directory / "leases").glob("*box-*.json")]
            measured = [found for found in groups if found is not None]
            launcher = [_resident_bytes(path) for path in (directory / "leases").glob("*.launcher.json")]
            return {"sandboxes": count, "num_bytes": sum(measured) + sum(launcher) if measured else None}
        finally:
            with trio.CancelScope(shield=True):
                for sandbox in opened:
                    await sandbox.aclose()


def _group_bytes(lease: Path) -> int | None:
    for group in json.loads(lease.read_text())["group"]:
        for name in ("memory.usage_in_bytes", "memory.current"):
            path = Path(group, name)
            if path.exists():
                return int(path.read_text())
    return None


def _resident_bytes(lease: Path) -> int:
    pid = json.loads(lease.read_text())["pid"]
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)


def table(report: dict[str, Any]) -> Table:
    """Return the figures for a person."""
    shown = Table(title=f"sandboxes behind {report['wall']}")
    for column in ("what", "median", "95 %", "beside it"):
        shown.add_column(column)

    def row(what: str, found: dict[str, float], beside: str = "") -> None:
        shown.add_row(what, f"{found['median_ms']:.2f} ms", f"{found['p95_ms']:.2f} ms", beside)

    for name, what in (("true", "/bin/true"), ("python", "Python, doing nothing")):
        row(f"{what}, a plain process", report["bare"][name])
        cold = report["cold"][name]
        beside = f"{cold['above_bare_ms']:.1f} ms more, {cold['times_bare']:.1f} times"
        row(f"{what}, a new sandbox", cold, beside)
    row("/bin/true, in an open sandbox", report["one_shot"])
    row("/bin/true, in its shell", report["shell"])
    row("fork of a task of 20 files", report["fork"])
    row("opening over a prepared task", report["prepared"])
    row("one verdict of the JSON judge", report["judge"])
    for start in report["starts"]:
        shown.add_row(f"new sandboxes, {start['workers']} workers", f"{start['per_second']:.0f} a second", "", "")
    together = report["together"]
    taken = "not counted" if together["num_bytes"] is None else f"{together['num_bytes'] / 2**20:.0f} MiB"
    shown.add_row(f"{together['sandboxes']} open together", taken, "", "")
    return shown
