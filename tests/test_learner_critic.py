"""Critics in three forms: values and gradients against plain transformers, whole steps, what they leave alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_groups import make_group, make_segment
from test_advantages import expected_gae
from test_learner_numerics import with_exact_norms
from test_learner_step import job_for, step
from tiny_model import build_tiny_model, state_of

from asyncrl.configs import load_config
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.credit import select
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.critic import rewards_in_time
from asyncrl.learner.critic_settings import CriticSettings, Question, read_question
from asyncrl.learner.process import Learner
from asyncrl.learner.states import question_states, token_states
from asyncrl.packing import Batch, lay_out, split
from asyncrl.types import Group, Logprobs, Segment, TrajectoryStatus, TurnSpan
from asyncrl.wire import PublishRequest, SaveRequest

ASKS = {"question": "?!", "yes": "Y", "no": "N"}
"""The tiny model's tokens are bytes: its words for yes and no are letters."""
QUESTION = [ord("?"), ord("!")]

CRITICS: dict[str, dict[str, Any]] = {
    "model": {"kind": "model", "learning_rate": 3e-3},
    "head": {"kind": "head", "learning_rate": 3e-2},
    "head_through": {"kind": "head", "learning_rate": 3e-2, "stop_gradient": False, "value_coef": 0.5},
    "yes_no": {"kind": "yes_no", **ASKS, "value_coef": 1.0},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, dtype=torch.float32)


def learner_for(model: Path, published: Path, critic: dict[str, Any], **settings: Any) -> Learner:
    resume_from = settings.pop("resume_from", None)
    options = {"loss": "ppo", "critic": CriticSettings(**critic), **settings}
    return Learner(job_for(model, published, resume_from=resume_from, **options))


