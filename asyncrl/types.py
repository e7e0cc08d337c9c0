"""The records that travel between the parts. Standard library only; every record is frozen and owned by nobody.

Per-token arrays are compact: token ids are int32, log-probs float32, masks one byte a token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    _IntArray = array[int]
    _FloatArray = array[float]
else:
    _IntArray = array
    _FloatArray = array

PolicyVersion = int
"""Optimizer steps applied; 0 is the starting weights."""


class TokenIds(_IntArray):
    """[n] int32 token ids. Treated as immutable; a slice is a plain `array`, wrap it again to keep the type."""

    def __new__(cls, values: Iterable[int] = ()) -> TokenIds:
        return cast("TokenIds", super().__new__(cls, "i", values))


class Logprobs(_FloatArray):
    """[n] float32, nats, <= 0. Treated as immutable."""

    def __new__(cls, values: Iterable[float] = ()) -> Logprobs:
        return cast("Logprobs", super().__new__(cls, "f", values))


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model sampled an end token."""
    LENGTH = "length"
    """The limit on tokens was reached: the completion is truncated."""


class TrajectoryStatus(StrEnum):
    """How an episode ended. Only the first four carry a reward; a failed one is masked, never a reward of 0."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"
    TRUNCATED_TURNS = "truncated_turns"
    TIMED_OUT = "timed_out"
    FAILED_ENVIRONMENT = "failed_environment"
    FAILED_SANDBOX = "failed_sandbox"
    FAILED_ENGINE = "failed_engine"
    FAILED_DEADLINE = "failed_deadline"
    """It still ran when its group's time was up."""

    @property
    def failed(self) -> bool:
        """True where infrastructure, not the agent, ended the episode."""
        return self.value.startswith("failed_")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens that were sampled under one version of the weights."""

    start: int
    end: int
    """Half-open, over the tokens of the completion or segment that holds the span."""
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the model returned for one request.

    Example:
        >>> Completion(token_ids=TokenIds([5, 2]), behaviour_logprobs=Logprobs([-0.5, -0.1]),
        ...            spans=(TokenSpan(start=0, end=2, version=3),), finish_reason=FinishReason.STOP).spans[0].version
        3
    """

    token_ids: TokenIds
    """[n] as sampled, the end token included where one was sampled."""
    behaviour_logprobs: Logprobs
    """[n] nats, <= 0; under the distribution each token was really sampled from (after temperature)."""
    spans: tuple[TokenSpan, ...]
    """Cover exactly the n tokens, in order."""
    finish_reason: FinishReason
    seconds: float = 0.0
    """From sending the request to its last token."""
    engine: str = ""
    """Name of the engine that answered; the names of all, in order, where one died and others went on."""
    moved_at: tuple[int, ...] = ()
    """How many tokens had been sampled each time an engine failed and another went on behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call and its reply."""

    context_token_ids: TokenIds
    """The tokens that this turn adds before the completion (the prompt, or what the environment answered)."""
    completion: Completion
    starts_segment: bool = False
    """True where what went before was rewritten: `context_token_ids` is then the whole prompt again."""
    reward: float | None = None
    """What this turn earned, a part of its trajectory's reward; None where the environment did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """The sampled tokens of one turn, or of one step of reasoning inside a turn, and what they earned."""

    start: int
    end: int
    """Half-open, over the tokens of the segment that holds the span; empty for a turn without a trained token."""
    reward: float | None = None
    """A part of the trajectory's reward; what the parts leave is earned at the last turn. None: nobody said."""
    finish_reason: FinishReason | None = None
    """Why the turn's completion ended; None: nobody said."""
    engine: str = ""
    """Which engine sampled it, as `Completion.engine`; empty: nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One contiguous token sequence that the model really saw, and may be trained on."""

    token_ids: TokenIds
    """[L]"""
    loss_mask: bytes
    """[L] 1 where the model sampled the token and it is trained on, else 0."""
    behaviour_logprobs: Logprobs
    """[L] nats; log-prob of token t itself. 0.0 where `loss_mask` is 0, and never read there."""
    spans: tuple[TokenSpan, ...]
    """Cover exactly the tokens whose `loss_mask` is 1."""
    advantages: Logprobs | None = None
    """[L] float32, per-token credit that overrides the trainer's where it is a number; NaN, or None for the whole
    segment, leaves the token to the trainer."""
    teacher_prompt_token_ids: TokenIds | None = None
    """What a teacher reads in place of the tokens before the first sampled one: the prompt with the answer in it, say.
    All that follows, later turns included, it reads as it is. None: it reads what the policy read."""
    turns: tuple[TurnSpan, ...] = ()
    """The segment's turns in order. They cover exactly the tokens whose `loss_mask` is 1; or none, where turns are not
    told apart."""
    token_fields: Mapping[str, Logprobs] = field(default_factory=dict)
    """name -> [L] float32, passed through unread to the loss, where one of your own finds it by its name."""


