"""Which finished groups a step takes: a preference, under the rule that keeps every other group trainable in time.

To choose is to schedule with deadlines. A group that was admitted while the engines held version u must be eaten by a
step that begins at version u + n or before, and a step eats P groups. So the groups that a step leaves behind, finished
or not, must be few enough for the steps that are left to them: among those, at most k P may be due within the k steps
that follow. `STALENESS.md` proves that the rule can always be obeyed, and that obeying it keeps the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Order(StrEnum):
    """Which of the finished groups a step prefers."""

    WINDOWED_FIFO = "windowed_fifo"
    """The oldest, and none that was admitted a window or more after one that is left behind."""
    FRESHEST = "freshest"
    """The last admitted."""
    UNIFORM = "uniform"
    """Drawn at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group that waits to be trained on, or still runs."""

    group_id: int
    deadline: int
    """The largest version at which the step that eats it may begin."""
    finished: bool
    reuse: bool = False
    """It was trained on before: it may be once more, and need not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a step would take now."""

    group_ids: tuple[int, ...]
    """Fewer than a step needs where it has to wait."""
    straggler: int | None = None
    """The oldest running group that the step cannot do without, where it has to wait and others are ready."""


def choose(
    candidates: Sequence[Candidate],
    *,
    version: int,
    groups_per_step: int,
    order: Order,
    window: int | None = None,
    rng: Random | None = None,
) -> Choice:
    """Return as many groups as the step that begins at `version` may take, at most `groups_per_step`.

    `candidates` are all groups that are admitted and not eaten, and those that may be reused, each in order of
    admission; a reuse is taken only for a place that no finished first use can have. `window` is for windowed FIFO;
    None sets no limit besides the rule's. `rng` is for the uniform order. The number taken does not depend on the
    preference: the rule's choices are the independent sets of a matroid, so a greedy pass ends with a largest one.

    Example:
        >>> waiting = [Candidate(group_id=0, deadline=3, finished=False), Candidate(group_id=1, deadline=4,
        ...            finished=True), Candidate(group_id=2, deadline=4, finished=True)]
        >>> choose(waiting, version=2, groups_per_step=2, order=Order.FRESHEST).group_ids
        (2, 1)
        >>> choose(waiting, version=3, groups_per_step=2, order=Order.FRESHEST)  # group 0 is due: one place is its own
        Choice(group_ids=(2,), straggler=0)
    """
    first_uses = [candidate for candidate in candidates if not candidate.reuse]
    reuses = [candidate for candidate in candidates if candidate.reuse]
    room = _room(first_uses, version, groups_per_step)
    oldest_left: int | None = None

    def may_take(candidate: Candidate) -> bool:
        if candidate.reuse:
            return all(places > 0 for places in room.values())
        if window is not None and oldest_left is not None and candidate.group_id >= oldest_left + window:
            return False
        return all(places > 0 for due, places in room.items() if due < candidate.deadline)

    taken: list[int] = []
    for candidate in (*_by_preference(first_uses, order, rng), *_by_preference(reuses, order, rng)):
        if len(taken) == groups_per_step:
            return Choice(group_ids=tuple(taken))
        if candidate.finished and may_take(candidate):
            taken.append(candidate.group_id)
            for due in room:
                room[due] -= candidate.reuse or due < candidate.deadline
        elif oldest_left is None and not candidate.reuse:
            oldest_left = candidate.group_id
    missing = groups_per_step - len(taken)
    helpful = [c.group_id for c in first_uses if not c.finished and may_take(c)]
    others_ready = any(candidate.finished for candidate in candidates)
    straggler = helpful[0] if others_ready and 0 < len(helpful) <= missing else None
    return Choice(group_ids=tuple(taken), straggler=straggler)


def _room(candidates: Sequence[Candidate], version: int, groups_per_step: int) -> dict[int, int]:
    """Return, for every deadline d, how many groups that are due after d the step may take."""
    numbers = Counter(candidate.deadline for candidate in candidates)
    room: dict[int, int] = {}
    num_due = 0
    for due in sorted(numbers):
        num_due += numbers[due]
        must = max(0, num_due - (due - version) * groups_per_step)
        assert must <= groups_per_step, f"{num_due} groups are due by version {due}, and the learner is at {version}"
        room[due] = groups_per_step - must
    return room


def _by_preference(candidates: Sequence[Candidate], order: Order, rng: Random | None) -> Sequence[Candidate]:
    match order:
        case Order.WINDOWED_FIFO:
            return candidates
        case Order.FRESHEST:
            return candidates[::-1]
        case Order.UNIFORM:
            assert rng is not None, "the uniform order needs a random generator"
            return rng.sample(candidates, len(candidates))