def mixed_groups(seed: int, *, version: int = 0, silent: bool = False) -> list[Group]:
    """Return groups of one, two and three trajectories with several turns and segments, ended in every way.

    `silent`: the environment's own credit of 0 on every token, so that the policy's loss has no gradient.
    """
    rng = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(250) for _ in range(rng.randint(low, high))]

    statuses = [
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED_TURNS,
        TrajectoryStatus.FAILED_SANDBOX,
        TrajectoryStatus.TIMED_OUT,
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED_LENGTH,
    ]
    groups = []
    for group_id, size in enumerate((1, 2, 3)):
        prompt = words(6, 12)
        trajectories = []
        for place in range(size):
            status = statuses[group_id * (group_id + 1) // 2 + place]
            segments = []
            for _ in range(rng.randint(1, 2)):
                turns = [(words(1, 6), words(0, 3)) for _ in range(rng.randint(1, 3))]
                if rng.random() < 0.5:
                    turns[-1] = (turns[-1][0], [])  # the last sampled token ends the segment
                segment = make_segment(prompt, turns, version=version, logprob=-rng.uniform(1, 8))
                credit = Logprobs([0.0] * len(segment.token_ids)) if silent else None
                segments.append(replace(segment, advantages=credit))
            reward = None if status.failed else rng.choice([0.0, 1.0, 0.25])
            group = make_group(group_id, segments[:1], [reward])
            trajectories.append(
                replace(
                    group.trajectories[0],
                    trajectory_id=f"{group_id}/{place}",
                    status=status,
                    segments=tuple(segments),
                )
            )
        groups.append(replace(group, trajectories=tuple(trajectories)))
    return groups


def prepared(learner: Learner, groups: Sequence[Group]) -> tuple[Batch, Any, float]:
    """Return batch, estimate and the policy's loss, with the gradients summed and not applied."""
    stepper = learner._stepper
    settings, critic = learner._job.learner, learner._critic
    assert critic is not None
    selection = select(groups, settings, assign=critic.assign)
    microbatches = split(selection.batch, max_tokens=settings.microbatch_tokens, share_prefixes=settings.share_prefixes)
    loss, _, _ = stepper.accumulate(selection.batch, microbatches)
    return selection.batch, critic.under_way, loss


def give_head_weights(learner: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the value head to something, so that the body behind it matters; return weight [C] and bias []."""
    head = learner._critic._head  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator, dtype=torch.float64) * 0.2)
        head.bias.fill_(0.1)
    return head.weight.detach().clone()[0], head.bias.detach().clone()[0]


# --- an independent computation -------------------------------------------------------------------------------


class Plain:
    """One whole step's values, advantages, value loss and gradients by transformers alone, row by row in float64."""

    def __init__(self, path: Path, head: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
        with_exact_norms(self.model)
        self.head = None if head is None else tuple(part.clone().requires_grad_() for part in head)

    def outputs(self, segment: Segment, places: Sequence[int]) -> list[torch.Tensor]:
        """Return the value (or z_yes - z_no) of the states before each of `places`."""
        tokens = list(segment.token_ids)
        if self.head is not None:
            hidden = self.model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            return [hidden[place - 1] @ self.head[0] + self.head[1] for place in places]
        found = []
        for place in places:
            logits = self.model(input_ids=torch.tensor([[*tokens[:place], *QUESTION]])).logits[0, -1]
            found.append(logits[ord("Y")] - logits[ord("N")])
        return found

    def value_of(self, output: torch.Tensor) -> float:
        """Return the value that an output stands for."""
        return float((output if self.head is not None else output.sigmoid()).detach())

    def steps_of(self, segment: Segment) -> list[int]:
        """Return the places where a time step begins: every sampled token, or the first of a run of them."""
        mask = segment.loss_mask
        return [p for p in range(len(mask)) if mask[p] and (self.head is not None or not mask[p - 1])]

    def value_loss(
        self, groups: Sequence[Group], *, gamma: float, lam: float, bootstrap: bool
    ) -> tuple[torch.Tensor, list[float]]:
        """Return the loss over all time steps, and the advantage of every sampled token."""
        losses, credit = [], []
        for trajectory in [t for g in groups for t in g.trajectories if t.reward is not None]:
            outputs = [z for s in trajectory.segments for z in self.outputs(s, self.steps_of(s))]
            values = [self.value_of(z) for z in outputs]
            after = 0.0
            if bootstrap and trajectory.status is not TrajectoryStatus.COMPLETED:
                last = trajectory.segments[-1]
                end = last.loss_mask.rfind(1) + 1
                (z,) = self.outputs(last, [end])
                after = self.value_of(z)
            rewards = [0.0] * (len(values) - 1) + [float(trajectory.reward or 0.0)]
            advantages, returns = expected_gae(rewards, values, [True] * len(values), gamma, lam, after)
            for z, target in zip(outputs, returns, strict=True):
                if self.head is not None:
                    losses.append((z - target).square() / 2)
                else:
                    held = min(1.0, max(0.0, target))
                    losses.append(-held * torch.log(z.sigmoid()) - (1 - held) * torch.log(1 - z.sigmoid()))
            step_number = -1
            for segment in trajectory.segments:
                starts = set(self.steps_of(segment))
                for place, trained in enumerate(segment.loss_mask):
                    step_number += place in starts
                    if trained:
                        credit.append(advantages[step_number])
        return torch.stack(losses).mean(), credit


@pytest.mark.slow
@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize(("name", "microbatch_tokens"), [(name, 10_000) for name in CRITICS] + [("head_through", 60)])
def test_a_steps_values_loss_and_gradients_are_those_of_plain_transformers(
    model_path: Path, tmp_path: Path, name: str, microbatch_tokens: int, bootstrap: bool
) -> None:
    critic = {**CRITICS[name], "gamma": 0.9, "lam": 0.8, "bootstrap_truncated": bootstrap}
    learner = learner_for(model_path, tmp_path, critic, dtype="float64", microbatch_tokens=microbatch_tokens)
    with_exact_norms(learner._model.model)
    head = None if name == "yes_no" else give_head_weights(learner)
    if name == "model":
        with_exact_norms(learner._critic._body)  # type: ignore[union-attr]
    groups = mixed_groups(1, silent=True)
    plain = Plain(model_path, head)
    wanted, credit = plain.value_loss(groups, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    wanted.backward()
    batch, estimate, _ = prepared(learner, groups)
    torch.testing.assert_close(
        estimate.advantages[batch.loss_mask], torch.tensor(credit, dtype=torch.float64), rtol=1e-9, atol=1e-10
    )
    metrics = learner._critic.finish(batch, stepped=False)  # type: ignore[union-attr]
    assert metrics["value_loss"] == pytest.approx(wanted.item(), rel=1e-10)
    learner._optimizer.discard()
    prepared(learner, groups)
    policy = learner._optimizer.gradients()
    names = {parameter: name for name, parameter in plain.model.named_parameters()}
    coefficient = float(critic.get("value_coef", 0.1)) if name != "model" else 1.0
    own = learner._critic.optimizer.gradients() if name != "yes_no" else {}  # type: ignore[union-attr]
    if plain.head is not None:
        assert plain.head[0].grad is not None
        torch.testing.assert_close(own["head.weight"][0], coefficient * plain.head[0].grad, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(own["head.bias"][0], coefficient * plain.head[1].grad, rtol=1e-8, atol=1e-10)
    for parameter, tensor_name in names.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else coefficient * parameter.grad
        if name == "model":
            found = own["body." + tensor_name.removeprefix("model.")]
            assert torch.count_nonzero(policy[tensor_name]) == 0
        else:
            found = policy[tensor_name]
        if name == "head":
            assert torch.count_nonzero(found) == 0, "the stopped gradient reaches the policy's body"
        else:
            torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-10, msg=lambda m: f"{tensor_name}: {m}")  # noqa: B023
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "head_through"])
def test_a_stopped_gradient_leaves_the_policys_own_exactly_as_it_is(
    model_path: Path, tmp_path: Path, name: str
) -> None:
    found = []
    for place, coefficient in enumerate((0.0, 3.0)):
        critic = {**CRITICS[name], "value_coef": coefficient}
        learner = learner_for(model_path, tmp_path / str(place), critic)
        give_head_weights(learner)
        prepared(learner, mixed_groups(1))
        found.append(learner._optimizer.gradients())
        learner.close()
    assert sum(float(g.abs().max()) for g in found[0].values()) > 0
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0]) == (name == "head")


