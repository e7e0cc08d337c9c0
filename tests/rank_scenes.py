"""Runs of one tiny model by one process and by ranks, which are forked from `rank_of_learner`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import fork_ranks
from tiny_model import build_tiny_model

_OF_THE_PROCESS = ("seconds_", "tokens_per_second", "num_microbatches", "tokens_forwarded", "rank_imbalance")


class Scene:
    """Runs of one model in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = build_tiny_model(directory / "model", tied=True)
        teacher = build_tiny_model(directory / "teacher", seed=1, tied=True)
        self.taught: dict[str, Any] = {"loss": "opd", "teacher": {"source": "model", "path": str(teacher)}}
        self.compared: dict[str, Any] = {"loss": "dpo", "pairs": {"per_group": 2}}
        self.held: dict[str, Any] = {"loss": "grpo", "credit": {"reward_kl_coef": 0.1}}

    def run(
        self,
        name: str,
        *,
        ranks: int,
        seeds: tuple[int, ...],
        after: str = "",
        groups: str = "some",
        gradients: bool = False,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return what `rank_of_learner` is told: go on `after` another run's checkpoint, and save as `name`."""
        job = {
            "model": str(settings.pop("model", self.model)),
            "run_id": name,
            "resume_from": str(self.directory / after) if after else "",
            "canary": [5, 6, 7, 8],
            "weight_sync": {"transport": "filesystem", "directory": str(self.directory / "published")},
            "learner": {
                "learning_rate": 1e-3,
                "dtype": "float32",
                "ranks": ranks,
                "microbatch_tokens": 60,
                "threads": 1,
                **settings,
            },
        }
        save = str(self.directory / name)
        chosen = {"seeds": seeds, "groups": groups, "gradients": gradients}
        return {"job": job, "first": seeds[0], "save": save, **chosen}

    def on_ranks(self, count: int, *runs: dict[str, Any]) -> list[Any]:
        """Return what the first of `count` ranks finds in each run, after comparing it with what the others find."""
        place = self.directory / f"ranks-{count}"
        place.mkdir()
        (place / "runs.json").write_text(json.dumps(runs))
        first, *others = fork_ranks("rank_of_learner.py", place, world_size=count)
        for other in others:
            for ours, theirs in zip(first, other, strict=True):
                assert theirs.get("refused") == ours.get("refused")
                assert [numbers_of(step) for step in theirs.get("steps", [])] == [
                    numbers_of(step) for step in ours.get("steps", [])
                ], "every rank comes to the same"
        return list(first)


def numbers_of(step: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that do not depend on how many processes took the step."""
    return {
        name: value
        for name, value in step.items()
        if isinstance(value, (int, float)) and not name.startswith(_OF_THE_PROCESS)
    }


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare two steps: losses within 1e-6, every other metric to float32's rounding, and what is told of tokens."""
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert numbers_of(found) == pytest.approx(numbers_of(wanted), rel=1e-3, abs=1e-5)
    ours, theirs = ([(row["trajectory_id"], row["token_id"]) for row in step["top"]] for step in (found, wanted))
    assert sorted(ours) == sorted(theirs)
    assert len(found["spikes"]) == len(wanted["spikes"])
