"""Saved models by their paths: tinker://MODEL/weights/NAME to train on, tinker://MODEL/sampler_weights/NAME to sample.

Below the service's directory they lie as MODEL/weights/NAME: whoever has the directory has them, whichever program
wrote them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError

SCHEME = "tinker://"
TRAINING, SAMPLER = "weights", "sampler_weights"
STATE = "state.json"
"""The last file of a saved model: without it there is none."""
PARTIAL = ".partial"
"""Ends the name of a directory that is being filled; one that is found at the start was left by a kill."""
REPLACED = ".replaced"
"""Ends the name of one that another takes the place of."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One saved model."""

    model_id: str
    kind: str
    name: str
    directory: Path

    @property
    def path(self) -> str:
        """As clients know it."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


class Shelf:
    """What is saved below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, model_id: str, kind: str, name: str) -> Saved:
        """Return where a model is saved under a name. Raises: ConfigError for a name that is no file's."""
        if not _WORD.fullmatch(name) or name.endswith((PARTIAL, REPLACED)):
            raise ConfigError(f"a name of saved weights has letters, digits and _.:- (at most 128), got {name[:200]!r}")
        return Saved(model_id=model_id, kind=kind, name=name, directory=self.root / model_id / kind / name)

    def parse(self, path: str) -> Saved:
        """Return what a path would name. Raises: ConfigError where it is no path."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in (TRAINING, SAMPLER):
            raise ConfigError(f"a path is {SCHEME}MODEL/{TRAINING}/NAME or /{SAMPLER}/NAME, got {path[:300]!r}")
        if not _WORD.fullmatch(parts[0]):
            raise ConfigError(f"{path[:300]!r} names no model")
        return self.place(*parts)

    def find(self, path: str) -> Saved:
        """Return what a path names. Raises: ConfigError where it is no path, or nothing is saved there."""
        saved = self.parse(path)
        if not (saved.directory / STATE).is_file():
            raise ConfigError(f"nothing is saved as {path}")
        return saved

    def saved(self, model_id: str | None = None) -> Iterator[Saved]:
        """Yield what is saved, of one model or of all, by path."""
        for state in sorted(self.root.glob(f"{model_id or '*'}/*/*/{STATE}")):
            directory = state.parent
            if not directory.name.endswith((PARTIAL, REPLACED)):
                yield self.place(directory.parent.parent.name, directory.parent.name, directory.name)

    def remove(self, saved: Saved) -> None:
        """Remove a saved model, where it is still there."""
        if saved.directory.exists():
            shutil.rmtree(saved.directory)


def sweep(root: Path) -> list[Path]:
    """Remove what a kill left half done below `root` and return it; a saved model that was being replaced stays."""
    left = sorted(root.glob(f"*/*/*{PARTIAL}"))
    for replaced in root.glob(f"*/*/*{REPLACED}"):
        place = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if place.exists():
            left.append(replaced)
        else:
            replaced.rename(place)
    for path in left:
        shutil.rmtree(path)
    return left
