"""Which tokens made a step's extremes, and one trajectory of the step token by token. `T` packed tokens, `S` segments.

The influence of token t is |d loss / d policy_logprob_t|, as the step's own backward pass found it, whatever the loss.
For a token-level surrogate that is |ratio x advantage| / denominator where the clip lets the token pass, and 0 where it
does not; what reaches the loss by the entropy or by a teacher's divergence is not in it. How far a token moves the
weights is its influence times the norm of its log-prob's own gradient, which no step computes token by token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.learner.credit import Selection
from asyncrl.losses import LossInputs
from asyncrl.losses.ratios import log_ratio
from asyncrl.packing import Batch
from asyncrl.types import Segment, Trajectory

TOP_TOKENS = 6
"""Tokens by each measure; a line of twice as many stays below 10 kB."""
_TOKENS_BEFORE = 24  # of the context that is shown with a token
_TOKENS_AFTER = 8
_SHOWN_TOKENS = 400  # sampled tokens of a trajectory that is written down token by token: 10 kB a step


def extreme_tokens(whole: LossInputs, influence: torch.Tensor, selection: Selection) -> list[dict[str, Any]]:
    """Return the tokens with the largest ratios and with the largest influence [T], and where each comes from.

    `by` says which of the two a token is among, with its rank from 1; None stands for a number that is not finite.
    """
    numbers = _Numbers(whole, influence)
    rows: dict[int, dict[str, Any]] = {}
    for measure, values in (("ratio", numbers.ratio), ("influence", numbers.influence)):
        usable = values if measure == "influence" else torch.where(numbers.mask, values, -1.0)
        chosen = usable.topk(min(TOP_TOKENS, int(numbers.mask.sum()))).indices.tolist()
        for rank, place in enumerate(chosen, start=1):
            if measure == "influence" and values[place] == 0.0:
                break  # nothing else has any
            row = rows.setdefault(place, {"by": {}})
            row["by"][measure] = rank
    for place, row in rows.items():
        row |= numbers.of(place) | _origin(place, selection, whole.policy_version or 0)
    return list(rows.values())


def token_by_token(whole: LossInputs, influence: torch.Tensor, selection: Selection) -> dict[str, Any]:
    """Return one trajectory of the step: at odd versions the one with the largest ratio, at even ones each in turn.

    `segments` hold runs of tokens, {"turn": None, "token_ids"} of what was read and {"turn", "token_ids", "ratio",
    "advantage", "version"} of what was sampled; `left_out` counts sampled tokens past the limit.
    """
    numbers, version = _Numbers(whole, influence), whole.policy_version or 0
    batch = selection.batch
    if version % 2:
        largest = int(torch.where(numbers.mask, numbers.ratio, -1.0).nan_to_num(posinf=math.inf).argmax())
        chosen, why = int(batch.trajectory_index[_segment_of(batch, largest)]), "largest ratio"
    else:
        chosen, why = (version // 2) % (int(batch.trajectory_index.max()) + 1), "in turn"
    trajectory = selection.trajectories[chosen]
    places = (batch.trajectory_index == chosen).nonzero().flatten().tolist()
    segments, left, turns_before = [], _SHOWN_TOKENS, 0
    for place, segment in zip(places, trajectory.segments, strict=True):
        start = int(batch.cu_seqlens[place])
        runs, left = _runs(segment, numbers, batch, start, turns_before, left)
        segments.append(runs)
        turns_before += len(segment.turns)
    return {
        "why": why,
        **_named(trajectory),
        "segments": segments,
        "left_out": max(0, trajectory.num_sampled_tokens - _SHOWN_TOKENS),
    }


class _Numbers:
    """What is known of every token, on the CPU."""

    def __init__(self, whole: LossInputs, influence: torch.Tensor) -> None:
        assert whole.behaviour_logprobs is not None
        assert whole.advantages is not None
        assert whole.versions is not None
        self.mask = whole.loss_mask
        self.policy = whole.policy_logprobs.double()
        self.behaviour = whole.behaviour_logprobs.double()
        self.ratio = log_ratio(self.policy, self.behaviour, self.mask).exp()
        self.influence = torch.where(self.mask, influence.double(), 0.0)
        self.total = float(self.influence.sum())
        self.advantage = whole.advantages.double()
        self.version = whole.versions

    def of(self, place: int) -> dict[str, float | None]:
        """Return one token's numbers; `influence_share` is of the sum over the batch."""
        influence = float(self.influence[place])
        found = {
            "ratio": float(self.ratio[place]),
            "influence": influence,
            "influence_share": influence / self.total if self.total else 0.0,
            "policy_logprob": float(self.policy[place]),
            "behaviour_logprob": float(self.behaviour[place]),
            "advantage": float(self.advantage[place]),
        }
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _origin(place: int, selection: Selection, version: int) -> dict[str, Any]:
    """Return where the token at `place` of T was sampled, and what stood around it."""
    batch = selection.batch
    index = _segment_of(batch, place)
    trajectory = selection.trajectories[int(batch.trajectory_index[index])]
    first_of_trajectory = int((batch.trajectory_index == batch.trajectory_index[index]).nonzero()[0])
    number = index - first_of_trajectory
    segment, position = trajectory.segments[number], place - int(batch.cu_seqlens[index])
    turn, start = _turn_of(segment, position)
    span = segment.turns[turn] if turn is not None else None
    sampled = int(batch.versions[place])
    begun = batch.versions[place - position + start : place + 1]
    return {
        "version": sampled,
        "staleness": version - sampled,
        # The engine keeps what it computed of a reply's beginning when new weights arrive in the middle of it.
        "begun_under": int(begun.min()),
        "token_id": segment.token_ids[position],
        "before": list(segment.token_ids[max(0, position - _TOKENS_BEFORE) : position]),
        "after": list(segment.token_ids[position + 1 : position + 1 + _TOKENS_AFTER]),
        "position": position,
        "position_in_turn": position - start,
        "segment": number,
        "turn": None if turn is None else turn + sum(len(s.turns) for s in trajectory.segments[:number]),
        "finish_reason": span.finish_reason if span else None,
        "engine": span.engine if span else "",
        **_named(trajectory),
    }