@pytest.mark.slow
def test_the_coefficient_scales_what_reaches_the_body(model_path: Path, tmp_path: Path) -> None:
    found = []
    for place, coefficient in enumerate((0.5, 1.0)):
        critic = {**CRITICS["head_through"], "value_coef": coefficient}
        learner = learner_for(model_path, tmp_path / str(place), critic, dtype="float64")
        give_head_weights(learner)
        prepared(learner, mixed_groups(1, silent=True))
        found.append(learner._optimizer.gradients())
        learner.close()
    assert sum(float(g.abs().max()) for g in found[0].values()) > 0
    for name, gradient in found[0].items():
        torch.testing.assert_close(2 * gradient, found[1][name], rtol=1e-12, atol=1e-15)


# --- states -----------------------------------------------------------------------------------------------------


def laid_out(rows: Sequence[Segment], owners: Sequence[int]) -> Batch:
    return lay_out(
        rows, trajectory_index=owners, group_index=owners, advantages=[0.0] * len(rows), rewards=[0.0] * len(rows)
    )


def test_states_of_tokens_and_of_questions() -> None:
    rows = [
        make_segment([1, 2], [([3, 4, 5], [6]), ([7], [])]),  # ends with a sampled token
        make_segment([1, 9], [([10, 11], [12, 13])]),
        make_segment([20], []),
        make_segment([20, 21], [([22], [])]),
    ]
    batch = laid_out(rows, [0, 0, 2, 3])
    goes_on = torch.tensor([True, True, True, True])
    tokens = token_states(batch, goes_on)
    assert batch.token_ids[tokens.token].tolist() == [3, 4, 5, 7, 10, 11, 22]
    assert tokens.cu_seqlens.tolist() == [0, 6, 6, 6, 7]
    assert tokens.end_of.tolist() == [0, 3]  # trajectories 1 and 2 have nothing sampled
    assert tokens.rows.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 9, 10, 11, 12, 13, 20, 20, 21, 22, 0]
    assert tokens.rows.token_ids[tokens.place].tolist() == [3, 4, 5, 7, 10, 11, 22, 12, 0]
    asked = question_states(batch, goes_on, Question(token_ids=(50, 51), yes=60, no=61), every=2)
    bounds = asked.rows.cu_seqlens.tolist()
    assert [asked.rows.token_ids[a:b].tolist() for a, b in pairwise(bounds)] == [
        [1, 2, 50, 51, 60],
        [1, 2, 3, 4, 50, 51, 60],
        [1, 2, 3, 4, 5, 6, 50, 51, 60],
        [1, 9, 50, 51, 60],
        [20, 21, 50, 51, 60],
        [1, 9, 10, 11, 50, 51, 60],
        [20, 21, 22, 50, 51, 60],
    ]
    assert asked.rows.loss_mask.nonzero()[:, 0].tolist() == sorted(asked.place.tolist()) == [b - 1 for b in bounds[1:]]
    assert asked.state_of_token[batch.loss_mask].tolist() == [0, 0, 1, 2, 3, 3, 4]
    assert asked.cu_seqlens.tolist() == [0, 4, 4, 4, 5]
    assert asked.end_of.tolist() == [0, 3]
    once = question_states(batch, ~goes_on, Question(token_ids=(50,), yes=60, no=61), every=0)
    assert batch.token_ids[once.token].tolist() == [3, 7, 10, 22]
    assert len(once.end_of) == 0


