"""From a loss per token to one number, with denominators of the whole optimizer batch. `T` tokens, `S` sequences.

An aggregation is a weight per token. Every denominator can be given from outside, so that the losses of microbatches
(and ranks) add up to the loss of the whole batch; a mean of means is never formed.
"""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError
from asyncrl.losses.inputs import Count, LossInputs, Prepared
from asyncrl.losses.segments import Segments


def token_weights(
    inputs: LossInputs, prepared: Prepared, mask: torch.Tensor, *, aggregation: str, const_length: float, kept: bool
) -> torch.Tensor:
    """Return [T] float64, what the loss of each token in `mask` is multiplied by before summing; 0 elsewhere.

    `mask` is the active tokens, or with `kept` those that a renormalising loss has not dropped.
    Raises: ConfigError when an input is missing, or a denominator of the kept tokens is.
    """
    segments, device = prepared.segments, prepared.policy.device
    active = mask.double()
    lengths_S = segments.sum(active) if kept else prepared.lengths
    if kept and inputs.num_kept_tokens is None and inputs.num_loss_tokens is not None:
        raise ConfigError(
            "this loss divides by the tokens that it keeps: beside num_loss_tokens give num_kept_tokens and "
            "num_kept_sequences (asyncrl.losses.denominators computes them)"
        )

    def scalar(given: Count | None, here: torch.Tensor) -> torch.Tensor:
        value = here if given is None else torch.as_tensor(given, dtype=torch.float64, device=device)
        return value.clamp(min=1.0)  # 0 only where nothing is active anywhere

    if aggregation == "sum":
        return active
    if aggregation == "token_mean":
        return active / scalar(inputs.num_kept_tokens if kept else inputs.num_loss_tokens, lengths_S.sum())
    if aggregation == "const":
        all_sequences = torch.tensor(float(segments.num_sequences), dtype=torch.float64, device=device)
        return active / (scalar(inputs.num_all_sequences, all_sequences) * const_length)
    if aggregation == "prompt_mean":
        prompt_tokens_S, here = prompt_counts(inputs, segments, lengths_S)
        return active / (scalar(inputs.num_prompts, here) * segments.spread(prompt_tokens_S.clamp(min=1.0)))
    given = inputs.num_kept_sequences if kept else inputs.num_sequences
    weights = active / scalar(given, (lengths_S > 0).double().sum())
    if aggregation == "seq_mean_token_mean":
        weights = weights / segments.spread(lengths_S.clamp(min=1.0))
    return weights


def observation_weight(inputs: LossInputs, prepared: Prepared) -> torch.Tensor:
    """Return [T] float64, 1 / (observation tokens of the whole batch) on observation tokens, 0 elsewhere."""
    assert prepared.observation is not None
    tokens = prepared.observation.double()
    given = inputs.num_observation_tokens
    count = tokens.sum() if given is None else torch.as_tensor(given, dtype=torch.float64, device=tokens.device)
    return tokens / count.clamp(min=1.0)


def prompt_counts(inputs: LossInputs, segments: Segments, lengths_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the active tokens of each sequence's prompt [S], and the number of prompts with any []."""
    if inputs.group_index is None:
        raise ConfigError("aggregation 'prompt_mean' needs group_index [S], and LossInputs.group_index is None")
    groups, group_S = torch.unique(inputs.group_index, return_inverse=True)
    tokens = lengths_S.new_zeros(len(groups)).index_add(0, group_S, lengths_S)
    given = inputs.num_prompt_tokens
    per_sequence = tokens[group_S] if given is None else given.double()
    return per_sequence, (tokens > 0).double().sum()
