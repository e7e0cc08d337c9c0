"""`asyncrl serve atropos-environment`: a configuration's environment, played for a trainer of Atropos."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import trio

from asyncrl.atropos.feeding import Feeder, Feeding
from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.preflight import preflight
from asyncrl.processes import open_evaluation
from asyncrl.run_directory import RunDirectory
from asyncrl.tokens import ChatRenderer


def add_service(services: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command line."""
    parser = services.add_parser(
        "atropos-environment",
        help="a configuration's environment, for a trainer of Atropos",
        description="Plays the training tasks of CONFIG for the trainer behind --to until its last step. [engine] urls "
        "name the servers whose weights that trainer changes; without them engines are started that keep the model's.",
    )
    add_config_arguments(parser)
    parser.add_argument("--to", required=True, metavar="URL", help="the server that the trainer asks")
    parser.add_argument("--max-groups", type=int, default=0, metavar="N", help="end after so many (default: 0, never)")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set)
    if not arguments.to.startswith(("http://", "https://")):
        raise ConfigError(f"--to must begin with http:// or https://, got {arguments.to!r}")
    feeding = Feeding(
        name=config.environment.name,
        group_size=config.buffer.group_size,
        max_running=config.buffer.num_slots,
        max_groups=arguments.max_groups,
        max_token_length=config.engine.max_model_len,
    )
    preflight(config)
    with tempfile.TemporaryDirectory(prefix="asyncrl-atropos-") as scratch:
        feeder = trio.run(_feed, config, RunDirectory(Path(scratch)), feeding, arguments.to)
    print(f"{feeder.posted} groups posted" + "".join(f", {n} {reason}" for reason, n in feeder.dropped.items()))
    return 0


async def _feed(config: Config, directory: RunDirectory, feeding: Feeding, url: str) -> Feeder:
    renderer = ChatRenderer.load(config.model.path)
    async with open_evaluation(config, directory, renderer, config.model.path, print) as (environment, sampler):
        feeder = Feeder(environment, sampler, feeding)
        await feeder.run(url)
        return feeder
