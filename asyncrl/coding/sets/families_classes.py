"""Families of small classes. A driver beside each calls its methods by name and returns their answers, as a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Draw, Template

Operation = list[Any]

_DRIVER = "thing = {name}({made})\nreturn [getattr(thing, name)(*arguments) for name, *arguments in operations]"


def small_class(
    name: str,
    says: str,
    body: str,
    *bugs: str,
    operations: Callable[[Random], Any] | None = None,
    whole: Draw | None = None,
    edges: Sequence[Sequence[Operation]],
    made: str = "",
) -> Template:
    """Return a template of a class.

    Args: `operations` draws a few calls, or `whole` all of them; `made` are the constructor's arguments.
    """

    def draw(random: Random) -> Arguments:
        if whole is not None:
            return whole(random)
        assert operations is not None
        return ([one for _ in range(random.randint(3, 5)) for one in operations(random)],)

    told = f"The class {name}: {says} use_{name.lower()} calls its methods, each a list of a name and arguments, and"
    return function(
        f"use_{name.lower()}",
        "operations",
        f"{told} returns the list of their answers.",
        _DRIVER.format(name=name, made=made),
        *bugs,
        draw=draw,
        edges=tuple((list(edge),) for edge in edges),
        above=f"class {name}:\n"
        + "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").split("\n"))
        + "\n\n",
    )


def _number(random: Random) -> int:
    return random.randint(1, 9)


def _containers() -> Iterator[Template]:
    yield small_class(
        "Stack",
        "push adds on top; pop takes the top away and peek does not, both return it, or None if it is empty; size "
        "tells how"
        " many there are.",
        """
def __init__(self):
    self.items = []

def push(self, item):
    self.items.append(item)

def pop(self):
    return self.items.pop() if self.items else None

def peek(self):
    return self.items[-1] if self.items else None

def size(self):
    return len(self.items)
""",
        "self.items.pop() if => self.items.pop(0) if",
        "self.items[-1] => self.items[0]",
        "append(item) => insert(0, item)",
        "len(self.items) => len(self.items) - 1",
        operations=lambda r: r.choice(
            ([["push", _number(r)], ["push", _number(r)]], [["pop"]], [["peek"]], [["push", _number(r)], ["size"]])
        ),
        edges=(
            [["push", 1], ["push", 2], ["pop"], ["peek"], ["size"]],
            [["pop"], ["push", 3], ["push", 4], ["peek"], ["pop"], ["pop"], ["size"]],
        ),
    )
    yield small_class(
        "Queue",
        "put adds at the end; take removes and returns the first, or None if it is empty; waiting returns the list "
        "of all.",
        """
def __init__(self):
    self.items = []

def put(self, item):
    self.items.append(item)

def take(self):
    return self.items.pop(0) if self.items else None

def waiting(self):
    return list(self.items)
""",
        "self.items.pop(0) => self.items.pop()",
        "append(item) => insert(0, item)",
        "return list(self.items) => return self.items[1:]",
        operations=lambda r: r.choice(
            ([["put", _number(r)], ["put", _number(r)]], [["take"], ["waiting"]], [["take"]])
        ),
        edges=([["put", 1], ["put", 2], ["take"], ["waiting"], ["take"]], [["take"], ["put", 5], ["waiting"]]),
    )
    yield small_class(
        "Ring",
        "it holds three items at most: add puts one in, in place of the oldest if it is full; items returns them, "
        "the oldest"
        " first; newest returns the last one, or None.",
        """
def __init__(self, size):
    self.size = size
    self.held = []

def add(self, item):
    self.held.append(item)
    if len(self.held) > self.size:
        self.held.pop(0)

def items(self):
    return list(self.held)

def newest(self):
    return self.held[-1] if self.held else None
