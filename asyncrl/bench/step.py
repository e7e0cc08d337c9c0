"""Seconds per optimizer step of the same batch, by asyncrl and by TRL, one after the other in one call."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import trio

from asyncrl.bench.child_run import call, train_in_child
from asyncrl.configs import Config, load_config
from asyncrl.environments import resolve_options
from asyncrl.errors import ConfigError
from asyncrl.processes import open_tasks
from asyncrl.rollout import Episode

_BATCH = ("environment.options.max_turns=1", "environment.options.max_tokens=96")
"""What TRL can do too: one turn, at most 96 tokens. Given overrides come after and may change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps of one trainer, the first left out: it pays for warm-up and for filling the pipeline."""

    trainer: str
    seconds: list[float]
    mean_seconds: float
    mean_completion_tokens: float
    """Over all completions: the two trainers sample their own, so the lengths differ a little."""


def bench_step(config_path: Path, overrides: list[str], *, steps: int, with_trl: bool) -> dict[str, Any]:
    """Return both trainers' step times and their ratio (above 1: asyncrl is faster)."""
    if with_trl and importlib.util.find_spec("trl") is None:
        raise ConfigError("TRL is not installed: pip install asyncrl[bench], or leave it out by --without-trl")
    config = load_config(config_path, [*_BATCH, *overrides])
    ours = _time_ours(config, steps)
    report: dict[str, Any] = {
        "groups_per_step": config.buffer.groups_per_step,
        "group_size": config.buffer.group_size,
        "max_off_policyness": config.buffer.max_off_policyness,
        "asyncrl": asdict(ours),
    }
    if with_trl:
        theirs = _time_trl(config, steps)
        ratio = theirs.mean_seconds / ours.mean_seconds
        lengths = ours.mean_completion_tokens / theirs.mean_completion_tokens
        report |= {"trl": asdict(theirs), "ratio": ratio, "ratio_per_token": ratio * lengths}
    return report


def _time_ours(config: Config, steps: int) -> StepTimes:
    records, summary = train_in_child(config, {"run.steps": steps + 1, "run.max_minutes": 0})
    moments = [record["seconds"] for record in records]
    seconds = [after - before for before, after in pairwise(moments)]
    episodes = sum(summary["trajectories"].values())
    return StepTimes(
        trainer="asyncrl",
        seconds=seconds,
        mean_seconds=fmean(seconds),
        mean_completion_tokens=fmean(record["completion_tokens_mean"] for record in records) if episodes else 0.0,
    )


def _time_trl(config: Config, steps: int) -> StepTimes:
    settings = {
        "model": str(config.model.path),
        "prompts": trio.run(_prompts, config, config.buffer.groups_per_step * (steps + 1)),
        "steps": steps + 1,
        "groups_per_step": config.buffer.groups_per_step,
        "group_size": config.buffer.group_size,
        "max_tokens": resolve_options(config.environment).max_tokens,
        "seed": config.run.seed,
    }
    output = call([sys.executable, "-m", "asyncrl.bench.trl_step", json.dumps(settings)], "TRL")
    result = json.loads(output.splitlines()[-1])
    return StepTimes(
        trainer="trl",
        seconds=result["seconds"][1:],
        mean_seconds=fmean(result["seconds"][1:]),
        mean_completion_tokens=result["mean_tokens"],
    )


async def _prompts(config: Config, count: int) -> list[str]:
    """Return the text of the prompts that training begins with, special tokens and all."""
    async with open_tasks(config) as (environment, renderer, _):
        episodes = [Episode(trajectory_id="bench", task=environment.get_item()) for _ in range(count)]
        prompts = [renderer.start(environment.start(e), reply_prefix=environment.reply_prefix) for e in episodes]
        return [renderer.decode(prompt, keep_special=True) for prompt in prompts]
