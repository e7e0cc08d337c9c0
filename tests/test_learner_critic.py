"""Critics: values and gradients against plain transformers, states, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from critics import ASKS, CRITICS, QUESTION, give_head_weights, learner_for, mixed_groups, prepared
from synthetic_groups import make_group, make_segment
from test_advantages import expected_gae
from test_learner_numerics import with_exact_norms
from test_learner_step import step
from tiny_model import build_tiny_model

from asyncrl.configs import load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.critic import rewards_in_time
from asyncrl.learner.critic_settings import CriticSettings, Question, read_question
from asyncrl.learner.states import question_states, token_states
from asyncrl.packing import Batch, lay_out
from asyncrl.types import Group, Segment, TrajectoryStatus, TurnSpan


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, dtype=torch.float32)


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
        with_exact_norms(learner._critic._body.model)  # type: ignore[union-attr]
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


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    with pytest.raises(ConfigError, match="replace_zero_advantage = true"):
        load_config(path, ["learner.critic.kind=head", "buffer.replace_zero_advantage=true"])
    with pytest.raises(ConfigError, match='level = "turn"'):
        load_config(path, ["learner.critic.kind=head", "learner.credit.level=turn"])
