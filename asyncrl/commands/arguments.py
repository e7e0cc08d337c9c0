"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file and `--set`."""
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="the configuration")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one setting of the file; may be given several times",
    )
