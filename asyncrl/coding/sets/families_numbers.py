"""Families over numbers: digits, recurrences, divisors, brackets, bases, bits, intervals, clocks."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Draw, Template


def _number(random: Random) -> Arguments:
    return (random.randint(10, 99999),)


def _small(random: Random) -> Arguments:
    return (random.randint(0, 24),)


def _interval(random: Random) -> list[int]:
    start = random.randint(0, 15)
    return [start, start + random.randint(1, 9)]


def _amounts(low: int, high: int) -> Draw:
    return lambda r: (r.choice((r.randint(0, low), r.randint(low, high), r.randint(high, 3 * high))),)


def _scores(top: int) -> Draw:
    return lambda r: (r.randint(0, top + top // 3),)


def _digit_lists(base: int) -> Draw:
    return lambda r: ([r.randint(0, base - 1) for _ in range(r.randint(2, 5))],)


def _digits() -> Iterator[Template]:
    kinds = (
        ("sum", "the sum of the digits", "sum(digits)", "sum(digits) => max(digits)"),
        ("product", "the product of the digits", "math.prod(digits)", "math.prod(digits) => sum(digits)"),
        ("largest", "the largest digit", "max(digits)", "max(digits) => digits[0]"),
        ("evens", "how many digits are even", "sum(d % 2 == 0 for d in digits)", "% 2 == 0 => % 2 == 1"),
        (
            "spread",
            "the largest digit minus the smallest",
            "max(digits) - min(digits)",
            "- min(digits) => - digits[-1]",
        ),
        ("distinct", "how many different digits occur", "len(set(digits))", "len(set(digits)) => len(digits)"),
        ("squares", "the sum of the squares of the digits", "sum(d * d for d in digits)", "d * d => d + d"),
        (
            "alternating",
            "the first digit minus the second plus the third, and so on",
            "sum(d if i % 2 == 0 else -d for i, d in enumerate(digits))",
            "i % 2 == 0 => i % 2 == 1",
        ),
    )
    for name, says, body, bug in kinds:
        for base in (10, 8):
            where = "" if base == 10 else f" of `n` in base {base}"
            yield function(
                f"digits_{name}" + ("" if base == 10 else f"_base_{base}"),
                "n",
                f"Return {says}{where or ' of the positive number `n`'}.",
                f"digits = []\nwhile n > 0:\n    digits.insert(0, n % {base})\n    n //= {base}\nreturn {body}",
                bug,
                f"n % {base} => n % {base - 1}",
                draw=_number,
                above="import math\n\n\n" if name == "product" else "",
            )


def _recurrences() -> Iterator[Template]:
    kinds = (
        ("lucas", (2, 1), "a + b", "each number is the sum of the two before it"),
        ("pell", (0, 1), "a + 2 * b", "each number is twice the one before it plus the one before that"),
        ("jacobsthal", (0, 1), "2 * a + b", "each number is the one before it plus twice the one before that"),
        (
            "powers_minus",
            (1, 3),
            "3 * b - 2 * a",
            "each number is three times the last minus twice the one before that",
        ),
        ("alternating_sum", (5, 2), "a - b", "each number is the one two places before minus the last"),
        ("products", (1, 2), "a * b % 1000", "each number is the product of the two before it, modulo 1000"),
    )
    for name, (first, second), step, says in kinds:
        yield function(
            f"{name}_number",
            "n",
            f"Return number `n` (from 0 on) of the sequence that begins {first}, {second} and in which {says}.",
            f"a, b = {first}, {second}\nfor _ in range(n):\n    a, b = b, {step}\nreturn a",
            "range(n) => range(n - 1)",
            f"{step} => {step} + 1",
            "return a => return b",
            draw=_small,
            edges=((0,), (1,), (5,)),
        )
        yield function(
            f"{name}_below",
            "limit",
            f"Return the numbers of the sequence {first}, {second}, ... before the first that is not below `limit`; "
            f"at most"
            f" 20 of them. In it {says}.",
            f"a, b = {first}, {second}\nfound = []\nwhile a < limit and len(found) < 20:\n    found.append(a)\n"
            f"    a, b = b, {step}\nreturn found",
            "a < limit and => a <= limit + 2 and",
            "found.append(a) => found.append(b)",
            "len(found) < 20 => len(found) < 2",
            draw=lambda r: (r.randint(3, 60),),
            edges=((3,), (6,)),
        )


def _divisors() -> Iterator[Template]:
    kinds = (
        ("count", "how many divisors `n` has", "len(found)", "len(found) => max(found)"),
        ("sum", "the sum of the divisors of `n`", "sum(found)", "sum(found) => sum(found) - n"),
        ("list", "the divisors of `n` in ascending order", "found", "n % d == 0 => n % d != 0"),
        ("largest_proper", "the largest divisor of `n` below `n`", "found[-2]", "found[-2] => found[-1]"),
        ("odd", "the odd divisors of `n`", "[d for d in found if d % 2]", "if d % 2 => if not d % 2"),
        (
            "is_perfect",
            "whether the divisors of `n` below `n` sum to `n`",
            "sum(found[:-1]) == n",
            "found[:-1] => found",
        ),
    )
    for name, says, body, bug in kinds:
        yield function(
            f"divisors_{name}",
            "n",
            f"Return {says}.",
            f"found = [d for d in range(1, n + 1) if n % d == 0]\nreturn {body}",
            bug,
            "range(1, n + 1) => range(2, n + 1)"
            if name != "largest_proper"
            else "n % d == 0 => n % d == 1 or d >= n - 1",
            draw=lambda r: (r.randint(4, 60),),
            edges=((6,), (28,), (12,)),
        )
    yield function(
        "prime_factors",
        "n",
        "Return the prime factors of `n` in ascending order, each as often as it divides `n`.",
        "found = []\nd = 2\nwhile n > 1:\n    while n % d == 0:\n        found.append(d)\n        n //= d\n    d += 1\n"
        "return found",
        "return found => return sorted(set(found))",
        "found.append(d) => found.insert(0, d)",
        "found.append(d) => found.append(n)",
        draw=lambda r: (r.randint(4, 200),),
        edges=((12,), (49,), (2,), (8,)),
    )
    yield function(
        "next_prime",
        "n",
        "Return the smallest prime greater than `n`.",
        "n += 1\nwhile n < 2 or any(n % d == 0 for d in range(2, n)):\n    n += 1\nreturn n",
        "n += 1\n    while => while",
        "range(2, n) => range(2, 3)",
        "return n => return n - 1",
        draw=lambda r: (r.randint(1, 60),),
        edges=((7,), (13,), (1,)),
    )
    yield function(
        "greatest_common_divisor",
        "a, b",
        "Return the greatest common divisor of two positive numbers.",
        "while b:\n    a, b = b, a % b\nreturn a",
        "return a => return a + 1",
        "a, b = b, a % b => a, b = b, a // b % b",
        draw=lambda r: (r.randint(2, 9) * (k := r.randint(1, 9)), r.randint(2, 9) * k),
    )
    yield function(
        "least_common_multiple",
        "a, b",
        "Return the least common multiple of two positive numbers.",
        "x, y = a, b\nwhile y:\n    x, y = y, x % y\nreturn a * b // x",
        "a * b // x => a * b",
        "a * b // x => (a + b) // x",
        "a * b // x => a // x",
        draw=lambda r: (r.randint(2, 9) * (k := r.randint(2, 5)), r.randint(2, 9) * k),
    )


def _rates() -> Iterator[Template]:
    for name, (low, high), (first, second, third), what in (
        ("income_tax", (1000, 5000), (0, 10, 30), "income tax"),
        ("water_bill", (20, 60), (2, 3, 5), "price of water"),
        ("parcel_cost", (5, 15), (4, 2, 1), "cost of a parcel by its weight"),
        ("taxi_fare", (3, 12), (5, 3, 2), "fare of a ride by its length"),
    ):
        yield function(
            name,
            "amount",
            f"Return the {what}: {first} for each unit up to {low}, {second} for each from there up to {high}, and "
            f"{third} "
            "for each beyond.",
            f"first = min(amount, {low}) * {first}\nsecond = max(0, min(amount, {high}) - {low}) * {second}\n"
            f"third = max(0, amount - {high}) * {third}\nreturn first + second + third",
            f"max(0, amount - {high}) * {third} => max(0, amount) * {third}",
            f"min(amount, {high}) - {low} => amount - {low}",
            f"- {low}) * {second} => - {low}) * {third}",
            "+ third => - third",
            draw=_amounts(low, high),
            edges=((low,), (high,), (2 * high,)),
        )
    for name, cuts, names in (
        ("grade", (90, 75, 60), ("A", "B", "C", "F")),
        ("age_group", (65, 18, 3), ("senior", "adult", "child", "baby")),
        ("wind", (90, 50, 20), ("storm", "gale", "breeze", "calm")),
        ("loyalty", (500, 200, 50), ("gold", "silver", "bronze", "none")),
    ):
        steps = "".join(f"if value >= {cut}:\n    return {word!r}\n" for cut, word in zip(cuts, names[:3], strict=True))
        told = ", ".join(f'"{word}" from {cut} on' for cut, word in zip(cuts, names[:3], strict=True))
        yield function(
            f"{name}_of",
            "value",
            f'Return {told}, else "{names[3]}".',
            f"{steps}return {names[3]!r}",
            f">= {cuts[0]} => > {cuts[0]}",
            f">= {cuts[1]} => >= {cuts[1] + 5}",
            f">= {cuts[2]} => <= {cuts[2]}",
            f"return {names[3]!r} => return {names[2]!r}",
            draw=_scores(cuts[0]),
            edges=tuple((cut - delta,) for cut in cuts for delta in (0, 1)),
        )


def _bases() -> Iterator[Template]:
    for base in (2, 3, 7, 12):
        yield function(
            f"to_base_{base}",
            "n",
            f"Return the digits of the positive number `n` in base {base} as a list, the highest first.",
            f"digits = []\nwhile n > 0:\n    digits.append(n % {base})\n    n //= {base}\nreturn digits[::-1]",
            "digits[::-1] => digits",
            f"n % {base} => n % {base + 1}",
            "n > 0 => n > 1",
            draw=lambda r: (r.randint(5, 500),),
            edges=((base,), (base * base + 1,)),
        )
        yield function(
            f"from_base_{base}",
            "digits",
            f"Return the number whose digits in base {base} are given as a list, the highest first.",
            f"value = 0\nfor digit in digits:\n    value = value * {base} + digit\nreturn value",
            f"value * {base} + digit => value + {base} * digit",
            "in digits => in digits[::-1]",
            "value = 0 => value = 1",
            draw=_digit_lists(base),
        )
    for name, says, body, bug in (
        ("ones", "how many bits of `n` are set", "bin(n).count('1')", "count('1') => count('0')"),
        ("highest", "the value of the highest bit of `n` that is set", "1 << (n.bit_length() - 1)", "- 1) => - 0)"),
        ("lowest", "the value of the lowest bit of `n` that is set", "n & -n", "n & -n => n & 1"),
        ("without_lowest", "`n` without its lowest set bit", "n & (n - 1)", "(n - 1) => (n + 1)"),
        ("flipped", "`n` with its eight lowest bits flipped", "n ^ 255", "^ 255 => ^ 15"),
        ("parity", "1 if an odd number of bits of `n` is set, else 0", "bin(n).count('1') % 2", "% 2 => // 2"),
        ("low_nibble", "the four lowest bits of `n`", "n & 15", "& 15 => | 15"),
    ):
        yield function(
            f"bits_{name}", "n", f"Return {says}.", f"return {body}", bug, draw=lambda r: (r.randint(9, 999),)
        )


def _intervals() -> Iterator[Template]:
    def two(random: Random) -> Arguments:
        return (_interval(random), _interval(random))

    def some(random: Random) -> Arguments:
        return ([_interval(random) for _ in range(random.randint(2, 5))],)

    def point(random: Random) -> Arguments:
        return (_interval(random), random.randint(0, 25))

    yield function(
        "intervals_overlap",
        "a, b",
        "Return whether two intervals [start, end) have a common point; ends are not included.",
        "return a[0] < b[1] and b[0] < a[1]",
        "a[0] < b[1] => a[0] <= b[1]",
        "b[0] < a[1] => b[0] < a[0]",
        "a[0] < b[1] and => a[0] < b[1] or",
        draw=two,
        edges=(([1, 3], [3, 5]), ([3, 5], [1, 3]), ([1, 9], [2, 3]), ([2, 3], [1, 9])),
    )
    yield function(
        "intervals_common",
        "a, b",
        "Return the common part of two intervals as [start, end], or None if there is none.",
        "start, end = max(a[0], b[0]), min(a[1], b[1])\nreturn [start, end] if start < end else None",
        "max(a[0], b[0]) => min(a[0], b[0])",
        "min(a[1], b[1]) => max(a[1], b[1])",
        "start < end => start <= end",
        draw=two,
        edges=(([1, 3], [3, 5]), ([1, 5], [2, 9])),
    )
    yield function(
        "intervals_merged",
        "intervals",
        "Merge the intervals that overlap or touch; return the rest sorted.",
        "merged = []\nfor start, end in sorted(intervals):\n    if merged and start <= merged[-1][1]:\n"
        "        merged[-1][1] = max(merged[-1][1], end)\n    else:\n        merged.append([start, end])\nreturn "
        "merged",
        "start <= merged[-1][1] => start < merged[-1][1]",
        "max(merged[-1][1], end) => end",
        "sorted(intervals) => intervals",
        draw=some,
        edges=(([[1, 2], [2, 4]],), ([[1, 9], [2, 3]],), ([[5, 6], [1, 2]],)),
    )
    yield function(
        "intervals_covered",
        "intervals",
        "Return how many whole numbers lie in at least one of the intervals [start, end).",
        "points = set()\nfor start, end in intervals:\n    points |= set(range(start, end))\nreturn len(points)",
        "range(start, end) => range(start, end + 1)",
        "points |= => points =",
        "len(points) => sum(points)",
        draw=some,
    )
    yield function(
        "intervals_contains",
        "interval, x",
        "Return whether `x` lies in the interval; its start does, its end does not.",
        "return interval[0] <= x < interval[1]",
        "<= x => < x",
        "x < interval[1] => x <= interval[1]",
        "return  => return not ",
        draw=point,
        edges=(([2, 5], 2), ([2, 5], 5), ([2, 5], 3)),
    )
    yield function(
        "intervals_gaps",
        "intervals",
        "Return the gaps between the sorted, disjoint intervals as [start, end].",
        "ordered = sorted(intervals)\nreturn [[a[1], b[0]] for a, b in zip(ordered, ordered[1:]) if a[1] < b[0]]",
        "[a[1], b[0]] => [a[0], b[0]]",
        "zip(ordered, ordered[1:]) => zip(ordered, ordered[2:])",
        "a[1] < b[0] => a[1] > b[0]",
        draw=lambda r: (
            [[10 * k + r.randint(0, 3), 10 * k + r.randint(5, 10)] for k in r.sample(range(6), r.randint(3, 4))],
        ),
    )


def _clocks() -> Iterator[Template]:
    yield function(
        "clock_text",
        "seconds",
        'Return the time as "h:mm:ss".',
        "hours, rest = divmod(seconds, 3600)\nreturn f'{hours}:{rest // 60:02d}:{rest % 60:02d}'",
        "3600 => 360",
        "rest // 60:02d => rest // 60",
        "rest % 60:02d => rest % 100:02d",
        draw=lambda r: (r.randint(60, 20000),),
        edges=((3605,), (59,), (7200,)),
    )
    yield function(
        "clock_seconds",
        "text",
        'Return the seconds of a time such as "1:02:03".',
        "total = 0\nfor part in text.split(':'):\n    total = total * 60 + int(part)\nreturn total",
        "total * 60 => total * 24",
        "total * 60 + int(part) => total + 60 * int(part)",
        draw=lambda r: (f"{r.randint(0, 5)}:{r.randint(0, 59):02d}:{r.randint(0, 59):02d}",),
    )
    yield function(
        "clock_later",
        "hour, minutes",
        "Return the hour of the day (0 to 23) `minutes` after the full `hour`.",
        "return (hour + minutes // 60) % 24",
        "% 24 => % 12",
        "// 60 => // 24",
        "(hour + minutes // 60) % 24 => hour + minutes // 60",
        draw=lambda r: (r.randint(0, 23), r.randint(0, 900)),
        edges=((23, 60), (12, 0)),
    )
    yield function(
        "clock_between",
        "start, end",
        "Return the minutes from `start` to `end`, both in minutes of the day; `end` may be on the next day.",
        "return (end - start) % 1440",
        "(end - start) => (start - end)",
        " % 1440 => ",
        "% 1440 => % 720",
        draw=lambda r: (r.randint(0, 1439), r.randint(0, 1439)),
        edges=((1400, 20), (0, 900)),
    )
    yield function(
        "days_in_month",
        "month, leap",
        "Return how many days a month (1 to 12) has; `leap` tells whether the year is one.",
        "if month == 2:\n    return 29 if leap else 28\nreturn 30 if month in (4, 6, 9, 11) else 31",
        "29 if leap else 28 => 28 if leap else 29",
        "(4, 6, 9, 11) => (4, 6, 8, 11)",
        "30 if month => 31 if month",
        draw=lambda r: (r.randint(1, 12), r.random() < 0.5),
        edges=((2, True), (2, False), (8, False), (9, True)),
    )


FAMILIES = {
    "digits": tuple(_digits()),
    "recurrences": tuple(_recurrences()),
    "divisors": tuple(_divisors()),
    "rates": tuple(_rates()),
    "bases and bits": tuple(_bases()),
    "intervals": tuple(_intervals()),
    "clocks": tuple(_clocks()),
}
