"""Settings of the way that weights take from the learner to the engines."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.types import Verification
from asyncrl.weight_sync import TRANSPORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncSettings:
    """Which transport, and where it keeps its files."""

    transport: str = "shared_memory"
    """A name of the TRANSPORTS table."""
    directory: Path = Path("")
    """Of the `filesystem` transport: a directory that learner and engines share. Empty for `shared_memory`."""
    delta: bool = False
    """Publish, beside each version, what differs from the one before; engines that hold that one read no more."""
    verify: Verification = Verification.DIGEST
    """What learner and engines compute of every tensor at every sync: "digest" or "full"."""
    canary: bool = True
    """After every sync, compare each engine's log-probs of a short text with the learner's, which finds what digests
    cannot."""
    publish_timeout_s: float = 300.0
    """For the learner to write one version. What the engines do with it has deadlines of its own ([engine])."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        offered = [name for name in TRANSPORTS if name != "nccl"]
        if self.transport not in TRANSPORTS:
            nearest = difflib.get_close_matches(self.transport, offered, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(
                f"transport must be one of {', '.join(offered)}, got {self.transport!r} ([weight_sync]){hint}"
            )
        if self.transport == "nccl":
            raise ConfigError(
                "transport = 'nccl' is not offered to runs ([weight_sync]): it has never run on a GPU. "
                "`python -m asyncrl.weight_sync.check_nccl MODEL` tries it there; take 'shared_memory' or 'filesystem'"
            )
        if self.transport == "filesystem" and self.directory == Path(""):
            raise ConfigError("directory must be given with transport = 'filesystem' ([weight_sync])")
        if not self.publish_timeout_s > 0:
            raise ConfigError(f"publish_timeout_s must be > 0 seconds, got {self.publish_timeout_s} ([weight_sync])")
