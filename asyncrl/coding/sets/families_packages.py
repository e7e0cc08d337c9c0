"""Small packages of several modules, in one of which the mistake lies; a function of the last one shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from asyncrl.environments.templates import Arguments, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package as files, and as one template: all of its modules after each other, without what they import."""

    files: Mapping[str, str]
    """In the order of their imports; no two define the same name."""
    module: str
    """Of the function that is called."""
    template: Template

    def buggy(self, bug: int) -> dict[str, str]:
        """Return the files with bug number `bug` in one of them, the first that holds its text."""
        old, new = self.template.bugs[bug]
        path = next(path for path, text in self.files.items() if old in text)
        return {**self.files, path: self.files[path].replace(old, new, 1)}


def _package(name: str, files: Mapping[str, str], template: Template) -> Package:
    paths = {f"{name}/{module}.py": text.lstrip("\n") for module, text in files.items()}
    return Package(files={f"{name}/__init__.py": "", **paths}, module=f"{name}.{list(files)[-1]}", template=template)


def _whole(files: Mapping[str, str]) -> str:
    lines = [line for text in files.values() for line in text.splitlines() if not line.startswith("from ")]
    return "\n".join(lines) + "\n"


_SHOP = {
    "catalogue": '''
"""What there is to buy."""

PRICES = {"book": 12, "lamp": 30, "pen": 2}
HEAVY = {"lamp"}


def price_of(kind):
    return PRICES[kind]


def is_heavy(kind):
    return kind in HEAVY
''',
    "discounts": '''
"""What is taken off."""

from shop.catalogue import price_of


def bulk_discount(kind, count):
    """Return what is taken off for many of a kind: the price of one for every five."""
    return count // 5 * price_of(kind)


def coupon_discount(total, coupon):
    """Return what a coupon takes off: ten per cent, rounded down, from 50 on."""
    return total // 10 if coupon and total >= 50 else 0
''',
    "shipping": '''
"""What sending costs."""

from shop.catalogue import is_heavy


def shipping(order, total):
    """Return 0 from 100 on, else 4, and 6 for each heavy piece."""
    if total >= 100:
        return 0
    return 4 + sum(6 * count for kind, count in order.items() if is_heavy(kind))
''',
    "checkout": '''
"""What is to be paid."""

from shop.catalogue import price_of
from shop.discounts import bulk_discount, coupon_discount
from shop.shipping import shipping


def to_pay(order, coupon):
    total = sum(count * price_of(kind) - bulk_discount(kind, count) for kind, count in order.items())
    total -= coupon_discount(total, coupon)
    return total + shipping(order, total)
''',
}


def _order(random: Random) -> Arguments:
    kinds = random.sample(("book", "lamp", "pen"), random.randint(1, 3))
    return ({kind: random.choice((1, 2, 3, 5, 6, 11)) for kind in kinds}, random.random() < 0.6)


_LIBRARY = {
    "books": '''
"""Books by their number."""


def kind_of(number):
    """Return "film" for numbers that end with 9, else "book"."""
    return "film" if number % 10 == 9 else "book"


def days_allowed(number):
    return 7 if kind_of(number) == "film" else 28
''',
    "members": '''
"""Who may borrow how much."""


def most_loans(age):
    """Return how many loans a person may have at a time: 3 below 12 years, else 5."""
    return 3 if age < 12 else 5


def fee_factor(age):
    return 0 if age < 12 else 1
''',
    "fees": '''
"""What late returns cost."""

from library.books import days_allowed, kind_of
from library.members import fee_factor


def fee(number, days, age):
    """Return 2 a day for films and 1 for books that are late, at most 20."""
    late = max(0, days - days_allowed(number))
    rate = 2 if kind_of(number) == "film" else 1
    return min(20, late * rate) * fee_factor(age)
''',
    "desk": '''
"""What a visit comes to."""

from library.fees import fee
from library.members import most_loans


def visit(age, returned, wanted):
    """Return the fees of what is returned, and how many of the wanted ones may be taken."""
    owed = sum(fee(number, days, age) for number, days in returned)
    return [owed, min(len(wanted), most_loans(age)) if owed <= 10 else 0]
''',
}


def _visit(random: Random) -> Arguments:
    returned = [[random.choice((19, 29, 10, 55)), random.randint(1, 45)] for _ in range(random.randint(1, 2))]
    return (random.choice((8, 11, 12, 30)), returned, list(range(random.randint(1, 7))))


_REPORT = {
    "reading": '''
"""Lines into fields."""


def fields_of(line):
    """Return name and number of a line such as "ann: 12"; comments and empty lines are None."""
    line = line.partition("#")[0].strip()
    if not line:
        return None
    name, _, number = line.partition(":")
    return name.strip().lower(), int(number)
''',
    "summing": '''
"""Numbers by name."""

from report.reading import fields_of


def totals(lines):
    found = {}
    for line in lines:
        fields = fields_of(line)
        if fields is not None:
            name, number = fields
            found[name] = found.get(name, 0) + number
    return found
''',
    "printing": '''
"""The report."""

from report.summing import totals


def report(lines, limit):
    """Return a line for each name with at least `limit`, the largest first, then by name; then the sum of all."""
    found = totals(lines)
    kept = sorted((name for name in found if found[name] >= limit), key=lambda name: (-found[name], name))
    return [f"{name} {found[name]}" for name in kept] + [f"total {sum(found.values())}"]
''',
}


def _lines(random: Random) -> Arguments:
    def line() -> str:
        name = random.choice(("ann", "Ann", "bob", "cy"))
        return random.choice(
            (f"{name}: {random.randint(1, 9)}", f" {name} : {random.randint(1, 9)} # {name}", "# none", "")
        )

    return ([line() for _ in range(random.randint(4, 7))], random.randint(3, 9))


