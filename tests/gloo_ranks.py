"""Several ranks of one gloo group, each a process of its own that runs a script of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent


def run_ranks(script: str, directory: Path, *, world_size: int = 2, timeout_s: float = 240.0) -> list[Any]:
    """Run `tests/SCRIPT rank world_size directory` for every rank and return what each leaves in `rank-RANK.json`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_TESTS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(_TESTS / script), str(rank), str(world_size), str(directory)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    said = "\n".join(f"--- rank {number}:\n{output[-3000:]}" for number, output in enumerate(outputs))
    assert not any(codes), f"the ranks ended with {codes}\n{said}"
    return [json.loads((directory / f"rank-{number}.json").read_text()) for number in range(world_size)]
