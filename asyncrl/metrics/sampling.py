"""What has to be looked at between scrapes: the loop's lag, memory, disk, leases, and the engines' own metrics."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.tallies import Buckets

_LAG_EVERY_S = 0.25
_LOOK_EVERY_S = 5.0  # a scrape's usual interval is 15 s; an engine's metrics are some 50 KB of text
_ENGINE_TIMEOUT_S = 4.0
_PAGE = os.sysconf("SC_PAGE_SIZE")

LAG_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

ENGINE_SAMPLES: Mapping[str, str] = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}
"""vLLM's name of a sample -> ours. Of several ranks of one server the sum, and of usage the largest."""


class Sampled:
    """The newest of what was looked at, and the lag's distribution since the start."""

    def __init__(self, directory: Path) -> None:
        """`directory` is the run's: its disk is watched, and the ledgers of sandboxes below it."""
        self._directory = directory
        self.lag = Buckets(LAG_SECONDS)
        self.engines: Mapping[str, Mapping[str, float]] = {}
        """engine -> what it says of itself, by the names of `ENGINE_SAMPLES`; who does not answer is missing."""
        self.memory: Mapping[str, float] = {}
        """role -> resident bytes of its processes; what they share is counted in each."""
        self.disk_free = self.disk_total = 0.0
        self.leases = 0

    async def watch(self, read_engines: Callable[[float], Awaitable[Mapping[str, str]]] | None = None) -> None:
        """Look again and again until cancelled. `read_engines` is `EnginePool.read_metrics`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_lag)
            while True:
                if read_engines is not None:
                    texts = await read_engines(_ENGINE_TIMEOUT_S)
                    self.engines = {name: parse_engine(text) for name, text in texts.items()}
                await trio.to_thread.run_sync(self.look)
                await trio.sleep(_LOOK_EVERY_S)

    async def _watch_lag(self) -> None:
        while True:
            due = trio.current_time() + _LAG_EVERY_S
            await trio.sleep_until(due)
            self.lag.add(max(0.0, trio.current_time() - due))

    def look(self) -> None:
        """Look at memory, disk and leases."""
        self.memory = memory_by_role(os.getpid())
        usage = shutil.disk_usage(self._directory)
        self.disk_free, self.disk_total = float(usage.free), float(usage.total)
        leases = self._directory / "sandboxes" / "leases"
        self.leases = sum(name.endswith(".json") for name in os.listdir(leases)) if leases.is_dir() else 0


def parse_engine(text: str) -> dict[str, float]:
    """Return what `ENGINE_SAMPLES` names in a server's metrics, whose other lines are not parsed."""
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_WANTED)) + "\n"
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            name = ENGINE_SAMPLES.get(sample.name)
            if name is not None:
                before = found.get(name, 0.0)
                found[name] = max(before, sample.value) if name == "kv_cache_usage" else before + sample.value
    return found


_WANTED = tuple(f"{name}{end}" for name in ENGINE_SAMPLES for end in ("{", " "))

_ROLES = {"asyncrl.learner": "learner", "vllm.entrypoints": "engines"}
"""words of a command line -> role of the process and of all below it; others are "other"."""


def memory_by_role(pid: int) -> dict[str, float]:
    """Return the resident bytes of a process ("orchestrator") and of all below it, by role."""
    found = {"orchestrator": _resident(pid), "learner": 0.0, "engines": 0.0, "other": 0.0}
    waiting = [(child, "") for child in child_pids(pid)]
    while waiting:
        child, above = waiting.pop()
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        role = above or next((role for words, role in _ROLES.items() if words in line), "")
        found[role or "other"] += _resident(child)
        waiting += [(below, role) for below in child_pids(child)]
    return found


def child_pids(pid: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended meanwhile
    return found


def _resident(pid: int) -> float:
    try:
        return float(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
