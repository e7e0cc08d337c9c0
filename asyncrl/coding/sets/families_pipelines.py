"""Families in which values are chosen, changed and put together: pipelines, windows, nested lists."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Template

# (word for the name, words for the text, expression, expression with a bug)
_CHOOSE = (
    ("even", "are even", "n % 2 == 0", "n % 2 == 1"),
    ("negative", "are negative", "n < 0", "n > 0"),
    ("large", "are at least 5", "n >= 5", "n > 5"),
    ("three", "are divisible by 3", "n % 3 == 0", "n % 3 == 1"),
    ("middle", "lie from -3 to 3, both included", "-3 <= n <= 3", "-3 < n < 3"),
    ("odd_positive", "are odd and positive", "n % 2 == 1 and n > 0", "n % 2 == 1 or n > 0"),
)
_CHANGE = (
    ("squares", "the square of", "n * n", "n + n"),
    ("sizes", "the absolute value of", "abs(n)", "-n"),
    ("rests", "the remainder of division by 4 of", "n % 4", "n // 4"),
    ("tripled", "three times", "3 * n", "n ** 3"),
    ("shifted", "one less than", "n - 1", "1 - n"),
)
_REDUCE = (
    ("total", "Return the sum of {0}.", "sum(chosen)", "len(chosen)"),
    (
        "most",
        "Return the largest of {0}, or None if there is none.",
        "max(chosen, default=None)",
        "min(chosen, default=None)",
    ),
    ("list", "Return the list of {0}, in order.", "chosen", "chosen[::-1]"),
    ("sorted", "Return {0}, sorted from large to small.", "sorted(chosen, reverse=True)", "sorted(chosen)"),
    ("first_two", "Return the first two of {0}, or fewer if there are not as many.", "chosen[:2]", "chosen[-2:]"),
    ("distinct", "Return how many different values there are among {0}.", "len(set(chosen))", "len(chosen)"),
)


def _mixed(random: Random) -> Arguments:
    return ([random.randint(-9, 12) for _ in range(random.randint(5, 9))],)


def _pipelines() -> Iterator[Template]:
    for number, (choose, chosen_words, test, wrong_test) in enumerate(_CHOOSE):
        for other, (change, changed_words, value, wrong_value) in enumerate(_CHANGE):
            # each reduction meets each choice and each change, without all of the combinations
            reduce, words, result, wrong_result = _REDUCE[(number + other) % len(_REDUCE)]
            if reduce == "distinct":  # which most changes leave as it is
                wrong_value = "n // 3"
            elif (choose, change) == ("negative", "sizes"):
                wrong_value = "n"
            bugs = [f"if {test} => if {wrong_test}", f"[{value} for => [{wrong_value} for"]
            if result != "chosen" or choose != "middle":
                bugs.append(f"return {result} => return {wrong_result}")
            yield function(
                f"{reduce}_of_{change}_where_{choose}",
                "numbers",
                words.format(f"{changed_words} those numbers that {chosen_words}"),
                f"chosen = [{value} for n in numbers if {test}]\nreturn {result}",
                *bugs,
                draw=_mixed,
                edges=(
                    ([5, -3, 3, 6, 0, -8, 9, 2, 5, -3, 7],),
                    ([4, -6, 1, 12, 5, 3, -1, -3],),
                    ([8, 8, -4, -4, 3, 9, 2, -2],),
                ),
            )


# --- text -----------------------------------------------------------------------------------------------------

_WORDS_THAT = (
    ("long", "have more than four letters", "len(w) > 4", "len(w) >= 4"),
    ("capital", "begin with a capital letter", "w[0].isupper()", "w[0].islower()"),
    ("with_e", 'hold the letter "e"', "'e' in w.lower()", "'e' == w.lower()[0]"),
    ("ending_s", 'end with "s"', "w.endswith('s')", "w.startswith('s')"),
    (
        "palindromic",
        "read the same backwards, upper and lower case alike",
        "w.lower() == w.lower()[::-1]",
        "w == w[::1]",
    ),
)
_EACH_WORD = (
    ("upper", "in capital letters", "w.upper()", "w.lower()"),
    ("reversed", "backwards", "w[::-1]", "w[::1]"),
    ("initials", "cut to the first letter", "w[0]", "w[-1]"),
    ("doubled", "with the last letter doubled", "w + w[-1]", "w + w[0]"),
)
_TOGETHER = (
    ("joined", "joined by hyphens", "'-'.join(found)", "''.join(found)"),
    (
        "counted",
        "as a dictionary of how often each occurs",
        "{w: found.count(w) for w in found}",
        "{w: len(w) for w in found}",
    ),
    ("in_order", "as a list in alphabetical order", "sorted(found)", "found"),
    ("backwards", "as a list, the last first", "found[::-1]", "found"),
)
_VOCABULARY = (  # noqa: SIM905
    "Anna level Tree house stars boss Eve green Rivers noon glass Moss sees Otto kayak trains Ocean list class Bees"
).split()


def _text(random: Random) -> Arguments:
    return (" ".join(random.choices(_VOCABULARY, k=random.randint(6, 9))),)


def _text_pipelines() -> Iterator[Template]:
    edge = "Anna sees glass trains level Moss Bees house Ocean noon Tree stars boss"
    for number, (choose, chosen_words, test, wrong_test) in enumerate(_WORDS_THAT):
        for other, (each, each_words, value, wrong_value) in enumerate(_EACH_WORD):
            together, words, result, wrong_result = _TOGETHER[(number + other) % len(_TOGETHER)]
            bugs = [f"if {test} => if {wrong_test}"]
            if not (choose == "palindromic" and each == "reversed"):
                bugs.append(f"[{value} for => [{wrong_value} for")
            yield function(
                f"{each}_{choose}_words_{together}",
                "text",
                f"Return the words of the text that {chosen_words}, {each_words}, {words}.",
                f"found = [{value} for w in text.split() if {test}]\nreturn {result}",
                *bugs,
                f"return {result} => return {wrong_result}",
                draw=_text,
                edges=((edge,), (" ".join(edge.split()[::-1]),)),
            )


# --- windows --------------------------------------------------------------------------------------------------


def _window(random: Random) -> Arguments:
    return ([random.randint(-9, 20) for _ in range(random.randint(5, 8))], random.randint(2, 3))


def _windows() -> Iterator[Template]:
    for name, says, value, wrong in (
        ("sums", "the sum", "sum(part)", "max(part)"),
        ("maxima", "the largest number", "max(part)", "part[-1]"),
        ("spreads", "the largest number minus the smallest", "max(part) - min(part)", "part[-1] - part[0]"),
        ("rises", "the last number minus the first", "part[-1] - part[0]", "part[0] - part[-1]"),
        ("evens", "how many numbers are even", "sum(n % 2 == 0 for n in part)", "sum(n % 2 for n in part)"),
        ("middles", "the middle number, or the right one of two,", "sorted(part)[size // 2]", "part[size // 2]"),
    ):
        yield function(
            f"window_{name}",
            "numbers, size",
            f"Return {says} of each `size` numbers that follow each other, from left to right.",
            f"found = []\nfor start in range(len(numbers) - size + 1):\n    part = numbers[start:start + size]\n"
            f"    found.append({value})\nreturn found",
            f"found.append({value}) => found.append({wrong})",
            "len(numbers) - size + 1 => len(numbers) - size",
            "numbers[start:start + size] => numbers[start:start + size - 1]",
            draw=_window,
            edges=(([5, 1, 8, 2, 2], 3), ([4, 4, 1, 9], 2)),
        )
        yield function(
            f"chunk_{name}",
            "numbers, size",
            f"Cut the list into pieces of `size` numbers, the last one perhaps shorter, and return {says} of each "
            f"piece.".replace(
                "the middle number, or the right one of two,", "the number in the middle by size (index size // 2)"
            ),
            f"found = []\nfor start in range(0, len(numbers), size):\n    part = numbers[start:start + size]\n"
            f"    found.append({value})\nreturn found".replace("size // 2]", "len(part) // 2]"),
            f"found.append({value}) => found.append({wrong})".replace("size // 2]", "len(part) // 2]"),
            "len(numbers), size) => len(numbers) - size, size)",
            "range(0, => range(1,",
            draw=_window,
            edges=(([5, 1, 8, 2, 2, 7], 3), ([4, 4, 1, 9, 6], 2)),
        )


# --- nested lists ---------------------------------------------------------------------------------------------


def _nest(random: Random, depth: int = 0) -> list[object]:
    made: list[object] = []
    for _ in range(random.randint(2, 4)):
        deeper = depth < 2 and random.random() < 0.45
        made.append(_nest(random, depth + 1) if deeper else random.randint(-9, 9))
    return made


def _nested() -> Iterator[Template]:
    edge = [1, [2, -3, [4, [5, -6]], 7], [], [[8]], -9]
    for name, says, leaf, wrong, above, none in (
        ("sum", "the sum of all numbers", "item", "abs(item)", "sum(parts)", "0"),
        ("count", "how many numbers there are", "1", "item", "sum(parts)", "0"),
        ("negatives", "how many numbers are negative", "int(item < 0)", "int(item > 0)", "sum(parts)", "0"),
        (
            "odd_sum",
            "the sum of the odd numbers",
            "(item if item % 2 else 0)",
            "(0 if item % 2 else item)",
            "sum(parts)",
            "0",
        ),
        (
            "depth",
            "how deep lists lie in each other (1 for a list of numbers)",
            "0",
            "1",
            "1 + max(parts, default=0)",
            "1",
        ),
        (
            "largest",
            "the largest size of a number, 0 if there is none",
            "abs(item)",
            "item",
            "max(parts, default=0)",
            "0",
        ),
        ("lists", "how many lists there are, the outermost too", "0", "1", "1 + sum(parts)", "1"),
        (
            "text",
            "the numbers and brackets as text without spaces",
            "str(item)",
            "'n'",
            "'[' + ','.join(parts) + ']'",
            "",
        ),
    ):
        bugs = [f"[{leaf} if not => [{wrong} if not"]
        if "sum(parts)" in above:
            bugs.append(f"return {above} => return {above.replace('sum(parts)', 'sum(parts[:-1])')}")
        elif none:
            bugs.append(f"return {above} => return {above.replace('max(parts, default=0)', 'sum(parts)')}")
        else:
            bugs.append("','.join => ''.join")
        yield function(
            f"nested_{name}",
            "items",
            f"Return {says} in lists that lie in each other.",
            f"parts = [{leaf} if not isinstance(item, list) else nested_{name}(item) for item in items]\nreturn "
            f"{above}",
            *bugs,
            f"else nested_{name}(item) => else nested_{name}(item[:1])",
            draw=lambda r: (_nest(r),),
            edges=((edge,), ([-5, [3, 4, 5], [-7]],)),
        )
    for name, says, test, wrong in (
        ("flat", "all numbers, from left to right", "True", "item > 0"),
        ("flat_positive", "the positive numbers, from left to right", "item > 0", "item < 0"),
        ("flat_even", "the even numbers, from left to right", "item % 2 == 0", "item % 2"),
    ):
        yield function(
            f"nested_{name}",
            "items",
            f"Return {says}, out of lists that lie in each other, as one list.",
            f"found = []\nfor item in items:\n    if isinstance(item, list):\n        "
            f"found.extend(nested_{name}(item))\n"
            f"    elif {test}:\n        found.append(item)\nreturn found",
            "found.extend( => found.append(",
            f"elif {test}: => elif {wrong}:",
            "found.append(item) => found.insert(0, item)",
            draw=lambda r: (_nest(r),),
            edges=((edge,),),
        )


FAMILIES = {
    "list pipelines": tuple(_pipelines()),
    "text pipelines": tuple(_text_pipelines()),
    "windows": tuple(_windows()),
    "nested lists": tuple(_nested()),
}
