"""What grading says of one step of a coding task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an agent's files, or a reference's, came out."""

    reward: float
    """What the checks pay: the share of passed checks where they are told apart, else what the script wrote."""
    solved: bool
    """Whether every check passed, in every run; for a script, whether its reward is 1."""
    passed: Mapping[str, bool] = field(default_factory=dict)
    """Check -> whether it passed; empty where the checks are not told apart."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What a script wrote by name; empty for other checks."""
    flaky: tuple[str, ...] = ()
    """Checks that passed in some runs and not in others."""
    tampered: bool = False
    """Whether the candidate was seen to meddle with its judge; `reward` is 0 then."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Files of the agent's that could not cross: path -> why. The agent's doing."""
    detail: str = ""
    """What a person would want to read of it, shortened; never shown to the agent."""
