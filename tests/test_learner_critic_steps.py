"""Whole steps with a critic: what they learn, what they leave alone, and that they go on after a restart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from critics import CRITICS, learner_for, mixed_groups
from synthetic_groups import make_group, make_segment
from test_learner_step import step
from tiny_model import build_tiny_model, state_of

from asyncrl.errors import CheckpointError
from asyncrl.types import Group, Logprobs
from asyncrl.wire import PublishRequest, SaveRequest


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, dtype=torch.float32)


def fixed_groups(version: int) -> list[Group]:
    """Return tasks of one trajectory each, whose prompt says what it is worth."""
    groups = []
    for group_id in range(6):
        segment = make_segment(
            [group_id, 40 + group_id, 7], [([100 + group_id, 120], [5]), ([130], [])], version=version
        )
        quiet = replace(segment, advantages=Logprobs([0.0] * len(segment.token_ids)))
        groups.append(make_group(group_id, [quiet], [float(group_id % 2)]))
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_each_kind_learns_what_its_states_are_worth(model_path: Path, tmp_path: Path, name: str) -> None:
    learner = learner_for(model_path, tmp_path, CRITICS[name])
    seen = [step(learner, fixed_groups(version)) for version in range(12)]
    first, last = seen[0].metrics, seen[-1].metrics
    assert all(result.stepped for result in seen)
    assert last["value_loss"] < 0.5 * first["value_loss"]
    assert last["value_explained_variance"] > 0.5
    assert last["value_mean"] == pytest.approx(0.5, abs=0.2)
    assert first["return_mean"] == 0.5
    assert first["value_states"] == (12 if name == "yes_no" else 18)
    if name == "yes_no":
        assert "critic_grad_norm" not in first
    else:
        assert first["critic_grad_norm"] > 0
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_a_group_of_one_is_trained_on_by_its_advantage(model_path: Path, tmp_path: Path, name: str) -> None:
    learner = learner_for(model_path, tmp_path, {**CRITICS[name]})
    before = {key: tensor.clone() for key, tensor in learner._optimizer.masters.items()}
    result = step(learner, mixed_groups(2))
    assert result.stepped
    assert result.metrics["num_failed_trajectories"] == 1
    assert result.metrics["advantage_abs_mean"] > 0
    assert result.metrics["grad_norm"] > 0
    assert any(not torch.equal(before[key], tensor) for key, tensor in learner._optimizer.masters.items())
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_a_resumed_critic_takes_bitwise_the_same_next_step(model_path: Path, tmp_path: Path, name: str) -> None:
    critic = {**CRITICS[name], "critic_warmup_steps": 2}
    learner = learner_for(model_path, tmp_path / "a", critic, warmup_steps=5, dtype="bfloat16")
    step(learner, mixed_groups(1))
    saved = tmp_path / "saved"
    saved.mkdir()
    files = learner.answer(SaveRequest(directory=str(saved))).files  # type: ignore[attr-defined]
    assert "learner/critic.safetensors" in files
    again = learner_for(model_path, tmp_path / "b", critic, warmup_steps=5, dtype="bfloat16", resume_from=saved)
    for version in (1, 2):  # the second of the two warms up no more
        wanted, found = (step(one, mixed_groups(2 + version, version=version)) for one in (learner, again))
        assert wanted.metrics["critic_warmup"] == (version == 1)
        assert {k: v for k, v in found.metrics.items() if "second" not in k} == {
            k: v for k, v in wanted.metrics.items() if "second" not in k
        }
    for ours, theirs in (
        (learner._optimizer.state(), again._optimizer.state()),
        (learner._critic.tensors(), again._critic.tensors()),  # type: ignore[union-attr]
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for one in (learner, again):
        one.close()


@pytest.mark.slow
def test_a_checkpoint_of_another_kind_of_critic_is_refused(model_path: Path, tmp_path: Path) -> None:
    learner = learner_for(model_path, tmp_path / "a", CRITICS["head"])
    (tmp_path / "saved").mkdir()
    learner.answer(SaveRequest(directory=str(tmp_path / "saved")))
    learner.close()
    with pytest.raises(CheckpointError, match='written with kind = "head" and cannot go on with "none"'):
        learner_for(model_path, tmp_path / "b", {}, resume_from=tmp_path / "saved")
    (tmp_path / "saved" / "learner" / "critic.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"learner/critic\.safetensors is missing"):
        learner_for(model_path, tmp_path / "c", CRITICS["head"], resume_from=tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_engines_and_saved_models_get_the_policys_tensors_alone(model_path: Path, tmp_path: Path, name: str) -> None:
    learner = learner_for(model_path, tmp_path / "a", CRITICS[name])
    (tmp_path / "saved").mkdir()
    learner.answer(SaveRequest(directory=str(tmp_path / "saved")))
    manifest = learner.answer(PublishRequest()).manifest  # type: ignore[attr-defined]
    plain = set(learner_for(model_path, tmp_path / "b", {})._model.tensors())
    assert {entry.name for entry in manifest.tensors} == plain
    assert set(state_of(tmp_path / "saved" / "model")) == plain
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_what_is_not_finite_in_either_skips_the_step_of_both(
    model_path: Path, tmp_path: Path, name: str, broken: str
) -> None:
    learner = learner_for(model_path, tmp_path, CRITICS[name])
    critic = learner._critic
    assert critic is not None
    own = critic.optimizer
    if own is None and broken == "critic":
        return  # a yes/no critic has no weights of its own
    weights = learner._model.tensors() if broken == "policy" or own is None else own._parameters
    before = [{k: t.clone() for k, t in o.masters.items()} for o in (learner._optimizer, own) if o is not None]
    weight = list(weights.values())[-1]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    result = step(learner, mixed_groups(1))
    assert not result.stepped
    assert result.version == 1
    assert result.metrics.get("value_nonfinite", 0) > 0 or broken == "policy"
    nonfinite = [result.metrics[f"{part}grad_norm_nonfinite"] for part in ("", *(("critic_",) if own else ()))]
    assert 1.0 in nonfinite
    after = [o.masters for o in (learner._optimizer, own) if o is not None]
    assert all(torch.equal(b[k], a[k]) for b, a in zip(before, after, strict=True) for k in b)
    assert critic.steps == 0
    with torch.no_grad():
        weight.copy_(kept)
    assert step(learner, mixed_groups(1, version=1)).stepped  # nothing of the bad gradient is left
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_the_warmup_trains_the_critic_alone(model_path: Path, tmp_path: Path, name: str) -> None:
    critic = {**CRITICS[name], "critic_warmup_steps": 2, "bootstrap_truncated": False}
    critic |= {} if name == "yes_no" else {"learning_rate": 3e-3}
    learner = learner_for(model_path, tmp_path, critic, learning_rate=2e-4)
    before = {key: tensor.detach().clone() for key, tensor in learner._model.tensors().items()}
    results = [step(learner, mixed_groups(4, version=version)) for version in range(2)]
    same = all(torch.equal(before[key], tensor) for key, tensor in learner._model.tensors().items())
    assert same == (name != "yes_no")  # its values are the policy's own words
    assert learner._optimizer.updates == (0 if same else 2)
    assert [r.metrics["critic_warmup"] for r in results] == [1.0, 1.0]
    assert results[1].metrics["value_loss"] < results[0].metrics["value_loss"]
    third = step(learner, mixed_groups(4, version=2))
    assert third.metrics["critic_warmup"] == 0.0
    assert any(not torch.equal(before[key], tensor) for key, tensor in learner._model.tensors().items())
    learner.close()


@pytest.mark.slow
def test_further_updates_move_values_as_far_as_the_clip_lets_them(model_path: Path, tmp_path: Path) -> None:
    seen = {}
    for clip in (0.0, 0.05):
        critic = {**CRITICS["model"], "updates_per_batch": 3, "value_clip": clip}
        learner = learner_for(model_path, tmp_path / str(clip), critic)
        metrics = step(learner, mixed_groups(3)).metrics
        assert learner._critic is not None
        assert learner._critic.optimizer is not None
        assert learner._critic.optimizer.updates == 3
        assert metrics["critic_updates_skipped"] == 0
        seen[clip] = metrics.get("value_clip_fraction", 0.0)
        learner.close()
    assert seen[0.0] == 0.0
    assert seen[0.05] > 0.0
