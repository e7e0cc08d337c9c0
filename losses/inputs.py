"""What a loss is computed from, and what it returns. `T` packed tokens, `S` sequences, `P` pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from asyncrl.errors import ConfigError, EngineError, ShapeError
from asyncrl.losses.reduction import Record
from asyncrl.losses.segments import Segments, segments_of

_POSITIVE_TOLERANCE = 1e-5  # engines round a log-prob of 0 up to about this; more is a wrong number, not rounding
_ENGINE_FLOOR = -1000.0  # engines write about -1e4 for "not in the distribution"; no sampled token is this unlikely

Count = int | float | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One packed (micro)batch. Tensors are float32 or float64 unless said otherwise.

    Values where the masks are False are never read: NaN and infinities there change nothing.
    `policy_logprobs` must be finite where a mask is True; elsewhere a non-finite value makes the loss non-finite.

    Example:
        >>> inputs = LossInputs(policy_logprobs=torch.tensor([-1.0]), loss_mask=torch.tensor([True]),
        ...                     cu_seqlens=torch.tensor([0, 1]))
        >>> inputs.advantages is None
        True
    """

    policy_logprobs: torch.Tensor
    """[T] nats; log-prob of token t itself under the weights being trained. The only input that gets a gradient,
    besides `entropy` and `teacher_divergence`."""
    loss_mask: torch.Tensor
    """[T] bool; True where the policy sampled the token and it is trained on."""
    cu_seqlens: torch.Tensor
    """[S+1] integer; sequence i is the tokens cu_seqlens[i] up to cu_seqlens[i+1]. Sequences may be empty."""
    behaviour_logprobs: torch.Tensor | None = None
    """[T] nats; under the distribution each token was really sampled from."""
    advantages: torch.Tensor | None = None
    """[T] finite where `loss_mask`."""
    proximal_logprobs: torch.Tensor | None = None
    """[T] nats; under the weights at the start of this optimizer step."""
    reference_logprobs: torch.Tensor | None = None
    """[T] nats; under the frozen reference model."""
    teacher_logprobs: torch.Tensor | None = None
    """[T] nats; under the teacher."""
    teacher_divergence: torch.Tensor | None = None
    """[T] nats; how far the student's distribution of token t is from the teacher's (`asyncrl.losses.divergence`). Gets
    a gradient."""
    observation_mask: torch.Tensor | None = None
    """[T] bool; True on tokens that the environment wrote. Disjoint from `loss_mask`."""
    versions: torch.Tensor | None = None
    """[T] integer; the policy version that sampled the token. Any value where `loss_mask` is False."""
    policy_version: int | None = None
    """Version being trained, for staleness; None stands for the newest version among the active tokens."""
    rewards: torch.Tensor | None = None
    """[S]"""
    group_index: torch.Tensor | None = None
    """[S] integer; equal for sequences of one prompt."""
    pairs: torch.Tensor | None = None
    """[P, 2] integer; (chosen, rejected) sequences."""
    entropy: torch.Tensor | None = None
    """[T] nats; exact entropy of the policy at token t. Gets a gradient."""
    token_fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """name -> [T] float32, what environments passed through, unread by losses of `LOSSES`; NaN where nothing was."""
    num_loss_tokens: Count | None = None
    """Active tokens of the whole optimizer batch, over all microbatches and ranks; None: those given here. So for
    every `num_` below: give all that the loss divides by, or none; `asyncrl.losses.denominators` counts them."""
    num_sequences: Count | None = None
    """Sequences with an active token."""
    num_all_sequences: Count | None = None
    """All sequences, empty ones included (aggregation `const`); `num_sequences` where only that is given."""
    num_observation_tokens: Count | None = None
    num_prompts: Count | None = None
    """Groups with an active token."""
    num_prompt_tokens: torch.Tensor | None = None
    """[S] active tokens of each sequence's group."""
    num_pairs: Count | None = None
    num_kept_tokens: Count | None = None
    """Active tokens that the loss does not drop (`renormalise`)."""
    num_kept_sequences: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What `evaluate` returns."""

    loss: torch.Tensor
    """[] in the dtype of `policy_logprobs`; differentiable, also when nothing is active."""
    token_loss: torch.Tensor
    """[T] detached; the loss of each token before aggregation, 0 where nothing is trained on."""
    metrics: Mapping[str, Record]
    """Exactly reducible over microbatches and ranks by `asyncrl.losses.reduce`; `finalise` gives floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked inputs in float64 with every unread slot set to 0."""

    segments: Segments
    mask: torch.Tensor
    """[T] bool; active tokens."""
    usable: torch.Tensor
    """[T] bool; active tokens whose behaviour log-prob can be used. The others stay in every denominator."""
    observation: torch.Tensor | None
    policy: torch.Tensor
    """[T] with a gradient."""
    behaviour: torch.Tensor | None
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    teacher: torch.Tensor | None
    divergence: torch.Tensor | None
    """[T] with a gradient."""
    advantages: torch.Tensor | None
    entropy: torch.Tensor | None
    lengths: torch.Tensor
    """[S] float64; active tokens of each sequence."""
    counts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[] numbers of bad behaviour log-probs by kind."""


