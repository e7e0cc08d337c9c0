"""Files that hold a secret."""

from __future__ import annotations

import stat
from pathlib import Path

from asyncrl.private_files import write_privately


def test_nobody_else_can_read_a_private_file_not_even_where_one_was_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    path.write_text("old")
    path.chmod(0o644)
    with path.open() as reader:
        write_privately(path, "secret")
        assert reader.read() == "old"
    assert path.read_text() == "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
