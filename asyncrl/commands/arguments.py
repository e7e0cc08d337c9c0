"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from asyncrl.configs import Config
from asyncrl.configs.loader import apply_overrides, build, read_toml
from asyncrl.errors import ConfigError
from asyncrl.run_directory import RunDirectory
from asyncrl.sandbox import SandboxSettings
from asyncrl.simulation import Fault, Forecast, SimulationRates, measured_rates, simulate


def add_config_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the configuration file, which may be `optional`, and `--set`."""
    parser.add_argument(
        "config", type=Path, nargs="?" if optional else None, metavar="CONFIG.toml", help="the configuration"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one setting of the file; may be given several times",
    )


def add_place_argument(parser: argparse.ArgumentParser) -> None:
    """Add where the run's processes are."""
    parser.add_argument(
        "--on",
        choices=("here", "ray"),
        default="here",
        help="where the processes are: on this machine (default), or where Ray places them by [ray]",
    )


def needs_ray() -> None:
    """Raise ConfigError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--on ray needs Ray, which is not installed: pip install asyncrl[ray]")


def add_rate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where a simulation's rates come from."""
    rates = ", ".join(f"{field.name} ({field.default:g})" for field in fields(SimulationRates))
    parser.add_argument("--from", type=Path, dest="run", metavar="RUN", help="take the rates from a run that has been")
    parser.add_argument(
        "--rate", action="append", default=[], metavar="NAME=NUMBER", help=f"put over them; seconds, tokens: {rates}"
    )


def rates_of(arguments: argparse.Namespace, config: Config) -> SimulationRates:
    """Return the rates that the arguments name. Raises: ConfigError."""
    if arguments.run is None:
        return SimulationRates().with_changes(arguments.rate)
    return measured_rates(RunDirectory(arguments.run), engines=num_engines(config)).with_changes(arguments.rate)


def num_engines(config: Config) -> int:
    """Return how many engines a run of the configuration has."""
    return len(config.engine.urls) or config.roles.engines or config.engine.count


def forecast_of(
    config: Config, rates: SimulationRates, *, steps: int, seed: int = 0, faults: tuple[Fault, ...] = ()
) -> Forecast:
    """Return the forecast of a configuration's buffer and engines."""
    return simulate(
        config.buffer,
        rates,
        steps=steps,
        engines=num_engines(config),
        engine_slots=config.engine.max_num_seqs,
        seed=seed,
        faults=faults,
    )


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a configuration of which only [sandbox] is looked at, and `--set`."""
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.toml", help="whose [sandbox] is taken; the defaults without one"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="sandbox.KEY=VALUE", help="replace one setting of [sandbox]"
    )


def sandbox_settings_of(path: Path | None, overrides: Sequence[str]) -> SandboxSettings:
    """Return the [sandbox] section of a configuration, which need not be whole otherwise. Raises ConfigError."""
    tables = apply_overrides({} if path is None else read_toml(path), overrides)
    if strangers := [override for override in overrides if not override.startswith("sandbox.")]:
        raise ConfigError(f"--set takes sandbox.KEY=VALUE here, got {strangers[0]!r}")
    table = tables.get("sandbox", {})
    if not isinstance(table, dict):
        raise ConfigError(f"sandbox must be a section, got {table!r}")
    return build(SandboxSettings, table, section="sandbox")


def need_matplotlib() -> None:
    """Raise ConfigError where pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed: pip install asyncrl[plot]")


def check_picture(path: Path) -> None:
    """Raise ConfigError unless a picture can be drawn into a file of this name."""
    need_matplotlib()
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"the picture must end in .svg, .png or .pdf, got {path}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent} for the picture")