@pytest.mark.slow
def test_rewards_of_turns_and_of_tokens_reach_what_came_before_them(model_path: Path, tmp_path: Path) -> None:
    learner = learner_for(model_path, tmp_path, {"kind": "head", "gamma": 0.5})
    spans = (TurnSpan(start=2, end=4, reward=1.0), TurnSpan(start=5, end=6, reward=0.25), TurnSpan(start=6, end=6))
    segment = replace(make_segment([1, 2], [([3, 4], [6]), ([7], [8])]), turns=spans)
    unsaid = make_segment([1, 2], [([9, 9], [])])
    trajectories = make_group(0, [unsaid, segment], [1.0, 4.0]).trajectories
    batch = laid_out([unsaid, segment], [0, 1])
    rewards = torch.tensor([1.0, 4.0], dtype=torch.float64)
    assert rewards_in_time(batch, trajectories, rewards).tolist() == [0, 0, 0, 1.0, 0, 0, 0, 1.0, 0, 3.0, 0]
    paid = torch.zeros(11)
    paid[6] = -0.5  # as a KL penalty is
    assert learner._critic is not None
    advantages = learner._critic.assign(batch, trajectories, rewards, paid)  # the head's values are all 0 yet
    assert advantages.tolist() == [0, 0, 0.5, 1.0, 0, 0, -0.5 + 0.5 * 2.5, 2.5, 0, 3.0, 0]
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_values_are_not_trained_on_trajectories_that_are_filtered(model_path: Path, tmp_path: Path, name: str) -> None:
    segments = [make_segment([1, 2], [([3 + i, 4], [])]) for i in range(3)]
    group = make_group(0, segments, [1.0, 0.0, 0.5])
    cut = replace(group.trajectories[1], status=TrajectoryStatus.TRUNCATED_LENGTH, truncated=True)
    group = replace(group, trajectories=(group.trajectories[0], cut, group.trajectories[2]))
    learner = learner_for(model_path, tmp_path, CRITICS[name], credit=CreditSettings(overlong_filter=True))
    metrics = step(learner, [group]).metrics
    assert metrics["overlong_filtered_share"] == pytest.approx(1 / 3)
    assert metrics["return_mean"] == pytest.approx(0.75)
    learner.close()


# --- whole steps ------------------------------------------------------------------------------------------------


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


