"""Groups that teach nothing because their rewards are all equal: dropped and replaced, up to a limit.

Source: dynamic sampling of DAPO, arXiv:2503.14476, which keeps the groups with 0 < number correct < group size.
"""

from __future__ import annotations

from asyncrl.evaluation import is_solved
from asyncrl.types import Group, PolicyVersion

_EQUAL = 1e-6  # rewards that differ by no more give an advantage of exactly 0 (`losses.reduction.ZERO_VARIANCE`)

FILTERED = "filtered"
"""In the extras of every trajectory of a group that its environment does not want to be trained on: why."""

ALL_PASS = "all_pass"
ALL_FAIL = "all_fail"
ALL_EQUAL = "all_equal"


def zero_advantage_reason(group: Group) -> str | None:
    """Return why no trajectory of a group can have an advantage, or None where one can.

    "all_pass" where every episode solved its task, "all_fail" where none did and the reward is at most 0, "all_equal"
    otherwise. It goes by the environment's rewards, as they are before anything is added to them. Credit that the
    environment gives to tokens, or differently to turns, is something to learn from.
    """
    scored = [t for t in group.trajectories if t.reward is not None]
    by_agent: dict[str, list[float]] = {}
    for trajectory in scored:
        by_agent.setdefault(trajectory.agent, []).append(trajectory.reward or 0.0)
    rewards = [reward for own in by_agent.values() for reward in own]
    if not rewards or any(max(own) - min(own) > _EQUAL for own in by_agent.values()):
        return None
    segments = [segment for t in scored for segment in t.segments]
    if any(segment.advantages is not None for segment in segments):
        return None
    if len({tuple(turn.reward for s in t.segments for turn in s.turns) for t in scored}) > 1:
        return None
    if all(is_solved(t) for t in scored):
        return ALL_PASS
    return ALL_FAIL if max(rewards) <= 0.0 and not any(is_solved(t) for t in scored) else ALL_EQUAL


def is_filtered(group: Group) -> bool:
    """Tell whether an environment's own filter has let a group go."""
    return bool(group.trajectories) and all(FILTERED in trajectory.extras for trajectory in group.trajectories)


class Replacements:
    """How many groups have been replaced since the learner's last step began.

    At most `limit` groups are replaced before a step, whatever the rewards are; from then on every finished group is
    kept, and the step comes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._version: PolicyVersion | None = None
        self._number = 0

    def allow(self, version: PolicyVersion) -> bool:
        """Return whether one more group may be replaced before the step that begins at `version`; count it if so."""
        if version != self._version:
            self._version, self._number = version, 0
        if self._number == self._limit:
            return False
        self._number += 1
        return True
