"""What a run and an environment that lives elsewhere say to each other, as frames of `asyncrl.wire`.

    run                                     service
    Hello             ->
                      <-  Welcome | Refused
    Restore           ->                                before tasks, where the run goes on from a state
    NextItem          ->  <-  Item | ItemsEnded
    Collect           ->
                      <-  SampleRequest                 any number, side by side
    Sampled | SampleFailed  ->
                      <-  Finished                      each trajectory as it ends
                      <-  Collected | CollectFailed
    Cancel, Observe   ->                                no answer

The connection is the lease: when it breaks, the service ends what it did for the run, and the run asks again.
"""

from __future__ import annotations

from typing import Any

from asyncrl.types import Completion, Task, TokenIds, Trajectory
from asyncrl.wire import Message

PROTOCOL = 1


class Hello(Message, frozen=True, kw_only=True):
    """Who comes, and what the environment is built with."""

    protocol: int
    token: str
    renderer: dict[str, Any]
    """As `ChatRenderer.record` gives it."""
    options: dict[str, Any]
    seed: int


class Welcome(Message, frozen=True, kw_only=True):
    """The environment is built."""

    name: str
    held_out: list[Task]
    state: Any
    """Before any task is drawn."""
    learns: bool
    """It wants to know what became of its groups."""


class Refused(Message, frozen=True, kw_only=True):
    """It is not, or cannot go on; the connection closes."""

    reason: str


class Restore(Message, frozen=True, kw_only=True):
    """Go on from this state; tasks of an earlier generation are not wanted any more."""

    generation: int
    state: Any


class NextItem(Message, frozen=True, kw_only=True):
    """Draw a task."""

    generation: int


class Item(Message, frozen=True, kw_only=True):
    """A task, and the environment's state after it was drawn."""

    generation: int
    task: Task
    state: Any


class ItemsEnded(Message, frozen=True, kw_only=True):
    """The tasks are used up."""

    generation: int


class Collect(Message, frozen=True, kw_only=True):
    """Run and score a group."""

    number: int
    task: Task
    group_id: str
    group_size: int
    kept: list[Trajectory]
    """Episodes of it that are finished already."""


class SampleRequest(Message, frozen=True, kw_only=True):
    """An episode of a group wants a completion."""

    number: int
    """Of the request."""
    group: int
    """Number of its `Collect`."""
    token_ids: TokenIds
    max_tokens: int
    trajectory_id: str
    stop_token_ids: list[int]


class Sampled(Message, frozen=True, kw_only=True):
    """Here it is."""

    number: int
    completion: Completion


class SampleFailed(Message, frozen=True, kw_only=True):
    """No engine could answer."""

    number: int
    message: str


class Finished(Message, frozen=True, kw_only=True):
    """An episode of a group is final."""

    group: int
    trajectory: Trajectory


class Collected(Message, frozen=True, kw_only=True):
    """A group is."""

    group: int
    trajectories: list[Trajectory]


class CollectFailed(Message, frozen=True, kw_only=True):
    """The environment's own code raised."""

    group: int
    message: str


class Cancel(Message, frozen=True, kw_only=True):
    """Nobody waits for this group any more."""

    group: int


class Observe(Message, frozen=True, kw_only=True):
    """A group of a task that was drawn is finished, whether it is trained on or not."""

    task: Task
    trajectories: list[Trajectory]


ToService = Restore | NextItem | Collect | Sampled | SampleFailed | Cancel | Observe
ToRun = Refused | Item | ItemsEnded | SampleRequest | Finished | Collected | CollectFailed
