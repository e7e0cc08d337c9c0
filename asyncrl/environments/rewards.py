"""What a reward function of a user's own returned, as a grade."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import EnvironmentFault
from asyncrl.rollout import Grade


def grade_of(said: Any, function: str) -> Grade:
    """Return the grade that a number stands for, or a mapping with `reward` and parts beside it.

    Example:
        >>> grade_of({"reward": 1, "form": 0.5}, "my_rewards:solved")
        Grade(reward=1.0, parts={'form': 0.5})

    Raises: EnvironmentFault naming the function where it returned no number.
    """
    parts = dict(said) if isinstance(said, Mapping) else {"reward": said}
    numbers = {name: _number(value, name, function) for name, value in parts.items()}
    if "reward" not in numbers:
        raise EnvironmentFault(f"{function} returned no 'reward' among {sorted(numbers)}")
    return Grade(reward=numbers.pop("reward"), parts=numbers)


def _number(value: Any, name: str, function: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"{function} returned {value!r} for {name!r}, no number") from error
    if not math.isfinite(number):
        raise EnvironmentFault(f"{function} returned {number} for {name!r}, which must be finite")
    return number


def answer_is_right(result: Any, row: Mapping[str, Any]) -> float:
    """Return 1.0 where an agent left the line's `answer`, and nothing else, in answer.txt; else 0.0.

    An agent that left no file has answered nothing: what ended it by no fault of its own never comes here.
    """
    path = result.directory / "answer.txt"
    return float(
        path.is_file() and path.read_text(encoding="utf-8", errors="replace").strip(" .\n") == str(row["answer"])
    )
