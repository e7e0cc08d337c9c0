"""Write a run's metrics for TensorBoard, Weights & Biases or trackio, by their own libraries.

  asyncrl export runs/demo-1 --to tensorboard
  asyncrl export runs/demo-1 --to wandb --project bugfix --follow
  WANDB_MODE=offline asyncrl export runs/demo-1 --to wandb

A program of its own, so that the run waits for none of them. With --follow it goes on until the run ends. Needs the
library: asyncrl[tensorboard], asyncrl[wandb] or asyncrl[trackio].
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.export import WRITERS, export, open_writer
from asyncrl.run_directory import RunDirectory

HELP = "write a run's metrics for TensorBoard, Weights & Biases or trackio"

# Steps take seconds, and this is a program of its own. inotify was rejected: it says nothing of what another machine
# writes to a shared file system, where runs may lie, so that looking again would be needed all the same.
_LOOK_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/demo-1")
    parser.add_argument("--to", choices=tuple(WRITERS), required=True, help="whose library writes")
    parser.add_argument("--project", default="asyncrl", help="of wandb and trackio (default: asyncrl)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="for files (default: in the run directory)")
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")


def main(arguments: argparse.Namespace) -> int:
    """Write; return the exit code."""
    directory = RunDirectory(arguments.run)
    if not directory.config.is_file():
        raise ConfigError(f"{directory.path} is no run directory: it holds no config.toml")
    wait = partial(time.sleep, _LOOK_EVERY_S) if arguments.follow else None
    with closing(open_writer(arguments.to, directory, project=arguments.project, out=arguments.out)) as writer:
        number = export(directory, writer, wait=wait)
    print(f"{number} steps written for {arguments.to}")
    return 0
