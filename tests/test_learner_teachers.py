"""Learning from teachers, against transformers' own models with whole logits, one segment at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from synthetic_groups import random_groups
from test_learner_numerics import with_exact_norms
from tiny_model import build_tiny_model

from asyncrl.errors import ConfigError
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.replicas import MovingAverage, Replica
from asyncrl.learner.settings import LearnerSettings, PairSettings
from asyncrl.learner.step import Stepper
from asyncrl.learner.teacher_settings import ReferenceSettings, TeacherSettings
from asyncrl.learner.teachers import Teachers
from asyncrl.types import Group, Segment, TokenIds

_TEMPERATURE = 0.7
_CPU = torch.device("cpu")
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a segment's student [n, V], teacher [n, V], sampled tokens [n] and behaviour log-probs [n] to a loss [n]."""


@cache
def directory(which: str) -> Path:
    """Return a student's or a teacher's model: they share nothing but the vocabulary."""
    seed, layers = (0, 2) if which == "student" else (1, 1)
    return build_tiny_model(Path(mkdtemp()), seed=seed, num_layers=layers, tied=which == "student")


def load(which: str) -> PolicyModel:
    model = load_model(directory(which), dtype=torch.float64, device=_CPU, temperature=_TEMPERATURE)
    with_exact_norms(model.model)
    return model


def plain(which: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory(which), dtype=torch.float64)
    with_exact_norms(model)
    return model


def settings_for(loss: str, teacher: TeacherSettings | None = None, **changes: Any) -> LearnerSettings:
    teacher = teacher or TeacherSettings(source="self")
    return LearnerSettings(loss=loss, teacher=teacher, dtype="float64", microbatch_tokens=10_000, **changes)


def teachers_for(settings: LearnerSettings, student: PolicyModel, which: str = "teacher") -> Teachers:
    model = student if settings.teacher.source == "self" else load(which)
    teacher = Replica(model, _CPU, max_tokens=settings.microbatch_tokens, share_prefixes=settings.share_prefixes)
    return Teachers(settings.resolved_loss, student, _CPU, settings=settings.teacher, teacher=teacher)


