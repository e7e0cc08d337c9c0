"""The loop's own memory: what it keeps of groups, steps and episodes does not grow while it goes on."""

from __future__ import annotations

import gc
import os
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from asyncrl.bench.loop import LoopBench
from asyncrl.bench.trend import trend
from asyncrl.buffers import BufferSettings, Journal, SelectionStatistics
from asyncrl.run import Limits
from asyncrl.testing import run_inline

_OTHERS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, SelectionStatistics)
"""Not looked into: code, and the bins of the distributions, whose number has a bound of its own."""


def _num_kept(root: Any) -> int:
    """Return how many objects are reachable from `root`, numbers and strings included; bounded queues are passed by."""
    seen, queue = {id(root)}, [root]
    while queue:
        for found in gc.get_referents(queue.pop()):
            outside = isinstance(found, _OTHERS) or type(found).__module__.startswith(("trio", "_"))
            outside |= isinstance(found, deque) and found.maxlen is not None  # it holds its most after more steps
            if not outside and id(found) not in seen:
                seen.add(id(found))
                queue.append(found)
    return len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("max_uses", [1, 2])
def test_what_the_loop_keeps_does_not_grow_with_its_steps(tmp_path: Path, max_uses: int) -> None:
    """Kills: a group, a step, a weight digest or an episode that is kept for ever in any of the loop's parts."""
    kept: list[int] = []
    buffer = BufferSettings(max_off_policyness=3, groups_per_step=2, group_size=2, max_uses=max_uses)
    limits = Limits(steps=150, checkpoint_every_steps=10)
    with (
        Journal(tmp_path / "journal", run_id="test", file_bytes=2**16) as journal,
        Path(os.devnull).open("w") as nowhere,
    ):
        bench = LoopBench(
            tmp_path,
            journal,
            buffer,
            limits,
            nowhere,
            run_blocking=run_inline,
            on_step=lambda step: kept.append(_num_kept(bench)),
        )
        trio.run(bench.train, clock=trio.testing.MockClock(autojump_threshold=0))
    early, late = max(kept[50:100]), max(kept[100:])
    assert len(kept) == 150
    assert early > 500
    assert late < early + 50, "one object a step is 50 more"


def test_a_trend_is_the_median_of_slopes_with_its_interval() -> None:
    """By hand: seven points on a line of slope 2, of which one is far off."""
    ys = [0.0, 2.0, 4.0, 600.0, 8.0, 10.0, 12.0]
    line = trend(range(7), ys)
    assert line.slope == 2.0
    assert line.low <= 2.0 <= line.high
    assert not line.is_flat
    level = trend(range(9), [5.0, 5.5, 4.5, 5.0, 5.5, 4.5, 5.0, 5.5, 4.5])
    assert level.is_flat
