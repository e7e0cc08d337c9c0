"""Several ranks of one gloo group, each a process of its own that runs a script of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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


def fork_ranks(script: str, directory: Path, *, world_size: int, timeout_s: float = 240.0) -> list[Any]:
    """As `run_ranks` for a script that makes its own ranks (`forked`), so that what it imports is imported once."""
    done = subprocess.run(
        [sys.executable, str(_TESTS / script), str(world_size), str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(_TESTS)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads((directory / f"rank-{number}.json").read_text()) for number in range(world_size)]


def forked(main: Callable[[int, int, Path], None]) -> None:
    """Run `main(rank, world_size, directory)` in a process for each rank, with the script's own arguments, and end.

    Nothing may have been computed before: a fork has none of the threads that would compute more.
    """
    world_size, directory = int(sys.argv[1]), Path(sys.argv[2])
    for rank in range(world_size):
        if os.fork() == 0:
            main(rank, world_size, directory)
            sys.exit(0)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(world_size)]
    sys.exit(max(map(abs, codes)))
