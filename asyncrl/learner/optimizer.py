"""AdamW on master weights of float32, beside the copy that the model computes with.

Gradients of microbatches are added in the master's dtype as soon as the backward pass has made them, so a low-precision
sum never exists and the model's own `.grad` is freed at once.

Of a model that is sharded over ranks each steps its own part, whose parameters are the masters themselves. Parameters
that every rank holds whole (a value head) are stepped alike on each, on gradients that were added up over all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.settings import LearnerSettings


class Optimizer:
    """Master weights, moments and summed gradients, by the parameter's name in the checkpoint."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: LearnerSettings,
        *,
        masters: Mapping[str, torch.Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._parameters = dict(parameters)
        self.updates = 0
        """Optimizer steps that changed the weights: the warmup counts these, not the skipped ones."""
        self.warm_updates = 0
        """Those of them that were on demonstrations, at a learning rate of their own: the warmup begins after them."""
        self.masters: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._hooks = []
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                assert masters is None
                self.masters[name] = local_part(parameter.detach())
            else:
                wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                source = parameter.detach() if masters is None else masters[name]
                self.masters[name] = source.to(device=parameter.device, dtype=wide, copy=True)
            if masters is not None:
                with torch.no_grad():
                    parameter.copy_(self.masters[name])
            self._sums[name] = torch.zeros_like(self.masters[name])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_Adder(self._sums[name])))
        self._whole = [name for name, parameter in self._parameters.items() if not isinstance(parameter, DTensor)]
        matrices = [name for name, master in self.masters.items() if master.dim() > 1]
        others = [name for name, master in self.masters.items() if master.dim() <= 1]
        self._names = matrices + others
        self._adam = torch.optim.AdamW(
            [
                {"params": [self.masters[name] for name in matrices], "weight_decay": settings.weight_decay},
                {"params": [self.masters[name] for name in others], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_eps,
            fused=True,
        )

    def learning_rate(self, scale: float = 1.0) -> float:
        """Return the next step's learning rate, warmup included."""
        warmup = self._settings.warmup_steps
        share = 1.0 if warmup == 0 else min(1.0, (self.updates - self.warm_updates + 1) / warmup)
        return self._settings.learning_rate * share * scale

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield masters and moments, the tensors themselves."""
        for master in self.masters.values():
            yield master
            yield from self._adam.state.get(master, {}).values()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the summed gradients by name; `step` and `discard` empty them."""
        return dict(self._sums)

    def add_up(self) -> None:
        """Add up over ranks the gradients of what each holds whole: once a batch, after its last backward pass."""
        self._ranks.add_up(*(self._sums[name] for name in self._whole))

    def gradient_norm(self) -> float:
        """Return the norm of the summed gradients over all ranks, nan or inf if any of them is."""
        if self._ranks.count == 1:
            return self._norm_of(self._sums)
        sharded = self._norm_of([name for name in self._sums if name not in self._whole])
        return math.hypot(math.sqrt(self._ranks.total(sharded * sharded)), self._norm_of(self._whole))

    def _norm_of(self, names: Collection[str]) -> float:
        if not names:
            return 0.0
        norms = torch._foreach_norm([self._sums[name] for name in names])
        return float(torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])))

    def step(self, norm: float, *, scale: float = 1.0, learning_rate: float | None = None) -> None:
        """Apply the summed gradients, whose global norm is `norm`, and empty the sums.

        `learning_rate` is that of a step on demonstrations; None takes the schedule's, times `scale`.
        """
        assert math.isfinite(norm)
        limit = self._settings.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_(list(self._sums.values()), limit / norm)
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate(scale) if learning_rate is None else learning_rate
        for name, master in self.masters.items():
            master.grad = self._sums[name]
        self._adam.step()
        for master in self.masters.values():
            master.grad = None
        self.updates += 1
        self.warm_updates += learning_rate is not None
        self._copy_to_model()
        self.discard()

    def discard(self) -> None:
        """Empty the sums."""
        torch._foreach_zero_(list(self._sums.values()))

    def _copy_to_model(self) -> None:
        if self._whole:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self._parameters[name] for name in self._whole], [self.masters[name] for name in self._whole]
                )

    def state(self) -> dict[str, torch.Tensor]:
        """Return masters and moments as flat names for a safetensors file: "master.NAME", "exp_avg.NAME", ...

        Of a sharded parameter they are sharded as it is.
        """
        found = {f"master.{name}": shard_of(self._parameters[name], master) for name, master in self.masters.items()}
        for name in self._names:
            for key, value in self._adam.state.get(self.masters[name], {}).items():
                found[f"{key}.{name}"] = shard_of(self._parameters[name], value)
        return found

    def blank_state(self, *, moments: bool) -> dict[str, torch.Tensor]:
        """Return what `state` would, of zeros and in memory of its own, for a reader to fill."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for key in ("master", "exp_avg", "exp_avg_sq") if moments else ("master",):
                found[f"{key}.{name}"] = shard_of(self._parameters[name], torch.zeros_like(master))
            if moments:
                found[f"step.{name}"] = torch.zeros(())
        return found

    def restore(self, state: Mapping[str, torch.Tensor], *, updates: int, warm_updates: int = 0) -> None:
        """Go on from what `state` returned. Raises: CheckpointError naming what is missing or of another shape."""
        for name, master in self.masters.items():
            found = state.get(f"master.{name}")
            shape = self._parameters[name].shape
            if found is None or found.shape != shape:
                what = "is missing" if found is None else f"has shape {list(found.shape)}, not {list(shape)}"
                raise CheckpointError(f"the optimizer's state: master weight {name} {what}")
            master.copy_(local_part(found))
            if updates:
                moments: dict[str, Any] = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    value = state.get(f"{key}.{name}")
                    if value is None:
                        raise CheckpointError(f"the optimizer's state: {key} of {name} is missing")
                    value = local_part(value)
                    moments[key] = value.to(value.device if key == "step" else master.device)
                self._adam.state[master] = moments
        self.updates, self.warm_updates = updates, warm_updates
        self._copy_to_model()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which is all of one that is not sharded; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return this rank's `part` as a shard of what belongs to a sharded `parameter`; anything else as it is."""
    if not isinstance(parameter, DTensor) or part.dim() == 0:
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


class _Adder:
    """Adds a parameter's gradient into a sum and frees it."""

    def __init__(self, total: torch.Tensor) -> None:
        self._total = total

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._total.add_(local_part(parameter.grad))
        parameter.grad = None
