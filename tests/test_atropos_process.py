"""A real process of atroposlib 0.4.0, unmodified, as an environment of a run: from its registration to its end."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio
from atropos_client import atropos_python, environment_command
from test_atropos_environment import Rig, run
from tiny_model import write_byte_tokenizer

from asyncrl.tokens import ChatRenderer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path) -> ChatRenderer:
    """Write the files that both sides read: the gateway's renderer, and the environment's tokenizer."""
    directory.mkdir()
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return ChatRenderer.load(directory)


async def fail_on_end(process: trio.Process, log: Path) -> None:
    raise AssertionError(f"the environment ended with {await process.wait()}: {log.read_text()[-4000:]}")


@pytest.mark.slow  # imports transformers, wandb and more in another process
@pytest.mark.parametrize("kind", ["tokens", "chat"])
def test_an_unmodified_environment_registers_samples_posts_and_ends(kind: str, tmp_path: Path) -> None:
    python = atropos_python()
    environment = {**os.environ, "KIND": kind, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    log = tmp_path / "environment.log"

    async def body(rig: Rig) -> None:
        rig.sampler.version = 1
        for group_id in range(4):
            rig.ask(str(group_id))
            await rig.wait_asked()
        command = environment_command(python, rig.addresses, tmp_path / "model", group_size=4, total_steps=4)
        with log.open("w") as output:
            start = partial(trio.run_process, command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            process: trio.Process = await rig.nursery.start(partial(start, check=False))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_on_end, process, log)
            await rig.wait_groups(4)
            nursery.cancel_scope.cancel()
        rig.sampler.version = 9  # the run's last step is behind it
        rig.ask("more")
        assert await process.wait() == 0, log.read_text()[-4000:]

    run(tmp_path, body, *[f"{'abcdefgh' * (n % 5)}"[:10] for n in range(1000)], make=write_model, num_steps=5)