_ROUTES = {
    "maps": '''
"""Roads between towns: [from, to, length], both ways."""


def neighbours(roads, town):
    """Return [town, length] of every road from a town, sorted."""
    found = [[b, length] for a, b, length in roads if a == town]
    found += [[a, length] for a, b, length in roads if b == town]
    return sorted(found)
''',
    "search": '''
"""Ways through a map."""

from routes.maps import neighbours


def lengths_from(roads, start):
    """Return the length of the shortest way to each town that can be reached."""
    found = {start: 0}
    left = [start]
    while left:
        town = min(left, key=lambda one: (found[one], one))
        left.remove(town)
        for other, length in neighbours(roads, town):
            if found.get(other, 10**9) > found[town] + length:
                found[other] = found[town] + length
                left.append(other)
    return found
''',
    "planner": '''
"""What a traveller asks."""

from routes.search import lengths_from


def within(roads, start, limit):
    """Return the other towns at most `limit` away, the nearest first, then by name."""
    lengths = lengths_from(roads, start)
    near = [town for town in lengths if town != start and lengths[town] <= limit]
    return sorted(near, key=lambda town: (lengths[town], town))
''',
}


def _roads(random: Random) -> Arguments:
    towns = "abcde"
    roads = [[*random.sample(towns, 2), random.randint(1, 9)] for _ in range(random.randint(4, 7))]
    return (roads, random.choice(towns), random.randint(4, 14))


PACKAGES: Mapping[str, Package] = {
    "shop": _package(
        "shop",
        _SHOP,
        Template(
            name="to_pay",
            code=_whole(_SHOP),
            draw=_order,
            says="It says what an order costs: of every five pieces of a kind one is free, a coupon takes off ten "
            "per cent (rounded"
            " down) from 50 on, and sending costs 4, and 6 for each heavy piece, but nothing from 100 on.",
            bugs=(
                ("count // 5", "count // 6"),
                (">= 50 else 0", "> 60 else 0"),
                ("total >= 100", "total > 110"),
                ('HEAVY = {"lamp"}', 'HEAVY = {"book"}'),
                ("total -= coupon_discount(total, coupon)", "total = coupon_discount(total, coupon)"),
                ("4 + sum(6 * count", "4 + sum(6"),
            ),
            edges=(
                ({"book": 5}, False),
                ({"lamp": 2}, True),
                ({"book": 9}, True),
                ({"lamp": 5, "pen": 1}, True),
                ({"lamp": 3, "book": 1}, False),
                ({"pen": 25}, True),
            ),
        ),
    ),
    "library": _package(
        "library",
        _LIBRARY,
        Template(
            name="visit",
            code=_whole(_LIBRARY),
            draw=_visit,
            says="Returned are pairs of a number and the days it was out; films (numbers that end with 9) may be out "
            "7 days and cost 2 a day"
            " beyond, books 28 days and 1, at most 20 each, nothing for children below 12. Who owes more than 10 may "
            "take nothing, a"
            " child else 3, others 5.",
            bugs=(
                ("number % 10 == 9", "number // 10 == 9"),
                ("7 if kind_of", "14 if kind_of"),
                ("3 if age < 12 else 5", "3 if age <= 12 else 5"),
                ("min(20, late * rate)", "late * rate"),
                ("max(0, days - days_allowed(number))", "days - days_allowed(number)"),
                ("owed <= 10", "owed < 1"),
            ),
            edges=(
                (30, [[19, 9]], [1, 2]),
                (12, [[10, 3]], [1, 2, 3, 4]),
                (30, [[10, 70], [29, 1]], [1]),
                (8, [[19, 40]], [1, 2, 3, 4]),
                (40, [[55, 38]], [7]),
                (50, [[19, 12]], [1]),
            ),
        ),
    ),
    "report": _package(
        "report",
        _REPORT,
        Template(
            name="report",
            code=_whole(_REPORT),
            draw=_lines,
            says='Lines such as "ann: 12" are summed up by name, upper and lower case alike; what follows "#" counts '
            "nothing. Names with at"
            " least the limit are listed, the largest number first and then by name, and then the sum of all.",
            bugs=(
                ("found.get(name, 0) + number", "number"),
                ("name.strip().lower()", "name.strip()"),
                (">= limit", "> limit"),
                ("-found[name], name", "found[name], name"),
                ("sum(found.values())", "len(found)"),
                ('partition("#")[0]', 'partition("#")[2]'),
            ),
            edges=(
                (["Ann: 3", "ann: 4", "bob: 7 # bob: 9", "", "cy: 1"], 7),
                (["cy: 5", "ann: 5", "bob: 9"], 5),
                (["# none"], 1),
            ),
        ),
    ),
    "routes": _package(
        "routes",
        _ROUTES,
        Template(
            name="within",
            code=_whole(_ROUTES),
            draw=_roads,
            says="Roads are [town, town, length] and go both ways. Asked is for the other towns whose shortest way "
            "from `start` has at most the"
            " length `limit`, the nearest first, then by name.",
            bugs=(
                ("found += [[a, length]", "found += [[b, length]"),
                ("> found[town] + length", "> 10**8"),
                ("lengths[town] <= limit", "lengths[town] < limit"),
                ("town != start and ", ""),
                ("(lengths[town], town)", "town"),
                ("found[other] = found[town] + length", "found[other] = length"),
            ),
            edges=(
                ([["a", "b", 9], ["a", "c", 2], ["c", "b", 3], ["d", "b", 1]], "a", 6),
                ([["b", "a", 4], ["c", "a", 1]], "a", 4),
                ([["a", "b", 3], ["b", "c", 3], ["c", "d", 3]], "d", 9),
            ),
        ),
    ),
}
"""Packages by their names, which are also those of their families."""
