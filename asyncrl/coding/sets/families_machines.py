"""Families of small classes that keep a state, or that add up values."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families_classes import small_class
from asyncrl.environments.templates import Template


def _number(random: Random) -> int:
    return random.randint(1, 9)


def _machines() -> Iterator[Template]:
    yield small_class(
        "Turnstile",
        "it is locked at first; coin unlocks it, push goes through and locks it again, or is blocked; both return "
        "the state"
        ' after it, "locked" or "open"; passed tells how many went through.',
        """
def __init__(self):
    self.state = 'locked'
    self.count = 0

def coin(self):
    self.state = 'open'
    return self.state

def push(self):
    if self.state == 'open':
        self.count += 1
        self.state = 'locked'
    return self.state

def passed(self):
    return self.count
""",
        "self.count += 1\n            self.state = 'locked' => self.count += 1",
        "if self.state == 'open' => if self.state == 'locked'",
        "self.count += 1 => self.count = 1",
        operations=lambda r: r.choice(
            ([["coin"], ["push"], ["passed"]], [["push"]], [["coin"], ["coin"], ["push"]], [["passed"]])
        ),
        edges=(
            [["push"], ["coin"], ["push"], ["push"], ["coin"], ["push"], ["passed"]],
            [["coin"], ["coin"], ["push"], ["push"], ["passed"]],
        ),
    )
    yield small_class(
        "Account",
        "pay_in adds an amount; pay_out takes one away and tells whether it did: never below -5; both fees and "
        "interest are"
        " unknown; balance returns what is there.",
        """
def __init__(self):
    self.amount = 0

def pay_in(self, amount):
    self.amount += amount
    return self.amount

def pay_out(self, amount):
    if self.amount - amount < -5:
        return False
    self.amount -= amount
    return True

def balance(self):
    return self.amount
""",
        "< -5 => < 0",
        "< -5 => <= -5",
        "self.amount -= amount => self.amount = -amount",
        "self.amount += amount => self.amount = amount",
        operations=lambda r: [
            r.choice((["pay_in", _number(r)], ["pay_out", _number(r)], ["pay_out", _number(r)])),
            ["balance"],
        ],
        edges=(
            [["pay_in", 3], ["pay_in", 1], ["pay_out", 9], ["balance"], ["pay_out", 1]],
            [["pay_out", 6], ["pay_out", 5], ["balance"]],
        ),
    )
    yield small_class(
        "Editor",
        "type adds text at the end; erase removes the last letters; undo takes the last of either back; text returns "
        "what is"
        " there.",
        """
def __init__(self):
    self.now = ''
    self.before = []

def type(self, text):
    self.before.append(self.now)
    self.now += text

def erase(self, count):
    self.before.append(self.now)
    self.now = self.now[:max(0, len(self.now) - count)]

def undo(self):
    if self.before:
        self.now = self.before.pop()

def text(self):
    return self.now
""",
        "self.before.pop() => self.before[-1]",
        "self.before.pop() => self.before.pop(0)",
        "len(self.now) - count => count",
        "self.now += text => self.now = text",
        operations=lambda r: [
            r.choice((["type", r.choice(("ab", "c", "def"))], ["erase", r.randint(1, 3)], ["undo"])),
            ["text"],
        ],
        edges=(
            [
                ["type", "ab"],
                ["type", "cde"],
                ["erase", 1],
                ["text"],
                ["undo"],
                ["undo"],
                ["text"],
                ["undo"],
                ["undo"],
                ["text"],
            ],
        ),
    )
    yield small_class(
        "Limiter",
        "allow tells whether a call at a time (in seconds, never earlier than the last) may be made: at most two "
        "allowed calls in"
        " any 10 seconds, of which the first second counts and the eleventh does not; left tells how many more a "
        "time allows.",
        """
def __init__(self):
    self.times = []

def recent(self, now):
    return [time for time in self.times if now - time < 10]

def allow(self, now):
    if len(self.recent(now)) >= 2:
        return False
    self.times.append(now)
    return True

def left(self, now):
    return 2 - len(self.recent(now))
""",
        "now - time < 10 => now - time <= 10",
        ">= 2 => > 2",
        "self.times.append(now) => self.times = [now]",
        "2 - len => 1 - len",
        whole=lambda r: ([[r.choice(("allow", "allow", "left")), time] for time in sorted(r.choices(range(25), k=6))],),
        edges=(
            [["allow", 0], ["allow", 5], ["allow", 9], ["allow", 10], ["left", 14], ["left", 15]],
            [["left", 1], ["allow", 1], ["allow", 1], ["allow", 2], ["left", 11], ["allow", 30], ["left", 30]],
            [["allow", 3], ["left", 3], ["allow", 4], ["left", 12], ["left", 13]],
            [["allow", 7], ["allow", 16], ["allow", 17], ["left", 17]],
        ),
    )
    yield small_class(
        "Robot",
        'it begins at [0, 0] and looks north, which is where the second number grows; turn takes "left" or "right"; '
        "go moves it by"
        " steps; both return where it is.",
        """
def __init__(self):
    self.x, self.y = 0, 0
    self.dx, self.dy = 0, 1

def turn(self, side):
    if side == 'left':
        self.dx, self.dy = -self.dy, self.dx
    else:
        self.dx, self.dy = self.dy, -self.dx
    return [self.x, self.y]

def go(self, steps):
    self.x += steps * self.dx
    self.y += steps * self.dy
    return [self.x, self.y]