def prepare(
    inputs: LossInputs, *, bad_logprobs: str = "cap", min_reward: float | None = None, reads_behaviour: bool = True
) -> Prepared:
    """Return `inputs` checked, in float64, with every slot that may not be read set to 0.

    Raises: ShapeError for shapes that contradict each other; ConfigError for dtypes and values that cannot be used;
    EngineError for bad behaviour log-probs where `bad_logprobs` is "raise".
    """
    policy = inputs.policy_logprobs
    if policy.dim() != 1:
        raise ShapeError(f"policy_logprobs must be [T], got {list(policy.shape)}")
    num_tokens = policy.numel()
    segments = segments_of(inputs.cu_seqlens.to(policy.device), num_tokens)
    _check_shapes(inputs, num_tokens, segments.num_sequences)
    mask = _as_mask("loss_mask", inputs.loss_mask)
    if min_reward is not None:
        if inputs.rewards is None:
            raise ConfigError("min_reward needs rewards [S], and LossInputs.rewards is None")
        mask = mask & segments.spread(inputs.rewards.detach() > min_reward)
    observation = None if inputs.observation_mask is None else _as_mask("observation_mask", inputs.observation_mask)
    read = mask if observation is None else mask | observation

    behaviour, usable, counts = inputs.behaviour_logprobs, mask, {}
    if behaviour is not None and reads_behaviour:
        behaviour = _clean(behaviour.detach(), mask)
        kinds = bad_logprob_kinds(behaviour)
        counts = {kind: found.sum() for kind, found in kinds.items()}
        bad = behaviour.isnan() if bad_logprobs == "cap" else torch.stack(list(kinds.values())).any(0)
        if bad_logprobs == "raise" and bool(bad.any()):
            found = ", ".join(f"{int(count)} {kind.removeprefix('bad_logprobs_')}" for kind, count in counts.items())
            raise EngineError(
                f"behaviour_logprobs on active tokens: {found}; set bad_logprobs to 'cap' or 'mask' to go on"
            )
        usable = mask & ~bad
        behaviour = _clean(behaviour, usable)
    elif behaviour is not None:
        behaviour = None

    advantages = None if inputs.advantages is None else _clean(inputs.advantages.detach(), mask)
    if advantages is not None and not bool(advantages.isfinite().all()):
        raise ConfigError(
            f"advantages must be finite on active tokens: {int((~advantages.isfinite()).sum())} are not, the first at "
            f"token {int((~advantages.isfinite()).nonzero()[0])}"
        )
    return Prepared(
        segments=segments,
        mask=mask,
        usable=usable,
        observation=observation,
        policy=_clean(policy, read),
        behaviour=behaviour,
        proximal=_constant(inputs.proximal_logprobs, mask),
        reference=_constant(inputs.reference_logprobs, mask),
        teacher=_constant(inputs.teacher_logprobs, mask),
        divergence=None if inputs.teacher_divergence is None else _clean(inputs.teacher_divergence, mask),
        advantages=advantages,
        entropy=None if inputs.entropy is None else _clean(inputs.entropy, mask),
        lengths=segments.sum(mask.double()),
        counts=counts,
    )


def bad_logprob_kinds(behaviour_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return metric name -> [T] bool, where a behaviour log-prob (nats) cannot be that of a sampled token.

    A token is of one kind at most.
    """
    finite = behaviour_T.isfinite()
    return {
        "bad_logprobs_positive": finite & (behaviour_T > _POSITIVE_TOLERANCE),
        "bad_logprobs_nonfinite": ~finite,
        "bad_logprobs_floor": finite & (behaviour_T < _ENGINE_FLOOR),
    }


def _clean(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return [T] float64, 0 outside the mask; `where`, because 0 * NaN is NaN, forward and backward."""
    return torch.where(mask_T, values_T.double(), 0.0)


def _constant(values_T: torch.Tensor | None, mask_T: torch.Tensor) -> torch.Tensor | None:
    return None if values_T is None else _clean(values_T.detach(), mask_T)


def _as_mask(name: str, mask: torch.Tensor) -> torch.Tensor:
    """Return a bool mask; a number tensor is taken when it holds only 0 and 1, so that a wrong tensor is not a mask."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ConfigError(f"{name} must be bool (or only 0 and 1), got {mask.dtype} with other values: is it a mask?")
    return mask.detach().bool()


def _check_shapes(inputs: LossInputs, num_tokens: int, num_sequences: int) -> None:
    per_token = (
        "loss_mask behaviour_logprobs advantages proximal_logprobs reference_logprobs teacher_logprobs "
        "teacher_divergence observation_mask versions entropy"
    )
    wanted = {name: (num_tokens,) for name in per_token.split()}
    wanted |= {name: (num_sequences,) for name in ("rewards", "group_index", "num_prompt_tokens")}
    for name, shape in wanted.items():
        tensor = getattr(inputs, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            axis = "T" if name in per_token.split() else "S"
            raise ShapeError(f"{name} must be [{axis}] = {list(shape)}, got {list(tensor.shape)}")
    for name, tensor in inputs.token_fields.items():
        if tuple(tensor.shape) != (num_tokens,):
            raise ShapeError(f"token_fields[{name!r}] must be [T] = [{num_tokens}], got {list(tensor.shape)}")
    pairs = inputs.pairs
    if pairs is not None and pairs.numel():
        if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.is_floating_point():
            raise ShapeError(f"pairs must be integers [P, 2], got {pairs.dtype} {list(pairs.shape)}")
        if not (int(pairs.min()) >= 0 and int(pairs.max()) < num_sequences):
            raise ShapeError(
                f"pairs must index the {num_sequences} sequences, got {int(pairs.min())}..{int(pairs.max())}"
            )
    for name in ("policy_logprobs", *per_token.split(), "rewards"):
        tensor = getattr(inputs, name)
        if tensor is None or name in ("loss_mask", "observation_mask", "versions"):
            continue
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"{name} must be float32 or float64, got {tensor.dtype}: at 16 bits the spacing of a ratio near 1 "
                "is wider than the clip bounds"
            )
    for name in ("versions", "group_index"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.numel() and tensor.is_floating_point():
            raise ConfigError(f"{name} must be integers, got {tensor.dtype}")
