"""Groups to flat tensors, and flat tensors to microbatches that read every shared prefix once.

Legend: `T` tokens of the batch's segments laid end to end, `S` segments, `N` slots of a microbatch's tree (each token
of a shared prefix has one slot), `P` predictions that need the LM head.

A microbatch is a token trie: segments are sorted, and each one adds slots only for what follows its longest common
prefix with the segment before it. So a prompt is forwarded once per group instead of once per completion, a system
prompt that groups share once per microbatch, and equal completions once in all. A segment is the list of its slots;
attention is causal along that list, whatever else lies between the slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np
import torch

from asyncrl.errors import ShapeError, StalenessError
from asyncrl.types import PolicyVersion, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """What a teacher reads in place of the first tokens of each segment. `U` tokens of all of them, end to end."""

    token_ids: torch.Tensor
    """[U] int64."""
    cu_seqlens: torch.Tensor
    """[S + 1] int64 over U."""
    replaced: torch.Tensor
    """[S] int64; the segment's first tokens that each stands for: those before the first sampled one."""
    given: torch.Tensor
    """[S] bool; False where it is what the policy read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step eats: the segments of all trajectories that carry a reward, laid end to end.

    Example:
        >>> from asyncrl.types import Logprobs, Segment, TokenIds, TokenSpan
        >>> segment = Segment(token_ids=TokenIds([5, 7, 9]), loss_mask=bytes([0, 1, 1]), spans=(
        ...     TokenSpan(start=1, end=3, version=4),), behaviour_logprobs=Logprobs([0.0, -0.5, -0.25]))
        >>> lay_out([segment], trajectory_index=[0], group_index=[0], advantages=[1.0], rewards=[1.0]).versions.tolist()
        [-1, 4, 4]
    """

    token_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64; position of the token in its own segment."""
    loss_mask: torch.Tensor
    """[T] bool; True where the token is trained on."""
    observation_mask: torch.Tensor
    """[T] bool; True for tokens that the environment put after the first sampled token."""
    behaviour_logprobs: torch.Tensor
    """[T] float32, nats; 0.0 where `loss_mask` is False."""
    advantages: torch.Tensor
    """[T] float32; 0.0 where `loss_mask` is False. NaN on trained tokens whose credit is still to come."""
    versions: torch.Tensor
    """[T] int64; the version that sampled the token, -1 where `loss_mask` is False."""
    cu_seqlens: torch.Tensor
    """[S + 1] int64; segment s is the half-open range cu_seqlens[s] to cu_seqlens[s + 1]."""
    trajectory_index: torch.Tensor
    """[S] int64; counts the trajectories in the order in which they were given."""
    group_index: torch.Tensor
    """[S] int64."""
    rewards: torch.Tensor
    """[S] float32; reward of the segment's trajectory."""
    num_loss_tokens: int
    """Tokens with `loss_mask` True, over all microbatches and ranks."""
    teacher_prompts: TeacherPrompts | None = None
    """None where a teacher reads what the policy read."""
    token_fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T] float32, what environments pass through to the loss; NaN where a segment has no such field."""

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


def lay_out(
    segments: Sequence[Segment],
    *,
    trajectory_index: Sequence[int],
    group_index: Sequence[int],
    rewards: Sequence[float],
    advantages: Sequence[float] | None = None,
) -> Batch:
    """Return the batch of `segments`; the four sequences are [S].

    A segment's own per-token advantages override `advantages` where they are numbers; NaN leaves a token to
    `advantages`, and without those it stays NaN.

    Raises: ShapeError where a segment's arrays disagree, its first token is trained on (nothing predicts it), or its
    spans, or turns where it has any, do not cover exactly the trained tokens.
    """
    lengths = [len(segment.token_ids) for segment in segments]
    total = sum(lengths)
    token_ids = np.empty(total, np.int64)
    position_ids = np.empty(total, np.int64)
    loss_mask = np.zeros(total, bool)
    observation_mask = np.zeros(total, bool)
    logprobs = np.zeros(total, np.float32)
    credit = np.zeros(total, np.float32)
    versions = np.full(total, -1, np.int64)
    start = 0
    for index, (segment, length) in enumerate(zip(segments, lengths, strict=True)):
        _check_segment(segment, index)
        end = start + length
        mask = np.frombuffer(segment.loss_mask, np.uint8).astype(bool)
        token_ids[start:end] = np.frombuffer(segment.token_ids, np.int32)
        position_ids[start:end] = np.arange(length)
        loss_mask[start:end] = mask
        observation_mask[start:end] = ~mask & (np.cumsum(mask) > 0)
        logprobs[start:end] = np.where(mask, np.frombuffer(segment.behaviour_logprobs, np.float32), 0.0)
        credit[start:end] = np.where(mask, np.nan if advantages is None else advantages[index], 0.0)
        if segment.advantages is not None:
            own = np.frombuffer(segment.advantages, np.float32)
            np.copyto(credit[start:end], own, where=mask & ~np.isnan(own))
        for span in segment.spans:
            versions[start + span.start : start + span.end] = span.version
        if not np.array_equal(versions[start:end] >= 0, mask):
            raise ShapeError(f"segment {index}: its spans do not cover exactly the tokens of its loss_mask")
        if segment.turns and not _covers([(turn.start, turn.end) for turn in segment.turns], mask):
            raise ShapeError(f"segment {index}: its turns do not cover exactly the tokens of its loss_mask, in order")
        start = end
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(position_ids),
        loss_mask=torch.from_numpy(loss_mask),
        observation_mask=torch.from_numpy(observation_mask),
        behaviour_logprobs=torch.from_numpy(logprobs),
        advantages=torch.from_numpy(credit),
        versions=torch.from_numpy(versions),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths, dtype=np.int64).tolist()], dtype=torch.int64),
        trajectory_index=torch.tensor(list(trajectory_index), dtype=torch.int64),
        group_index=torch.tensor(list(group_index), dtype=torch.int64),
        rewards=torch.tensor(list(rewards), dtype=torch.float32),
        num_loss_tokens=int(loss_mask.sum()),
        teacher_prompts=_teacher_prompts(segments),
        token_fields=_token_fields(segments),
    )


def _token_fields(segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
    names = sorted({name for segment in segments for name in segment.token_fields})
    return {
        name: torch.cat(
            [
                torch.tensor(segment.token_fields.get(name, [math.nan] * len(segment.token_ids)), dtype=torch.float32)
                for segment in segments
            ]
        )
        for name in names
    }


def _teacher_prompts(segments: Sequence[Segment]) -> TeacherPrompts | None:
    given = [segment.teacher_prompt_token_ids for segment in segments]
    if all(prompt is None for prompt in given):
        return None
    first = [segment.loss_mask.find(1) for segment in segments]
    replaced = [len(s.token_ids) if place < 0 else place for s, place in zip(segments, first, strict=True)]
    prompts = [
        segment.token_ids[:length] if prompt is None else prompt
        for segment, prompt, length in zip(segments, given, replaced, strict=True)
    ]
    return TeacherPrompts(
        token_ids=torch.tensor([token_id for prompt in prompts for token_id in prompt], dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *np.cumsum([len(prompt) for prompt in prompts]).tolist()], dtype=torch.int64),
        replaced=torch.tensor(replaced, dtype=torch.int64),
        given=torch.tensor([prompt is not None for prompt in given], dtype=torch.bool),
    )


def _check_segment(segment: Segment, index: int) -> None:
    length = len(segment.token_ids)
    found = {"loss_mask": len(segment.loss_mask), "behaviour_logprobs": len(segment.behaviour_logprobs)}
    if segment.advantages is not None:
        found["advantages"] = len(segment.advantages)
    found |= {f"token_fields[{name!r}]": len(values) for name, values in segment.token_fields.items()}
    for name, got in found.items():
        if got != length:
            raise ShapeError(f"segment {index}: {name} has {got} entries for {length} tokens")
    if length and segment.loss_mask[0]:
        raise ShapeError(f"segment {index}: its first token is trained on, but nothing predicts it")
    if segment.teacher_prompt_token_ids is not None and not len(segment.teacher_prompt_token_ids):
        raise ShapeError(f"segment {index}: its teacher's prompt is empty, so nothing predicts its first sampled token")


def _covers(ranges: Sequence[tuple[int, int]], mask: np.ndarray) -> bool:
    """Tell whether the ranges follow each other and hold exactly the tokens of `mask`."""
    covered = np.zeros_like(mask)
    last = 0
    for start, end in ranges:
        if not last <= start <= end <= len(mask):
            return False
        covered[start:end] = True
        last = end
    return np.array_equal(covered, mask)


def check_staleness(batch: Batch, *, version: PolicyVersion, max_off_policyness: int) -> None:
    """Raise StalenessError if a trained token is older than the bound allows, or newer than the weights themselves."""
    trained = batch.versions[batch.loss_mask]
    if not len(trained):
        return
    oldest, newest = int(trained.min()), int(trained.max())
    if oldest < version - max_off_policyness:
        raise StalenessError(
            f"a token sampled at version {oldest} reached training at version {version}: {version - oldest} steps old, "
            f"at most {max_off_policyness} (max_off_policyness) are allowed"
        )
    if newest > version:
        raise StalenessError(f"a token claims version {newest}, but the learner is at version {version}")


# --- microbatches ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Slots that follow each other: each of them sees its own past among them, and all that came before."""

    queries: slice
    before: tuple[slice, ...]
    """Slots that all of them see, in the order of their positions."""
    shift: int = 0
    """How many rows before its slot each query stands: not 0 where there are only some of a microbatch's queries."""

    @property
    def rows(self) -> slice:
        """Where the queries stand among all that there are."""
        return slice(self.queries.start - self.shift, self.queries.stop - self.shift)

    @property
    def num_queries(self) -> int:
        """Slots that look."""
        return int(self.queries.stop - self.queries.start)

    @property
    def keys(self) -> tuple[slice, ...]:
        """All that is seen, in the order of positions; the last ones are the queries."""
        return (*self.before, self.queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What one forward eats: some segments of a batch as a tree of tokens."""

    segment_index: torch.Tensor
    """[S_m] int64 segments of the batch, ascending."""
    token_index: torch.Tensor
    """[T_m] int64 places in the batch's flat arrays of those segments' tokens."""
    cu_seqlens: torch.Tensor
    """[S_m + 1] int64 over T_m."""
    tree_token_ids: torch.Tensor
    """[N] int64."""
    tree_position_ids: torch.Tensor
    """[N] int64."""
    blocks: tuple[AttentionBlock, ...]
    """As queries these hold every slot once, in order."""
    predict_slot: torch.Tensor
    """[P] int64 slots whose hidden state goes through the LM head, ascending."""
    target_ids: torch.Tensor
    """[P] int64 the token whose log-prob is wanted there."""
    scored_index: torch.Tensor
    """[Q] int64 places in T_m of the tokens that get a log-prob."""
    prediction_index: torch.Tensor
    """[Q] int64 the entry of P that predicts each of them."""

    @property
    def num_slots(self) -> int:
        """N: tokens that the model's body reads."""
        return len(self.tree_token_ids)


def nothing() -> Microbatch:
    """Return a microbatch of no segment, with one slot and one prediction that nobody reads."""
    none = torch.zeros(0, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    return Microbatch(
        segment_index=none,
        token_index=none,
        cu_seqlens=zero,
        tree_token_ids=zero,
        tree_position_ids=zero,
        blocks=(AttentionBlock(queries=slice(0, 1), before=()),),
        predict_slot=zero,
        target_ids=zero,
        scored_index=none,
        prediction_index=none,
    )


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch with all its tensors on `device`."""
    values = {one.name: getattr(microbatch, one.name) for one in fields(microbatch)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(microbatch, **moved)  # type: ignore[arg-type]


def split(
    batch: Batch,
    *,
    max_tokens: int,
    share_prefixes: bool = True,
    observations: bool = False,
    apart: torch.Tensor | None = None,
    members: Sequence[int] | None = None,
    targets: torch.Tensor | None = None,
) -> list[Microbatch]:
    """Return microbatches that cover every segment of `batch` once, each of at most `max_tokens` slots.

    A segment that is longer than `max_tokens` by itself gets a microbatch of its own. Segments of one group stay
    together while they fit. `observations` asks for log-probs of the environment's tokens too. Without
    `share_prefixes`, each segment has slots of its own: the same numbers for more work. Segments marked in `apart` [S]
    bool never share a microbatch with those that are not. `members` are the segments to cover; None is all of them.
    `targets` [T] int64 is predicted at each marked token, given that token and those before it; without it a marked
    token is predicted itself, given those before it.
    """
    tokens = batch.token_ids.numpy()
    bounds = batch.cu_seqlens.tolist()
    rows = [tokens[start:end] for start, end in pairwise(bounds)]
    groups = batch.group_index.tolist()
    # Lexicographic order inside a group puts each segment beside the one it shares the most with.
    kinds = [False] * len(rows) if apart is None else apart.tolist()
    chosen = range(len(rows)) if members is None else members
    order = sorted(chosen, key=lambda s: (kinds[s], groups[s], rows[s].tolist()))
    bins: list[list[int]] = []
    used = 0
    for place, segment in enumerate(order):
        shared = 0
        joins = bool(bins) and kinds[order[place - 1]] == kinds[segment]
        if share_prefixes and joins and groups[order[place - 1]] == groups[segment]:
            shared = common_prefix(rows[order[place - 1]], rows[segment])
        length = len(rows[segment])
        if joins and used + length - shared <= max_tokens:
            bins[-1].append(segment)
            used += length - shared
        else:
            bins.append([segment])
            used = length
    wanted = batch.loss_mask | batch.observation_mask if observations else batch.loss_mask
    return [_microbatch(batch, sorted(members), wanted.numpy(), share_prefixes, targets) for members in bins]


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many tokens two segments begin with alike."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _microbatch(
    batch: Batch, members: list[int], wanted: np.ndarray, share_prefixes: bool, targets: torch.Tensor | None
) -> Microbatch:
    tokens = batch.token_ids.numpy()
    bounds = batch.cu_seqlens.tolist()
    rows = {s: tokens[bounds[s] : bounds[s + 1]] for s in members}
    order = sorted(members, key=lambda s: rows[s].tolist())
    slots: dict[int, np.ndarray] = {}
    tree_tokens: list[np.ndarray] = []
    tree_positions: list[np.ndarray] = []
    runs: list[tuple[int, int]] = []  # length of the prefix that is shared with the run before, and of the run itself
    num_slots = 0
    for place, segment in enumerate(order):
        row = rows[segment]
        before = order[place - 1]
        shared = common_prefix(rows[before], row) if place and share_prefixes else 0
        own = np.arange(num_slots, num_slots + len(row) - shared)
        slots[segment] = np.concatenate([slots[before][:shared], own]) if shared else own
        tree_tokens.append(row[shared:])
        tree_positions.append(np.arange(shared, len(row)))
        num_slots += len(own)
        runs.append((shared, len(own)))
    token_index = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in members])
    lengths = [len(rows[s]) for s in members]
    slot_of_token = np.concatenate([slots[s] for s in members])
    scored = np.flatnonzero(wanted[token_index])
    # The one place where labels are shifted: the token at place t of a segment is predicted by the slot of place t - 1
    # of the same segment, which `lay_out` guarantees to exist.
    if targets is None:
        slots_Q, targets_Q = slot_of_token[scored - 1], tokens[token_index][scored]
    else:
        slots_Q, targets_Q = slot_of_token[scored], targets.numpy()[token_index][scored]
    predict_slot, target_ids, prediction_index = _predictions(slots_Q, targets_Q)
    return Microbatch(
        segment_index=torch.tensor(members, dtype=torch.int64),
        token_index=torch.from_numpy(token_index),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64),
        tree_token_ids=torch.from_numpy(np.concatenate(tree_tokens)),
        tree_position_ids=torch.from_numpy(np.concatenate(tree_positions)),
        blocks=_attention_blocks(runs),
        predict_slot=torch.from_numpy(predict_slot),
        target_ids=torch.from_numpy(target_ids),
        scored_index=torch.from_numpy(scored),
        prediction_index=torch.from_numpy(prediction_index),
    )


def _predictions(slots_Q: np.ndarray, targets_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (predict_slot [P], target_ids [P], prediction_index [Q]): equal pairs of slot and target once."""
    unique, inverse = np.unique(np.stack([slots_Q, targets_Q], axis=1), axis=0, return_inverse=True)
    return unique[:, 0].copy(), unique[:, 1].copy(), inverse.reshape(-1)


def _attention_blocks(runs: Sequence[tuple[int, int]]) -> tuple[AttentionBlock, ...]:
    """Return the blocks of runs of slots, each (positions shared with the run before, own length), in sorted order."""
    blocks = []
    path: list[slice] = []  # the slots of a segment, in the order of their positions
    start = 0
    for position, length in runs:
        path = _beginning(path, position)
        if length:
            queries = slice(start, start + length)
            blocks.append(AttentionBlock(queries=queries, before=tuple(path)))
            path.append(queries)
            start += length
    return tuple(blocks)


def _beginning(path: Sequence[slice], count: int) -> list[slice]:
    """Return the first `count` slots of a path."""
    found = []
    for part in path:
        if count <= 0:
            break
        found.append(slice(part.start, min(part.stop, part.start + count)))
        count -= part.stop - part.start
    return found


def unpack(microbatch: Microbatch, predicted: torch.Tensor) -> torch.Tensor:
    """Return [T_m]: each scored token's entry of `predicted` [P], and 0.0 for every other token; differentiable."""
    result = predicted.new_zeros(len(microbatch.token_index))
    return result.index_put((microbatch.scored_index,), predicted.index_select(0, microbatch.prediction_index))


def staleness_of(batch: Batch, version: PolicyVersion) -> torch.Tensor:
    """Return [num_loss_tokens] int64: `version` minus the version that sampled each trained token."""
    return version - batch.versions[batch.loss_mask]
