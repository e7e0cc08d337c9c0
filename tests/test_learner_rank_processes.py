"""The learner's ranks as the orchestrator starts them: real processes, which end together and leave nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from synthetic_groups import random_groups
from tiny_model import build_tiny_model

from asyncrl.children import Child
from asyncrl.errors import LearnerError
from asyncrl.learner_processes import accept_learner, start_learner_processes
from asyncrl.processes import LearnerProcess

pytestmark = pytest.mark.slow

_TIMEOUT_S = 240.0  # far above what two ranks need here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@asynccontextmanager
async def learner_of(
    directory: Path, model: Path, *, ranks: int = 2, said: int = 2
) -> AsyncIterator[tuple[LearnerProcess, list[Child]]]:
    """Start `ranks` processes of a learner whose settings say that there are `said`."""
    settings = write_job(directory, model, said=said)
    with trio.fail_after(_TIMEOUT_S):
        async with AsyncExitStack() as stack:
            children, ours = await start_learner_processes(
                settings, ranks=ranks, run_id="ranks", published=[f"{directory}/published/asyncrl-*"], stack=stack
            )
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            stack.push_async_callback(stream.aclose)
            yield LearnerProcess(stream, children[0]), children


def write_job(directory: Path, model: Path, *, said: int) -> Path:
    """Write settings of a learner that say that it has `said` ranks."""
    job = {
        "model": str(model),
        "run_id": "ranks",
        "weight_sync": {"transport": "filesystem", "directory": str(directory / "published")},
        "learner": {"learning_rate": 1e-3, "dtype": "float32", "ranks": said},
    }
    settings = directory / "logs" / "learner.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(job))
    return settings


def left_behind(directory: Path) -> list[str]:
    found = [*directory.glob("published/*"), *directory.glob("logs/*.rendezvous")]
    return [path.name for path in found]


def test_two_ranks_step_publish_save_and_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with learner_of(tmp_path, model) as (learner, children):
            await learner.wait_ready(0)
            result = await learner.step(random_groups(0))
            assert (result.version, result.stepped) == (1, True)
            manifest = await learner.publish()
            assert Path(manifest.location).is_file()
            (tmp_path / "saved").mkdir()
            files = await learner.save(str(tmp_path / "saved"))
            assert {"model/model.safetensors", "learner/state.json"} < set(files)
            assert sum("learner/optimizer/" in name for name in files) == 2, "a file of each rank"
            await learner.shut_down()
            assert [(await child.wait_exit()).code for child in children] == [0, 0]

    trio.run(main)
    assert left_behind(tmp_path) == []


def test_a_rank_that_is_killed_ends_the_learner_by_name_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    pids: list[int] = []

    async def main() -> None:
        async with learner_of(tmp_path, model) as (learner, children):
            await learner.wait_ready(0)
            manifest = await learner.publish()
            assert Path(manifest.location).is_file()
            for child in children:
                (pid,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
                pids.append(int(pid))
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(LearnerError, match=r"learner rank 1 of 2 was ended by signal 9"):
                await children[1].fail_on_exit(LearnerError)
            with pytest.raises(LearnerError, match=r"the learner (failed|rank 0 of 2)"):
                await learner.step(random_groups(0))

    trio.run(main)
    assert left_behind(tmp_path) == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_ranks_that_torchrun_starts_by_hand_find_the_run_that_waits(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("of a long name " * 9).strip()
    settings = write_job(folder, model, said=2)
    said: list[str] = []

    async def main() -> None:
        with trio.fail_after(_TIMEOUT_S):
            async with trio.open_nursery() as nursery:

                def start(words: str) -> None:
                    said.append(words)
                    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(words.split(": ")[1])[1:]]
                    nursery.start_soon(partial(trio.run_process, command))

                ours = await accept_learner(settings, ranks=2, say=start, own_cores=True)
                async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
                    learner = LearnerProcess(stream, None)
                    await learner.wait_ready(0)
                    assert (await learner.step(random_groups(0))).stepped
                    await learner.shut_down()

    trio.run(main)  # torchrun's exit code is 0, or run_process raises
    assert "torchrun --standalone --nproc-per-node 2 -m asyncrl.learner" in said[0]
    assert said[0].endswith(" --own-cores")
    assert [path.name for path in folder.rglob("*.socket")] == []


def test_another_number_of_processes_than_the_settings_say_is_refused(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with learner_of(tmp_path, model, ranks=1, said=3) as (learner, _):
            with pytest.raises(LearnerError, match=r"ranks = 3 \(\[learner\]\), and 1 processes"):
                await learner.wait_ready(0)

    trio.run(main)
