"""Templates over lists."""

from __future__ import annotations

from random import Random

from asyncrl.environments.templates import (
    Arguments,
    Template,
    number,
    number_list,
    numbers,
    positive,
    small,
    word,
    word_list,
    words,
)


def _list_and_element(random: Random) -> Arguments:
    values = numbers(random)
    return (values, random.choice([*values, number(random), number(random)]))


def _repeating(random: Random) -> Arguments:
    return ([random.randint(1, 6) for _ in range(random.randint(3, 5))],)


def _two_lists(random: Random) -> Arguments:
    length = random.randint(2, 4)
    return (numbers(random, length, length), numbers(random, length, length))


def _sometimes_sorted(random: Random) -> Arguments:
    values = numbers(random)
    return (sorted(values) if random.random() < 0.5 else values,)


TEMPLATES = (
    Template(
        name="first",
        says="Return the first element of the list.",
        code="def first(items):\n    return items[0]\n",
        bugs=(("items[0]", "items[1]"), ("items[0]", "items[-1]")),
        draw=number_list,
    ),
    Template(
        name="last",
        says="Return the last element of the list.",
        code="def last(items):\n    return items[-1]\n",
        bugs=(("items[-1]", "items[0]"), ("items[-1]", "items[1]")),
        draw=number_list,
    ),
    Template(
        name="largest",
        says="Return the largest number in the list.",
        code="def largest(numbers):\n    return max(numbers)\n",
        bugs=(("max(numbers)", "min(numbers)"), ("max(numbers)", "numbers[0]")),
        draw=number_list,
    ),
    Template(
        name="total",
        says="Return the sum of all numbers in the list.",
        code=("def total(numbers):\n    result = 0\n    for n in numbers:\n        result += n\n    return result\n"),
        bugs=(("result = 0", "result = 1"), ("+= n", "-= n"), ("+= n", "= n")),
        draw=number_list,
    ),
    Template(
        name="mean",
        says="Return the mean of the numbers in the list.",
        code="def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
        bugs=(("sum(numbers) / len(numbers)", "sum(numbers)"), ("/ len(numbers)", "/ 2")),
        draw=lambda r: (numbers(r, 3, 4),),
    ),
    Template(
        name="count_positive",
        says="Return how many numbers in the list are greater than zero.",
        code="def count_positive(numbers):\n    return len([n for n in numbers if n > 0])\n",
        bugs=(("n > 0", "n < 0"), ("n > 0", "n == 0")),
        draw=number_list,
    ),
    Template(
        name="evens",
        says="Return the list of the even numbers.",
        code="def evens(numbers):\n    return [n for n in numbers if n % 2 == 0]\n",
        bugs=(("== 0", "== 1"), ("== 0", "!= 0")),
        draw=number_list,
    ),
    Template(
        name="doubled",
        says="Return a list with each number doubled.",
        code="def doubled(numbers):\n    return [n * 2 for n in numbers]\n",
        bugs=(("n * 2", "n + 2"), ("n * 2", "n ** 2")),
        draw=number_list,
    ),
    Template(
        name="squares",
        says="Return a list with the square of each number.",
        code="def squares(numbers):\n    return [n * n for n in numbers]\n",
        bugs=(("n * n", "n + n"), ("n * n", "n * 3")),
        draw=number_list,
    ),
    Template(
        name="backwards",
        says="Return the list in reverse order.",
        code="def backwards(items):\n    return items[::-1]\n",
        bugs=(("items[::-1]", "items[::1]"), ("items[::-1]", "items[:-1]")),
        draw=number_list,
    ),
    Template(
        name="sort_descending",
        says="Return the numbers sorted from largest to smallest.",
        code="def sort_descending(numbers):\n    return sorted(numbers, reverse=True)\n",
        bugs=(("reverse=True", "reverse=False"), (", reverse=True", "")),
        draw=number_list,
    ),
    Template(
        name="contains",
        says="Return True if `x` is in the list, else False.",
        code="def contains(items, x):\n    return x in items\n",
        bugs=(("x in items", "x not in items"), ("x in items", "items[0] == x")),
        draw=_list_and_element,
    ),
    Template(
        name="is_empty",
        says="Return True if the list is empty, else False.",
        code="def is_empty(items):\n    return len(items) == 0\n",
        bugs=(("== 0", "> 0"), ("== 0", "== 1")),
        draw=lambda r: (numbers(r, 1, 3),),
        edges=(([],), ([0],)),
    ),
    Template(
        name="unique",
        says="Return the list without repeated elements, in order of first appearance.",
        code=(
            "def unique(items):\n    result = []\n    for item in items:\n"
            "        if item not in result:\n            result.append(item)\n    return result\n"
        ),
        bugs=(("item not in result", "item in result"), ("if item not in result", "if item in items")),
        draw=_repeating,
        edges=(([2, 2, 1],), ([3, 1, 3, 1],)),
    ),
    Template(
        name="product",
        says="Return the product of all numbers in the list.",
        code=("def product(numbers):\n    result = 1\n    for n in numbers:\n        result *= n\n    return result\n"),
        bugs=(("result = 1", "result = 0"), ("*= n", "+= n")),
        draw=_repeating,
    ),
    Template(
        name="spread",
        says="Return the largest number minus the smallest number.",
        code="def spread(numbers):\n    return max(numbers) - min(numbers)\n",
        bugs=((") - min", ") + min"), ("- min(numbers)", "- numbers[0]")),
        draw=number_list,
    ),
    Template(
        name="without_first",
        says="Return the list without its first element.",
        code="def without_first(items):\n    return items[1:]\n",
        bugs=(("items[1:]", "items[:1]"), ("items[1:]", "items[:-1]"), ("items[1:]", "items[2:]")),
        draw=number_list,
    ),
    Template(
        name="take",
        says="Return the first `n` elements of the list.",
        code="def take(items, n):\n    return items[:n]\n",
        bugs=(("items[:n]", "items[n:]"), ("items[:n]", "items[:n - 1]")),
        draw=lambda r: (numbers(r, 3, 5), r.randint(1, 3)),
    ),
    Template(
        name="count_of",
        says="Return how often `x` appears in the list.",
        code="def count_of(items, x):\n    return items.count(x)\n",
        bugs=(("items.count(x)", "len(items)"), ("items.count(x)", "items[x]")),
        draw=lambda r: ([r.randint(0, 2) for _ in range(r.randint(3, 5))], r.randint(0, 2)),
    ),
    Template(
        name="position_of_largest",
        says="Return the index of the largest number.",
        code="def position_of_largest(numbers):\n    return numbers.index(max(numbers))\n",
        bugs=(("max(numbers)", "min(numbers)"), ("numbers.index(max(numbers))", "max(numbers)")),
        draw=number_list,
    ),
    Template(
        name="add_lists",
        says="Add the two lists element by element.",
        code="def add_lists(a, b):\n    return [x + y for x, y in zip(a, b)]\n",
        bugs=(("x + y", "x - y"), ("x + y", "x * y")),
        draw=_two_lists,
    ),
    Template(
        name="dot",
        says="Return the sum of the products of paired elements.",
        code="def dot(a, b):\n    return sum(x * y for x, y in zip(a, b))\n",
        bugs=(("x * y", "x + y"), ("x * y", "x - y")),
        draw=_two_lists,
    ),
    Template(
        name="flatten",
        says="Join the inner lists into one list.",
        code=(
            "def flatten(lists):\n    result = []\n    for row in lists:\n"
            "        result.extend(row)\n    return result\n"
        ),
        bugs=(("extend", "append"), ("result.extend(row)", "result = row")),
        draw=lambda r: ([numbers(r, 1, 2) for _ in range(r.randint(2, 3))],),
    ),
    Template(
        name="every_other",
        says="Return every second element, starting with the first.",
        code="def every_other(items):\n    return items[::2]\n",
        bugs=(("items[::2]", "items[1::2]"), ("items[::2]", "items[:2]"), ("items[::2]", "items[::3]")),
        draw=lambda r: (numbers(r, 4, 6),),
    ),
    Template(
        name="longest_word",
        says="Return the longest word in the list.",
        code="def longest_word(words):\n    return max(words, key=len)\n",
        bugs=(("max", "min"), (", key=len", "")),
        draw=word_list,
        edges=((["zoo", "banana"],), (["sun", "a", "orange"],)),
    ),
    Template(
        name="lengths",
        says="Return a list with the length of each word.",
        code="def lengths(words):\n    return [len(word) for word in words]\n",
        bugs=(("len(word)", "len(words)"), ("len(word)", "word")),
        draw=word_list,
    ),
    Template(
        name="is_sorted",
        says="Return True if the list is in ascending order, else False.",
        code="def is_sorted(numbers):\n    return numbers == sorted(numbers)\n",
        bugs=(("==", "!="), ("== sorted(numbers)", "== numbers[::-1]")),
        draw=_sometimes_sorted,
    ),
    Template(
        name="has_duplicates",
        says="Return True if any element appears twice, else False.",
        code="def has_duplicates(items):\n    return len(items) != len(set(items))\n",
        bugs=(("!=", "=="), ("!=", "<")),
        draw=_repeating,
    ),
    Template(
        name="running_totals",
        says="Return the list of running totals.",
        code=(
            "def running_totals(numbers):\n    total = 0\n    result = []\n    for n in numbers:\n"
            "        total += n\n        result.append(total)\n    return result\n"
        ),
        bugs=(("append(total)", "append(n)"), ("total += n", "total = n"), ("total = 0", "total = 1")),
        draw=number_list,
    ),
    Template(
        name="median",
        says="Return the middle number of the sorted list. The list has an odd length.",
        code="def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]\n",
        bugs=(("sorted(numbers)", "numbers"), ("len(numbers) // 2", "0")),
        draw=lambda r: (numbers(r, *r.choice(((3, 3), (5, 5)))),),
    ),
    Template(
        name="drop_zeros",
        says="Return the list without its zeros.",
        code="def drop_zeros(numbers):\n    return [n for n in numbers if n != 0]\n",
        bugs=(("!= 0", "== 0"), ("!= 0", "!= 1")),
        draw=lambda r: ([r.randint(0, 2) for _ in range(r.randint(3, 5))],),
    ),
    Template(
        name="all_positive",
        says="Return True if all numbers are greater than zero.",
        code="def all_positive(numbers):\n    return all(n > 0 for n in numbers)\n",
        bugs=(("all(n", "any(n"), ("n > 0", "n < 0")),
        draw=lambda r: ([r.choice((1, 3, 5, 8, -2)) for _ in range(r.randint(2, 4))],),
    ),
    Template(
        name="second_largest",
        says="Return the second largest number of the list.",
        code="def second_largest(numbers):\n    return sorted(numbers)[-2]\n",
        bugs=(("[-2]", "[-1]"), ("[-2]", "[2]"), ("[-2]", "[1]")),
        draw=lambda r: (r.sample(range(1, 30), r.randint(4, 5)),),
    ),
    Template(
        name="with_item",
        says="Return the list with `item` added at its end.",
        code="def with_item(items, item):\n    return items + [item]\n",
        bugs=(("items + [item]", "[item] + items"), ("items + [item]", "items")),
        draw=lambda r: (numbers(r, 1, 4), number(r)),
    ),
    Template(
        name="rotate",
        says="Move the first element of the list to its end.",
        code="def rotate(items):\n    return items[1:] + items[:1]\n",
        bugs=(("items[1:] + items[:1]", "items[1:]"), ("items[1:] + items[:1]", "items[:1] + items[1:]")),
        draw=number_list,
    ),
    Template(
        name="repeat",
        says="Return a list that holds `item` `n` times.",
        code="def repeat(item, n):\n    return [item] * n\n",
        bugs=(("[item] * n", "[item] + [n]"), ("[item] * n", "[item]"), ("[item] * n", "[n] * item")),
        draw=lambda r: (small(r), r.randint(0, 4)),
    ),
    Template(
        name="sum_of_squares",
        says="Return the sum of the squares of the numbers.",
        code="def sum_of_squares(numbers):\n    return sum(n * n for n in numbers)\n",
        bugs=(("n * n", "n"), ("n * n", "n * 2")),
        draw=number_list,
    ),
    Template(
        name="count_below",
        says="Return how many numbers are less than `limit`.",
        code="def count_below(numbers, limit):\n    return len([n for n in numbers if n < limit])\n",
        bugs=(("n < limit", "n > limit"), ("n < limit", "n == limit")),
        draw=lambda r: (numbers(r), number(r)),
    ),
    Template(
        name="ends",
        says="Return a list of the first and the last element.",
        code="def ends(items):\n    return [items[0], items[-1]]\n",
        bugs=(("items[-1]", "items[1]"), ("items[0]", "items[1]")),
        draw=number_list,
    ),
    Template(
        name="swap",
        says="Return the list `[b, a]`.",
        code="def swap(a, b):\n    return [b, a]\n",
        bugs=(("[b, a]", "[a, b]"), ("[b, a]", "[b, b]")),
        draw=lambda r: (positive(r), word(r)),
    ),
    Template(
        name="short_words",
        says="Return the words that have at most four letters.",
        code="def short_words(words):\n    return [w for w in words if len(w) <= 4]\n",
        bugs=(("<= 4", ">= 4"), ("<= 4", "<= 3")),
        draw=lambda r: (words(r, 3, 4),),
    ),
)
