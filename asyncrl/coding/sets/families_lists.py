"""Families over lists: searching, sorting, sets in order."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Template


def _ints(random: Random, least: int = 5, most: int = 8, low: int = -9, high: int = 20) -> list[int]:
    return [random.randint(low, high) for _ in range(random.randint(least, most))]


def _one(random: Random) -> Arguments:
    return (_ints(random),)


def _few(random: Random) -> Arguments:
    return ([random.randint(1, 5) for _ in range(random.randint(5, 8))],)


def _two(random: Random) -> Arguments:
    return ([random.randint(0, 7) for _ in range(4)], [random.randint(0, 7) for _ in range(random.randint(3, 5))])


def _searching() -> Iterator[Template]:
    def drawn(random: Random) -> Arguments:
        items = sorted(_ints(random))
        return (items, random.choice([*items, random.randint(-10, 21)]))

    half = (
        "low, high = 0, len(items)\nwhile low < high:\n    middle = (low + high) // 2\n    if items[middle] {0} x:\n"
        "        low = middle + 1\n    else:\n        high = middle\n"
    )
    for name, says, sign, result, wrong, wrong_sign in (
        (
            "place_before",
            "Return the first place at which `x` can be put into the sorted list so that it stays sorted.",
            "<",
            "low",
            "low + 1",
            "<=",
        ),
        (
            "place_behind",
            "Return the last place at which `x` can be put into the sorted list so that it stays sorted.",
            "<=",
            "low",
            "low - 1",
            "<",
        ),
        (
            "count_smaller",
            "Return how many numbers of the sorted list are smaller than `x`.",
            "<",
            "low",
            "len(items) - low",
            "<=",
        ),
        (
            "next_larger",
            "Return the smallest number of the sorted list that is larger than `x`, or None.",
            "<=",
            "items[low] if low < len(items) else None",
            "items[low - 1] if low < len(items) else None",
            "<",
        ),
        (
            "has",
            "Return whether the sorted list holds `x`.",
            "<",
            "low < len(items) and items[low] == x",
            "low < len(items)",
            "<=",
        ),
    ):
        yield function(
            f"sorted_{name}",
            "items, x",
            says,
            half.format(sign) + f"return {result}",
            f"return {result} => return {wrong}",
            f"items[middle] {sign} x => items[middle] {wrong_sign} x",
            draw=drawn,
            edges=(([1, 3, 3, 5], 3), ([2, 4], 5), ([2, 4], 1), ([7], 7), ([1, 2, 2, 2, 9], 2)),
        )
    for name, says, body, *bugs in (
        (
            "peak",
            "Return the first place whose number is larger than both neighbours, or -1; the ends have none.",
            "for i in range(1, len(items) - 1):\n    if items[i - 1] < items[i] > items[i + 1]:\n        return i\n"
            "return -1",
            "items[i - 1] < items[i] > => items[i - 1] > items[i] >",
            "return i\n => return items[i]\n",
            "return -1 => return None",
        ),
        (
            "first_repeat",
            "Return the first number that occurred before in the list, or None.",
            "seen = set()\nfor n in items:\n    if n in seen:\n        return n\n    seen.add(n)\nreturn None",
            "if n in seen => if n not in seen",
            "return None => return -1",
            "return n\n => return len(seen)\n",
        ),
        (
            "first_missing",
            "Return the smallest whole number from 0 on that the list lacks.",
            "n = 0\nwhile n in items:\n    n += 1\nreturn n",
            "n = 0 => n = 1",
            "return n => return n - 1",
        ),
        (
            "second_smallest",
            "Return the second smallest of the different numbers in the list.",
            "return sorted(set(items))[1]",
            "sorted(set(items)) => sorted(items)",
            "[1] => [0]",
            "[1] => [-1]",
        ),
        (
            "closest_to_zero",
            "Return the number closest to zero; of equals the positive one.",
            "return min(items, key=lambda n: (abs(n), -n))",
            "abs(n), -n => abs(n), n",
            "min( => max(",
            "(abs(n), -n) => n",
        ),
        (
            "leaders",
            "Return the numbers that are larger than all behind them, in order.",
            "return [n for i, n in enumerate(items) if all(n > m for m in items[i + 1:])]",
            "n > m for => n < m for",
            "items[i + 1:] => items[:i]",
            "all(n => any(n",
        ),
    ):
        yield function(
            f"find_{name}",
            "items",
            says,
            body,
            *bugs,
            draw=lambda r: (_ints(r, 5, 8, -2, 6),),
            edges=(([0, 1, 2, 1, 5, 3],), ([3, 3, 1, 0, -1, 2],), ([2, 0, 1, 1, -2],), ([4, 3, 2],), ([1, 3, 6, 0],)),
        )


def _sorting() -> Iterator[Template]:
    for name, says, body, *bugs in (
        (
            "by_insertion",
            "Return the numbers sorted; each is put into its place among those before it.",
            "items = list(items)\nfor i in range(1, len(items)):\n    j = i\n    while j > 0 and items[j - 1] > "
            "items[j]:\n"
            "        items[j - 1], items[j] = items[j], items[j - 1]\n        j -= 1\nreturn items",
            "j > 0 and => j > 1 and",
            "items[j - 1] > items[j]: => items[j - 1] < items[j]:",
            "range(1, len(items)) => range(1, len(items) - 1)",
        ),
        (
            "by_selection",
            "Return the numbers sorted; the smallest of the rest comes next.",
            "rest, done = list(items), []\nwhile rest:\n    smallest = min(rest)\n    rest.remove(smallest)\n    "
            "done.append(smallest)\nreturn done",
            "min(rest) => max(rest)",
            "done.append(smallest) => done.insert(0, smallest)",
            "while rest: => while len(rest) > 1:",
        ),
        (
            "by_counting",
            "Return the numbers (from 1 to 5) sorted; how often each occurs is counted first.",
            "counts = [0] * 6\nfor n in items:\n    counts[n] += 1\nreturn [n for n in range(6) for _ in "
            "range(counts[n])]",
            "counts[n] += 1 => counts[n] = 1",
            "for n in range(6) => for n in range(5)",
            "range(counts[n]) => range(n)",
        ),
        (
            "by_parity",
            "Return the even numbers, then the odd ones; each part keeps its order.",
            "return sorted(items, key=lambda n: n % 2)",
            "n % 2) => -(n % 2))",
            "key=lambda n: n % 2 => key=lambda n: (n % 2, n)",
        ),
        (
            "by_frequency",
            "Return the different numbers, the most frequent first; of equally frequent ones the smaller first.",
            "return sorted(set(items), key=lambda n: (-items.count(n), n))",
            "-items.count(n), n => items.count(n), n",
            "-items.count(n), n => -items.count(n), -n",
            "sorted(set(items) => sorted(items",
        ),
        (
            "descents",
            "Return at how many places a number is followed by a smaller one.",
            "return sum(a > b for a, b in zip(items, items[1:]))",
            "a > b => a >= b",
            "a > b => a < b",
            "items[1:] => items[2:]",
        ),
        (
            "ranks",
            "Return for each number how many in the list are smaller.",
            "return [sum(m < n for m in items) for n in items]",
            "m < n => m <= n",
            "m < n => m > n",
            "for n in items] => for n in sorted(items)]",
        ),
    ):
        yield function(
            f"sort_{name}",
            "items",
            says,
            body,
            *bugs,
            draw=_few,
            edges=(([5, 2, 2, 4, 1, 5],), ([3, 1, 2],), ([2, 5, 5, 1, 3],)),
        )
    yield function(
        "sort_merge",
        "a, b",
        "Merge two sorted lists into one sorted list.",
        "merged = []\na, b = list(a), list(b)\nwhile a and b:\n    merged.append(a.pop(0) if a[0] <= b[0] else "
        "b.pop(0))\nreturn merged + a + b",
        "merged + a + b => merged + a",
        "a[0] <= b[0] => a[0] >= b[0]",
        "merged + a + b => merged + b",
        draw=lambda r: (sorted(_ints(r, 2, 4)), sorted(_ints(r, 2, 4))),
        edges=(([1, 4], [2, 3]), ([1], [2, 9]), ([5, 6], [1])),
    )


def _sets() -> Iterator[Template]:
    for name, says, body, *bugs in (
        (
            "union",
            "Return the different elements of both lists, in order of first appearance.",
            "return list(dict.fromkeys(a + b))",
            "a + b => b + a",
            "dict.fromkeys(a + b) => a + b",
        ),
        (
            "common",
            "Return the different elements of `a` that are in `b` too, in order.",
            "return [x for i, x in enumerate(a) if x in b and x not in a[:i]]",
            "x in b and => x not in b and",
            " and x not in a[:i] => ",
        ),
        (
            "only_first",
            "Return the elements of `a` that are not in `b`, in order, repetitions too.",
            "return [x for x in a if x not in b]",
            "x not in b => x in b",
            "for x in a if x not in b => for x in b if x not in a",
        ),
        (
            "in_one_only",
            "Return the sorted elements that are in exactly one of the lists.",
            "return sorted(set(a) ^ set(b))",
            "set(a) ^ set(b) => set(a) | set(b)",
            "set(a) ^ set(b) => set(a) - set(b)",
        ),
        (
            "share",
            "Return how many different elements are in both lists, divided by how many are in either.",
            "return len(set(a) & set(b)) / len(set(a) | set(b))",
            "set(a) | set(b) => set(a)",
            "set(a) & set(b) => set(a) - set(b)",
        ),
        (
            "pairs",
            "Return how many pairs of an element of `a` and one of `b` are equal.",
            "return sum(x == y for x in a for y in b)",
            "x == y => x < y",
            "for x in a for y in b => for x, y in zip(a, b)",
        ),
        (
            "as_bags",
            "Return the elements of `a` without as many equal ones as `b` has, sorted.",
            "left = sorted(a)\nfor x in b:\n    if x in left:\n        left.remove(x)\nreturn left",
            "left.remove(x) => left = [y for y in left if y != x]",
            "sorted(a) => sorted(set(a))",
        ),
    ):
        yield function(
            f"lists_{name}",
            "a, b",
            says,
            body,
            *bugs,
            draw=_two,
            edges=(([3, 1, 3, 2], [2, 2, 5]), ([1, 1, 2], [1, 3]), ([4, 4, 4], [4, 6]), ([7, 2, 2], [2, 7, 0])),
        )


FAMILIES = {
    "searching": tuple(_searching()),
    "sorting": tuple(_sorting()),
    "sets in order": tuple(_sets()),
}
