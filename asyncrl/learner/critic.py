"""A critic: values of states, advantages from them, and what is learned from the returns.

Legend: `T` tokens of the batch, `W` of the rows that are forwarded, `K` states, `N` trajectories, `P` predictions
of a microbatch, `C` hidden width.

Values are taken once before the update, in a forward pass of their own without gradients: advantages are needed before
the first backward pass, and to keep the graphs of all microbatches until then would need the memory of them all. That
costs a third of a forward and backward pass more, of the policy's body ("head", "yes_no") or of the value model's. With
one update a batch the values of the learning pass are the same again, so nothing is clipped (`value_clip`).

A time step is a state in which the policy chose: a sampled token, or with "yes_no" a question, which holds for the
tokens up to the next. GAE runs over the states of all segments of a trajectory, one segment after the other.

Of several ranks each takes the values of its share of the states, in passes that all make at once; what is made of them
is the same on every rank.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.advantages import gae
from asyncrl.dealing import deal
from asyncrl.errors import CheckpointError
from asyncrl.learner.critic_settings import CriticSettings
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import Ranks, merge_over
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.states import States, last_actions, token_states
from asyncrl.losses import LossOutput, clipped_value_loss, finalise, reduce
from asyncrl.losses.reduction import Record
from asyncrl.packing import Batch, Microbatch, nothing, split, to_device
from asyncrl.types import Trajectory, TrajectoryStatus

_CUT_OFF = (TrajectoryStatus.TRUNCATED_LENGTH, TrajectoryStatus.TRUNCATED_TURNS, TrajectoryStatus.TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a critic says of a batch before the update, and what it is to learn from it."""

    advantages: torch.Tensor
    """[T] float64; 0 where nothing is trained on."""
    states: States
    microbatches: Sequence[Microbatch]
    """Of this rank's share of the states' rows."""
    values: torch.Tensor
    """[K] float64, before the update."""
    returns: torch.Tensor
    """[K] float64, what the values are to become."""
    num_nonfinite: int
    """Values that were no numbers; the step must be skipped."""
    num_clamped: int
    """Returns outside of what a yes/no value can stand for, brought to its ends."""


