"""`python -m asyncrl.learner --fd N --settings FILE.json`: the learner process, started by the orchestrator."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from asyncrl.learner.environment import set_environment


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.learner", description="Steps the optimizer of one run.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket that carries asyncrl.wire frames")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file that describes the job")
    arguments = parser.parse_args()
    set_environment()

    from asyncrl.learner.process import exit_on_terminate, serve

    exit_on_terminate()
    with socket.socket(fileno=arguments.fd) as stream:
        return serve(stream, arguments.settings)


if __name__ == "__main__":
    sys.exit(main())
