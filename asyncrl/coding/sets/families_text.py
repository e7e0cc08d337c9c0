"""Families over text: ciphers, runs, brackets, names in code, parsing, substrings."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Template, sentence, word


def _sentence(random: Random) -> Arguments:
    return (sentence(random, 2, 4),)


def _letters(random: Random) -> str:
    return "".join(random.choice("aabbbc") for _ in range(random.randint(6, 10)))


def _ciphers() -> Iterator[Template]:
    for shift in (1, 3, 13):
        yield function(
            f"caesar_{shift}",
            "text",
            f"Move each lower-case letter {shift} places on in the alphabet, after z comes a; leave the rest.",
            f"found = ''\nfor c in text:\n    found += chr((ord(c) - 97 + {shift}) % 26 + 97) if c.islower() else c\n"
            f"return found",
            f"+ {shift}) % 26 => - {shift}) % 26" if shift != 13 else "+ 13) % 26 => + 12) % 26",
            "% 26 + 97 => % 25 + 97",
            "else c => else ''",
            draw=_sentence,
            edges=(("zebra yak xyz",),),
        )
    yield function(
        "mirrored_alphabet",
        "text",
        "Replace a by z, b by y, and so on; leave what is no lower-case letter.",
        "return ''.join(chr(219 - ord(c)) if c.islower() else c for c in text)",
        "219 => 218",
        "if c.islower() => if c.isupper()",
        "''.join => ' '.join",
        draw=_sentence,
    )
    yield function(
        "shift_by_key",
        "text, key",
        "Move each letter (all are lower case) on by the place (a is 0) of the key's letter over it;"
        " the key is repeated.",
        "found = ''\nfor i, c in enumerate(text):\n    step = ord(key[i % len(key)]) - 97\n    found += chr((ord(c) "
        "- 97 + step) % 26 + 97)\n"
        "return found",
        "i % len(key) => 0",
        "- 97 + step) => - 97 - step)",
        "% 26 + 97 => % 26 + 98",
        draw=lambda r: (word(r), word(r)),
    )
    yield function(
        "rail_fence",
        "text",
        "Return the characters at even places (the first is 0), then those at odd places.",
        "return text[::2] + text[1::2]",
        "text[1::2] => text[::2]",
        "text[::2] + text[1::2] => text[1::2] + text[::2]",
        draw=_sentence,
    )


def _runs() -> Iterator[Template]:
    def drawn(random: Random) -> Arguments:
        return (_letters(random),)

    loop = (
        "runs = []\nfor c in text:\n    if runs and runs[-1][0] == c:\n        runs[-1][1] += 1\n    else:\n"
        "        runs.append([c, 1])\n"
    )
    for name, says, result, wrong in (
        (
            "encoded",
            'Write each run of equal letters as the letter and its length, such as "a3b1".',
            "''.join(f'{c}{n}' for c, n in runs)",
            "''.join(f'{n}{c}' for c, n in runs)",
        ),
        (
            "squeezed",
            "Keep one letter of each run of equal letters.",
            "''.join(c for c, _ in runs)",
            "''.join(c for c, n in runs if n == 1)",
        ),
        (
            "longest",
            "Return the length of the longest run of equal letters.",
            "max(n for _, n in runs)",
            "max(runs)[1]",
        ),
        (
            "longest_letter",
            "Return the letter of the longest run of equal letters, of equals the first.",
            "max(runs, key=lambda run: run[1])[0]",
            "max(runs)[0]",
        ),
        (
            "singles",
            "Return how many runs of equal letters have only one letter.",
            "sum(n == 1 for _, n in runs)",
            "len(runs)",
        ),
        (
            "lengths",
            "Return the list of the lengths of the runs of equal letters.",
            "[n for _, n in runs]",
            "sorted(n for _, n in runs)",
        ),
    ):
        yield function(
            f"runs_{name}",
            "text",
            says,
            f"{loop}return {result}",
            f"return {result} => return {wrong}",
            "runs[-1][0] == c => runs[0][0] == c",
            "runs.append([c, 1]) => runs.append([c, 0])"
            if name not in ("squeezed", "longest_letter")
            else "runs[-1][0] == c => runs[-1][0] != c",
            draw=drawn,
            edges=(("aabbbcca",), ("caabbbb",), ("abbbca",)),
        )
    yield function(
        "runs_decoded",
        "text",
        'Undo the run-length code: "a3b1" becomes "aaab"; each length has one digit.',
        "return ''.join(text[i] * int(text[i + 1]) for i in range(0, len(text), 2))",
        "range(0, len(text), 2) => range(0, len(text) - 2, 2)",
        "int(text[i + 1]) => (int(text[i + 1]) + 1)",
        draw=lambda r: ("".join(f"{c}{r.randint(1, 5)}" for c in r.sample("abcd", r.randint(2, 3))),),
    )


def _brackets() -> Iterator[Template]:
    def drawn(random: Random) -> Arguments:
        return ("".join(random.choice("(()))a") for _ in range(random.randint(4, 9))),)

    balanced = (("(a)(())",), ("(()",), ("())(",), ("a",), ("((a))()",), ("))a)",))
    for name, says, body, *bugs in (
        (
            "balanced",
            "Return whether each bracket is closed, and none that was not opened.",
            "open_ones = 0\nfor c in text:\n    if c == '(':\n        open_ones += 1\n    elif c == ')':\n        "
            "open_ones -= 1\n"
            "        if open_ones < 0:\n            return False\nreturn open_ones == 0",
            "return open_ones == 0 => return True",
            "return False => continue",
            "open_ones < 0 => open_ones <= 0",
        ),
        (
            "depth",
            "Return how many brackets are open at most at a time; one that closes nothing does not count.",
            "depth = most = 0\nfor c in text:\n    if c == '(':\n        depth += 1\n    elif c == ')':\n        "
            "depth = max(0, depth - 1)\n"
            "    most = max(most, depth)\nreturn most",
            "return most => return depth",
            "max(0, depth - 1) => depth - 1",
            "max(most, depth) => depth",
        ),
        (
            "missing",
            "Return how many brackets must be added, anywhere, so that all are in pairs.",
            "open_ones = missing = 0\nfor c in text:\n    if c == '(':\n        open_ones += 1\n    elif c == ')' "
            "and open_ones:\n"
            "        open_ones -= 1\n    elif c == ')':\n        missing += 1\nreturn missing + open_ones",
            "missing + open_ones => missing",
            "missing + open_ones => open_ones",
            "missing += 1 => missing = 1",
        ),
        (
            "removed",
            "Return the text without its brackets and what stands in them; one that closes nothing is removed too.",
            "depth, kept = 0, ''\nfor c in text:\n    if c == '(':\n        depth += 1\n    elif c == ')':\n        "
            "depth = max(0, depth - 1)\n"
            "    elif depth == 0:\n        kept += c\nreturn kept",
            "depth == 0 => depth > 0",
            "kept += c => kept = c",
            "max(0, depth - 1) => depth - 1",
        ),
    ):
        edges = (*balanced, ("a)b(c)d(e",), ("ab(a(b)a)ba",))
        yield function(f"brackets_{name}", "text", says, body, *bugs, draw=drawn, edges=edges)
    yield function(
        "brackets_of_all_kinds",
        "text",
        "Return whether the brackets of the kinds (), [] and {} are closed in the right order.",
        "pairs = {')': '(', ']': '[', '}': '{'}\nopen_ones = []\nfor c in text:\n    if c in '([{':\n        "
        "open_ones.append(c)\n"
        "    elif not open_ones or open_ones.pop() != pairs[c]:\n        return False\nreturn not open_ones",
        "return not open_ones => return True",
        "open_ones.pop() != pairs[c] => not open_ones.pop()",
        "return False => continue",
        draw=lambda r: ("".join(r.choice("()[]{}") for _ in range(r.choice((2, 4)))),),
        edges=(("([]{})",), ("([)]",), ("((",), ("]",), ("{[()]}",), ("(]",)),
    )


def _cases() -> Iterator[Template]:
    def snake(random: Random) -> Arguments:
        return ("_".join(word(random) for _ in range(random.randint(2, 3))),)

    def camel(random: Random) -> Arguments:
        return ("".join(word(random).title() for _ in range(random.randint(2, 3))),)

    yield function(
        "snake_to_camel",
        "name",
        'Turn "two_words" into "twoWords".',
        "first, *rest = name.split('_')\nreturn first + ''.join(part.title() for part in rest)",
        "return first + => return first.title() +",
        "part.title() => part.lower()",
        "''.join => '_'.join",
        draw=snake,
    )
    yield function(
        "camel_to_snake",
        "name",
        'Turn "TwoWords" into "two_words".',
        "found = ''\nfor c in name:\n    if c.isupper() and found:\n        found += '_'\n    found += c.lower()\n"
        "return found",
        "c.isupper() and found => c.isupper()",
        "c.lower() => c",
        "c.isupper() and found => c.islower() and found",
        draw=camel,
    )
    yield function(
        "kebab",
        "text",
        "Write the words in lower case with hyphens between them.",
        "return '-'.join(text.lower().split())",
        "'-'.join => '_'.join",
        ".lower() => .upper()",
        draw=lambda r: (sentence(r).title(),),
    )
    yield function(
        "constant_case",
        "text",
        "Write the words in capital letters with underscores between them.",
        "return '_'.join(text.upper().split())",
        ".upper() => .title()",
        "'_'.join => ''.join",
        draw=_sentence,
    )
    yield function(
        "title_with_small_words",
        "text",
        'Begin each word with a capital letter, but not "of" and "the", except at the front.',
        "words = text.split()\nreturn ' '.join(w if i and w in ('of', 'the') else w.title() for i, w in "
        "enumerate(words))",
        "if i and w in => if w in",
        "('of', 'the') => ('of',)",
        "else w.title() => else w.upper()",
        draw=lambda r: (" ".join(r.choice(("the", "of", word(r), word(r))) for _ in range(5)),),
        edges=(("the tree of the king",), ("of sun and the moon",)),
    )
    yield function(
        "alternating_case",
        "text",
        "Write the characters at even places (the first is 0) in capital letters, the others in small ones.",
        "return ''.join(c.upper() if i % 2 == 0 else c.lower() for i, c in enumerate(text))",
        "i % 2 == 0 => i % 2 == 1",
        "else c.lower() => else c.upper()",
        draw=_sentence,
    )


def _parsing() -> Iterator[Template]:
    def pairs(random: Random) -> Arguments:
        names = random.sample("abcdef", random.randint(2, 4))
        return ("; ".join(f"{name} = {random.randint(0, 99)}" for name in names),)

    def version(random: Random) -> str:
        return ".".join(str(random.randint(0, 12)) for _ in range(random.randint(2, 3)))

    yield function(
        "parse_settings",
        "text",
        'Return the dictionary from names to numbers that "a = 1; b = 2" tells.',
        "found = {}\nfor part in text.split(';'):\n    name, value = part.split('=')\n    found[name.strip()] = "
        "int(value)\nreturn found",
        "name.strip() => name",
        "int(value) => value.strip()",
        "found[name.strip()] = => found = {}; found[name.strip()] =",
        draw=pairs,
    )
    yield function(
        "parse_query",
        "text",
        'Return the dictionary of a query such as "a=1&b=&a=2": a name comes with the list of its values.',
        "found = {}\nfor part in text.split('&'):\n    name, _, value = part.partition('=')\n    "
        "found.setdefault(name, []).append(value)\n"
        "return found",
        ".append(value) => .append(name)",
        "setdefault(name, []).append(value) => update({name: [value]})",
        "split('&') => split('&', 1)",
        draw=lambda r: ("&".join(f"{r.choice('abc')}={r.randint(0, 9)}" for _ in range(4)),),
        edges=(("a=1&b=&a=2",),),
    )
    yield function(
        "parse_size",
        "text",
        'Return the bytes of a size such as "3K", "2M" or "7" (K is 1024 bytes, M 1024 K).',
        "units = {'K': 1024, 'M': 1024 ** 2}\nif text[-1] in units:\n    return int(text[:-1]) * units[text[-1]]\n"
        "return int(text)",
        "1024 ** 2 => 1000 ** 2",
        "int(text[:-1]) => int(text[0])",
        "{'K': 1024 => {'K': 1000",
        draw=lambda r: (f"{r.randint(2, 99)}{r.choice(('K', 'M', ''))}",),
        edges=(("12K",), ("31M",), ("40",)),
    )
    yield function(
        "parse_csv_row",
        "text",
        "Split a row at commas, without spaces around the fields; empty fields become None.",
        "return [field.strip() or None for field in text.split(',')]",
        "field.strip() or None => field.strip()",
        "field.strip() or => field or",
        "split(',') => split(', ')",
        draw=lambda r: (", ".join(r.choice((word(r), "", word(r) + " ")) for _ in range(4)),),
        edges=(("a,, b ,c",),),
    )
    yield function(
        "newer_version",
        "a, b",
        'Return the newer of two versions such as "1.10"; parts are compared as numbers.',
        "return max(a, b, key=lambda version: [int(part) for part in version.split('.')])",
        "max(a => min(a",
        "[int(part) for part in version.split('.')] => version",
        "int(part) for => len(part) for",
        draw=lambda r: (version(r), version(r)),
        edges=(("1.9", "1.10"), ("2.0", "1.11"), ("1.2", "1.2.1"), ("0.9", "0.10")),
    )
    yield function(
        "parse_ranges",
        "text",
        'Return the numbers that "1-3,7" names: 1, 2, 3 and 7.',
        "found = []\nfor part in text.split(','):\n    first, _, last = part.partition('-')\n"
        "    found += range(int(first), int(last or first) + 1)\nreturn found",
        "int(last or first) + 1 => int(last or first)",
        "last or first => last or 0",
        "found += => found =",
        draw=lambda r: (
            ",".join(
                f"{n}-{n + k}" if k else str(n) for n, k in ((r.randint(0, 20), r.randint(0, 3)) for _ in range(3))
            ),
        ),
        edges=(("1-3,7",), ("5,8-9",)),
    )
    yield function(
        "filled_template",
        "text, values",
        'Replace each "{name}" by the value of that name; names without a value stay.',
        "for name, value in values.items():\n    text = text.replace('{' + name + '}', str(value))\nreturn text",
        "str(value) => name",
        "'{' + name + '}' => name",
        "str(value))\n    return => str(value), 1)\n    return",
        draw=lambda r: (f"{{a}} {word(r)} {{b}} {{a}} {{c}}", {"a": r.randint(1, 9), "b": word(r)}),
    )


def _substrings() -> Iterator[Template]:
    two = lambda r: (_letters(r), _letters(r)[:2])  # noqa: E731
    for name, says, body, *bugs in (
        (
            "count",
            "Return how often `part` occurs in the text; occurrences may overlap.",
            "return sum(text.startswith(part, i) for i in range(len(text)))",
            "sum(text.startswith(part, i) for i in range(len(text))) => text.count(part)",
            "range(len(text)) => range(1, len(text))",
            "text.startswith(part, i) => text.startswith(part[0], i)",
        ),
        (
            "places",
            "Return the list of all places at which `part` begins in the text.",
            "return [i for i in range(len(text)) if text[i:i + len(part)] == part]",
            "i + len(part)] => i + 1]",
            "range(len(text)) => range(len(text) - len(part))",
            "[i for => [i + 1 for",
        ),
        (
            "after",
            "Return the text behind the first `part`, or the whole text if there is none.",
            "before, found, after = text.partition(part)\nreturn after if found else before",
            "text.partition(part) => text.rpartition(part)",
            "if found else before => if found else ''",
            "return after if => return found + after if",
        ),
        (
            "without",
            "Return the text with every `part` removed, from left to right.",
            "return text.replace(part, '')",
            "replace(part, '') => replace(part, '', 1)",
            "replace(part, '') => strip(part)",
        ),
        (
            "last",
            "Return the place at which the last `part` begins, or -1.",
            "return text.rfind(part)",
            "rfind => find",
            "rfind(part) => rfind(part[0])",
        ),
    ):
        yield function(
            f"part_{name}",
            "text, part",
            says,
            body,
            *bugs,
            draw=two,
            edges=(("abbbab", "bb"), ("bbabba", "ab"), ("abcabcab", "ab"), ("aabbcc", "ca"), ("babab", "bab")),
        )
    pair = lambda r: (_letters(r), _letters(r))  # noqa: E731
    for name, says, body, *bugs in (
        (
            "prefix",
            "Return the longest text with which both begin.",
            "n = 0\nwhile n < min(len(a), len(b)) and a[n] == b[n]:\n    n += 1\nreturn a[:n]",
            "return a[:n] => return a[:n + 1]",
            "return a[:n] => return a[n:]",
            "a[n] == b[n] => a[n] in b",
        ),
        (
            "differences",
            "Return at how many places the texts differ; where one is longer, its rest counts too.",
            "return sum(x != y for x, y in zip(a, b)) + abs(len(a) - len(b))",
            " + abs(len(a) - len(b)) => ",
            "x != y => x == y",
            "abs(len(a) - len(b)) => max(len(a), len(b))",
        ),
        (
            "distance",
            "Return how many letters must be added, removed or replaced to turn `a` into `b`.",
            "row = list(range(len(b) + 1))\nfor i, x in enumerate(a, 1):\n    last, row[0] = row[0], i\n    for j, y "
            "in enumerate(b, 1):\n"
            "        last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))\nreturn row[-1]",
            "last + (x != y)) => last + 1)",
            "row[j - 1] + 1 => row[j - 1]",
            "return row[-1] => return row[0]",
        ),
        (
            "subsequence",
            "Return whether the letters of `b` occur in `a` in this order, perhaps with others between them.",
            "rest = iter(a)\nreturn all(c in rest for c in b)",
            "c in rest => c in a",
            "iter(a) => iter(a[1:])",
            "all(c => any(c",
        ),
        (
            "common",
            "Return the length of the longest text that occurs in both, without gaps.",
            "best = 0\nfor i in range(len(a)):\n    n = 1\n    while i + n <= len(a) and a[i:i + n] in b:\n        "
            "best = max(best, n)\n"
            "        n += 1\nreturn best",
            "best = max(best, n) => best = n",
            "i + n <= len(a) => i + n < len(a)",
            "range(len(a)) => range(1)",
        ),
    ):
        yield function(
            f"texts_{name}",
            "a, b",
            says,
            body,
            *bugs,
            draw=pair,
            edges=(
                ("abbc", "abcc"),
                ("abcc", "acc"),
                ("abcabc", "bca"),
                ("cab", "abc"),
                ("bbaacc", "bac"),
                ("aacbb", "cbb"),
            ),
        )


FAMILIES = {
    "ciphers": tuple(_ciphers()),
    "runs": tuple(_runs()),
    "brackets": tuple(_brackets()),
    "cases": tuple(_cases()),
    "parsing": tuple(_parsing()),
    "substrings": tuple(_substrings()),
}