def _segment_of(batch: Batch, place: int) -> int:
    return int(torch.searchsorted(batch.cu_seqlens, place, right=True)) - 1


def _turn_of(segment: Segment, position: int) -> tuple[int | None, int]:
    """Return (which of the segment's turns sampled the token, where that turn begins).

    Where turns are not told apart, None and the beginning of the run of sampled tokens.
    """
    for number, turn in enumerate(segment.turns):
        if turn.start <= position < turn.end:
            return number, turn.start
    return None, segment.loss_mask.rfind(0, 0, position) + 1


def _named(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "environment": trajectory.environment,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
    }


def _runs(
    segment: Segment, numbers: _Numbers, batch: Batch, start: int, turns_before: int, left: int
) -> tuple[list[Mapping[str, Any]], int]:
    """Return the segment's runs of read and of sampled tokens, and how many more sampled ones may be written down."""
    runs: list[Mapping[str, Any]] = []
    mask, at = segment.loss_mask, 0
    while at < len(mask) and left > 0:
        end = mask.find(1 - mask[at], at + 1)
        end = len(mask) if end < 0 else end
        if not mask[at]:
            runs.append({"turn": None, "token_ids": list(segment.token_ids[at:end])})
            at = end
            continue
        turn, _ = _turn_of(segment, at)
        end = min(end, at + left, segment.turns[turn].end if turn is not None else end)
        here = slice(start + at, start + end)
        runs.append(
            {
                "turn": None if turn is None else turns_before + turn,
                "token_ids": list(segment.token_ids[at:end]),
                "ratio": _rounded(numbers.ratio[here]),
                "advantage": _rounded(numbers.advantage[here]),
                "version": numbers.version[here].tolist(),
            }
        )
        left -= end - at
        at = end
    return runs, left


def _rounded(values: torch.Tensor) -> list[float | None]:
    return [round(value, 3) if math.isfinite(value) else None for value in values.tolist()]
