"""Families over lists as sequences: reshaping, statistics, stretches of numbers that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Template


def _ints(random: Random, least: int = 5, most: int = 8, low: int = -9, high: int = 20) -> list[int]:
    return [random.randint(low, high) for _ in range(random.randint(least, most))]


def _two(random: Random) -> Arguments:
    return ([random.randint(0, 7) for _ in range(4)], [random.randint(0, 7) for _ in range(random.randint(3, 5))])


def _shapes() -> Iterator[Template]:
    with_n = lambda r: (_ints(r), r.randint(2, 3))  # noqa: E731
    for name, says, body, *bugs in (
        (
            "chunks",
            "Cut the list into pieces of `n`; the last may be shorter.",
            "return [items[i:i + n] for i in range(0, len(items), n)]",
            "items[i:i + n] => items[i:n]",
            "range(0, len(items), n) => range(0, len(items) - n, n)",
        ),
        (
            "parts",
            "Deal the elements out to `n` lists in turn.",
            "return [items[i::n] for i in range(n)]",
            "items[i::n] => items[i:n]",
            "range(n) => range(1, n)",
        ),
        (
            "left",
            "Move the first `n` elements to the end.",
            "return items[n:] + items[:n]",
            "items[n:] + items[:n] => items[-n:] + items[:-n]",
            "items[:n] => items[n:]",
        ),
        (
            "right",
            "Move the last `n` elements to the front.",
            "return items[-n:] + items[:-n]",
            "items[-n:] + items[:-n] => items[n:] + items[:n]",
            "items[:-n] => items[:n]",
        ),
        (
            "every",
            "Return every `n`-th element: the `n`-th, the one `n` places later, and so on.",
            "return items[n - 1::n]",
            "items[n - 1::n] => items[::n]",
            "items[n - 1::n] => items[n::n]",
        ),
        (
            "repeated",
            "Return the list with each element `n` times in a row.",
            "return [x for x in items for _ in range(n)]",
            "for x in items for _ in range(n) => for _ in range(n) for x in items",
            "range(n) => range(n - 1)",
        ),
        (
            "without",
            "Return the list without its `n` smallest elements; the others keep their order.",
            "left = list(items)\nfor _ in range(n):\n    left.remove(min(left))\nreturn left",
            "min(left) => max(left)",
            "left.remove(min(left)) => left.pop()",
        ),
    ):
        yield function(
            f"shape_{name}",
            "items, n",
            says,
            body,
            *bugs,
            draw=with_n,
            edges=(([1, 5, 2, 8, 3], 2), ([9, 1, 4, 4, 7, 2, 0], 3)),
        )
    yield function(
        "shape_woven",
        "a, b",
        "Take elements of both lists in turn, beginning with `a`; the rest of the longer one follows.",
        "woven = []\nfor i in range(max(len(a), len(b))):\n    woven += a[i:i + 1] + b[i:i + 1]\nreturn woven",
        "max(len(a), len(b)) => min(len(a), len(b))",
        "a[i:i + 1] + b[i:i + 1] => b[i:i + 1] + a[i:i + 1]",
        draw=_two,
        edges=(([1, 2, 3], [4]), ([1], [2, 3])),
    )


def _statistics() -> Iterator[Template]:
    for name, says, body, *bugs in (
        (
            "median",
            "Return the median; of an even number of elements the mean of the two in the middle.",
            "s = sorted(items)\nhalf = len(s) // 2\nreturn s[half] if len(s) % 2 else (s[half - 1] + s[half]) / 2",
            "sorted(items) => items",
            "s[half - 1] + s[half] => s[half] + s[half]",
            "if len(s) % 2 else => if len(s) % 2 == 0 else",
        ),
        (
            "variance",
            "Return the mean of the squared differences from the mean.",
            "mean = sum(items) / len(items)\nreturn sum((x - mean) ** 2 for x in items) / len(items)",
            "** 2 => * 2",
            "items) / len(items)\n => items)\n",
            "(x - mean) ** 2 => abs(x - mean)",
        ),
        (
            "mode",
            "Return the most frequent number; of equals the smallest.",
            "return min(items, key=lambda n: (-items.count(n), n))",
            "-items.count(n), n => items.count(n), n",
            "min(items => max(items",
        ),
        (
            "running_max",
            "Return the largest number so far, after each.",
            "found = []\nfor n in items:\n    found.append(max([n] + found[-1:]))\nreturn found",
            "max([n] => min([n]",
            "found[-1:] => found[:-1]",
        ),
        (
            "differences",
            "Return the differences of each number to the one before it.",
            "return [b - a for a, b in zip(items, items[1:])]",
            "b - a => a - b",
            "items[1:] => items[2:]",
            "b - a => abs(b - a)",
        ),
        (
            "above_mean",
            "Return the numbers above the mean, in order.",
            "mean = sum(items) / len(items)\nreturn [n for n in items if n > mean]",
            "n > mean => n < mean",
            "/ len(items) => // 2",
        ),
        (
            "scaled",
            "Return the numbers scaled so that the smallest becomes 0 and the largest 1.",
            "low, high = min(items), max(items)\nreturn [(n - low) / (high - low) for n in items]",
            "(n - low) / => n / ",
            "(high - low) => high",
        ),
        (
            "trimmed_mean",
            "Return the mean of the numbers without one smallest and one largest.",
            "s = sorted(items)[1:-1]\nreturn sum(s) / len(s)",
            "[1:-1] => [1:]",
            "[1:-1] => [:-1]",
            "/ len(s) => / len(items)",
        ),
    ):
        yield function(
            f"statistics_{name}",
            "items",
            says,
            body,
            *bugs,
            draw=lambda r: ([*r.sample(range(-9, 20), r.randint(4, 6)), r.randint(-9, 9)],),
            edges=(([4, 1, 7, 2],), ([3, 9, 3, 1, 9],), ([5, 5, 2, 8, 0, -4],)),
        )


def _stretches() -> Iterator[Template]:
    for name, says, body, *bugs in (
        (
            "best_sum",
            "Return the largest sum of numbers that follow each other; at least one.",
            "best = here = items[0]\nfor n in items[1:]:\n    here = max(n, here + n)\n    best = max(best, here)\n"
            "return best",
            "return best => return here",
            "max(n, here + n) => here + n",
            "max(n, here + n) => max(0, here + n)",
        ),
        (
            "longest_rise",
            "Return the length of the longest stretch in which each number is larger than the one before.",
            "best = here = 1\nfor a, b in zip(items, items[1:]):\n    here = here + 1 if b > a else 1\n    best = "
            "max(best, here)\nreturn best",
            "b > a => b < a",
            "return best => return here",
            "else 1 => else 0",
        ),
        (
            "pairs_with_sum",
            "Return how many pairs of places hold numbers that sum to 6.",
            "return sum(items[i] + items[j] == 6 for i in range(len(items)) for j in range(i + 1, len(items)))",
            "range(i + 1, len(items)) => range(i, len(items))",
            "range(i + 1, => range(",
            "== 6 => >= 6",
        ),
        (
            "balance_point",
            "Return the first place where the numbers before it sum to as much as those behind it, or -1.",
            "for i in range(len(items)):\n    if sum(items[:i]) == sum(items[i + 1:]):\n        return i\nreturn -1",
            "items[i + 1:] => items[i:]",
            "return -1 => return 0",
            "items[:i] => items[:i + 1]",
        ),
        (
            "majority",
            "Return the number that fills more than half of the places, or None.",
            "for n in items:\n    if items.count(n) * 2 > len(items):\n        return n\nreturn None",
            "* 2 > len(items) => * 2 >= len(items)",
            "* 2 > => > ",
            "return None => return items[0]",
        ),
        (
            "sign_changes",
            "Return how often a number is followed by one of the other sign; zeros have none and are passed over.",
            "signs = [n > 0 for n in items if n]\nreturn sum(a != b for a, b in zip(signs, signs[1:]))",
            " if n] => ]",
            "a != b => a == b",
            "n > 0 => n > 1",
        ),
        (
            "water",
            "Return the water that stands between walls of these heights (below 0 counts as 0) after rain.",
            "h = [max(0, n) for n in items]\nreturn sum(max(0, min(max(h[:i + 1]), max(h[i:])) - h[i]) for i in "
            "range(len(h)))",
            "min(max(h[:i + 1]), max(h[i:])) => max(max(h[:i + 1]), max(h[i:]))",
            "- h[i]) => )",
            "max(0, n) => abs(n)",
        ),
    ):
        yield function(
            f"stretch_{name}",
            "items",
            says,
            body,
            *bugs,
            draw=lambda r: (_ints(r, 5, 8, -5, 6),),
            edges=(
                ([2, 3, -9, 4, 1, 2],),
                ([-3, -1, -2],),
                ([4, 4, 1, 4],),
                ([4, 2, 4, 1],),
                ([1, 2, 3, 0, 1],),
                ([2, 9, 2],),
                ([-1, 0, 2, -2, 3],),
            ),
        )


FAMILIES = {
    "shapes of lists": tuple(_shapes()),
    "statistics": tuple(_statistics()),
    "stretches": tuple(_stretches()),
}
