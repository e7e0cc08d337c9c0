"""The ranks of a learner: `test_learner_ranks` runs two or four.

    python rank_of_learner.py WORLD_SIZE DIRECTORY

DIRECTORY holds `runs.json` (see `learn`); `rank-RANK.json` takes what each run came to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from critics import mixed_groups
from gloo_ranks import forked
from synthetic_groups import random_groups
from test_learner_teachers import told
from torch.distributed.tensor import DTensor

from asyncrl import wire
from asyncrl.errors import CheckpointError, LearnerError
from asyncrl.learner.optimizer import shard_of
from asyncrl.learner.process import Learner
from asyncrl.learner.ranks import ALONE, Place, Ranks
from asyncrl.learner.settings import parse_job
from asyncrl.types import Group


def learn(run: Mapping[str, Any], ranks: Ranks = ALONE) -> dict[str, Any]:
    """Step on each batch, publish, and save where that is asked; return the metrics of all steps.

    A run is {"job", "first": version, "seeds": of its batches, "groups": of `GROUPS`, "save": directory or ""}.
    """
    learner = Learner(parse_job(json.dumps(run["job"]).encode(), Path("job")), ranks)
    measured = gradients_of(learner, run["groups"]) if run.get("gradients") else None
    steps = []
    for version, seed in enumerate(run["seeds"], start=run["first"]):
        reply = learner.answer(wire.StepRequest(groups=GROUPS[run["groups"]](seed, version)))
        assert isinstance(reply, wire.StepReply)
        steps.append({**reply.result.metrics, "top": reply.result.top_ratios, "spikes": reply.result.spikes})
    demonstrations = [t.segments[0] for group in random_groups(99) for t in group.trajectories]
    supervised = learner.answer(wire.SupervisedLossRequest(segments=demonstrations))
    assert isinstance(supervised, wire.SupervisedLossReply)
    canary = learner.hello().canary_logprobs
    learner.answer(wire.PublishRequest())
    if run["save"]:
        Path(run["save"]).mkdir(exist_ok=True)
        learner.answer(wire.SaveRequest(directory=run["save"]))
    learner.close()
    return {"steps": steps, "supervised": supervised.loss, "canary": canary, "measured": measured}


def gradients_of(learner: Learner, groups: str) -> dict[str, Any]:
    """Return log-probs of a batch's tokens, and of each weight's gradient every 101st number and the norm."""
    stepper, optimizer = learner._stepper, learner._optimizer
    batch = stepper._select(GROUPS[groups](11, 0)).batch
    _, _, whole = stepper.accumulate(batch, stepper._split(batch))
    found = {}
    for name, gradient in optimizer.gradients().items():
        sharded = shard_of(optimizer._parameters[name], gradient)
        flat = (sharded.full_tensor() if isinstance(sharded, DTensor) else sharded).flatten().double()
        found[name] = [*flat[::101].tolist(), float(flat.norm())]
    optimizer.discard()
    return {"logprobs": whole.policy_logprobs.tolist(), "gradients": found}


def some_groups(seed: int, version: int) -> list[Group]:
    """Return four groups; the rewards of one do not differ, so it is forwarded without a gradient, after the others."""
    groups = random_groups(seed, num_groups=4, versions=(version,))
    same = tuple(replace(trajectory, reward=1.0) for trajectory in groups[1].trajectories)
    return [groups[0], replace(groups[1], trajectories=same), *groups[2:]]


def mixed(seed: int, version: int) -> list[Group]:
    """Return groups with several turns and segments, ended in every way."""
    return mixed_groups(seed, version=version)


def told_groups(seed: int, version: int) -> list[Group]:
    """Return groups with longer prompts for teachers, which make more microbatches of teachers than of the policy."""
    return told(random_groups(seed, num_groups=3, versions=(version,)))


GROUPS = {"some": some_groups, "mixed": mixed, "told": told_groups}


def main(rank: int, world_size: int, directory: Path) -> None:
    """Take part in every run; the model's files are out of reach of all ranks but the first."""
    ranks = Ranks(Place(rank, world_size, rank, world_size, f"file://{directory / 'rendezvous'}"))
    found = []
    for run in json.loads((directory / "runs.json").read_text()):
        job = run["job"]
        if not ranks.is_first:
            job["model"] = "/nonexistent"
            for section in (job["learner"].get("teacher", {}), job["learner"].get("critic", {})):
                section |= {"path": "/nonexistent"} if section.get("path") else {}
        try:
            found.append(learn({**run, "job": job}, ranks))
        except (CheckpointError, LearnerError) as error:
            found.append({"refused": str(error)})
    ranks.close()
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    forked(main)
