"""Seconds and peak memory of one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def timed(run: Callable[[], Report]) -> Report:
    """Return what `run` returns and its `seconds`, `cpu_seconds` and `peak_bytes`.

    The last is the largest resident memory meanwhile above the one before, as Linux counts it for the process.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew from here
    before = _memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    report = run()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {**report, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": _memory("VmHWM") - before}


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)
