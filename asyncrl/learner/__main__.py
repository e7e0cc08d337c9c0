"""The learner process, or one rank of it, started by the orchestrator.

    python -m asyncrl.learner --fd N --settings FILE.json
    python -m asyncrl.learner [--fd N] --settings FILE.json --rank R --ranks N --rendezvous URL

The first rank alone has the socket.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--rendezvous", default="", help="init_method of torch.distributed")
    arguments = parser.parse_args()
    set_environment()

    from asyncrl.learner.process import exit_on_terminate, serve
    from asyncrl.learner.ranks import Place

    rank, ranks = arguments.rank, arguments.ranks
    place = Place(rank, ranks, local_rank=rank, local_count=ranks, rendezvous=arguments.rendezvous)
    if ranks == 1:
        exit_on_terminate()
    if arguments.fd is None:
        return serve(None, arguments.settings, place)
    with socket.socket(fileno=arguments.fd) as stream:
        return serve(stream, arguments.settings, place)


if __name__ == "__main__":
    sys.exit(main())
