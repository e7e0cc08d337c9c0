"""A task directory of the older Terminal-Bench form: task.yaml, run-tests.sh, tests/, solution.sh, Dockerfile.

Its tests' exit code is the reward: 0 is 1. Source: Harbor 0.26 (Apache-2.0), which maps such tasks in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncrl.coding.sets.dockerfile import NeedsImageError, read_dockerfile
from asyncrl.coding.sets.harbor import PLACES, without_canary
from asyncrl.coding.sets.harbor_checks import require_tests
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.task_files import TaskFiles, read_text, read_tree
from asyncrl.coding.tasks import CodingTask, Reference, ScriptChecks, TaskStep
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxLimits

_TESTS_SCRIPT = "run-tests.sh"
_SCRIPT = b"bash /tests/run-tests.sh\nif [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
_PLAIN_SERVICE = {"build", "image", "container_name", "command", "environment", "volumes", "working_dir", "platform"}
_NOT_COPIED = {"task.yaml", "docker-compose.yaml", "solution.sh", "solution.yaml", _TESTS_SCRIPT}
_VARIABLES = {"TEST_DIR": "/tests"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskYaml:
    """What of task.yaml matters here."""

    instruction: str
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = 60.0
    descriptions: list[dict[str, Any]] = field(default_factory=list)


def read_terminal_bench_task(root: Path, task_id: str, settings: HarborSettings) -> CodingTask:
    """Return the task in the directory `root`. Raises: ConfigError, NeedsImageError."""
    config = _read_yaml(root, task_id)
    _require_one_service(root, task_id)
    tests = dict(read_tree(root, "tests", task_id=task_id).files)
    if not (root / _TESTS_SCRIPT).is_file():
        raise ConfigError(f"{task_id}: it has no tests: {_TESTS_SCRIPT} is not there")
    tests |= {_TESTS_SCRIPT: read_text(root, _TESTS_SCRIPT, task_id=task_id).encode(), "test.sh": _SCRIPT}
    require_tests(task_id, tests, settings)
    if not (root / "Dockerfile").is_file():
        raise NeedsImageError(f"{task_id}: it has no Dockerfile beside task.yaml that says where it runs")
    try:
        recipe = read_dockerfile(
            read_text(root, "Dockerfile", task_id=task_id),
            _context(root, task_id),
            base_images=settings.base_images,
            provided=settings.tests_provided,
        )
    except NeedsImageError as error:
        raise NeedsImageError(
            f"{task_id}: it needs an image, since {error}: leave it out (skip_refused = true)"
        ) from None
    # the format's own images work in /app
    work = recipe.work if recipe.work != "/" else "/app"
    if any(not path.startswith(work + "/") for path in recipe.files):
        raise NeedsImageError(f"{task_id}: it needs an image, since it copies files to places other than {work}")
    timeout_s = settings.agent_timeout_s(config.max_agent_timeout_sec)
    limits = SandboxLimits(
        wall_s=timeout_s or settings.command_s, cpu_s=timeout_s or settings.command_s,
        memory_bytes=settings.max_memory_mb * 2**20, disk_bytes=settings.max_storage_mb * 2**20, max_pids=256,
        max_files=20_000,
    )  # fmt: skip
    return CodingTask(
        task_id=task_id,
        steps=(
            TaskStep(
                instruction=without_canary(config.instruction),
                checks=ScriptChecks(
                    files=tests,
                    timeout_s=settings.verifier_timeout_s(config.max_test_timeout_sec),
                    provided=settings.tests_provided,
                ),
                reference=_reference(root, task_id),
                agent_timeout_s=timeout_s,
            ),
        ),
        files={path.removeprefix(work + "/"): data for path, data in recipe.files.items()},
        executable=tuple(path.removeprefix(work + "/") for path in recipe.executable),
        work=work,
        places=PLACES,
        variables={**_VARIABLES, **recipe.variables},
        limits=limits,
        origin=str(root),
        notes=("it may count on a network, and runs without one",),
    )


def _context(root: Path, task_id: str) -> TaskFiles:
    """Return what the Dockerfile may copy: no tests, no solution, nothing that tells of them."""
    tree = read_tree(root, ".", task_id=task_id)
    files = {
        path: data for path, data in tree.files.items() if path not in _NOT_COPIED and not path.startswith("tests/")
    }
    return TaskFiles(files=files, executable=tree.executable)


def _read_yaml(root: Path, task_id: str) -> TaskYaml:
    try:
        return msgspec.convert(yaml.safe_load(read_text(root, "task.yaml", task_id=task_id)), TaskYaml)
    except yaml.YAMLError as error:
        raise ConfigError(f"{task_id}: task.yaml is not YAML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{task_id}: task.yaml: {error}") from None


def _require_one_service(root: Path, task_id: str) -> None:
    """Raise NeedsImageError where docker-compose.yaml asks for more than the usual one container."""
    if not (root / "docker-compose.yaml").is_file():
        return
    try:
        composed = yaml.safe_load(read_text(root, "docker-compose.yaml", task_id=task_id))
    except yaml.YAMLError as error:
        raise ConfigError(f"{task_id}: docker-compose.yaml is not YAML: {error}") from None
    services = composed.get("services") if isinstance(composed, Mapping) else None
    if not isinstance(services, Mapping) or len(services) != 1:
        raise NeedsImageError(f"{task_id}: it is made of several containers (docker-compose.yaml)")
    (service,) = services.values()
    usual = isinstance(service, Mapping) and not set(service) - _PLAIN_SERVICE
    if not usual or any("${T_BENCH_" not in str(one) for one in service.get("environment") or ()):
        raise NeedsImageError(f"{task_id}: docker-compose.yaml asks for more than one plain container")


def _reference(root: Path, task_id: str) -> Reference | None:
    if not (root / "solution.sh").is_file():
        return None
    script = read_text(root, "solution.sh", task_id=task_id).encode()
    return Reference(files={"solution.sh": script}, script="solution.sh")
