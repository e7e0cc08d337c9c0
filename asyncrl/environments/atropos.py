"""Environments of Atropos, unmodified, as processes of their own: they sample at the run's gateway and post groups.

[environment]
name = "atropos"

[gateway]
port = 8000

The run writes how they reach it into `access`; see ENVIRONMENTS.md beside this file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.atropos.door import Door
from asyncrl.atropos.handover import RunTrainer
from asyncrl.atropos.matching import SampledTokens
from asyncrl.atropos.messages import Registration
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.gateway import Gateway, Record, Session
from asyncrl.private_files import write_privately
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, Task, TokenIds, Trajectory

_SESSION = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposSettings:
    """What environments of Atropos are told of the run."""

    access: Path = Path("atropos.json")
    """A file that the run writes and removes: the addresses and the key that environments need, for your eyes alone."""
    batch_size: int = 0
    """Sequences of a batch, from which an environment decides how many groups it runs at a time: as many as fill three
    batches (its `max_batches_offpolicy`). 0 takes a third of what the run can have under way, which suits one
    environment; of several, each runs that many."""
    max_token_len: int = 0
    """Tokens of a sequence; a longer one is refused. 0 is no limit."""
    num_steps: int = 0
    """Optimizer steps after which environments end themselves; 0 leaves them running."""
    checkpoint_directory: Path = Path("")
    """Where environments keep their own state; a directory that they and their successors share. Empty: nowhere."""
    checkpoint_interval: int = 0
    """Optimizer steps between two of these; 0 is never."""
    max_sampled_tokens: int = 50_000_000
    """Of what was sampled and not posted yet, kept to recognise it by; eight bytes each, and more for short replies."""
    ghost_s: float = 60.0
    """Seconds without a word from an environment, after which it counts no longer."""
    max_body_mib: float = 64.0
    """Largest post, unpacked; a larger one is refused."""
    max_requests: int = 4096
    """Completions that environments may ask for at once."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        least = {"batch_size": 0, "max_token_len": 0, "num_steps": 0, "checkpoint_interval": 0}
        least |= {"max_sampled_tokens": 1, "max_requests": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ([environment.options])")
        for name in ("ghost_s", "max_body_mib"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be > 0 and finite, got {getattr(self, name)} ([environment.options])")
        if not self.access.parent.is_dir():
            raise ConfigError(f"access: there is no directory {self.access.parent} ([environment.options])")
        if self.checkpoint_interval and not self.checkpoint_directory.name:
            raise ConfigError("checkpoint_interval needs a checkpoint_directory ([environment.options])")


class AtroposEnvironment:
    """Takes the groups that environments of Atropos post. Fulfils `protocols.Environment`."""

    name = "atropos"
    settings_type = AtroposSettings
    needs_gateway = True

    def __init__(
        self, settings: AtroposSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        del sandboxes, seed  # the environments' own
        self.settings = settings
        registration = Registration(
            wandb_group="asyncrl",
            wandb_project="asyncrl",
            batch_size=settings.batch_size,
            max_token_len=settings.max_token_len,
            checkpoint_dir=str(settings.checkpoint_directory),
            save_checkpoint_interval=settings.checkpoint_interval,
            starting_step=0,
            num_steps=settings.num_steps or -1,
        )
        self.trainer = RunTrainer(
            registration, renderer, ghost_s=settings.ghost_s, max_sampled_tokens=settings.max_sampled_tokens
        )
        self._renderer = renderer
        self._gateway: Gateway | None = None
        self._session: Session | None = None
        self._num_asked = 0
        self._path = f"/atropos/{secrets.token_urlsafe(16)}"  # the contract knows no keys: who has the path has one

    def use_gateway(self, gateway: Gateway) -> None:
        """See `protocols.NeedsGateway`."""
        self._gateway = gateway
        door = Door(self.trainer, max_body_bytes=int(self.settings.max_body_mib * 2**20))
        gateway.more_routes += [replace(route, path=f"{self._path}{route.path}") for route in door.routes()]

    def get_item(self) -> Task:
        """Return a place for the next group, whichever that is."""
        self._num_asked += 1
        return Task(task_id=f"group-{self._num_asked}", environment=self.name, group_size=0)

    def held_out(self) -> Sequence[Task]:
        """Return nothing: environments of Atropos evaluate themselves."""
        return ()

    async def collect_trajectories(
        self, task: Task, sampler: Sampler, *, group_id: str, group_size: int
    ) -> Sequence[Trajectory]:
        """Return the next group that is posted, of any size."""
        self._open()
        async with self.trainer.place(group_id, sampler):
            posted = await self.trainer.next_group()
        return posted.trajectories(task, group_id)

    def state(self) -> Mapping[str, Any]:
        """Return how many groups were asked for."""
        return {"asked": self._num_asked}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._num_asked = state["asked"]

    async def aclose(self) -> None:
        """Let nobody sample any more."""
        self.settings.access.unlink(missing_ok=True)
        if self._gateway is not None and self._session is not None:
            self._gateway.forget(self._session)
            self._session = None

    def _open(self) -> None:
        """Open what environments reach, and write where that is, as soon as anything is asked for."""
        if self._session is not None:
            return
        if self._gateway is None:
            raise EnvironmentFault(f"environment {self.name!r} needs a gateway, and nobody has given it one")
        self._session = session = self._gateway.open(
            self.trainer,
            task=Task(task_id=_SESSION, environment=self.name),
            trajectory_id=_SESSION,
            record=_Sampled(self.trainer.sampled, self._renderer),
            max_requests=self.settings.max_requests,
        )
        access = {
            "rollout_server_url": f"{self._gateway.url}{self._path}",
            "base_url": session.base_url,
            "api_key": session.token,
        }
        write_privately(self.settings.access, json.dumps(access, indent=2) + "\n")


class _Sampled(Record):
    """The record of a session that all environments share: what is sampled can be recognised for a while."""

    def __init__(self, sampled: SampledTokens, renderer: ChatRenderer) -> None:
        super().__init__(end_token_ids=renderer.end_token_ids, vocab_size=renderer.vocab_size)
        self._sampled = sampled

    def add(self, prompt: TokenIds, completion: Completion, *, messages: bytes | None = None) -> None:
        """See `Record.add`. Chats are rendered anew at each request, as environments tokenise them in the end."""
        self.num_turns += 1
        self.num_sampled_tokens += len(completion.token_ids)
        self._sampled.add(prompt, completion)
