"""Harbor task directories of the tests' own, written where a test wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.harbor_tasks import HarborTasks
from asyncrl.coding.tasks import CodingTask, ScriptChecks, TaskStep

TASK = {
    "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 20.0\n',
    "instruction.md": "<!-- canary 1234 -->\n\nWrite hello to greeting.txt.\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nENV NAME=world\nWORKDIR /app\nCOPY start.txt .\n",
    "environment/start.txt": "begin\n",
    "tests/test.sh": (
        "#!/bin/bash\nif [ \"$(cat greeting.txt 2>/dev/null)\" = 'hello' ]; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt\nexit 3\n"
    ),
    "solution/solve.sh": "#!/bin/bash\necho hello > greeting.txt\n",
}


def write_task(root: Path, **changes: str | None) -> Path:
    """Write a task into `root`, with files replaced, added or (None) left out."""
    files: dict[str, str | None] = {**TASK, **changes}
    for name, text in files.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


def read(root: Path, **settings: Any) -> CodingTask:
    """Return the one task in `root`."""
    tasks = HarborTasks(HarborSettings(path=root, **settings))
    (task_id,) = tasks.all_ids()
    return tasks.task(task_id)


def checks_of(step: TaskStep) -> ScriptChecks:
    """Return a step's checks, which are a script."""
    assert isinstance(step.checks, ScriptChecks)
    return step.checks
