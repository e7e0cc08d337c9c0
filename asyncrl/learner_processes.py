"""The learner's processes, started and watched by the orchestrator: one, or one for each rank of its model.

They are children of the orchestrator by themselves, and not of a launcher like torchrun, so that the one that dies is
named and its last lines are shown. Ranks on several hosts are started by hand, by torchrun, as the orchestrator says;
the first rank is on its host and connects to a socket that only its user can open.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType

import trio

from asyncrl.children import Child, start_child

SHUTDOWN_S = 20.0
"""For the learner to end a request and remove what it published; then it is terminated."""

_HERE_ALONE = MappingProxyType({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
"""Ranks of one host speak over the loopback: their connections ask for no name and no secret."""


async def start_learner_processes(
    settings_path: Path,
    *,
    ranks: int,
    run_id: str,
    published: Sequence[str],
    stack: AsyncExitStack,
    own_cores: bool = False,
) -> tuple[list[Child], socket.socket]:
    """Return the processes, the first rank's first, and the socket to it; `stack` ends them. They do not answer yet.

    `published` are the files that must not outlive the first, as glob patterns; logs stand beside `settings_path`.
    """
    logs = settings_path.parent
    meeting = (logs / f"learner-{run_id}.rendezvous").absolute()
    ours, theirs = socket.socketpair()
    children = []
    with theirs:
        for rank in range(ranks):
            command = [sys.executable, "-m", "asyncrl.learner", "--settings", str(settings_path)]
            if own_cores:
                command.append("--own-cores")
            if rank == 0:
                command += ["--fd", str(theirs.fileno())]
            if ranks > 1:
                command += ["--rank", str(rank), "--ranks", str(ranks), "--rendezvous", meeting.as_uri()]
            child = start_child(
                "learner" if ranks == 1 else f"learner rank {rank} of {ranks}",
                command,
                log_path=logs / (f"learner-{rank}.log" if rank else "learner.log"),
                environment=_HERE_ALONE if ranks > 1 else None,
                pass_fds=[theirs.fileno()] if rank == 0 else [],
                grace_s=SHUTDOWN_S,
                remove_on_exit=[] if rank else [*published, str(meeting)],
            )
            children.append(await stack.enter_async_context(child))
    return children, ours


async def accept_learner(
    settings_path: Path, *, ranks: int, say: Callable[[str], None], own_cores: bool = False
) -> socket.socket:
    """Say what starts the ranks by hand, and return the connection of the first once it is there."""
    path = settings_path.with_suffix(".socket").absolute()
    command = [
        *("torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", "asyncrl.learner"),
        *("--connect", str(path), "--settings", str(settings_path.absolute())),
        *(["--own-cores"] if own_cores else []),
    ]
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with trio.socket.socket(socket.AF_UNIX) as listener:
            await listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's own path holds 107 characters
            path.chmod(0o600)
            listener.listen(1)
            say(f'waiting for the learner (start = "by_hand", [learner]); on this host: {shlex.join(command)}')
            connection, _ = await listener.accept()
    finally:
        os.close(folder)
        path.unlink(missing_ok=True)
    descriptor = connection.detach()
    return socket.socket(fileno=descriptor)