def test_the_value_model_may_start_from_another_model(model_path: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=5, num_layers=1)
    learner = learner_for(model_path, tmp_path / "a", {**CRITICS["model"], "path": other})
    assert learner._critic is not None
    assert len(learner._critic.tensors()) < len(learner._optimizer.masters)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("<|user|>", "<|someone|>"))
    with pytest.raises(ConfigError, match=r"has another vocabulary .*\[learner.critic\]"):
        learner_for(model_path, tmp_path / "b", {**CRITICS["model"], "path": other})
    with pytest.raises(ConfigError, match="holds no model in Hugging Face form"):
        learner_for(model_path, tmp_path / "c", {**CRITICS["model"], "path": tmp_path})
    learner.close()


def test_a_reward_that_a_yes_no_value_cannot_stand_for_is_refused_by_name(model_path: Path, tmp_path: Path) -> None:
    learner = learner_for(model_path, tmp_path, {**CRITICS["yes_no"], "reward_low": -1.0, "reward_high": 2.0})
    segments = [make_segment([1, 2], [([3, 4], [])]), make_segment([1, 2], [([5], [])])]
    batch, estimate, _ = prepared(learner, [make_group(0, segments, [-1.0, 0.5])])
    assert estimate.returns.tolist() == [0.0, 0.5]
    assert batch.rewards.tolist() == [-1.0, 0.5]
    with pytest.raises(ConfigError, match=r"task-0/1 of environment 'synthetic' has reward 2.5, outside of reward_low"):
        step(learner, [make_group(0, segments, [0.0, 2.5])])
    learner.close()


def test_the_question_is_read_in_the_models_own_tokens(model_path: Path) -> None:
    settings = CriticSettings(kind="yes_no", **ASKS)  # type: ignore[arg-type]
    found = read_question(settings, model_path)
    assert (found.token_ids, found.yes, found.no) == ((ord("?"), ord("!")), ord("Y"), ord("N"))
    for change, words in (
        ({"yes": " Yes"}, "yes = ' Yes' must be one token of the model .*, it is 4"),
        ({"no": "Y"}, "yes and no are the same token"),
        ({"question": ""}, "question must hold a token"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_question(replace(settings, **change), model_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "heads"}, "kind must be one of none, model, head, yes_no, got 'heads'"),
        ({"gamma": 0.9}, 'gamma = 0.9 is not used with kind = "none"'),
        ({"kind": "head", "path": Path("x")}, 'it is for "model"'),
        ({"kind": "yes_no", "stop_gradient": False}, 'it is for "head"'),
        ({"kind": "model", "value_coef": 0.5}, 'it is for "head" or "yes_no"'),
        ({"kind": "head", "updates_per_batch": 2}, 'it is for "model"'),
        ({"kind": "head", "gamma": 1.1}, "gamma must be from 0 to 1, got 1.1"),
        ({"kind": "head", "lam": math.nan}, "lam must be from 0 to 1"),
        ({"kind": "head", "learning_rate": -1.0}, "learning_rate must be >= 0"),
        ({"kind": "head", "value_clip": math.inf}, "value_clip must be >= 0"),
        ({"kind": "yes_no", "question_every": -1}, "question_every must be >= 0 tokens, got -1"),
        ({"kind": "yes_no", "reward_low": 1.0}, "reward_low must be below reward_high, got 1.0 and 1.0"),
    ],
)
def test_settings_that_cannot_run_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CriticSettings(**settings)


def test_a_group_of_one_is_allowed_with_a_critic_and_a_loss_without_advantages_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[environment]\nname = "bugfix"\n[buffer]\ngroup_size = 1\n')
    with pytest.raises(ConfigError, match="group_size must be >= 2"):
        load_config(path)
    config = load_config(path, ["learner.critic.kind=head"])
    assert (config.buffer.group_size, config.learner.critic.kind) == (1, "head")
    with pytest.raises(ConfigError, match="loss 'sft' reads no advantages"):
        load_config(path, ["learner.critic.kind=head", "learner.loss=sft"])
    with pytest.raises(ConfigError, match='level = "turn"'):
        load_config(path, ["learner.critic.kind=head", "learner.credit.level=turn"])
