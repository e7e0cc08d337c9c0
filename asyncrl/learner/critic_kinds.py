"""The three forms of a critic: a value model, a head on the policy's body, the policy's yes or no to a question.

`P` predictions of a microbatch, `C` hidden width, `T` tokens of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from asyncrl import wire
from asyncrl.errors import ConfigError
from asyncrl.learner.critic import Critic
from asyncrl.learner.critic_settings import Question, check_critic, read_question
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.learner.sharded import load_sharded
from asyncrl.learner.states import States, last_actions, question_states
from asyncrl.losses import LossOutput, reduce, yes_no_loss
from asyncrl.losses.reduction import Record, Sum
from asyncrl.packing import Batch, Microbatch, unpack
from asyncrl.types import Trajectory


class ModelCritic(Critic):
    """A value model: a body and a head of its own, and its own optimizer."""

    def __init__(
        self, settings: LearnerSettings, body: PolicyModel, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(settings, device, ranks)
        decoder: torch.nn.Module = body.model.get_decoder()  # type: ignore[operator]
        parameters = dict(decoder.named_parameters(prefix="body"))
        self._model = body
        self._head = _value_head(body, device)
        parameters |= dict(self._head.named_parameters(prefix="head"))
        self.optimizer = Optimizer(parameters, _own(settings), ranks=ranks)

    def modules(self) -> list[torch.nn.Module]:
        """See `Critic.modules`."""
        return [self._model.model, self._head]

    @property
    def _body(self) -> PolicyModel:
        return self._model

    @property
    def _coefficient(self) -> float:
        return 1.0

    def _outputs(self, microbatch: Microbatch) -> torch.Tensor:
        return unpack(microbatch, _apply(self._head, self._model.hidden(microbatch)))

    def _update_again(self, batch: Batch) -> Mapping[str, Record]:
        assert self.optimizer is not None
        seen: list[Mapping[str, Record]] = []
        for _ in range(1, self.settings.updates_per_batch):
            self.accumulate(batch)
            records = self._told()
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

    def __init__(
        self, settings: LearnerSettings, policy: PolicyModel, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(settings, device, ranks)
        self._policy = policy
        self._head = _value_head(policy, device)
        self.optimizer = Optimizer(dict(self._head.named_parameters(prefix="head")), _own(settings), ranks=ranks)

    def modules(self) -> list[torch.nn.Module]:
        """See `Critic.modules`."""
        return [self._head]

    @property
    def _body(self) -> PolicyModel:
        return self._policy

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
        """See `Critic.accumulate`: the head has learned in the policy's own pass already."""
        assert self.optimizer is not None
        self.optimizer.add_up()

    def _outputs(self, microbatch: Microbatch) -> torch.Tensor:
        return unpack(microbatch, _apply(self._head, self._policy.hidden(microbatch)))


class YesNoCritic(Critic):
    """The policy's own probability of yes against no after a question. Values and returns are rescaled rewards."""

    def __init__(
        self,
        settings: LearnerSettings,
        policy: PolicyModel,
        device: torch.device,
        question: Question,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(settings, device, ranks)
        self._policy = policy
        self._question = question

    @property
    def _body(self) -> PolicyModel:
        return self._policy

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


def open_critic(job: LearnerJob, policy: PolicyModel, device: torch.device, *, ranks: Ranks = ALONE) -> Critic | None:
    """Return the critic that `job` asks for, or None. The first of `ranks` alone reads files.

    Raises: ConfigError where the files of the policy, or of the value model, cannot do what is asked.
    """
    settings = job.learner
    if ranks.is_first:
        check_critic(settings.critic, job.model)
    match settings.critic.kind:
        case "model":
            path = settings.critic.path if settings.critic.path != Path("") else job.model
            load = load_model if ranks.count == 1 else partial(load_sharded, ranks=ranks, with_head=False)
            body = load(
                path,
                dtype=getattr(torch, settings.dtype),
                device=device,
                temperature=1.0,
                head_dtype=None,
                gradient_checkpointing=settings.gradient_checkpointing,
                attention=settings.attention,
                compiled=settings.compiled_by,
            )
            return ModelCritic(settings, body, device, ranks)
        case "head":
            return HeadCritic(settings, policy, device, ranks)
        case "yes_no":
            found = wire.encode(read_question(settings.critic, job.model)) if ranks.is_first else None
            return YesNoCritic(settings, policy, device, wire.decode(ranks.pass_on(found), Question), ranks)
    return None


def _own(settings: LearnerSettings) -> LearnerSettings:
    return replace(settings, learning_rate=settings.critic.learning_rate)


def _value_head(model: PolicyModel, device: torch.device) -> torch.nn.Linear:
    """Return a head whose values are all 0, in float32 at least; of several ranks each holds it whole."""
    words: torch.Tensor = model.model.get_input_embeddings().weight  # type: ignore[operator]
    head = torch.nn.Linear(words.shape[1], 1, device=device, dtype=_wide(words.dtype))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def _apply(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = head(hidden.to(head.weight.dtype))[:, 0]
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
