"""Play the environment of a run on another host, in sandboxes of this one.

  asyncrl environment --connect train-0:8780 --token-file token

Which environment, with which options and sandboxes, the orchestrator says; what it needs must be installed here. When
the connection breaks for longer than the run's lost_s, its groups go on elsewhere: finished episodes are kept, and what
was sampled is not sampled anew. `asyncrl environments` lists environments, and `asyncrl serve environment` serves one
to runs that come to it.
"""

from __future__ import annotations

import argparse

from asyncrl.commands.role_arguments import add_role_arguments, play
from asyncrl.role_services import EnvironmentRole

HELP = "play the environment of a run on another host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_role_arguments(parser, "environment")


def main(arguments: argparse.Namespace) -> int:
    """Play; return the exit code."""
    return play(arguments, EnvironmentRole())
