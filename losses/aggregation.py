"""From a loss per token to one number, with denominators of the whole optimizer batch. `T` tokens, `S` sequences.

An aggregation is a weight per token. Every denominator can be given from outside, so that the losses of microbatches
(and ranks) add up to the loss of the whole batch; a mean of means is never formed.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from asyncrl.errors import ConfigError
from asyncrl.losses.inputs import LossInputs, Prepared
from asyncrl.losses.segments import Segments

_DENOMINATORS = tuple(field.name for field in fields(LossInputs) if field.name.startswith("num_"))


def token_weights(
    inputs: LossInputs, prepared: Prepared, mask: torch.Tensor, *, aggregation: str, const_length: float, kept: bool
) -> torch.Tensor:
    """Return [T] float64, what the loss of each token in `mask` is multiplied by before summing; 0 elsewhere.

    `mask` is the active tokens, or with `kept` those that a renormalising loss has not dropped.
    Raises: ConfigError when an input or a denominator is missing.
    """
    segments = prepared.segments
    active = mask.double()
    lengths_S = segments.sum(active) if kept else prepared.lengths
    if aggregation == "sum":
        return active
    if aggregation == "token_mean":
        return active / denominator(inputs, "num_kept_tokens" if kept else "num_loss_tokens", lengths_S.sum())
    if aggregation == "const":
        every = active.new_tensor(float(segments.num_sequences))
        non_empty_given = inputs.num_all_sequences is None and inputs.num_sequences is not None
        given = "num_sequences" if non_empty_given else "num_all_sequences"
        return active / (denominator(inputs, given, every) * const_length)
    if aggregation == "prompt_mean":
        prompt_tokens_S, here = prompt_counts(inputs, segments, lengths_S)
        prompts = denominator(inputs, "num_prompts", here)
        return active / (prompts * segments.spread(prompt_tokens_S.clamp(min=1.0)))
    filled = (lengths_S > 0).double().sum()
    weights = active / denominator(inputs, "num_kept_sequences" if kept else "num_sequences", filled)
    if aggregation == "seq_mean_token_mean":
        weights = weights / segments.spread(lengths_S.clamp(min=1.0))
    return weights


def denominator(inputs: LossInputs, name: str, here: torch.Tensor) -> torch.Tensor:
    """Return [] float64, the denominator `name` as given for the whole batch, or as counted `here`; at least 1.

    Raises: ConfigError when others are given and this one is not: one counted over a microbatch would be wrong.
    """
    value = getattr(inputs, name)
    if value is None:
        others = [other for other in _DENOMINATORS if getattr(inputs, other) is not None]
        if others:
            raise ConfigError(
                f"{others[0]} is given and {name} is not: this loss divides by it, so give it for the whole batch too "
                "(asyncrl.losses.denominators counts all of them)"
            )
        value = here
    return torch.as_tensor(value, dtype=torch.float64, device=here.device).clamp(min=1.0)


def observation_weight(inputs: LossInputs, prepared: Prepared) -> torch.Tensor:
    """Return [T] float64, 1 / (observation tokens of the whole batch) on observation tokens, 0 elsewhere."""
    assert prepared.observation is not None
    tokens = prepared.observation.double()
    return tokens / denominator(inputs, "num_observation_tokens", tokens.sum())


def prompt_counts(inputs: LossInputs, segments: Segments, lengths_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the active tokens of each sequence's prompt [S], and the number of prompts with any []."""
    if inputs.group_index is None:
        raise ConfigError("aggregation 'prompt_mean' needs group_index [S], and LossInputs.group_index is None")
    groups, group_S = torch.unique(inputs.group_index, return_inverse=True)
    tokens = lengths_S.new_zeros(len(groups)).index_add(0, group_S, lengths_S)
    given = inputs.num_prompt_tokens
    per_sequence = tokens[group_S] if given is None else given.double()
    return per_sequence, (tokens > 0).double().sum()
