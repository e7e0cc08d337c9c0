"""Which groups make the next batch of so many sequences: any mix of sizes packs, and the oldest group always goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOOK_AHEAD = 256  # groups that may stand in for one that does not fit; more costs time for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What packing knows of a group."""

    env_id: int | None
    size: int


def choose_batch(
    waiting: Sequence[Waiting], batch_size: int, minima: Mapping[int, float] | None = None
) -> list[int] | None:
    """Return the places of the groups that make a batch, the oldest first; None while there are too few.

    A batch holds the oldest group, so that none waits for ever, and no group is larger than a batch. With it go those
    of the next 256 that fill the batch to exactly `batch_size` sequences where some choice does, and else to the most
    below it; of such choices, the one with the oldest groups. Once so many wait, a batch is always made.

    `minima`: env_id -> share of the batch that is the environment's. Each of them has at least one group in it, or the
    batch waits; beyond that it takes up to its share before the others' turn.

    Example:
        >>> groups = [Waiting(env_id=0, size=3), Waiting(env_id=0, size=3), Waiting(env_id=0, size=1)]
        >>> choose_batch(groups, 4)
        [0, 2]
    """
    if sum(group.size for group in waiting) < batch_size:
        return None
    first = _minimum(waiting, batch_size, minima or {})
    if first is None:
        return None
    others = [place for place in range(len(waiting)) if place not in first]
    room = batch_size - sum(waiting[place].size for place in first)
    if others and waiting[others[0]].size <= room:  # so that it is never passed over for a better fit
        first, others = [*first, others[0]], others[1:]
        room -= waiting[first[-1]].size
    others = others[:_LOOK_AHEAD]
    return sorted(first + [others[place] for place in _fill([waiting[place].size for place in others], room)])


def _minimum(waiting: Sequence[Waiting], batch_size: int, minima: Mapping[int, float]) -> list[int] | None:
    wanted = {env_id: int(batch_size * share) for env_id, share in minima.items() if int(batch_size * share) > 0}
    scale = min(1.0, batch_size / max(1, sum(wanted.values())))
    found: list[int] = []
    room = batch_size
    for env_id, sequences in wanted.items():
        own = [place for place, group in enumerate(waiting) if group.env_id == env_id]
        if not own:
            return None
        left = max(1, int(sequences * scale))
        for place in own:
            size = waiting[place].size
            if left > 0 and size <= room and (size <= left or place == own[0]):
                found.append(place)
                left -= size
                room -= size
    return found


def _fill(sizes: Sequence[int], room: int) -> list[int]:
    """Return the places of sizes that fill `room` best, the first ones where several choices do."""
    # reach[i]: the sums, as bits, that sizes[i:] can make
    reach = [1] * (len(sizes) + 1)
    for place in range(len(sizes) - 1, -1, -1):
        reach[place] = (reach[place + 1] | reach[place + 1] << sizes[place]) & ((1 << (room + 1)) - 1)
    left = reach[0].bit_length() - 1
    found = []
    for place, size in enumerate(sizes):
        if size <= left and reach[place + 1] >> (left - size) & 1:
            found.append(place)
            left -= size
    return found
