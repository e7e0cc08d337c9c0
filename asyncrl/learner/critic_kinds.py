"""The three forms of a critic: a value model, a head on the policy's body, the policy's yes or no to a question.

`P` predictions of a microbatch, `C` hidden width, `T` tokens of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.critic import Critic
from asyncrl.learner.critic_settings import Question, check_critic, read_question
from asyncrl.learner.model import PolicyModel, hidden_states, load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.learner.states import States, last_actions, question_states
from asyncrl.losses import LossOutput, reduce, yes_no_loss
from asyncrl.losses.reduction import Record, Sum
from asyncrl.packing import Batch, Microbatch, unpack
from asyncrl.types import Trajectory


class ModelCritic(Critic):
    """A value model: a body and a head of its own, and its own optimizer."""

    def __init__(self, settings: LearnerSettings, body: PolicyModel) -> None:
        decoder: torch.nn.Module = body.model.get_decoder()  # type: ignore[operator]
        parameters = dict(decoder.named_parameters(prefix="body"))
        example = next(iter(parameters.values()))
        super().__init__(settings, example.device)
        self._body = decoder
        self._head = _value_head(body)
        parameters |= dict(self._head.named_parameters(prefix="head"))
        self.optimizer = Optimizer(parameters, _own(settings))

    @property
    def _coefficient(self) -> float:
        return 1.0

    def _outputs(self, microbatch: Microbatch) -> torch.Tensor:
        return unpack(microbatch, _apply(self._head, hidden_states(self._body, microbatch)))

    def _update_again(self, batch: Batch) -> Mapping[str, Record]:
        assert self.optimizer is not None
        seen: list[Mapping[str, Record]] = []
        for _ in range(1, self.settings.updates_per_batch):
            self.accumulate(batch)
            records, self._records = reduce(self._records), []
            norm = self.optimizer.gradient_norm()
            if math.isfinite(norm):
                self.optimizer.step(norm)
            else:
                self.optimizer.discard()
            # Of the rest the first pass has told, and before the update.
            told = {name: record for name, record in records.items() if name == "value_clip_fraction"}
            seen.append({**told, "critic_updates_skipped": Sum(float(not math.isfinite(norm)))})
        return reduce(seen)


class HeadCritic(Critic):
    """A linear head on the policy's body."""

    def __init__(self, settings: LearnerSettings, policy: PolicyModel) -> None:
        self._policy = policy
        self._head = _value_head(policy)
        super().__init__(settings, self._head.weight.device)
        self.optimizer = Optimizer(dict(self._head.named_parameters(prefix="head")), _own(settings))

    @property
    def trains_body(self) -> bool:
        """See `Critic.trains_body`."""
        return not self.settings.stop_gradient and not self.warms_up

    def losses(self, batch: Batch, microbatch: Microbatch, hidden: torch.Tensor) -> list[torch.Tensor]:
        """See `Critic.losses`."""
        hidden = hidden if self.trains_body else hidden.detach()
        estimate = self.under_way
        places, state_T = microbatch.token_index.cpu(), estimate.states.state_of_token
        output = self._loss_of(
            unpack(microbatch, _apply(self._head, hidden)),
            estimate.returns[state_T[places]].to(self._device),
            batch.loss_mask[places].to(self._device),
            estimate.values[state_T[places]].to(self._device),
            batch.num_loss_tokens,
        )
        self._records.append(output.metrics)
        return [self._coefficient * output.loss]

    def accumulate(self, batch: Batch) -> None:
        """Nothing: the head learns in the policy's own pass, from the hidden states that are there already."""

    def _outputs(self, microbatch: Microbatch) -> torch.Tensor:
        return unpack(microbatch, _apply(self._head, self._policy.hidden(microbatch)))


