"""The books of what was generated: nothing is lost, and what is dropped has a reason.

    generated = trained + in the buffer + in flight + dropped, summed over its reasons

holds at every moment, in groups, in trajectories and in sampled tokens. Each side is kept by itself: `generated` where
something comes into being, the others where it goes; so that what one of them forgets shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.types import Group, Trajectory

DISCARDED = "discarded"
"""Reason of tokens that were sampled and are in no segment: of attempts that were started again, and cut-off ends."""
RETRIED = "retried"
"""Reason of failed episodes that another attempt has replaced."""
LOST = "lost_at_resume"
"""Reason of what was in flight or in the buffer when the run was ended, and did not survive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """So many groups, trajectories and sampled tokens."""

    groups: int = 0
    trajectories: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            groups=self.groups + other.groups,
            trajectories=self.trajectories + other.trajectories,
            tokens=self.tokens + other.tokens,
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            groups=self.groups - other.groups,
            trajectories=self.trajectories - other.trajectories,
            tokens=self.tokens - other.tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The books at one moment. A group whose step is under way is still in the buffer."""

    generated: Amount
    trained: Amount
    """Each once, however often it was trained on."""
    in_buffer: Amount
    in_flight: Amount
    dropped: Mapping[str, Amount]
    """reason -> what was dropped for it. A failed episode's reason is its status."""

    @property
    def difference(self) -> Amount:
        """What was generated and is nowhere. Anything but `Amount()` is a bug."""
        dropped = sum(self.dropped.values(), start=Amount())
        return self.generated - (self.trained + self.in_buffer + self.in_flight + dropped)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-like values."""
        return asdict(self)


@dataclass(slots=True)
class _Account:
    """One group that is neither trained on nor dropped."""

    amount: Amount
    finished: bool = False
    sampled: dict[str, int] = field(default_factory=dict)  # trajectory id -> tokens, while it is in flight


class Ledger:
    """Who keeps the books. Every method is an event; none may be forgotten.

    Example:
        >>> ledger = Ledger()
        >>> ledger.admit(0, num_trajectories=2)
        >>> ledger.sample(0, "0-0", 12)
        >>> ledger.statement().in_flight
        Amount(groups=1, trajectories=2, tokens=12)
        >>> ledger.drop(0, "stopped")
        >>> ledger.statement().difference
        Amount(groups=0, trajectories=0, tokens=0)
    """

    def __init__(self) -> None:
        self._generated = Amount()
        self._trained = Amount()
        self._dropped: dict[str, Amount] = {}
        self._open: dict[int, _Account] = {}

    def admit(self, group_id: int, *, num_trajectories: int) -> None:
        """Note that a group has started, with so many episodes; 0 where that is not known before they have come."""
        started = Amount(groups=1, trajectories=num_trajectories)
        self._generated += started
        self._open[group_id] = _Account(started)

    def sample(self, group_id: int, trajectory_id: str, num_tokens: int) -> None:
        """Note tokens that an engine sampled for an episode of a group; too late, they are discarded."""
        tokens = Amount(tokens=num_tokens)
        self._generated += tokens
        account = self._open.get(group_id)
        if account is None or account.finished:
            self._lose(DISCARDED, tokens)
            return
        account.amount += tokens
        account.sampled[trajectory_id] = account.sampled.get(trajectory_id, 0) + num_tokens

    def retry(self, group_id: int, trajectories: Iterable[Trajectory]) -> None:
        """Note that failed episodes of a group in flight were replaced by another attempt."""
        account = self._open[group_id]
        for trajectory in trajectories:
            held = trajectory.num_sampled_tokens
            sampled = account.sampled.pop(trajectory.trajectory_id, 0)
            self._generated += Amount(trajectories=1, tokens=max(0, held - sampled))
            account.amount -= Amount(tokens=sampled)
            self._lose(RETRIED, Amount(trajectories=1, tokens=max(held, sampled)))

    def finish(self, group: Group) -> None:
        """Note that a group is complete: its failed episodes are dropped here, the others are in the buffer."""
        account = self._open[group.group_id]
        expected = account.amount.trajectories
        self._generated += Amount(trajectories=len(group.trajectories) - expected)  # where nobody knew how many come
        account.finished, account.amount = True, Amount(groups=1)
        names = {trajectory.trajectory_id for trajectory in group.trajectories}
        # sampled before it was known which episode it would belong to
        unnamed = sum(account.sampled.pop(name) for name in [*account.sampled] if name not in names)
        for trajectory in group.trajectories:
            held = trajectory.num_sampled_tokens
            sampled = account.sampled.pop(trajectory.trajectory_id, 0)
            found = min(unnamed, max(0, held - sampled))
            unnamed -= found
            sampled += found
            self._generated += Amount(tokens=max(0, held - sampled))  # brought by the environment, not asked for here
            if trajectory.reward is None:
                self._lose(trajectory.status.value, Amount(trajectories=1, tokens=max(held, sampled)))
            else:
                account.amount += Amount(trajectories=1, tokens=held)
                self._lose(DISCARDED, Amount(tokens=max(0, sampled - held)))
        self._lose(DISCARDED, Amount(tokens=unnamed))

    def drop(self, group_id: int, reason: str) -> None:
        """Note that what is left of a group will not be trained on."""
        self._lose(reason, self._open.pop(group_id).amount)

    def train(self, group_ids: Iterable[int]) -> None:
        """Note that finished groups were trained on."""
        for group_id in group_ids:
            account = self._open.pop(group_id)
            assert account.finished, f"group {group_id} was trained on while it ran"
            self._trained += account.amount

    def statement(self) -> Statement:
        """Return the books as they stand."""
        return Statement(
            generated=self._generated,
            trained=self._trained,
            in_buffer=sum((a.amount for a in self._open.values() if a.finished), start=Amount()),
            in_flight=sum((a.amount for a in self._open.values() if not a.finished), start=Amount()),
            dropped=dict(self._dropped),
        )

    @property
    def open_groups(self) -> Set[int]:
        """Groups that are neither trained on nor dropped."""
        return self._open.keys()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs (JSON-like)."""
        return {
            "generated": asdict(self._generated),
            "trained": asdict(self._trained),
            "dropped": {reason: asdict(amount) for reason, amount in self._dropped.items()},
            "open": {str(group_id): asdict(account) for group_id, account in self._open.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; who resumes drops those of the open groups that did not survive."""
        self._generated = Amount(**state["generated"])
        self._trained = Amount(**state["trained"])
        self._dropped = {reason: Amount(**amount) for reason, amount in state["dropped"].items()}
        self._open = {
            int(group_id): _Account(Amount(**account["amount"]), account["finished"], dict(account["sampled"]))
            for group_id, account in state["open"].items()
        }

    def _lose(self, reason: str, amount: Amount) -> None:
        if amount != Amount():
            self._dropped[reason] = self._dropped.get(reason, Amount()) + amount
