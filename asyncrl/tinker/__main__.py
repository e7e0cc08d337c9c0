"""The process that holds the models, started by the service.

python -m asyncrl.tinker --fd N --settings FILE.json
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from asyncrl.learner.environment import set_environment


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.tinker", description="Holds the models of one base.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket that carries asyncrl.wire frames")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file that describes the job")
    parser.add_argument("--own-cores", action="store_true", help="see own_cores in [learner]")
    arguments = parser.parse_args()
    set_environment(own_cores=arguments.own_cores)

    from asyncrl.learner.process import exit_on_terminate
    from asyncrl.tinker.job import read_job
    from asyncrl.tinker.models import serve

    exit_on_terminate()
    with socket.socket(fileno=arguments.fd) as stream:
        return serve(stream, read_job(arguments.settings))


if __name__ == "__main__":
    sys.exit(main())
