"""Whole steps with a teacher, a reference or pairs: what they change, and that they go on after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups
from test_learner_step import job_for, on_policy, policy_logprobs, step
from test_learner_teachers import told
from tiny_model import build_tiny_model

from asyncrl.engines import free_port
from asyncrl.errors import CheckpointError, ConfigError, LearnerError
from asyncrl.learner.checkpoint import load as load_checkpoint
from asyncrl.learner.process import Learner
from asyncrl.learner.settings import PairSettings
from asyncrl.learner.teacher_settings import ReferenceSettings, TeacherSettings
from asyncrl.types import Group
from asyncrl.wire import SaveRequest


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("student"), tied=True)


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, num_layers=1)


def at_version(groups: Sequence[Group], version: int) -> list[Group]:
    """Return the groups as sampled by weights of `version`."""

    def moved(group: Group) -> Group:
        return replace(
            group, trajectories=tuple(replace(t, segments=tuple(map(renewed, t.segments))) for t in group.trajectories)
        )

    def renewed(segment: Any) -> Any:
        return replace(segment, spans=tuple(replace(span, version=version) for span in segment.spans))

    return [moved(group) for group in groups]


def metrics_of_steps(learner: Learner, groups: Sequence[Group], number: int) -> list[dict[str, float]]:
    return [dict(step(learner, on_policy(learner, at_version(groups, v))).metrics) for v in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "teacher",
    [
        {"divergence": "forward_kl"},
        {"divergence": "reverse_kl", "top_k": 16},
        {"divergence": "jsd", "top_k": 16, "support": "student"},
    ],
)
def test_steps_bring_the_student_nearer_to_its_teacher(
    model_path: Path, teacher_path: Path, tmp_path: Path, teacher: dict[str, Any]
) -> None:
    settings = TeacherSettings(source="model", path=teacher_path, **teacher)
    learner = Learner(job_for(model_path, tmp_path, loss="distillation", teacher=settings, learning_rate=3e-3))
    found = [m["teacher_divergence"] for m in metrics_of_steps(learner, random_groups(1), 4)]
    assert found[-1] < 0.7 * found[0]
    learner.close()


@pytest.mark.slow
def test_on_policy_distillation_makes_likelier_what_the_teacher_finds_likelier(
    model_path: Path, teacher_path: Path, tmp_path: Path
) -> None:
    settings = TeacherSettings(source="model", path=teacher_path)
    learner = Learner(job_for(model_path, tmp_path, loss="opd", teacher=settings, learning_rate=3e-3))
    groups = random_groups(1)
    batch = learner._stepper._select(groups).batch
    theirs = learner._teachers.teacher.logprobs(batch)[batch.loss_mask]  # type: ignore[union-attr]

    def distance() -> float:
        ours = torch.tensor([value for row in policy_logprobs(learner, groups) for value in row])[batch.loss_mask]
        return (ours - theirs).square().mean().item()

    before = distance()
    found = metrics_of_steps(learner, groups, 4)
    assert distance() < 0.8 * before
    assert all(m["grad_norm"] > 0 for m in found)
    learner.close()


@pytest.mark.slow
def test_the_policy_learns_from_itself_with_the_answer_in_its_prompt(model_path: Path, tmp_path: Path) -> None:
    settings = TeacherSettings(source="self", divergence="forward_kl")
    learner = Learner(job_for(model_path, tmp_path, loss="distillation", teacher=settings, learning_rate=3e-3))
    groups = told(random_groups(1))
    with pytest.raises(ConfigError, match="needs segments with a prompt for teachers"):
        step(learner, random_groups(1))
    found = metrics_of_steps(learner, groups, 3)
    assert found[0]["teacher_divergence"] > 0
    assert found[0]["num_segments_told"] == sum(
        s.teacher_prompt_token_ids is not None for g in groups for t in g.trajectories for s in t.segments
    )
    assert all(m["grad_norm"] > 0 for m in found)
    untold = step(learner, at_version(random_groups(1), 3)).metrics  # of an environment that has no notes, say
    assert untold["teacher_divergence"] == pytest.approx(0.0, abs=1e-6)
    learner.close()


def test_a_teacher_that_cannot_be_asked_stops_the_learner_before_its_first_step(
    model_path: Path, teacher_path: Path, tmp_path: Path
) -> None:
    settings = TeacherSettings(source="engine", url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(LearnerError, match=r"/v1/models does not answer: ConnectError.*\[learner.teacher\]"):
        Learner(job_for(model_path, tmp_path, loss="opd", teacher=settings))
    other = build_tiny_model(tmp_path / "other", seed=1, num_layers=1)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 97', '"a": 999', 1))
    settings = TeacherSettings(source="model", path=other)
    with pytest.raises(ConfigError, match="has another vocabulary"):
        Learner(job_for(model_path, tmp_path, loss="opd", teacher=settings))


@pytest.mark.slow
def test_a_loss_of_ones_own_may_ask_the_teacher(
    model_path: Path, teacher_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def gap(inputs):\n    return (inputs.policy_logprobs - inputs.teacher_logprobs).square()\n"
    (tmp_path / "own_losses.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    settings = TeacherSettings(source="model", path=teacher_path)
    learner = Learner(job_for(model_path, tmp_path, loss="own_losses:gap", teacher=settings, learning_rate=3e-3))
    found = [m["loss"] for m in metrics_of_steps(learner, random_groups(1), 3)]
    assert found == sorted(found, reverse=True)
    learner.close()


@pytest.mark.slow
def test_an_averaged_teacher_goes_on_after_a_restart_bitwise(model_path: Path, tmp_path: Path) -> None:
    settings = TeacherSettings(source="self", ema_rate=0.3)
    options = {"loss": "distillation", "teacher": settings, "learning_rate": 3e-3, "loss_settings": {"kl_coef": 0.1}}
    learner = Learner(job_for(model_path, tmp_path / "a", **options))
    groups = told(random_groups(1))
    first = step(learner, groups)
    (tmp_path / "saved").mkdir()
    files = learner.answer(SaveRequest(directory=str(tmp_path / "saved"))).files  # type: ignore[attr-defined]
    assert files["learner/teacher.safetensors"] > 0
    again = Learner(job_for(model_path, tmp_path / "b", resume_from=tmp_path / "saved", **options))
    wanted, found = (step(one, at_version(groups, 1)) for one in (learner, again))
    assert first.metrics["teacher_divergence"] > 0
    assert found.metrics["teacher_divergence"] == wanted.metrics["teacher_divergence"]
    assert all(torch.equal(value, again._teachers.state()[name]) for name, value in learner._teachers.state().items())
    (tmp_path / "saved" / "learner" / "teacher.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"learner/teacher\.safetensors is missing"):
        load_checkpoint(tmp_path / "saved")
    for one in (learner, again):
        one.close()


@pytest.mark.slow
def test_preferences_are_learned_from_the_starting_weights_on(model_path: Path, tmp_path: Path) -> None:
    options = {"loss_settings": {"dpo_beta": 1.0}, "pairs": PairSettings(per_group=2), "learning_rate": 1e-3}
    learner = Learner(job_for(model_path, tmp_path, loss="dpo", **options))
    found = metrics_of_steps(learner, random_groups(1), 4)
    assert found[0]["pair_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert [m["pair_loss"] for m in found] == sorted((m["pair_loss"] for m in found), reverse=True)
    assert found[-1]["pair_accuracy"] == 1.0
    assert found[0]["num_pairs"] > 0
    same = [replace(t, reward=1.0) for t in random_groups(1)[0].trajectories]
    nothing = step(learner, at_version([replace(random_groups(1)[0], trajectories=tuple(same))], 4))
    assert not nothing.stepped
    assert nothing.metrics["num_groups_without_pair"] == 1
    assert nothing.metrics["reward_mean"] == 1.0
    learner.close()


@pytest.mark.slow
def test_a_reference_may_be_another_model(model_path: Path, teacher_path: Path, tmp_path: Path) -> None:
    reference = ReferenceSettings(source="model", path=teacher_path)
    learner = Learner(job_for(model_path, tmp_path, loss="kl_k3", reference=reference))
    assert step(learner, random_groups(1)).metrics["reference_kl"] > 0.01
    learner.close()


@pytest.mark.slow
def test_a_rejected_sample_teaches_nothing_and_a_kept_one_needs_no_group(model_path: Path, tmp_path: Path) -> None:
    kept, rejected = make_segment([1, 2], [([3, 4, 5], [])]), make_segment([1, 2], [([6, 7], [])])
    groups = [make_group(0, [kept], [1.0]), make_group(1, [rejected], [0.5])]
    learners = [Learner(job_for(model_path, tmp_path / loss, loss=loss)) for loss in ("rejection_sft", "sft")]
    found, wanted = step(learners[0], groups), step(learners[1], groups[:1])
    assert found.metrics["num_segments_idle"] == 1
    assert found.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=1e-6)
    ours, theirs = (learner._optimizer.masters for learner in learners)
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-7) for name in ours)
    for learner in learners:
        learner.close()
