"""The environments that have registered with a trainer: their numbers, names and shares, and which are still alive.

An environment asks for its status several times a second as long as it lives. One that has not been heard of for
`ghost_s` counts as gone: it takes no part of the others' weights, and no batch waits for its minimum. When it is heard
of again, it counts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from asyncrl.atropos.messages import BadField, EnvironmentRegistration

_LEAST_WEIGHT = 0.01  # an environment of weight 0 still gets a hundredth of its slots, as the contract has it


class Member(msgspec.Struct, kw_only=True):
    """One environment process."""

    env_id: int
    """In order of registration."""
    name: str
    """What it asked for, and a number: `gsm8k_0`."""
    desired_name: str
    weight: float
    max_token_length: int
    group_size: int
    """The larger of what it said, and the largest of its groups that ever waited."""
    min_batch_allocation: float | None = None
    connected: bool = True
    """False once it has said good-bye."""
    heard_at: float = 0.0
    """On trio's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What `GET /status-env` answers."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class WaitingCounts:
    """How much waits: sequences of each environment, and groups by size."""

    def __init__(self) -> None:
        self.sequences: Counter[int | None] = Counter()
        """env_id -> sequences."""
        self.groups = 0
        self._sizes: Counter[tuple[int | None, int]] = Counter()

    def add(self, env_id: int | None, size: int) -> None:
        """Count a group that waits."""
        self.sequences[env_id] += size
        self._sizes[env_id, size] += 1
        self.groups += 1

    def remove(self, env_id: int | None, size: int) -> None:
        """Count a group that waits no longer."""
        self.sequences[env_id] -= size
        self._sizes[env_id, size] -= 1
        self.groups -= 1
        self.sequences += Counter()  # without what is 0
        self._sizes += Counter()

    def largest(self, env_id: int | None = None) -> int:
        """Return the size of the largest group, of all or of one environment; 0 without one."""
        return max((size for of, size in self._sizes if env_id is None or of == env_id), default=0)


class Roster:
    """Who has registered. Ids are places in it."""

    def __init__(self, *, ghost_s: float) -> None:
        self.members: list[Member] = []
        self._ghost_s = ghost_s

    def register(self, said: EnvironmentRegistration) -> Member:
        """Return a new environment; one that gives no name is called by its number. Raises: BadField."""
        if said.group_size < 1:
            raise BadField("group_size", f"must be >= 1, got {said.group_size}")
        if said.min_batch_allocation is not None and not 0 <= said.min_batch_allocation <= 1:
            raise BadField("min_batch_allocation", f"must be from 0 to 1, got {said.min_batch_allocation}")
        desired = said.desired_name or "environment"
        number = sum(member.desired_name == desired for member in self.members)
        member = Member(
            env_id=len(self.members),
            name=f"{desired}_{number}",
            desired_name=desired,
            weight=said.weight,
            max_token_length=said.max_token_length,
            group_size=said.group_size,
            min_batch_allocation=said.min_batch_allocation,
            heard_at=trio.current_time(),
        )
        self.members.append(member)
        return member

    def disconnect(self, env_id: int) -> None:
        """Note a good-bye. Raises: BadField."""
        self.member(env_id).connected = False

    def member(self, env_id: int) -> Member:
        """Return an environment. Raises: BadField."""
        if not 0 <= env_id < len(self.members):
            raise BadField("env_id", f"there is no environment {env_id}: {len(self.members)} have registered")
        return self.members[env_id]

    def hear(self, env_id: int | None) -> None:
        """Note a sign of life."""
        if env_id is not None and 0 <= env_id < len(self.members):
            self.members[env_id].heard_at = trio.current_time()

    @property
    def alive(self) -> list[Member]:
        """Those that have not said good-bye and were heard of lately."""
        since = trio.current_time() - self._ghost_s
        return [member for member in self.members if member.connected and member.heard_at >= since]

    @property
    def minima(self) -> Mapping[int, float]:
        """env_id -> the share of each batch that it asked for, of those that are alive."""
        return {member.env_id: share for member in self.alive if (share := member.min_batch_allocation)}

    def status(self, env_id: int, waiting: WaitingCounts, *, step: int, batch_size: int) -> Status:
        """Return what an environment is told of itself and the queue. Raises: BadField."""
        member = self.member(env_id)
        self.hear(env_id)
        member.group_size = size = max(member.group_size, waiting.largest(env_id))
        largest = max(1, waiting.largest())
        own, others = waiting.sequences[env_id], 0
        if largest > 1:
            minima = self.minima
            for other, sequences in waiting.sequences.items():
                if other != env_id:
                    packed = -(-sequences // largest) * largest
                    others += max(0, packed - int(batch_size * minima.get(-1 if other is None else other, 0.0)))
        return Status(
            current_step=step,
            queue_size=(own + others) // size,
            unallocated_fraction=1 - min(sum(self.minima.values()), 1),
            self_queue_size=own // size,
            max_group_size=largest,
            env_weight=self._weight(member),
        )

    def _weight(self, member: Member) -> float:
        shares = {one.env_id: one.max_token_length * max(0.0, one.weight) for one in self.alive}
        total = sum(shares.values())
        if not total:
            return 1 / max(1, len(shares))
        return max(_LEAST_WEIGHT, shares.get(member.env_id, 0.0) / total)

    def state(self) -> list[dict[str, Any]]:
        """Return what `restore` needs (JSON-like)."""
        return [msgspec.to_builtins(member) for member in self.members]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on with who had registered; all are alive until they are silent for too long."""
        self.members = msgspec.convert(state, list[Member])
        for member in self.members:
            member.heard_at = trio.current_time()