_SOLVED = 1.0 - 1e-6  # a sum of parts that is full reward may lie below it by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode."""

    trajectory_id: str
    task_id: str
    environment: str
    segments: tuple[Segment, ...]
    reward: float | None
    """None where the status is a failure, else finite."""
    status: TrajectoryStatus
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    agent: str = ""
    """Who played, where several agents did: a baseline compares trajectories of one group and one agent."""
    num_turns: int = 0
    seconds: float = 0.0
    detail: str = ""
    """For a failure, what failed; empty otherwise."""
    truncated: bool = False
    """True where any completion ended at the limit on tokens."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What the environment wants to keep; passed through unread. JSON-like values."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the model sampled, over all segments."""
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def is_solved(self) -> bool:
        """Whether the episode solved its task: its `solved` part says so, or else full reward."""
        return self.reward_parts.get("solved", self.reward or 0.0) >= _SOLVED

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """The oldest weights that any trained token was sampled under; None without sampled tokens."""
        return min((span.version for s in self.segments for span in s.spans), default=None)

    @property
    def bad_number(self) -> str | None:
        """What is wrong with the reward, the turns' rewards or the credit, or None; they must be finite.

        NaN among a segment's `advantages` is no number, and fine.
        """
        if self.reward is None:
            return None
        if not math.isfinite(self.reward):
            return f"the reward must be a finite number, got {self.reward}"
        for place, segment in enumerate(self.segments):
            for turn, span in enumerate(segment.turns):
                if span.reward is not None and not math.isfinite(span.reward):
                    return f"the reward of turn {turn} of segment {place} must be a finite number, got {span.reward}"
            if segment.advantages is not None and any(map(math.isinf, segment.advantages)):
                return f"the advantages of segment {place} must be finite, or NaN to leave a token to the trainer"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the environment asks. `data` is the environment's own and JSON-like."""

    task_id: str
    environment: str
    data: Mapping[str, Any] = field(default_factory=dict)
    group_size: int | None = None
    """Trajectories of its group where the task says it, and not `group_size` of [buffer]: two for a preference pair,
    one for a demonstration, 0 for as many as come."""

    def __post_init__(self) -> None:
        """Refuse a number of trajectories that is none."""
        if self.group_size is not None and self.group_size < 0:
            raise ValueError(f"task {self.task_id!r}: group_size must be >= 0, got {self.group_size}")

    @property
    def has_any_size(self) -> bool:
        """Whether its group comes as it is, of as many trajectories as it has."""
        return self.group_size == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The unit of work: the trajectories of one task that share a baseline."""

    group_id: int
    """In order of admission through the gate."""
    task: Task
    trajectories: tuple[Trajectory, ...]
    admitted_at: float = 0.0
    """Seconds on the orchestrator's monotonic clock."""
    admitted_version: PolicyVersion = 0
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """The oldest weights that any token of the group was sampled under."""
        versions = [t.oldest_version for t in self.trajectories]
        return min((v for v in versions if v is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies in a weight file, and what it must hash to."""

    name: str
    dtype: str
    """As safetensors names it: "BF16", "F32", ..."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file's data."""
    num_bytes: int
    digest: str
    """Hex digest of the tensor's bytes."""


class Verification(StrEnum):
    """How much of every tensor's bytes its digest takes in. Both sides compute it, at every sync."""

    DIGEST = "digest"
    """Sums over all bytes: any one changed word is found, and so are exchanged ones; cheap enough for every sync."""
    FULL = "full"
    """BLAKE2b over all bytes: no change of any kind goes unnoticed; ten times the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelta:
    """What of a version differs from the version published just before it, in a file of its own."""

    version: PolicyVersion
    base_version: PolicyVersion
    base_digest: str
    """What an engine must hold for the delta to make sense."""
    location: str
    tensors: tuple[TensorEntry, ...]
    """Parts of tensors, named and read as `asyncrl.weight_sync.delta` says; a tensor without parts has not changed."""
    digest: str
    """Over the parts' digests, in order."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a pull by the delta moves."""
        return sum(entry.num_bytes for entry in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """One version of the weights, ready to be pulled. Written last, then renamed into place."""

    run_id: str
    version: PolicyVersion
    transport: str
    location: str
    """What the transport needs to find the bytes: a file path, or a rendezvous address."""
    tensors: tuple[TensorEntry, ...]
    digest: str
    """Over the tensors' digests, in order."""
    verification: Verification = Verification.DIGEST
    """What the tensors' digests are."""
    adapter_scale: float | None = None
    """Where the tensors are the factors of a LoRA adapter, what their product is multiplied by (alpha / r) before it is
    added to the weights that the engine was started with; None where the tensors are the weights."""
    deltas: bool = False
    """Later versions come with deltas: an engine that keeps a copy of this one can take them."""
    delta: WeightDelta | None = None
    """What differs from the version before; None for the first one, and where it would be no smaller."""
    canary_logprobs: tuple[float, ...] = ()
    """What the learner makes of the canary's text under these weights (`asyncrl.engines.canary`); empty without one. It
    goes no further than the orchestrator."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a full pull moves."""
        return sum(entry.num_bytes for entry in self.tensors)
