"""What a role and the orchestrator say to each other, as frames of `asyncrl.wire`.

    role                                    orchestrator
    Hello             ->                                first on a conversation
                      <-  Welcome | Refused
    Beat              ->  <-  Beat                      every `Welcome.heartbeat_s`
    Ready             ->                                its service may be spoken to
                      <-  Open                          one more channel is wanted
    Channel           ->                                first on a connection of its own; bytes of the service follow
    CannotOpen        ->                                instead of the channel
    Note              ->                                what a person at the orchestrator should read
    Leave             ->  <-  Farewell                  the end of one side, which does not come back

A conversation that breaks is made again by the role. Channels are not part of it, and outlive it.
"""

from __future__ import annotations

from typing import Any

from asyncrl.wire import Message

PROTOCOL = 1

MAX_BYTES = 2**20
"""Of one message: far above a job's, and below what a stranger could make the other side hold."""


class Hello(Message, frozen=True, kw_only=True):
    """Who comes."""

    protocol: int
    asyncrl: str
    """Its version."""
    token: str
    kind: str
    """Of `KINDS`."""
    name: str
    """Its identity: another process under the same name takes the former one's place."""
    instance: str
    """Drawn when the process started: a conversation that is made again carries the same."""
    host: str
    clock_s: float
    """Its wall clock, seconds since the epoch."""
    devices: str
    """What it computes on, in words."""


class Welcome(Message, frozen=True, kw_only=True):
    """It is expected, and this is what it is to do."""

    job: dict[str, Any]
    """What its service is started from; a service that was started from the same goes on."""
    seed: int
    """Another one for each process."""
    heartbeat_s: float
    lost_s: float


class Refused(Message, frozen=True, kw_only=True):
    """It is not, and will not be; the connection closes."""

    reason: str


class Beat(Message, frozen=True, kw_only=True):
    """A sign of life."""


class Ready(Message, frozen=True, kw_only=True):
    """The service has been started, or started again."""

    token: str = ""
    """What the service itself asks for."""


class Open(Message, frozen=True, kw_only=True):
    """Dial a channel to the service."""

    key: str
    """Drawn for this channel: who knows it may open it, once."""


class CannotOpen(Message, frozen=True, kw_only=True):
    """The service does not answer."""

    key: str


class Channel(Message, frozen=True, kw_only=True):
    """This connection is the channel that was asked for."""

    key: str


class Note(Message, frozen=True, kw_only=True):
    """For the orchestrator's output."""

    text: str


class Leave(Message, frozen=True, kw_only=True):
    """The role ends."""

    reason: str


class Farewell(Message, frozen=True, kw_only=True):
    """The run ends, and the role may."""

    reason: str


First = Hello | Channel
ToOrchestrator = Beat | Ready | CannotOpen | Note | Leave
ToRole = Beat | Open | Farewell