class Critic(abc.ABC):
    """A value of states. `optimizer` steps what is the critic's own, where it has any."""

    optimizer: Optimizer | None = None

    def __init__(self, settings: LearnerSettings, device: torch.device, ranks: Ranks) -> None:
        self.settings: CriticSettings = settings.critic
        self._ranks = ranks
        self.steps = 0
        """Optimizer steps that the critic took part in, skipped ones left out."""
        self._learner = settings
        self._device = device
        self._under_way: Estimate | None = None
        self._records: list[Mapping[str, Record]] = []

    @property
    def warms_up(self) -> bool:
        """Whether the policy's loss is left out of the next step."""
        return self.steps < self.settings.critic_warmup_steps

    @property
    def freezes_policy(self) -> bool:
        """Whether the next step leaves the policy's weights as they are."""
        return self.warms_up

    @property
    def trains_body(self) -> bool:
        """Whether the values' gradient goes through the graph of the policy's own pass."""
        return False

    def assign(
        self, batch: Batch, trajectories: Sequence[Trajectory], rewards: torch.Tensor, token_rewards: torch.Tensor
    ) -> torch.Tensor:
        """Return the advantages [T] float64 of `batch`, and keep what is to be learned from it until `finish`.

        `rewards` [N] float64 are the trajectories', `token_rewards` [T] what is added on single tokens.
        Raises: ConfigError for a trajectory's reward that a yes/no value cannot stand for.
        """
        self._under_way = None
        if not batch.num_loss_tokens:
            return torch.zeros(batch.num_tokens, dtype=torch.float64)
        placed = token_rewards.double() + rewards_in_time(batch, trajectories, rewards.double())
        estimate = self._estimate(batch, trajectories, placed)
        self._under_way = estimate
        return estimate.advantages

    @property
    def under_way(self) -> Estimate:
        """What is to be learned from the batch of the last `assign`."""
        assert self._under_way is not None
        return self._under_way

    def _estimate(self, batch: Batch, trajectories: Sequence[Trajectory], rewards: torch.Tensor) -> Estimate:
        """Return values, advantages and returns; `rewards` [T] float64 on trained tokens."""
        cut = [self.settings.bootstrap_truncated and t.status in _CUT_OFF for t in trajectories]
        states = self._states(batch, torch.tensor(cut, dtype=torch.bool))
        size, share = self._learner.microbatch_tokens, self._learner.share_prefixes
        members = deal(states.rows, self._ranks.num_shares, max_tokens=size, share_prefixes=share)
        microbatches = split(states.rows, max_tokens=size, share_prefixes=share, members=members[self._ranks.share])
        with torch.no_grad():
            outputs_W = torch.zeros(states.rows.num_tokens, dtype=torch.float64)
            for microbatch in self._ranks.in_step(microbatches):
                found = self._outputs(to_device(microbatch or nothing(), self._device))
                if microbatch is not None:
                    outputs_W[microbatch.token_index] = found.double().cpu()
        self._body.release()
        self._ranks.add_up_shares(outputs_W)
        values_Q = self._value_of(outputs_W[states.place])
        num_nonfinite = int((~values_Q.isfinite()).sum())
        values_Q = torch.where(values_Q.isfinite(), values_Q, 0.0)
        num_states, mask = len(states.token), batch.loss_mask
        values, ends = values_Q[:num_states], torch.zeros(len(trajectories), dtype=torch.float64)
        ends[states.end_of] = values_Q[num_states:]
        rewards = self._rescaled(batch, trajectories, rewards)
        advantages, returns = gae(
            torch.zeros(num_states, dtype=torch.float64).index_add(0, states.state_of_token[mask], rewards[mask]),
            values,
            torch.ones(num_states, dtype=torch.bool),
            states.cu_seqlens,
            gamma=self.settings.gamma,
            lam=self.settings.lam,
            bootstrap_values=ends,
        )
        reachable = self._reachable(returns)
        return Estimate(
            advantages=torch.where(mask, advantages[states.state_of_token], 0.0),
            states=states,
            microbatches=microbatches,
            values=values,
            returns=reachable,
            num_nonfinite=num_nonfinite,
            num_clamped=int((reachable - returns).abs().gt(1e-9).sum()),
        )

    def losses(self, batch: Batch, microbatch: Microbatch, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return what goes into the policy's backward pass over `microbatch`: nothing, or the value loss [].

        `microbatch` is on the device, `hidden` [P, C] what the policy's body made of it. `batch.loss_mask` tells which
        states are learned from, here and below.
        """
        return []

    def accumulate(self, batch: Batch) -> None:
        """Add the gradients of a pass of the critic's own over its rows; all ranks call it."""
        estimate = self.under_way
        states = estimate.states
        learns_K = batch.loss_mask[states.token]
        place_K = states.place[: len(states.token)]

        def spread(values_K: torch.Tensor) -> torch.Tensor:
            return values_K.new_zeros(states.rows.num_tokens).index_copy(0, place_K, values_K)

        mask_W, returns_W, values_W = spread(learns_K), spread(estimate.returns), spread(estimate.values)
        learning = [m for m in estimate.microbatches if bool(mask_W[m.token_index].any())]
        for microbatch in self._ranks.in_step(learning):
            if microbatch is None:
                self._outputs(to_device(nothing(), self._device)).sum().backward()
                continue
            places = microbatch.token_index
            output = self._loss_of(
                self._outputs(to_device(microbatch, self._device)),
                returns_W[places].to(self._device),
                mask_W[places].to(self._device),
                values_W[places].to(self._device),
                int(learns_K.sum()),
            )
            (self._coefficient * output.loss).backward()
            self._records.append(output.metrics)
        self._body.release()
        if self.optimizer is not None:
            self.optimizer.add_up()

    @property
    def can_step(self) -> bool:
        """Whether all values and all gradients of the critic's own are finite."""
        finite = self.optimizer is None or math.isfinite(self.optimizer.gradient_norm())
        return finite and not self.under_way.num_nonfinite

    def finish(self, batch: Batch, *, stepped: bool) -> dict[str, float]:
        """Apply the critic's own gradients, or forget them unless `stepped`; return the step's metrics."""
        estimate = self.under_way
        metrics = {
            "value_states": float(len(estimate.states.token)),
            "value_nonfinite": float(estimate.num_nonfinite),
            "return_clamped_share": estimate.num_clamped / len(estimate.states.token),
            "critic_warmup": float(self.warms_up),
        }
        if self.optimizer is not None:
            norm = self.optimizer.gradient_norm()
            metrics |= {"critic_grad_norm": norm, "critic_grad_norm_nonfinite": float(not math.isfinite(norm))}
            metrics["critic_learning_rate"] = self.optimizer.learning_rate()
            if stepped:
                self.optimizer.step(norm)
            else:
                self.optimizer.discard()
        records = self._told()
        if stepped:
            self.steps += 1
            records = reduce([records, self._update_again(batch)])
        return {**metrics, **finalise(records)}

    def modules(self) -> list[torch.nn.Module]:
        """Return what the critic computes with besides the policy."""
        return []

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold of the critic's own weights and moments."""
        return {} if self.optimizer is None else self.optimizer.state()

    def blank_tensors(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return what `tensors` would where `state` returned this, for a reader to fill."""
        return {} if self.optimizer is None else self.optimizer.blank_state(moments=int(state["updates"]) > 0)

    def state(self) -> dict[str, Any]:
        """Return what else a checkpoint must hold."""
        updates = 0 if self.optimizer is None else self.optimizer.updates
        return {"kind": self.settings.kind, "steps": self.steps, "updates": updates}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Go on from what `tensors` and `state` returned. Raises: CheckpointError."""
        if self.optimizer is not None:
            self.optimizer.restore(tensors, updates=int(state["updates"]))
        self.steps = int(state["steps"])

    def _told(self) -> dict[str, Record]:
        """Return what the passes since the last call said of themselves, on all ranks."""
        records, self._records = reduce(self._records), []
        return merge_over(self._ranks, records)

    @property
    @abc.abstractmethod
    def _body(self) -> PolicyModel:
        """What `_outputs` makes its passes through."""

    @property
    def _coefficient(self) -> float:
        return self.settings.value_coef

    def _states(self, batch: Batch, goes_on: torch.Tensor) -> States:
        return token_states(batch, goes_on)

    @abc.abstractmethod
    def _outputs(self, microbatch: Microbatch) -> torch.Tensor:
        """Return [T_m] float32 or float64, what stands for the value before each scored token; differentiable."""

    def _value_of(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def _loss_of(
        self, outputs: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, old: torch.Tensor, number: int
    ) -> LossOutput:
        clip = self.settings.value_clip
        return clipped_value_loss(outputs, returns, mask, old_values=old, clip=clip, num_loss_tokens=number)

    def _update_again(self, batch: Batch) -> Mapping[str, Record]:
        """Take the further steps on the same batch; return what they say of themselves."""
        return {}

    def _rescaled(self, batch: Batch, trajectories: Sequence[Trajectory], rewards: torch.Tensor) -> torch.Tensor:
        return rewards

    def _reachable(self, returns: torch.Tensor) -> torch.Tensor:
        return returns


def check_kind(critic: Critic | None, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `state`, as `Critic.state` returned it, is of the `critic`'s kind; {} is of none."""
    kind = "none" if critic is None else critic.settings.kind
    if state.get("kind", "none") != kind:
        raise CheckpointError(
            f'the checkpoint was written with kind = "{state.get("kind", "none")}" and cannot go on with "{kind}" '
            "([learner.critic]); start a new run from its model folder instead"
        )


def rewards_in_time(batch: Batch, trajectories: Sequence[Trajectory], rewards: torch.Tensor) -> torch.Tensor:
    """Return [T] float64: what a turn earned on its last trained token, the rest of the reward on the trajectory's.

    `rewards` [N] float64 are whole trajectories', those of their turns included. A trajectory without a trained token
    has none to put its reward on, and teaches nothing.
    """
    placed = torch.zeros(batch.num_tokens, dtype=torch.float64)
    left = rewards.clone()
    bounds = iter(batch.cu_seqlens.tolist())
    for number, trajectory in enumerate(trajectories):
        for segment in trajectory.segments:
            start = next(bounds)
            for turn in segment.turns:
                if turn.reward is not None and turn.end > turn.start:
                    placed[start + turn.end - 1] += turn.reward
                    left[number] -= turn.reward
    last = last_actions(batch, len(trajectories))
    some = last >= 0
    return placed.index_add(0, last[some], left[some])
