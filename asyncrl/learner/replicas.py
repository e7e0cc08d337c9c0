"""Models in the learner that are asked and not trained, and the moving average that one of them may be.

Legend: `W` tokens of the rows that are asked about, `N` predictions, `C` hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from asyncrl.dealing import deal
from asyncrl.errors import CheckpointError
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import local_part, shard_of
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.packing import Batch, split, to_device


class Replica:
    """A model that reads a batch's rows, never with a gradient. The policy itself can be one."""

    def __init__(
        self,
        model: PolicyModel,
        device: torch.device,
        *,
        max_tokens: int,
        share_prefixes: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        """`ranks` hold the model between them and share the rows; all of them ask for the same."""
        self.model = model
        self._ranks = ranks
        self._device = device
        self._max_tokens = max_tokens
        self._share_prefixes = share_prefixes

    def logprobs(self, rows: Batch) -> torch.Tensor:
        """Return [W] nats of the tokens that `rows.loss_mask` marks, 0.0 for all others; on the CPU."""
        found = torch.zeros(rows.num_tokens, dtype=_wide(self.model.head.dtype))
        size, share = self._max_tokens, self._share_prefixes
        members = deal(rows, self._ranks.num_shares, max_tokens=size, share_prefixes=share)[self._ranks.share]
        with torch.no_grad():
            for microbatch in self._ranks.in_step(split(rows, max_tokens=size, share_prefixes=share, members=members)):
                if microbatch is None:
                    self.model.keep_pace(self._device, backward=False)
                    continue
                logprobs, _ = self.model.logprobs(to_device(microbatch, self._device))
                found[microbatch.token_index] = logprobs.cpu()
        self.model.release()
        self._ranks.add_up_shares(found)
        return found

    def states(self, rows: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states [N, C] on the device, and [W] int64 which of them predicts each marked token.

        -1 for tokens that `rows.loss_mask` does not mark. Each rank asks for rows of its own, all at once; one that has
        none keeps pace. Until `release` a sharded model's head is whole.
        """
        states: list[torch.Tensor] = []
        row = torch.full((rows.num_tokens,), -1, dtype=torch.int64)
        microbatches = split(rows, max_tokens=self._max_tokens, share_prefixes=self._share_prefixes)
        with torch.no_grad():
            for microbatch in self._ranks.in_step(microbatches):
                if microbatch is None:
                    self.model.keep_pace(self._device, backward=False)
                    continue
                marked = microbatch.token_index[microbatch.scored_index]
                row[marked] = microbatch.prediction_index + sum(map(len, states))
                states.append(self.model.hidden(to_device(microbatch, self._device)))
        return torch.cat(states), row

    def keep_pace(self) -> None:
        """Stand beside ranks that ask for states while this one has nothing to ask for."""
        with torch.no_grad():
            for _ in self._ranks.in_step([]):
                self.model.keep_pace(self._device, backward=False)


class MovingAverage:
    """Weights that follow the policy's: average += rate (policy - average) after each step, in the masters' dtype.

    It begins where the policy is when it is first asked, so that a warm start is in it. Of a model that is sharded over
    ranks each moves its own part.
    Source: a teacher of averaged weights as in SDPO, arXiv:2601.20802 (rate 0.05 there).
    """

    def __init__(self, model: PolicyModel, masters: Mapping[str, torch.Tensor], rate: float) -> None:
        """`model` is what holds the average in the dtype that it computes with; `masters` are the policy's, live."""
        self._parameters = model.tensors()
        self._masters = masters
        self._rate = rate
        self._average: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Start at the policy's present weights, the first time."""
        if not self._average:
            self._average = {name: self._masters[name].clone() for name in self._parameters}
            self._copy()

    def advance(self) -> None:
        """Move towards the policy's present weights."""
        for name, average in self._average.items():
            average.lerp_(self._masters[name], self._rate)
        self._copy()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the average's tensors themselves."""
        yield from self._average.values()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the average by parameter name, sharded as the model is; nothing where it has not begun."""
        return {name: shard_of(self._parameters[name], average) for name, average in self._average.items()}

    def blank_state(self) -> dict[str, torch.Tensor]:
        """Return what `state` would, of zeros and in memory of its own, for a reader to fill."""
        return {
            name: shard_of(parameter, torch.zeros_like(self._masters[name]))
            for name, parameter in self._parameters.items()
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned. Raises: CheckpointError naming what is missing or of another shape."""
        if not state:
            return
        self.begin()
        for name, average in self._average.items():
            found, shape = state.get(name), self._parameters[name].shape
            if found is None or found.shape != shape:
                what = "is missing" if found is None else f"has shape {list(found.shape)}, not {list(shape)}"
                raise CheckpointError(f"the teacher's average: {name} {what}")
            average.copy_(local_part(found))
        self._copy()

    def _copy(self) -> None:
        with torch.no_grad():
            for name, average in self._average.items():
                local_part(self._parameters[name]).copy_(average)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
