"""Be the learner of a run on another host: all of its ranks, on this one.

  asyncrl learner --connect train-0:8780 --token-file token

The run directory and the directory of [weight_sync] must be shared with the orchestrator's host under the same paths:
checkpoints are written there. A learner that is lost ends its run, as it does at home; the run goes on with --resume,
and this command takes part in it again.
"""

from __future__ import annotations

import argparse

from asyncrl.commands.role_arguments import add_places, add_role_arguments, logs_of, play
from asyncrl.role_services import LearnerRole

HELP = "be the learner of a run on another host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_role_arguments(parser, "learner")
    add_places(parser)


def main(arguments: argparse.Namespace) -> int:
    """Learn; return the exit code."""
    return play(arguments, LearnerRole(logs_of(arguments, "learner"), model=arguments.model))
