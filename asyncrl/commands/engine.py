"""Serve a run of another host with an engine of this one: vLLM, started as the run asks.

  asyncrl engine --connect train-0:8780 --token-file token
  CUDA_VISIBLE_DEVICES=1 asyncrl engine --connect train-0:8780 --token-file token --name engine-1

One server, on the devices that this process sees. It listens on this host's loopback, and is spoken to through the
connections that this command makes. Its weights come from the directory of the run's [weight_sync], which this host
must share. A server that dies is started again, as often as [engine] restarts says.
"""

from __future__ import annotations

import argparse

from asyncrl.commands.role_arguments import add_places, add_role_arguments, logs_of, play
from asyncrl.role_services import EngineRole

HELP = "be an engine of a run on another host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_role_arguments(parser, "engine")
    add_places(parser)


def main(arguments: argparse.Namespace) -> int:
    """Serve; return the exit code."""
    return play(arguments, EngineRole(logs_of(arguments, "engine"), model=arguments.model))
