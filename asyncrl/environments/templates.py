"""What a bug-fix template is, and the seeded inputs that templates draw; the templates are in `templates_*`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

Arguments = tuple[Any, ...]
Draw = Callable[[Random], Arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One small function of our own writing, with the bugs that can be seeded into it.

    Example:
        >>> add = Template(name="add", says="Return the sum.", code="def add(a, b):\\n    return a + b\\n",
        ...                bugs=(("a + b", "a - b"),), draw=two_numbers)
        >>> print(add.buggy(0))
        def add(a, b):
            return a - b
        <BLANKLINE>
    """

    name: str
    """Of the function and of the template."""
    says: str
    """What the function should do, in one or two sentences; parameters stand in backticks."""
    code: str
    """The reference solution."""
    bugs: tuple[tuple[str, str], ...]
    """(text of the reference, text that replaces its first occurrence): each is one bug."""
    draw: Draw
    """One list of arguments, JSON-like."""
    edges: tuple[Arguments, ...] = ()
    """Argument lists that are always among the hidden tests."""
    hidden: tuple[Arguments, ...] = ()
    """Exactly the hidden tests, where they are not to be drawn."""

    def buggy(self, bug: int) -> str:
        """Return the source with bug number `bug` seeded."""
        old, new = self.bugs[bug]
        assert old in self.code, f"{self.name}: {old!r} is not in the reference"
        return self.code.replace(old, new, 1)


_WORDS = (  # noqa: SIM905
    "apple bird cloud dog eagle fish green house ice jump king lemon moon night ocean pen queen river sun tree "
    "under violet water yellow zebra level noon radar kayak civic"
).split()


def number(random: Random) -> int:
    """An integer from -20 to 20."""
    return random.randint(-20, 20)


def positive(random: Random) -> int:
    """An integer from 1 to 30."""
    return random.randint(1, 30)


def small(random: Random) -> int:
    """An integer from 0 to 9."""
    return random.randint(0, 9)


def numbers(random: Random, least: int = 3, most: int = 5) -> list[int]:
    """A list of `least` to `most` integers."""
    return [number(random) for _ in range(random.randint(least, most))]


def word(random: Random) -> str:
    """A lower-case word."""
    return random.choice(_WORDS)


def words(random: Random, least: int = 2, most: int = 4) -> list[str]:
    """A list of `least` to `most` different words."""
    return random.sample(_WORDS, random.randint(least, most))


def sentence(random: Random, least: int = 2, most: int = 4) -> str:
    """`least` to `most` different words with single spaces between them."""
    return " ".join(words(random, least, most))


def prices(random: Random) -> dict[str, int]:
    """A mapping of two to four words to integers, all different."""
    keys = words(random)
    return dict(zip(keys, random.sample(range(1, 30), len(keys)), strict=True))


def one_number(random: Random) -> Arguments:
    """(n,)"""
    return (number(random),)


def one_positive(random: Random) -> Arguments:
    """(n,), n > 0"""
    return (positive(random),)


def two_numbers(random: Random) -> Arguments:
    """(a, b)"""
    return (number(random), number(random))


def two_positive(random: Random) -> Arguments:
    """(a, b), both > 0"""
    return (positive(random), positive(random))


def number_list(random: Random) -> Arguments:
    """([...],), not empty"""
    return (numbers(random),)


def one_word(random: Random) -> Arguments:
    """(word,)"""
    return (word(random),)


def one_sentence(random: Random) -> Arguments:
    """("two to four words",)"""
    return (sentence(random),)


def word_list(random: Random) -> Arguments:
    """(["two", "to", "four", "words"],)"""
    return (words(random),)
