"""The program between an actor and the process that it keeps: starts it, tells how it ended, ends it when let go.

    python -m asyncrl.on_ray.hosting --order FD --events FD

When Ray kills an actor it also kills the processes that the actor has started, with SIGKILL. This program is what is
then killed, and a keeper, one process further, ends the family in order and removes what it published. It ends what it
started when the actor's end of its standard input closes, however that comes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import trio

from asyncrl.children import start_child


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.on_ray.hosting", description="Keeps one process.")
    parser.add_argument("--order", type=int, required=True, help="inherited descriptor to read the order from, as JSON")
    parser.add_argument("--events", type=int, required=True, help="inherited descriptor to tell of the end on, as JSON")
    arguments = parser.parse_args()
    with os.fdopen(arguments.order, encoding="utf-8") as file:
        order = json.load(file)
    trio.run(_host, order, arguments.events)
    return 0


async def _host(order: Mapping[str, Any], events: int) -> None:
    child = start_child(
        order["name"],
        order["argv"],
        log_path=Path(order["log_path"]),
        environment=order["environment"],
        pass_fds=order["pass_fds"],
        grace_s=order["grace_s"],
        remove_on_exit=order["remove_on_exit"],
        own_scratch=order["own_scratch"],
    )
    async with child as started:
        for descriptor in order["pass_fds"]:
            os.close(descriptor)  # so that the other end sees when the process is gone
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_let_go, nursery.cancel_scope)
            ended = await started.wait_exit()
            with closing(os.fdopen(events, "w", encoding="utf-8")) as told:
                json.dump(ended.describe(), told)
            nursery.cancel_scope.cancel()


async def _until_let_go(scope: trio.CancelScope) -> None:
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        async for _ in stream:
            pass
    scope.cancel()


if __name__ == "__main__":
    sys.exit(main())
