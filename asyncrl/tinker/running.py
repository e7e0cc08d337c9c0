"""The service with all its parts, started and ended together."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import trio

from asyncrl.configs import Config
from asyncrl.errors import ConfigError
from asyncrl.tinker.face import Face
from asyncrl.tinker.holder import open_holder
from asyncrl.tinker.job import ModelsJob
from asyncrl.tinker.service import HolderSampler, TinkerService
from asyncrl.tinker.settings import TinkerSettings
from asyncrl.tinker.shelf import Shelf, sweep

_LOCK = ".lock"


@asynccontextmanager
async def open_service(
    config: Config,
    settings: TinkerSettings,
    *,
    directory: Path,
    name: str,
    token: str,
    listener: socket.socket,
    scratch: Path,
    say: Callable[[str], None],
) -> AsyncIterator[TinkerService]:
    """Yield the service once it answers; `scratch` gets the logs of its processes. Takes the socket over.

    Raises: ConfigError where the base or the directory cannot be used; LearnerError (in a group) when the process of
    the models ends.
    """
    learner = config.learner
    job = ModelsJob(
        model=str(config.model.path),
        dtype=learner.dtype,
        head_dtype=learner.head_dtype,
        attention=learner.attention,
        device=learner.device,
        threads=learner.threads,
        gradient_checkpointing=learner.gradient_checkpointing,
        microbatch_tokens=learner.microbatch_tokens,
    )
    with _locked(directory):
        for path in sweep(directory):
            say(f"removed {path.name}, which a service that was killed had begun to write")
        async with open_holder(job, scratch, own_cores=learner.own_cores) as holder, trio.open_nursery() as nursery:
            service = TinkerService(
                holder,
                Shelf(directory),
                settings,
                base_names=(name, str(config.model.path)),
                sampler=HolderSampler(holder),
            )
            await nursery.start(service.serve)
            await nursery.start(partial(Face(service, token).serve, listener))
            yield service
            nursery.cancel_scope.cancel()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory for this service alone; a kill gives it back. Raises: ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--directory {directory} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"--directory {directory} is another service's, which is still running") from None
    finally:
        os.close(lock)