class YesNoCritic(Critic):
    """The policy's own probability of yes against no after a question. Values and returns are rescaled rewards."""

    def __init__(self, settings: LearnerSettings, policy: PolicyModel, question: Question) -> None:
        self._policy = policy
        self._question = question
        super().__init__(settings, policy.head.device)

    @property
    def freezes_policy(self) -> bool:
        """See `Critic.freezes_policy`."""
        return False

    def _states(self, batch: Batch, goes_on: torch.Tensor) -> States:
        return question_states(batch, goes_on, self._question, every=self.settings.question_every)

    def _outputs(self, microbatch: Microbatch) -> torch.Tensor:
        """Return z_yes - z_no, at temperature 1: it is no probability of sampling."""
        hidden = self._policy.hidden(microbatch)
        words = self._policy.head[[self._question.yes, self._question.no]]
        logits = torch.nn.functional.linear(hidden.to(_wide(hidden.dtype)), words.to(_wide(words.dtype)))
        return unpack(microbatch, logits[:, 0] - logits[:, 1])

    def _value_of(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sigmoid()

    def _loss_of(
        self, outputs: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, old: torch.Tensor, number: int
    ) -> LossOutput:
        return yes_no_loss(outputs, torch.zeros_like(outputs), returns, mask, num_loss_tokens=number)

    def _rescaled(self, batch: Batch, trajectories: Sequence[Trajectory], rewards: torch.Tensor) -> torch.Tensor:
        low, high = self.settings.reward_low, self.settings.reward_high
        for trajectory in trajectories:
            if trajectory.reward is not None and not low <= trajectory.reward <= high:
                raise ConfigError(
                    f"trajectory {trajectory.trajectory_id} of environment {trajectory.environment!r} has reward "
                    f"{trajectory.reward}, outside of reward_low = {low} and reward_high = {high} ([learner.critic])"
                )
        last = last_actions(batch, len(trajectories))
        last = last[last >= 0]
        shift = torch.full((len(last),), low, dtype=torch.float64)
        return rewards.index_add(0, last, -shift) / (high - low)

    def _reachable(self, returns: torch.Tensor) -> torch.Tensor:
        return returns.clamp(0.0, 1.0)


def open_critic(job: LearnerJob, policy: PolicyModel, device: torch.device) -> Critic | None:
    """Return the critic that `job` asks for, or None.

    Raises: ConfigError where the files of the policy, or of the value model, cannot do what is asked.
    """
    settings = job.learner
    check_critic(settings.critic, job.model)
    match settings.critic.kind:
        case "model":
            path = settings.critic.path if settings.critic.path != Path("") else job.model
            body = load_model(
                path,
                dtype=policy.head.dtype,
                device=device,
                gradient_checkpointing=settings.gradient_checkpointing,
                attention=settings.attention,
            )
            return ModelCritic(settings, body)
        case "head":
            return HeadCritic(settings, policy)
        case "yes_no":
            return YesNoCritic(settings, policy, read_question(settings.critic, job.model))
    return None


def resume_critic(critic: Critic | None, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Bring `critic` to what `tensors` and `state` of a checkpoint hold; `state` is empty where there was none.

    Raises: CheckpointError for one of another kind, or where something is missing.
    """
    kind = "none" if critic is None else critic.settings.kind
    if state.get("kind", "none") != kind:
        raise CheckpointError(
            f'the checkpoint was written with kind = "{state.get("kind", "none")}" and cannot go on with "{kind}" '
            "([learner.critic]); start a new run from its model folder instead"
        )
    if critic is not None:
        critic.restore(tensors, state)


def _own(settings: LearnerSettings) -> LearnerSettings:
    return replace(settings, learning_rate=settings.critic.learning_rate)


def _value_head(model: PolicyModel) -> torch.nn.Linear:
    """Return a head whose values are all 0, in float32 at least, beside the model's weights."""
    width = model.head.shape[1]
    head = torch.nn.Linear(width, 1, device=model.head.device, dtype=_wide(model.head.dtype))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def _apply(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = head(hidden.to(head.weight.dtype))[:, 0]
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
