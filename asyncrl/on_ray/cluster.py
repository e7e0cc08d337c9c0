"""The connection to Ray, what its nodes have, and the placement group of a run."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import trio
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from asyncrl import keeper
from asyncrl.errors import ConfigError
from asyncrl.on_ray.bundles import Bundle, check_cluster
from asyncrl.on_ray.calls import blocking, outcome
from asyncrl.ray_settings import RaySettings

_LOCAL_STORE_BYTES = 2**28  # of a cluster of this run's own: what passes through it is batches on their way
_FILES_S = 30.0  # for its files to be removed: Ray's last processes end some seconds after the others


@contextmanager
def connected(settings: RaySettings, bundles: Sequence[Bundle]) -> Iterator[None]:
    """Be connected to the cluster, which has what `bundles` take. One of this run's own is ended on leaving.

    Raises: ConfigError where there is no cluster, or where it lacks something.
    """
    with ExitStack() as stack:
        options: Mapping[str, Any] = {}
        if settings.address == "local":
            options = stack.enter_context(_own_cluster())
        try:
            ray.init(
                address=settings.address,
                namespace=settings.namespace,
                log_to_driver=settings.logs,
                logging_level=logging.WARNING,
                **options,
            )
        except (ConnectionError, ValueError, TimeoutError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster can be reached at address = {settings.address!r} ([ray]): {error}; `ray start --head` "
                'starts one, and address = "local" takes one of this run\'s own'
            ) from error
        stack.callback(ray.shutdown)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_cluster(bundles, settings, nodes, ray.available_resources())
        yield


@contextmanager
def _own_cluster() -> Iterator[Mapping[str, Any]]:
    """Yield what Ray is to start a cluster of this process with, which leaves no file behind, killed or not.

    Ray itself lets the cluster's processes end with this one.
    """
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as directory,
        ExitStack() as stack,
    ):
        stack.enter_context(_removed_if_killed(Path(directory)))
        stack.enter_context(_variables(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_TOKEN=secrets.token_hex(32)))
        yield {
            "include_dashboard": False,
            "object_store_memory": _LOCAL_STORE_BYTES,
            "_temp_dir": directory,  # short: Ray's sockets lie in it
        }


@contextmanager
def _removed_if_killed(directory: Path) -> Iterator[None]:
    """Have a keeper remove `directory` when this process has ended, however that came."""
    read, write = os.pipe()
    command = [sys.executable, "-I", "-S", keeper.__file__, "--pipe", str(read), "--grace", "0"]
    command += ["--remove", str(directory), "--", "sleep", "infinity"]
    guard = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[read], start_new_session=True)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        guard.wait(_FILES_S)


@contextmanager
def _variables(**variables: str) -> Iterator[None]:
    """Set what is not set in the environment, which Ray reads and hands on to its processes."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


async def place(bundles: Sequence[Bundle], settings: RaySettings) -> PlacementGroup:
    """Return a placement group whose bundles all have their places.

    Raises: ConfigError where some are not to be had: the resources are there in all, and not where they are needed.
    """
    group = await blocking(placement_group, [dict(one.amounts) for one in bundles], strategy=settings.strategy.value)
    with trio.move_on_after(settings.start_timeout_s):
        await outcome(group.ready())
        return group
    await remove(group)
    asked = "; ".join(f"{bundle.name} ({bundle.describe()})" for bundle in bundles)
    raise ConfigError(
        f"the Ray cluster {settings.address!r} has not placed the run in {settings.start_timeout_s:g} s "
        f"(start_timeout_s, [ray]) by strategy = {settings.strategy.value!r}: {asked}. It has that much in all, and "
        "not where it is needed: `ray status` shows what is free on each node"
    )


async def remove(group: PlacementGroup) -> None:
    """Give the places back; what still runs in them is ended."""
    await blocking(remove_placement_group, group)
