"""What every part promises the loop, asked of real parts and of `asyncrl.testing`'s by the same code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.protocols import Learner, ReportsTrajectories, Sampler, WeightPuller
from asyncrl.types import Completion, FinishReason, Group, PolicyVersion, TokenIds, Trajectory, WeightManifest

_MAX_TOKENS = 6


async def check_engine(sampler: Sampler, puller: WeightPuller, manifest: WeightManifest, prompt: TokenIds) -> None:
    """Sample, pull `manifest`, sample again."""
    before = await sampler.sample(prompt, max_tokens=_MAX_TOKENS, trajectory_id="1-0")
    version = before.spans[0].version
    _check_completion(before, version)
    reports = await puller.pull_all(manifest)
    assert reports
    for report in reports:
        assert report.verified
        assert report.version == manifest.version > version
        assert report.num_bytes == manifest.num_bytes > 0
        assert report.stall_seconds >= 0
        assert report.seconds
    _check_completion(await sampler.sample(prompt, max_tokens=_MAX_TOKENS, trajectory_id="1-0"), manifest.version)


def _check_completion(completion: Completion, version: PolicyVersion) -> None:
    length = len(completion.token_ids)
    assert 1 <= length <= _MAX_TOKENS
    assert len(completion.behaviour_logprobs) == length
    assert all(logprob <= 0 for logprob in completion.behaviour_logprobs)
    assert [(span.start, span.end, span.version) for span in completion.spans] == [(0, length, version)]
    assert length == _MAX_TOKENS or completion.finish_reason is FinishReason.STOP
    assert completion.engine


async def check_learner(learner: Learner, groups: Sequence[Group], directory: Path) -> None:
    """Step, learn from demonstrations, publish, save."""
    result = await learner.step(groups)
    assert result.version == 1
    trained = sum(t.num_sampled_tokens for group in groups for t in group.trajectories if t.reward is not None)
    assert result.metrics["tokens_trained"] == trained > 0
    assert result.metrics["importance_ratio_max"] > 0
    shown = [segment for group in groups for t in group.trajectories for segment in t.segments]
    before = await learner.supervised_loss(shown)
    result = await learner.supervised_step(shown, learning_rate=1e-3)
    assert result.version == 2
    assert result.stepped
    assert result.metrics["loss"] == pytest.approx(before, rel=1e-3)
    assert result.metrics["tokens_trained"] == sum(sum(segment.loss_mask) for segment in shown)
    assert result.metrics["learning_rate"] == 1e-3
    assert await learner.supervised_loss(shown) < before
    manifest = await learner.publish()
    assert manifest.version == 2
    assert manifest.num_bytes > 0
    assert manifest.digest
    files = await learner.save(str(directory))
    assert any(name.startswith("model/") for name in files)
    for name, num_bytes in files.items():
        assert (directory / name).stat().st_size == num_bytes


async def check_environment(environment: ReportsTrajectories, sampler: Sampler) -> None:
    """Collect groups, with and without being told of each episode."""
    task = environment.get_item()
    told: list[Trajectory] = []
    found = await environment.collect_trajectories(task, sampler, group_id="7", group_size=3, on_trajectory=told.append)
    assert {trajectory.trajectory_id for trajectory in found} == {"7-0", "7-1", "7-2"}
    assert sorted(told, key=lambda t: t.trajectory_id) == sorted(found, key=lambda t: t.trajectory_id)
    plain = await environment.collect_trajectories(task, sampler, group_id="8", group_size=2)
    assert len(plain) == 2