""",
        "= -self.dy, self.dx => = self.dy, self.dx",
        "self.dx, self.dy = 0, 1 => self.dx, self.dy = 1, 0",
        "self.y += steps => self.y -= steps",
        "self.x += steps * self.dx => self.x = steps * self.dx",
        operations=lambda r: [["go", _number(r)], ["turn", r.choice(("left", "right"))], ["go", _number(r)]],
        edges=(
            [["go", 2], ["turn", "left"], ["go", 3], ["go", 1], ["turn", "left"], ["go", 5]],
            [["turn", "right"], ["go", 4], ["turn", "right"], ["go", 1]],
        ),
    )
    yield small_class(
        "Thermostat",
        "it aims at 20 degrees; measure tells whether it heats after a temperature: it begins to below 19, ends "
        "above 21, and"
        " stays as it is between; aim sets another temperature and returns the old one.",
        """
def __init__(self):
    self.wanted = 20
    self.heats = False

def measure(self, degrees):
    if degrees < self.wanted - 1:
        self.heats = True
    elif degrees > self.wanted + 1:
        self.heats = False
    return self.heats

def aim(self, degrees):
    old, self.wanted = self.wanted, degrees
    return old
""",
        "self.wanted - 1 => self.wanted",
        "self.wanted + 1 => self.wanted",
        "return old => return degrees",
        "elif degrees > self.wanted + 1 => else",
        operations=lambda r: [
            ["measure", r.randint(16, 24)],
            ["measure", r.randint(18, 22)],
            *([["aim", r.randint(15, 25)]] if r.random() < 0.3 else []),
        ],
        edges=(
            [["measure", 19], ["measure", 18], ["measure", 20], ["measure", 21], ["measure", 22]],
            [["aim", 10], ["measure", 9], ["measure", 8], ["measure", 11], ["aim", 20]],
        ),
    )


def _values() -> Iterator[Template]:
    yield small_class(
        "Polynomial",
        "it is 0 at first; add adds a number times x to a power; at returns its value for x; degree returns the "
        "largest power"
        " whose factor is not 0, or -1; slope returns the derivative's value for x.",
        """
def __init__(self):
    self.factors = {}

def add(self, factor, power):
    self.factors[power] = self.factors.get(power, 0) + factor

def at(self, x):
    return sum(factor * x ** power for power, factor in self.factors.items())

def degree(self):
    return max((power for power, factor in self.factors.items() if factor), default=-1)

def slope(self, x):
    return sum(factor * power * x ** (power - 1) for power, factor in self.factors.items() if power)
""",
        "self.factors.get(power, 0) + factor => factor",
        "factor * x ** power => factor * x * power",
        " if factor), => ),",
        "factor * power * x ** (power - 1) => factor * x ** (power - 1)",
        operations=lambda r: [
            ["add", r.randint(-3, 4), r.randint(0, 3)],
            r.choice((["at", r.randint(-2, 3)], ["degree"], ["slope", r.randint(-2, 3)])),
        ],
        edges=(
            [["add", 2, 3], ["add", 1, 3], ["at", 2], ["slope", 2], ["add", -3, 3], ["degree"]],
            [["degree"], ["add", 4, 0], ["at", 5], ["slope", 5]],
        ),
    )
    yield small_class(
        "Inventory",
        "receive adds pieces of a kind and returns how many there are; send takes pieces away and returns how many "
        "it could, never"
        " more than there are; low returns the sorted kinds of which there are fewer than three.",
        """
def __init__(self):
    self.stock = {}

def receive(self, kind, count):
    self.stock[kind] = self.stock.get(kind, 0) + count
    return self.stock[kind]

def send(self, kind, count):
    sent = min(count, self.stock.get(kind, 0))
    if kind in self.stock:
        self.stock[kind] -= sent
    return sent

def low(self):
    return sorted(kind for kind, count in self.stock.items() if count < 3)
""",
        "self.stock.get(kind, 0) + count => count",
        "min(count, self.stock.get(kind, 0)) => count",
        "count < 3 => count <= 3",
        "self.stock[kind] -= sent => self.stock[kind] -= count",
        operations=lambda r: [
            ["receive", r.choice("ab"), r.randint(1, 4)],
            ["send", r.choice("abc"), r.randint(1, 5)],
            *([["low"]] if r.random() < 0.6 else []),
        ],
        edges=(
            [
                ["receive", "a", 5],
                ["receive", "a", 1],
                ["send", "a", 9],
                ["low"],
                ["receive", "b", 3],
                ["low"],
                ["receive", "a", 2],
            ],
            [["send", "x", 1], ["receive", "x", 4], ["send", "x", 1], ["low"]],
        ),
    )
    yield small_class(
        "Poll",
        "vote counts a vote of a person for a choice; a person's later vote replaces the earlier one; votes tells "
        "how many a choice has;"
        " winner returns the choice with the most, of equals the alphabetically first, or None.",
        """
def __init__(self):
    self.choices = {}

def vote(self, person, choice):
    self.choices[person] = choice
    return len(self.choices)

def votes(self, choice):
    return sum(one == choice for one in self.choices.values())

def winner(self):
    return min(set(self.choices.values()), key=lambda choice: (-self.votes(choice), choice), default=None)
""",
        "-self.votes(choice), choice => self.votes(choice), choice",
        "self.choices[person] = choice => self.choices.setdefault(person, choice)",
        "one == choice for => one != choice for",
        operations=lambda r: [
            ["vote", r.choice("pqr"), r.choice("xyz")],
            r.choice((["votes", r.choice("xyz")], ["winner"], ["vote", "q", r.choice("xyz")])),
        ],
        edges=(
            [
                ["vote", "p", "y"],
                ["vote", "q", "y"],
                ["vote", "r", "x"],
                ["winner"],
                ["vote", "q", "x"],
                ["winner"],
                ["votes", "y"],
            ],
            [["winner"], ["votes", "x"]],
        ),
    )


FAMILIES = {
    "machines": tuple(_machines()),
    "small classes": tuple(_values()),
}
