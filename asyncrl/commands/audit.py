"""`asyncrl environments audit`: what a run's attempts, or tasks alone, say of the judges."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import trio
from rich.console import Console
from rich.table import Table

from asyncrl.coding.audit import Attempt, Audit, audit, read_attempts, untold_by_task
from asyncrl.coding.tasks import BringsCodingTasks, CodingTask
from asyncrl.coding.verdict_file import VerdictFile
from asyncrl.configs import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.preflight import check_model
from asyncrl.processes import open_tasks
from asyncrl.run_directory import RunDirectory

T = TypeVar("T")
_SHOWN = 6  # of checks that always fail


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `audit`."""
    parser.add_argument("source", type=Path, metavar="RUN|CONFIG.toml", help="a run's directory; or tasks alone")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of CONFIG.toml")
    parser.add_argument(
        "--stronger", type=Path, action="append", default=[], metavar="RUN", help="whose solved tasks can be solved"
    )
    parser.add_argument(
        "--verdicts", type=Path, metavar="FILE", help="of `validate --keep`: whose tasks' references pass"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(command=audit_command)


def audit_command(arguments: argparse.Namespace) -> int:
    """Audit; return the exit code."""
    if not arguments.source.is_dir():
        if arguments.stronger or arguments.verdicts:
            raise ConfigError("--stronger and --verdicts go with a run's directory, which has attempts to compare")
        config = load_config(arguments.source, arguments.set)
        found = trio.run(_with_tasks, config, lambda task, ids: untold_by_task(filter(None, map(task, ids))))
        print(json.dumps(found, indent=2) if arguments.json else _untold_text(found))
        return 0
    if arguments.set:
        raise ConfigError("--set goes with CONFIG.toml: a run was what it was")
    attempts = read_attempts(RunDirectory(arguments.source).trajectories)
    stronger = {str(path): _solved(read_attempts(RunDirectory(path).trajectories)) for path in arguments.stronger}
    proven: set[str] = set()
    if arguments.verdicts is not None:
        if not arguments.verdicts.is_file():
            raise ConfigError(f"--verdicts: there is no file {arguments.verdicts}")
        verdicts = VerdictFile(arguments.verdicts).verdicts.values()
        proven = {verdict.task_id for verdict in verdicts if verdict.good and not verdict.unproven}
    config = load_config(RunDirectory(arguments.source).config, [])
    result = trio.run(
        _with_tasks,
        config,
        lambda task, _: audit(attempts, task=task, solved_elsewhere=stronger, proven=proven),
    )
    print(json.dumps(asdict(result), indent=2)) if arguments.json else _show(result)
    return 0


def _solved(attempts: list[Attempt]) -> set[str]:
    return {attempt.task_id for attempt in attempts if attempt.solved}


async def _with_tasks(config: Config, use: Callable[..., T]) -> T:
    """Return what `use` makes of a function from ids to coding tasks, and of all ids."""
    check_model(config.model.path)
    async with open_tasks(config) as (environment, _, _):
        tasks = environment.task_set if isinstance(environment, BringsCodingTasks) else None

        def task(task_id: str) -> CodingTask | None:
            try:
                return None if tasks is None else tasks.task(task_id)
            except ConfigError:  # of another part of a mixture, or of a set that has changed since
                return None

        return use(task, () if tasks is None else tasks.all_ids())


def _untold_text(found: dict[str, tuple[str, ...]]) -> str:
    lines = [f"{task_id}: {'; '.join(told)}" for task_id, told in found.items()]
    return "\n".join([*lines, f"{len(found)} tasks have hidden tests that ask for names which nothing tells"])


def _show(result: Audit) -> None:
    console = Console()
    failed = Table(
        "task", "attempts", "best reward", "why it should be solved", "what always fails", title="failed wrongly?"
    )
    for one in result.failed_wrongly:
        always = ", ".join(one.always_failing[:_SHOWN])
        failed.add_row(one.task_id, str(one.attempts), f"{one.best_reward:.2f}", "; ".join(one.reasons), always)
    passed = Table("task", "attempt", "solved", "what to look at", title="passed wrongly?")
    for two in result.passed_wrongly:
        passed.add_row(two.task_id, two.trajectory_id, "yes" if two.solved else "no", "; ".join(two.reasons))
    same = Table("task", "groups", "equal rewards", "equal files too", title="groups without differing attempts")
    for three in result.undiffering:
        same.add_row(three.task_id, *map(str, (three.groups, three.equal_rewards, three.equal_answers)))
    for table in (failed, passed, same):
        if table.row_count:
            console.print(table)
    print(
        f"{result.attempts} attempts: {len(result.failed_wrongly)} tasks that were likely failed wrongly, "
        f"{len(result.passed_wrongly)} attempts to read, {len(result.undiffering)} tasks with groups that do not differ"
    )
    if result.without_evidence:
        print(f"{result.without_evidence} attempts have no evidence: their environment records rewards alone")
