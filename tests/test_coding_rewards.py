"""What work is paid: a solution, what was gained over the untouched files, and never what only looks like either."""

from __future__ import annotations

import pytest
from coding_tasks import TASKS

from asyncrl.coding.rewards import Conduct, RewardSettings, partial_of, pay
from asyncrl.coding.verdicts import Verdict

ONE, TWO, LAST = TASKS["calls"], TASKS["steps"], TASKS["last"]
CONDUCT = Conduct(num_calls=4, num_malformed=1, num_turns=3, max_turns=5, num_tokens=30, max_tokens=120)
SETTINGS = RewardSettings(partial_weight=0.5)
SOLVED = Verdict(reward=1.0, solved=True, passed={"a": True, "b": True, "c": True})
UNTOUCHED = Verdict(reward=1 / 3, solved=False, passed={"a": True, "b": False, "c": False})
HALF = Verdict(reward=2 / 3, solved=False, passed={"a": True, "b": True, "c": False})
WORSE = Verdict(reward=0.0, solved=False, passed={"a": False, "b": False, "c": False})


def number(reward: float, **more: bool) -> Verdict:
    """Return the verdict of a script."""
    return Verdict(reward=reward, solved=reward == 1.0, **more)


@pytest.mark.parametrize(
    ("verdict", "untouched", "share"),
    [
        (SOLVED, UNTOUCHED, 1.0),
        (HALF, UNTOUCHED, 0.5),
        (UNTOUCHED, UNTOUCHED, 0.0),
        (WORSE, UNTOUCHED, 0.0),
        (Verdict(reward=0.0, solved=False), UNTOUCHED, 0.0),  # the file did not cross, so that no check was made
        (SOLVED, SOLVED, 0.0),  # nothing was left to be gained
        (number(0.7), number(0.4), 0.5),
        (number(0.2), number(0.4), 0.0),
        (number(7.0), number(0.4), 1.0),
        (number(-3.0), number(-7.0), 0.5),
        (number(3.0), number(2.0), 0.0),
        (Verdict(reward=0.0, solved=False, tampered=True, passed=SOLVED.passed), UNTOUCHED, 0.0),
    ],
)
def test_only_what_was_gained_counts(verdict: Verdict, untouched: Verdict, share: float) -> None:
    assert partial_of(verdict, untouched) == pytest.approx(share)


def test_a_solution_is_paid_one_and_what_is_less_its_part() -> None:
    for verdict, reward in ((SOLVED, 1.0), (HALF, 0.25), (UNTOUCHED, 0.0), (WORSE, 0.0)):
        found, parts = pay(ONE, [verdict], [UNTOUCHED], CONDUCT, SETTINGS)
        assert found == pytest.approx(reward)
        assert parts["solved"] == float(verdict is SOLVED)
        assert (parts["paid_solved"], parts["paid_partial"]) == pytest.approx(
            (float(verdict is SOLVED), 0.5 * parts["partial"])
        )
    assert pay(ONE, [HALF], [], CONDUCT, SETTINGS)[0] == 0.0, "nothing is paid against files that were not judged"


def test_conduct_is_told_by_shares() -> None:
    _, parts = pay(ONE, [SOLVED], [UNTOUCHED], CONDUCT, SETTINGS)
    names = ("format", "brevity", "shortness", "tool_calls", "malformed", "tampered")
    assert [parts[name] for name in names] == [0.75, 0.5, 0.75, 3.0, 1.0, 0.0]
    silent = Conduct(num_calls=0, num_malformed=0, num_turns=1, max_turns=1, num_tokens=200, max_tokens=120)
    assert (silent.format, silent.brevity, silent.shortness) == (0.0, 0.0, 0.0)


def test_who_tampers_is_paid_nothing_whatever_else_was_done() -> None:
    settings = RewardSettings(partial_weight=0.5, checks_weight=1.0, format_weight=1.0, brevity_weight=1.0)
    tampered = Verdict(reward=0.0, solved=False, tampered=True, passed={"a": True})
    reward, parts = pay(TWO, [SOLVED, tampered], [UNTOUCHED, UNTOUCHED], CONDUCT, settings)
    assert (reward, parts["solved"], parts["tampered"]) == (0.0, 0.0, 1.0)
    assert {value for name, value in parts.items() if name.startswith("paid_")} == {0.0}
    reward, parts = pay(LAST, [tampered, SOLVED], [UNTOUCHED, UNTOUCHED], CONDUCT, settings)
    assert (reward, parts["solved"], parts["tampered"]) == (0.0, 0.0, 1.0)


def test_brevity_is_no_merit_of_a_failure() -> None:
    settings = RewardSettings(partial_weight=0.0, brevity_weight=1.0, length_weight=1.0)
    assert pay(ONE, [HALF], [UNTOUCHED], CONDUCT, settings)[0] == 0.0
    assert pay(ONE, [SOLVED], [UNTOUCHED], CONDUCT, settings)[0] == 1 + 0.5 + 0.75


def test_several_steps_have_their_mean_or_the_last_ones() -> None:
    both = [UNTOUCHED, UNTOUCHED]
    assert pay(TWO, [SOLVED, SOLVED], both, CONDUCT, SETTINGS)[0] == 1.0
    reward, parts = pay(TWO, [SOLVED, HALF], both, CONDUCT, SETTINGS)
    assert (reward, parts["solved"]) == (pytest.approx(0.5 + 0.25 / 2), 0.0)
    assert pay(TWO, [SOLVED], both, CONDUCT, SETTINGS)[0] == 0.5, "a step that was not reached counts as nothing"
    assert pay(LAST, [SOLVED], both, CONDUCT, SETTINGS)[0] == 0.0
    assert pay(LAST, [UNTOUCHED, SOLVED], both, CONDUCT, SETTINGS)[1]["solved"] == 1.0
