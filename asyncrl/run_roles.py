"""A run's parts that come from other hosts: what each is told to do, and what stands for it in the run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from asyncrl.configs import Config, to_table
from asyncrl.engines import Engine, EnginePool
from asyncrl.environments.served import ServedEnvironment, ServedSettings
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.protocols import SandboxBackend
from asyncrl.roles import Guest, Rendezvous
from asyncrl.roles.settings import split_address, tls_context
from asyncrl.run_directory import RunDirectory
from asyncrl.sandbox.access import read_token
from asyncrl.sandbox.remote import open_servers
from asyncrl.serving import listen
from asyncrl.tokens import ChatRenderer


@asynccontextmanager
async def open_roles(
    config: Config, directory: RunDirectory, learner_job: Mapping[str, Any], say: Callable[[str], None]
) -> AsyncIterator[Rendezvous | None]:
    """Yield where the run's roles meet, once all that it asks for are there; None where it asks for none.

    Leaving it lets them go. Raises: ConfigError; RoleError (in an exception group) where one does not come.
    """
    settings = config.roles
    if not settings.wanted:
        yield None
        return
    host, port = split_address(settings.listen, "listen ([roles])")
    rendezvous = Rendezvous(
        settings,
        role_jobs(config, directory, learner_job),
        token=read_token(settings.token_file, where="[roles]") if settings.token_file else "",
        tls=tls_context(settings),
        say=say,
        seed=config.run.seed,
    )
    async with rendezvous.opened(listen(host, port, setting="[roles] listen")):
        await rendezvous.wait_all()
        yield rendezvous


def role_jobs(config: Config, directory: RunDirectory, learner_job: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
    """Return by kind what a role of a run is told; the same for as long as what it has started may go on.

    Paths are those of the orchestrator's host, which the others share or replace.
    """
    engine = replace(config.engine, urls=(), devices=(), count=1, port=0)
    weights = str(config.weight_sync.directory.absolute())
    sandbox = to_table(config.sandbox)
    return {
        "engine": {"engine": to_table(engine), "model": str(config.model.path.absolute()), "weights": weights},
        "sandbox": {"sandbox": sandbox},
        "environment": {"environment": config.environment.name, "sandbox": sandbox},
        "learner": {
            "settings": dict(learner_job),
            "ranks": config.learner.ranks,
            "directory": str(directory.path.absolute()),
            "run_id": directory.run_id,
        },
    }


# --- what stands for a role in the run --------------------------------------------------------------------------------


class _Played:
    """An environment that a guest plays. A `served_links.Place`."""

    def __init__(self, guest: Guest) -> None:
        self.name = guest.name
        self._guest = guest

    def open(self, directory: Path) -> AbstractAsyncContextManager[trio.abc.Stream]:
        """Return a connection. Raises: OSError."""
        return self._guest.channel()


class _GuestsEnvironment(ServedEnvironment):
    """Has the environment's own state, so that a run may go on with it here or elsewhere."""

    def state(self) -> Mapping[str, Any]:
        """See `protocols.Environment`."""
        state: Mapping[str, Any] = super().state()["state"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `protocols.Environment`."""
        super().restore({"state": state})


def guests_environment(config: Config, roles: Rendezvous, renderer: ChatRenderer) -> ServedEnvironment:
    """Return the environment that guests play."""
    away_s = 2 * config.roles.lost_s  # one that is lost for good is told from one that comes back
    return _GuestsEnvironment(
        ServedSettings(
            environment=config.environment.name, options=config.environment.options, connect_s=max(60.0, away_s)
        ),
        renderer=config.environment.chat.rendering(renderer),
        sandboxes=None,
        seed=config.run.seed,
        places=[_Played(guest) for guest in roles.guests("environment")],
        token="",  # the channel is that of a guest, who had to have one
    )


def guests_sandboxes(config: Config, roles: Rendezvous) -> AbstractAsyncContextManager[SandboxBackend]:
    """Return what opens sandboxes at guests."""
    return open_servers({guest.url: guest.token for guest in roles.guests("sandbox")}, config.sandbox)


async def take_later_engines(
    roles: Rendezvous,
    pool: EnginePool,
    make_engine: Callable[[str, str], Engine],
    *,
    known: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Add engines to the pool that come after those whose names are `known`, for as long as this runs."""
    taken = {*known}

    async def take(guest: Guest) -> None:
        try:
            await pool.add(make_engine(guest.name, guest.url))
            say(f"engine {guest.name} serves too")
        except (EngineError, WeightSyncError) as error:
            say(f"engine {guest.name} is left out: {error}")

    async with trio.open_nursery() as nursery:
        while True:
            for guest in await roles.wait_later(taken):
                taken.add(guest.name)
                nursery.start_soon(take, guest)
