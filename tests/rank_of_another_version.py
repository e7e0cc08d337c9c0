"""Ranks that meet while the second finds another torch installed: `test_learner_ranks` runs two.

python rank_of_another_version.py WORLD_SIZE DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gloo_ranks import forked

from asyncrl.errors import ConfigError
from asyncrl.learner.ranks import Place, Ranks


def main(rank: int, world_size: int, directory: Path) -> None:
    """Leave in `rank-RANK.json` why this rank would not go on."""
    if rank:
        (installed := directory / "torch-0.1.dist-info").mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
        sys.path.insert(0, str(directory))
    said = ""
    try:
        Ranks(Place(rank, world_size, rank, world_size, f"file://{directory / 'rendezvous'}"))
    except ConfigError as error:
        said = str(error)
    (directory / f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    forked(main)