def told(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with prompts for teachers: longer ones, of several lengths, for all but one of a group."""

    def change(place: int, segment: Segment) -> Segment:
        prompt = segment.token_ids[: segment.loss_mask.find(1)]
        longer = TokenIds([*prompt[:3], *range(200, 205 + place), *prompt[3:]])
        return replace(segment, teacher_prompt_token_ids=longer if place != 1 else None)

    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, segments=tuple(change(place, s) for s in t.segments))
                for place, t in enumerate(group.trajectories)
            ),
        )
        for group in groups
    ]


def found_by_the_learner(
    groups: Sequence[Group], settings: LearnerSettings, teachers: Teachers
) -> tuple[float, dict[str, torch.Tensor]]:
    student = teachers.policy
    optimizer = Optimizer(student.tensors(), settings)
    stepper = Stepper(student, optimizer, settings, max_off_policyness=1, teachers=teachers)
    batch = stepper._select(groups).batch
    loss, _, _ = stepper.accumulate(batch, stepper._split(batch))
    gradients = {name: g.clone() for name, g in optimizer.gradients().items()}
    for parameter in student.tensors().values():
        parameter._post_accumulate_grad_hooks = None
    return loss, gradients


def written_out(groups: Sequence[Group], loss: Loss, *, source: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean of `loss` over the trained tokens and its gradient, from the definitions."""
    student = plain("student")
    teacher = student if source == "self" else plain("teacher")
    terms = []
    for segment in (s for group in groups for t in group.trajectories for s in t.segments):
        first = segment.loss_mask.find(1)
        tokens = torch.tensor(segment.token_ids)
        prompt = segment.token_ids[:first] if segment.teacher_prompt_token_ids is None else None
        read = torch.tensor([*(prompt or segment.teacher_prompt_token_ids or ()), *segment.token_ids[first:]])
        trained = torch.tensor(list(segment.loss_mask)).bool()[first:]
        behaviour = torch.tensor(segment.behaviour_logprobs, dtype=torch.float64)[first:]
        ours = next_tokens(student, tokens)[first - 1 :]
        with torch.no_grad():
            theirs = next_tokens(teacher, read)[len(read) - len(tokens) + first - 1 :]
        terms.append(loss(ours[trained], theirs[trained], tokens[first:][trained], behaviour[trained]))
    total = torch.cat(terms).mean()
    total.backward()
    return total.item(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def next_tokens(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return [L - 1, V], entry j the log-probs of what stands at j + 1."""
    return torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / _TEMPERATURE, -1)


def by_definition(settings: TeacherSettings) -> Loss:
    def loss(ours: torch.Tensor, theirs: torch.Tensor, tokens: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        p, q = theirs.exp(), ours.exp()
        if settings.top_k:
            kept = (p if settings.support == "teacher" else q).topk(settings.top_k).indices
            p, q = (torch.cat([x.gather(1, kept), 1 - x.gather(1, kept).sum(1, keepdim=True)], 1) for x in (p, q))
        mixed = settings.beta * p + (1 - settings.beta) * q
        if settings.divergence == "jsd":
            left, right = (p * (p / mixed).log()).sum(1), (q * (q / mixed).log()).sum(1)
            return settings.beta * left + (1 - settings.beta) * right
        return (p * (p / q).log()).sum(1) if settings.divergence == "forward_kl" else (q * (q / p).log()).sum(1)

    return loss


def assert_same(found: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    largest = max(float(g.abs().max()) for g in wanted[1].values())
    assert largest > 1e-6
    for name, gradient in found[1].items():
        torch.testing.assert_close(
            gradient, wanted[1][name], rtol=1e-7, atol=1e-9 * largest, msg=lambda m, name=name: f"{name}: {m}"
        )


MODEL = {"source": "model", "path": Path("teacher")}
CASES = [
    TeacherSettings(**MODEL, divergence="forward_kl"),
    TeacherSettings(**MODEL, divergence="jsd", beta=0.3),
    TeacherSettings(**MODEL, divergence="forward_kl", top_k=5),
    TeacherSettings(**MODEL, divergence="reverse_kl", top_k=5, support="student"),
    TeacherSettings(source="self", divergence="reverse_kl"),
    TeacherSettings(source="self", divergence="jsd", top_k=20),
]


@pytest.mark.slow
@pytest.mark.parametrize("teacher", CASES, ids=lambda t: f"{t.source}-{t.divergence}-{t.top_k}")
def test_distillation_is_the_mean_divergence_of_whole_distributions(teacher: TeacherSettings) -> None:
    groups = told(random_groups(1, num_groups=2))
    settings = settings_for("distillation", teacher)
    found = found_by_the_learner(groups, settings, teachers_for(settings, load("student")))
    assert_same(found, written_out(groups, by_definition(teacher), source=teacher.source))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["model", "self"])
def test_on_policy_distillation_weighs_the_sampled_tokens_by_what_the_teacher_finds(source: str) -> None:
    def loss(ours: torch.Tensor, theirs: torch.Tensor, tokens: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        ours, theirs = (x.gather(1, tokens[:, None])[:, 0] for x in (ours, theirs))
        return -(ours - behaviour).exp() * (theirs - behaviour).clamp(-20, 20)

    groups = told(random_groups(2, num_groups=2))
    settings = settings_for("opd", TeacherSettings(**MODEL) if source == "model" else None)
    found = found_by_the_learner(groups, settings, teachers_for(settings, load("student")))
    assert_same(found, written_out(groups, loss, source=source))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["distillation", "opd"])
def test_neither_split_nor_sharing_change_what_is_learned_from_a_teacher(loss: str) -> None:
    groups = told(random_groups(5, num_groups=3))
    whole = settings_for(loss, TeacherSettings(**MODEL))
    student = load("student")
    wanted = found_by_the_learner(groups, whole, teachers_for(whole, student))
    for variant in ({"microbatch_tokens": 40}, {"share_prefixes": False}):
        settings = replace(whole, **variant)
        found = found_by_the_learner(groups, settings, teachers_for(settings, student))
        assert found[0] == pytest.approx(wanted[0], rel=1e-11)
        assert_same(found, wanted)


@pytest.mark.slow
def test_a_divergence_beside_a_policy_loss_is_added_to_it() -> None:
    groups = told(random_groups(6))
    student = load("student")
    added = settings_for("dapo", TeacherSettings(**MODEL), loss_settings={"distillation_coef": 0.3})
    distilled = settings_for("distillation", TeacherSettings(**MODEL))
    alone = LearnerSettings(loss="dapo", dtype="float64", microbatch_tokens=10_000)
    loss, gradients = found_by_the_learner(groups, added, teachers_for(added, student))
    left = found_by_the_learner(groups, alone, Teachers(alone.resolved_loss, student, _CPU))
    right = found_by_the_learner(groups, distilled, teachers_for(distilled, student))
    assert loss == pytest.approx(left[0] + 0.3 * right[0], rel=1e-11)
    sums = {name: left[1][name] + 0.3 * right[1][name] for name in gradients}
    assert_same((loss, gradients), (loss, sums))


def test_the_policy_alone_has_nothing_to_teach_itself() -> None:
    settings = settings_for("distillation")
    student = load("student")
    with pytest.raises(ConfigError, match=r"needs segments with a prompt for teachers.*teacher_prompts"):
        teachers_for(settings, student).read(random_batch(settings, student))


def random_batch(settings: LearnerSettings, student: PolicyModel) -> Any:
    stepper = Stepper(student, Optimizer(student.tensors(), settings), settings, max_off_policyness=1)
    return stepper._select(random_groups(0)).batch


def test_an_average_begins_at_the_policy_and_follows_it() -> None:
    masters = {name: p.detach().clone() for name, p in load("student").tensors().items()}
    model = load("student")
    average = MovingAverage(model, masters, 0.25)
    for master in masters.values():
        master += 1.0  # a warm start before the first step
    assert average.state() == {}
    average.begin()
    first = {name: master.clone() for name, master in masters.items()}
    for master in masters.values():
        master += 1.0
    average.begin()
    average.advance()
    for name, parameter in model.tensors().items():
        torch.testing.assert_close(parameter.detach(), first[name] + 0.25, rtol=1e-12, atol=1e-12)
    again = MovingAverage(load("student"), masters, 0.25)
    again.restore(average.state())
    again.advance()
    average.advance()
    for name, value in average.state().items():
        assert torch.equal(again.state()[name], value)
        assert float((value - first[name]).mean()) == pytest.approx(0.25 + 0.75 * 0.25)


TEACHER = {"source": "model", "path": Path("large")}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "opd"}, r"loss 'opd' needs a teacher: set source .*\[learner.teacher\]"),
        ({"loss": "distillation"}, "needs a teacher"),
        ({"loss_settings": {"distillation_coef": 0.1}}, "loss 'dapo' needs a teacher"),
        ({"teacher": TEACHER}, "is not read by loss 'dapo': set distillation_coef"),
        ({"loss": "opd", "teacher": {**TEACHER, "top_k": 5}}, "top_k = '5' would not be read without a distillation_"),
        ({"loss": "opd", "teacher": {**TEACHER, "divergence": "jsd"}}, "divergence = 'jsd' would not be read"),
        ({"loss": "distillation", "teacher": {"source": "model"}}, "path must name a model directory"),
        ({"loss": "distillation", "teacher": {"source": "modle"}}, "source must be one of none, model, self, engine"),
        ({"loss": "distillation", "teacher": {"source": "engine", "url": "host:1"}}, "url must begin with http"),
        ({"loss": "distillation", "teacher": {"source": "engine", "url": "http://h"}}, "top_k must be >= 1"),
        (
            {
                "loss": "distillation",
                "teacher": {"source": "engine", "url": "http://h", "top_k": 5, "support": "student"},
            },
            "support must be 'teacher' with source = 'engine'",
        ),
        ({"loss": "distillation", "teacher": {**TEACHER, "url": "http://h"}}, "url = 'http://h' would not be read"),
        ({"loss": "distillation", "teacher": {**TEACHER, "ema_rate": 0.1}}, "ema_rate = '0.1' would not be read"),
        ({"loss": "distillation", "teacher": {"source": "self", "ema_rate": 1.0}}, r"ema_rate must be in \[0, 1\)"),
        ({"loss": "distillation", "teacher": {**TEACHER, "beta": 0.3}}, "beta = '0.3' would not be read"),
        (
            {"loss": "distillation", "teacher": {**TEACHER, "divergence": "jsd", "beta": 1.0}},
            r"beta must be inside \(0",
        ),
        ({"loss": "distillation", "teacher": {**TEACHER, "divergence": "kl"}}, "divergence must be one of forward_kl"),
        ({"loss": "distillation", "teacher": {**TEACHER, "support": "student"}}, "support = 'student' would not be"),
        ({"loss": "distillation", "teacher": {**TEACHER, "top_k": -1}}, "top_k must be >= 0"),
        (
            {"reference": {"source": "model", "path": Path("x")}},
            r"\[learner.reference\] is set and not read by loss 'dapo'",
        ),
        ({"loss": "grpo", "reference": {"source": "self"}}, "source must be one of start, model, engine"),
        ({"loss": "grpo", "reference": {"source": "engine", "url": "http://h", "timeout_s": math.inf}}, "timeout_s"),
        ({"pairs": {"per_group": 2}}, r"\[learner.pairs\] is set and not read by loss 'dapo'"),
        ({"loss": "dpo", "credit": {"whiten": True}}, r"\[learner.credit\] is set and not read by loss 'dpo'"),
        ({"loss": "dpo", "pairs": {"per_group": 0}}, "per_group must be >= 1"),
        ({"loss": "dpo", "pairs": {"min_gap": math.nan}}, "min_gap must be >= 0"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    kinds = {
        "credit": CreditSettings,
        "teacher": TeacherSettings,
        "reference": ReferenceSettings,
        "pairs": PairSettings,
    }

    def build() -> None:
        parts = {name: kinds[name](**value) if name in kinds else value for name, value in settings.items()}
        LearnerSettings(**parts)

    with pytest.raises(ConfigError, match=words):
        build()