""",
        "> self.size => >= self.size",
        "self.held.pop(0) => self.held.pop()",
        "self.held[-1] => self.held[0]",
        made="3",
        operations=lambda r: [["add", _number(r)], *r.choice(([["add", _number(r)]], [["newest"]], [["items"]]))],
        edges=(
            [["add", 1], ["add", 2], ["add", 3], ["add", 4], ["items"], ["newest"]],
            [["newest"], ["add", 7], ["items"]],
        ),
    )
    yield small_class(
        "Cache",
        "it keeps two values: put sets a key's; get returns it, or None; if there are more than two, the key that "
        "was longest not"
        " used by either is forgotten; keys returns those left, sorted.",
        """
def __init__(self):
    self.values = {}

def put(self, key, value):
    self.values.pop(key, None)
    self.values[key] = value
    if len(self.values) > 2:
        del self.values[next(iter(self.values))]

def get(self, key):
    if key not in self.values:
        return None
    self.values[key] = self.values.pop(key)
    return self.values[key]

def keys(self):
    return sorted(self.values)
""",
        "self.values[key] = self.values.pop(key) => pass",
        "> 2 => > 3",
        "self.values.pop(key, None) => pass",
        "next(iter(self.values)) => list(self.values)[-1]",
        operations=lambda r: [
            ["put", r.choice("abc"), _number(r)],
            ["get", r.choice("abc")],
            *([["keys"]] if r.random() < 0.4 else []),
        ],
        edges=(
            [["put", "a", 1], ["put", "b", 2], ["get", "a"], ["put", "c", 3], ["keys"], ["get", "b"]],
            [["put", "a", 1], ["put", "b", 2], ["put", "a", 3], ["put", "c", 4], ["get", "a"], ["get", "b"], ["keys"]],
        ),
    )
    yield small_class(
        "Bag",
        "add puts a word in and returns how often it is there now; remove takes one away and tells whether there was "
        "one; most"
        " returns the most frequent word, of equals the alphabetically first, or None.",
        """
def __init__(self):
    self.counts = {}

def add(self, word):
    self.counts[word] = self.counts.get(word, 0) + 1
    return self.counts[word]

def remove(self, word):
    if word not in self.counts:
        return False
    self.counts[word] -= 1
    if self.counts[word] == 0:
        del self.counts[word]
    return True

def most(self):
    return min(self.counts, key=lambda word: (-self.counts[word], word), default=None)
""",
        "self.counts.get(word, 0) + 1 => 1",
        "-self.counts[word], word => self.counts[word], word",
        "self.counts[word] == 0 => self.counts[word] < 0",
        operations=lambda r: [
            ["add", r.choice("abc")],
            r.choice((["add", "c"], ["remove", r.choice("abc")], ["most"])),
        ],
        edges=(
            [
                ["add", "b"],
                ["add", "b"],
                ["add", "a"],
                ["most"],
                ["remove", "a"],
                ["remove", "a"],
                ["remove", "b"],
                ["most"],
            ],
            [["most"], ["remove", "x"]],
        ),
    )
    yield small_class(
        "Priorities",
        "add puts a task in with a priority; next removes and returns the task with the largest priority, of equals "
        "the one"
        " added first, or None; count tells how many have at least a priority.",
        """
def __init__(self):
    self.tasks = []

def add(self, task, priority):
    self.tasks.append((priority, task))

def next(self):
    if not self.tasks:
        return None
    best = max(self.tasks, key=lambda entry: entry[0])
    self.tasks.remove(best)
    return best[1]

def count(self, priority):
    return sum(p >= priority for p, _ in self.tasks)
""",
        "entry[0]) => entry[1])",
        "p >= priority => p > priority",
        "max(self.tasks => min(self.tasks",
        "self.tasks.remove(best) => self.tasks.pop()",
        operations=lambda r: [
            ["add", r.choice("abcdef"), r.randint(1, 4)],
            ["add", r.choice("abcdef"), r.randint(1, 4)],
            r.choice((["next"], ["count", r.randint(1, 4)])),
        ],
        edges=(
            [["add", "z", 1], ["add", "a", 3], ["add", "m", 3], ["count", 3], ["next"], ["next"], ["next"], ["next"]],
            [["add", "b", 2], ["add", "c", 1], ["next"], ["next"]],
        ),
    )


FAMILIES = {
    "containers": tuple(_containers()),
}
