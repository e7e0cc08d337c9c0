"""The learner process, or one rank of it, started by the orchestrator.

    python -m asyncrl.learner --fd N --settings FILE.json
    python -m asyncrl.learner [--fd N] --settings FILE.json --rank R --ranks N --rendezvous URL
        [--local-rank R --local-ranks N]

    torchrun ... -m asyncrl.learner --connect PATH --settings FILE.json

The first rank alone has the socket, inherited or by its path; by hand torchrun says who is which.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from asyncrl.learner.environment import set_environment


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.learner", description="Steps the optimizer of one run.")
    parser.add_argument("--fd", type=int, help="inherited socket that carries asyncrl.wire frames; of the first rank")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file that describes the job")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--local-rank", type=int, help="among the ranks that see the same GPUs; default: all do")
    parser.add_argument("--local-ranks", type=int)
    parser.add_argument("--rendezvous", default="", help="init_method of torch.distributed")
    parser.add_argument("--connect", type=Path, help="socket of the orchestrator, where torchrun starts the ranks")
    parser.add_argument("--own-cores", action="store_true", help="nothing else computes on the cores of its threads")
    arguments = parser.parse_args()
    set_environment(own_cores=arguments.own_cores)

    from asyncrl.learner.process import exit_on_terminate, serve
    from asyncrl.learner.ranks import Place

    if arguments.connect is not None:
        place = Place.of_environment()
        if place.count == 1:
            exit_on_terminate()
        if place.rank:
            return serve(None, arguments.settings, place)
        with connect(arguments.connect) as stream:
            return serve(stream, arguments.settings, place)
    rank, ranks = arguments.rank, arguments.ranks
    local_rank = rank if arguments.local_rank is None else arguments.local_rank
    local_ranks = ranks if arguments.local_ranks is None else arguments.local_ranks
    place = Place(rank, ranks, local_rank, local_ranks, rendezvous=arguments.rendezvous)
    if ranks == 1:
        exit_on_terminate()
    if arguments.fd is None:
        return serve(None, arguments.settings, place)
    with socket.socket(fileno=arguments.fd) as stream:
        return serve(stream, arguments.settings, place)


def connect(path: Path) -> socket.socket:
    """Return a connection to the orchestrator's socket at `path`, however long that is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    return stream


if __name__ == "__main__":
    sys.exit(main())
