"""A Harbor task directory, unmodified, as a coding task.

Source: Harbor 0.26 (Apache-2.0): task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh, steps/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.coding.places import exported
from asyncrl.coding.sets.dockerfile import Recipe
from asyncrl.coding.sets.harbor_checks import checks
from asyncrl.coding.sets.harbor_config import HealthcheckTable, StepTable, TaskToml, read_task_toml
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.harbor_source import HarborSource, below, limits_of, require_possible, surroundings, work_of
from asyncrl.coding.sets.task_files import TaskFiles
from asyncrl.coding.tasks import CodingTask, Reference, TaskStep
from asyncrl.errors import ConfigError

PLACES = ("/logs/agent", "/logs/artifacts")
"""Besides the working directory, what an agent may write to."""

_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def read_harbor_task(root: Path, task_id: str, settings: HarborSettings) -> CodingTask:
    """Return the task in the directory `root`.

    Raises: ConfigError naming the task and what to do; NeedsImageError where it needs an image that is not allowed.
    """
    source = HarborSource(root=root, task_id=task_id, settings=settings)
    config, unknown = read_task_toml(source.text("task.toml"), task_id=task_id)
    environment = config.environment
    require_possible(source, environment)
    recipe, image = surroundings(source, environment, "environment")
    work = work_of(source, environment, recipe, image)
    files, executable = below(source, recipe, work)
    variables = {**recipe.variables, **source.resolved(environment.env)}
    steps = config.steps or [StepTable(name="")]
    return CodingTask(
        task_id=task_id,
        steps=tuple(
            _step(source, config, step, work, recipe, files, is_first=index == 0) for index, step in enumerate(steps)
        ),
        files=files,
        executable=executable,
        work=work,
        places=PLACES,
        image=image,
        variables=variables,
        limits=limits_of(source, environment, config.agent),
        last_step_counts=config.multi_step_reward_strategy == "final",
        origin=str(root),
        notes=tuple(_notes(source, config, unknown, recipe)),
    )


def _step(
    source: HarborSource,
    config: TaskToml,
    step: StepTable,
    work: str,
    recipe: Recipe,
    files: Mapping[str, bytes],
    *,
    is_first: bool,
) -> TaskStep:
    folder = f"steps/{step.name}/" if step.name else ""
    if step.name and not (source.root / folder).is_dir():
        raise ConfigError(f"{source.task_id}: task.toml has a step {step.name!r}, and there is no directory {folder}")
    brought = source.tree(f"{folder}workdir") if folder else TaskFiles()
    made = sorted(path for path in recipe.directories if path.startswith(work + "/")) if is_first else []
    setup = [f"mkdir -p {' '.join(made)}"] if made else []
    setup += ["bash setup.sh"] if "setup.sh" in brought.files else []
    checks_of = [config.environment.healthcheck] if is_first else []
    setup += [_waiting(check) for check in (*checks_of, step.healthcheck) if check is not None]
    minimum = step.min_reward
    return TaskStep(
        name=step.name,
        instruction=without_canary(source.text(f"{folder}instruction.md")),
        checks=checks(source, config, step, folder, work, files),
        reference=_reference(source, config, folder),
        files=brought.files,
        setup="set -e\n" + "\n".join(setup) if setup else "",
        agent_timeout_s=source.settings.agent_timeout_s(
            config.agent.timeout_sec if step.agent.timeout_sec is None else step.agent.timeout_sec
        ),
        min_reward={"reward": minimum} if isinstance(minimum, int | float) else minimum or {},
    )


def without_canary(text: str) -> str:
    """Return an instruction without the lines at its beginning that mark it for filters of training data."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _waiting(check: HealthcheckTable) -> str:
    """Return shell text that ends once the command succeeds, and fails after its retries."""
    grace = int(check.start_period_sec // max(check.start_interval_sec, 1.0)) if check.start_period_sec > 0 else 0
    pauses = [check.start_interval_sec] * grace + [check.interval_sec] * max(check.retries, 1)
    return (
        f"{exported({'CHECK': check.command})}ready=\nfor pause in {' '.join(f'{pause:g}' for pause in pauses)}; do\n"
        f'  if timeout {check.timeout_sec:g} bash -c "$CHECK"; then ready=1; break; fi\n  sleep "$pause"\ndone\n'
        '[ -n "$ready" ]'
    )


def _reference(source: HarborSource, config: TaskToml, folder: str) -> Reference | None:
    solution = source.tree(f"{folder}solution")
    if "solve.sh" not in solution.files:
        return None
    variables = {"DEBIAN_FRONTEND": "noninteractive", **source.resolved(config.solution.env)}
    return Reference(files=solution.files, script="solve.sh", variables=variables)


def _notes(source: HarborSource, config: TaskToml, unknown: Sequence[str], recipe: Recipe) -> list[str]:
    environment, settings = config.environment, source.settings
    notes = [f"task.toml has {name}, which the format does not" for name in unknown]
    networks = {table.network_mode for table in (environment, config.agent, config.verifier)} - {"", "no-network"}
    if networks or environment.allow_internet:
        notes.append(f"it asks for a network ({', '.join(sorted(networks)) or 'allow_internet'}) and runs without one")
    elif environment.allow_internet is None and not environment.network_mode:
        notes.append('it may count on a network, which is "public" by default, and runs without one')
    for name, found, most in (
        ("memory", environment.memory_mb or 0, settings.max_memory_mb),
        ("storage", environment.storage_mb or 0, settings.max_storage_mb),
    ):
        if found > most:
            notes.append(f"it asks for {name}_mb = {found} and gets {most} (max_{name}_mb)")
    if recipe.provided:
        notes.append(f"its image would have {', '.join(sorted(recipe.provided))}, which only its tests find here")
    if {config.agent.user, config.verifier.user} - {None}:
        notes.append("it names users; everything runs as one user without privileges")
    for path, what in (("trajectory.json", "what an agent did before"), ("environment/skills", "skills")):
        if source.has(path) or (path.endswith("skills") and environment.skills_dir):
            notes.append(f"it brings {what} ({path}), which agents here are not shown")
    if any(step.verifier.network_mode or step.agent.network_mode for step in config.steps):
        notes.append("its steps say what network they want; they run without one")
    return notes
