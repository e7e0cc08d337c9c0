"""A run's metrics for TensorBoard, Weights & Biases or trackio, by their own libraries.

A program of its own reads what the run writes: whatever a library or its server does, the run does not wait for it, and
a run that is over can be sent as well. Each library is an extra that is imported only when it is asked for.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.recording import WARM_START
from asyncrl.run_directory import RunDirectory, is_running


class Writer(Protocol):
    """Takes a run's figures."""

    def write(self, version: int, values: Mapping[str, float], *, date: float) -> None:
        """Take finite values of one step, by name; `version` never falls, `date` is in seconds since 1970."""
        ...

    def close(self) -> None:
        """Hand over what is left."""
        ...


Opener = Callable[[RunDirectory, str, Path | None], Writer]
"""From a run, a project's name and a directory for what is written, if one was given."""


def open_writer(name: str, directory: RunDirectory, *, project: str, out: Path | None) -> Writer:
    """Return a writer of `WRITERS`. Raises: ConfigError where its library is not installed."""
    module, opener = WRITERS[name]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{module} is not installed: pip install asyncrl[{name}]")
    return opener(directory, project, out)


def export(directory: RunDirectory, writer: Writer, *, wait: Callable[[], None] | None) -> int:
    """Write every step once, in order, and return how many; with `wait`, go on until the run has ended.

    `wait` returns when it is time to look again: no file system tells a program on another machine of a new line.
    Steps that a resumed run takes again are written as they were first taken.
    """
    newest, number = -1, 0
    steps = _Tail(directory.metrics)
    measured: set[int] = set()
    while True:
        running = wait is not None and is_running(directory)
        for line in steps.new_lines():
            version = line.get("version")
            if isinstance(version, int) and version > newest:
                writer.write(version, _named(line), date=float(line.get("time") or 0.0))
                newest, number = version, number + 1
        for result in _evaluations(directory):
            if result["version"] not in measured and result["version"] <= max(newest, 0):
                measured.add(result["version"])
                values = {"evaluation/solve_rate": result["solve_rate"], "evaluation/reward": result["mean_reward"]}
                writer.write(result["version"], _finite(values), date=0.0)
        if not running:
            return number
        assert wait is not None
        wait()


def _named(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's finite numbers, by names that say whether it was on rollouts or on demonstrations."""
    kind = "warm_start" if line.get("phase") == WARM_START else "train"
    return {f"{kind}/{name}": value for name, value in _finite(line).items() if name != "time"}


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _evaluations(directory: RunDirectory) -> list[dict[str, Any]]:
    try:
        status = json.loads(directory.status.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return list(status.get("counters", {}).get("evaluations", []))


class _Tail:
    """The lines of a file that is appended to, and replaced by a shorter one when its run is resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines that were not there before; what cannot be read is passed over."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            found = self._path.stat()
            if found.st_ino != self._inode or found.st_size < self._read:
                self._inode, self._read = found.st_ino, 0
            file.seek(self._read)
            whole, ended, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(ended)
        for text in whole.split(b"\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


# --- the libraries ---------------------------------------------------------------------------------------------------


def _tensorboard(directory: RunDirectory, project: str, out: Path | None) -> Writer:
    return _TensorBoard(out or directory.path / "tensorboard")


def _wandb(directory: RunDirectory, project: str, out: Path | None) -> Writer:
    return _Wandb(directory, project, out or directory.path)


def _trackio(directory: RunDirectory, project: str, out: Path | None) -> Writer:
    if out is not None:
        raise ConfigError("--out is not for trackio: it keeps everything where TRACKIO_DIR says")
    return _Trackio(directory, project)


class _TensorBoard:
    """Event files, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, version: int, values: Mapping[str, float], *, date: float) -> None:
        """See `Writer`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, version, walltime=date or None)

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases, of the run's own id: sent again, it goes on. WANDB_MODE=offline sends nothing."""

    def __init__(self, directory: RunDirectory, project: str, out: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=directory.path.resolve().name,
            id=directory.run_id,
            resume="allow",
            dir=str(out),
            config={"config.toml": directory.config.read_text(encoding="utf-8")},
            save_code=False,
            settings=wandb.Settings(disable_git=True, x_disable_stats=True, console="off"),
        )
        self._run.define_metric("*", step_metric="version")

    def write(self, version: int, values: Mapping[str, float], *, date: float) -> None:
        """See `Writer`."""
        self._run.log({**values, "version": version})

    def close(self) -> None:
        """See `Writer`."""
        self._run.finish()


class _Trackio:
    """A run of trackio, in its own database on this machine."""

    def __init__(self, directory: RunDirectory, project: str) -> None:
        import trackio

        self._trackio = trackio
        config = {"config.toml": directory.config.read_text(encoding="utf-8")}
        trackio.init(project=project, name=directory.path.resolve().name, config=config, resume="allow", embed=False)

    def write(self, version: int, values: Mapping[str, float], *, date: float) -> None:
        """See `Writer`."""
        self._trackio.log(dict(values), step=version)

    def close(self) -> None:
        """See `Writer`."""
        self._trackio.finish()


WRITERS: dict[str, tuple[str, Opener]] = {
    "tensorboard": ("tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
}
"""Name, which is also that of the extra -> (module that must be there, what opens it)."""
