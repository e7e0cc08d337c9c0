"""The commands of a shell text, as far as they can be told without running it."""

from __future__ import annotations

import contextlib
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_HERE = re.compile(
    r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1([^\n]*)\n(.*?)(?:^[ \t]*\2[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
_SUBSTITUTED = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_ASSIGNED = re.compile(r"\w+\+?=.*", re.DOTALL)
_BEFORE_PROGRAMS = frozenset(
    [
        "sudo",
        "env",
        "time",
        "nohup",
        "exec",
        "command",
        "xargs",
        "nice",
        "stdbuf",
        "then",
        "do",
        "else",
        "!",
        "if",
        "while",
        "until",
    ]
)
"""Words that may stand before the program that is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One program that is run. Quotes are gone, and so are directories of the program's path.

    Example:
        >>> [command.words for command in commands("cd a && /bin/ls 'b c' > d")]
        [('cd', 'a'), ('ls', 'b c')]
    """

    words: Sequence[str] = ()
    writes_to: Sequence[str] = ()
    """Files that its output is sent to."""
    bodies: Sequence[str] = field(default=())
    """Texts that stand in the shell text as its input."""

    @property
    def program(self) -> str:
        """The first word; empty where only files are written."""
        return self.words[0] if self.words else ""

    @property
    def arguments(self) -> Sequence[str]:
        """The words after the first."""
        return self.words[1:]


def commands(text: str) -> Iterator[Command]:
    """Yield the commands in order, those of substitutions after the one that they stand in.

    What cannot be read, such as quotes that are not closed, is left out, as a shell would refuse it.
    """
    bodies: list[str] = []

    def keep(match: re.Match[str]) -> str:
        bodies.append(match.group(4))
        return f" <<{len(bodies) - 1} {match.group(3)}\n"

    lexer = shlex.shlex(_HERE.sub(keep, text), posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    tokens: list[str] = []
    with contextlib.suppress(ValueError):
        tokens += lexer
    for command in _grouped(tokens, bodies):
        yield command
        for word in command.words:
            for match in _SUBSTITUTED.finditer(word):
                yield from commands(match.group(1) or match.group(2) or "")


def _grouped(tokens: Sequence[str], bodies: Sequence[str]) -> Iterator[Command]:
    words: list[str] = []
    writes_to: list[str] = []
    given: list[str] = []
    redirected = ""
    for token in [*tokens, ";"]:
        marks = set(token)
        if marks and marks <= set("<>&") and marks & set("<>"):
            redirected = token
        elif marks and marks <= set(";&|()\n"):
            if words or writes_to:
                yield Command(words=tuple(_from_program(words)), writes_to=tuple(writes_to), bodies=tuple(given))
            words, writes_to, given, redirected = [], [], [], ""
        elif redirected.startswith("<<"):
            given += [bodies[int(token)]] if token.isdigit() and int(token) < len(bodies) else [token]
            redirected = ""
        elif redirected:
            writes_to += [token] if ">" in redirected else []
            redirected = ""
        else:
            words.append(token)


def _from_program(words: Sequence[str]) -> list[str]:
    """Return the words from the program on, without assignments and without what only runs it."""
    left = list(words)
    while left:
        if _ASSIGNED.fullmatch(left[0]) or (left[0] in _BEFORE_PROGRAMS and len(left) > 1):
            del left[0]
        elif left[0] == "timeout" and len(left) > 2:
            del left[:2]
        elif left[0].startswith("-") and len(left) > 1:  # of what stood before: `sudo -n`, `xargs -0`
            del left[0]
        else:
            break
    return [posixpath.basename(left[0]), *left[1:]] if left else []
