"""Settings of the journal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncrl.errors import ConfigError


class Fsync(StrEnum):
    """When records of the journal survive a power failure; a kill of the process none of the three loses."""

    ALWAYS = "always"
    """Before appending returns."""
    GROUP = "group"
    """At the end of each group of episodes, and at each checkpoint."""
    NEVER = "never"
    """When the kernel likes, usually within half a minute."""


class LostLine(StrEnum):
    """What becomes of groups whose tokens were sampled under weights that a resumed run does not have."""

    REDRAW = "redraw"
    """They are dropped, counted as "lost_line", and their tasks are drawn again."""
    KEEP = "keep"
    """They are trained on where the bound on staleness allows, counting the steps back to the checkpoint and on from
    there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """The log from which a run that was killed goes on ([journal])."""

    fsync: Fsync = Fsync.GROUP
    """When records survive a power failure: "always", "group" or "never"."""
    file_mib: int = 64
    """MiB after which a new file begins; whole files are deleted when a checkpoint no longer needs them."""
    lost_line: LostLine = LostLine.REDRAW
    """Of groups sampled after the checkpoint that a run goes back to: "redraw" or "keep"."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        if not 1 <= self.file_mib <= 4096:
            raise ConfigError(f"file_mib must be from 1 to 4096 MiB, got {self.file_mib} ([journal])")
