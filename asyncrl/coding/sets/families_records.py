"""Families over dictionaries: records that are filtered and summed up, counts and groups, ledgers, nested settings."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Template, word

_CITIES = ("Bonn", "Lyon", "Oslo", "Rome")
_KINDS = ("book", "lamp", "pen")


def _people(random: Random) -> list[dict[str, object]]:
    return [
        {"name": name, "age": random.randint(5, 80), "city": random.choice(_CITIES), "active": random.random() < 0.6}
        for name in random.sample(("Ann", "Bob", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal"), random.randint(4, 6))
    ]


def _records(random: Random) -> Arguments:
    return (_people(random),)


_EDGE = [
    {"name": "Zoe", "age": 18, "city": "Oslo", "active": True},
    {"name": "Abe", "age": 17, "city": "Oslo", "active": False},
    {"name": "Kim", "age": 66, "city": "Rome", "active": True},
    {"name": "Lea", "age": 65, "city": "Lyon", "active": False},
    {"name": "Bea", "age": 40, "city": "Rome", "active": True},
    {"name": "Cem", "age": 41, "city": "Oslo", "active": True},
]


def _of_records() -> Iterator[Template]:
    wanted = (
        ("adults", "who are 18 or older", "p['age'] >= 18", "p['age'] > 18"),
        ("active", "who are active", "p['active']", "not p['active']"),
        ("elsewhere", "who do not live in Oslo", "p['city'] != 'Oslo'", "p['city'] == 'Oslo'"),
        (
            "working",
            "who are from 18 to 65 years old and active",
            "18 <= p['age'] <= 65 and p['active']",
            "p['age'] <= 65",
        ),
    )
    results = (
        (
            "names",
            "the names, sorted, of the people",
            "sorted(p['name'] for p in chosen)",
            "sorted(p['city'] for p in chosen)",
        ),
        ("ages", "the summed ages of the people", "sum(p['age'] for p in chosen)", "max(p['age'] for p in chosen)"),
        (
            "oldest",
            "the name of the oldest of the people",
            "max(chosen, key=lambda p: p['age'])['name']",
            "min(chosen, key=lambda p: p['age'])['name']",
        ),
        (
            "by_city",
            "a dictionary from city to how many live there, of the people",
            "{city: sum(p['city'] == city for p in chosen) for city in {p['city'] for p in chosen}}",
            "{p['city']: p['age'] for p in chosen}",
        ),
        ("share", "the share (0 to 1) of the people", "len(chosen) / len(people)", "len(people) / len(chosen)"),
        (
            "first_letters",
            "the first letters of the names, in order, as one text, of the people",
            "''.join(p['name'][0] for p in chosen)",
            "''.join(p['name'][-1] for p in chosen)",
        ),
    )
    for choose, who, test, wrong_test in wanted:
        for result, what, value, wrong in results:
            if (choose, result) == ("adults", "oldest"):  # whom those of exactly 18 do not change
                wrong_test = "p['age'] < 18"
            yield function(
                f"{result}_of_{choose}",
                "people",
                f'Return {what} {who}. Each is a dictionary with "name", "age", "city" and "active".',
                f"chosen = [p for p in people if {test}]\nreturn {value}",
                f"if {test}] => if {wrong_test}]",
                f"return {value} => return {wrong}",
                draw=lambda r: ([*_people(r), *r.sample(_EDGE, 3)],),
                edges=((_EDGE,), (_EDGE[::-1],)),
            )


def _words(random: Random) -> Arguments:
    return ([word(random) for _ in range(random.randint(5, 8))],)


def _counts(random: Random) -> dict[str, int]:
    return {name: random.randint(1, 9) for name in random.sample("abcdef", random.randint(3, 4))}


def _groups() -> Iterator[Template]:
    edge = (["ice", "apple", "ant", "bird", "ice", "bat", "apple", "ice"],)
    for name, says, key, wrong in (
        ("letter", "first letter", "w[0]", "w[-1]"),
        ("length", "length", "len(w)", "w[0]"),
        ("vowels", "number of vowels", "sum(c in 'aeiou' for c in w)", "len(w)"),
        ("last", "last letter", "w[-1]", "w[0]"),
    ):
        yield function(
            f"group_by_{name}",
            "words",
            f"Return a dictionary from each {says} to the list of the words with it, in order.",
            f"groups = {{}}\nfor w in words:\n    groups.setdefault({key}, []).append(w)\nreturn groups",
            f"setdefault({key}, => setdefault({wrong},",
            ".append(w) => .insert(0, w)",
            draw=_words,
            edges=(edge,),
        )
        yield function(
            f"count_by_{name}",
            "words",
            f"Return a dictionary from each {says} to how many different words have it.",
            f"counts = {{}}\nfor w in set(words):\n    counts[{key}] = counts.get({key}, 0) + 1\nreturn counts",
            f"counts.get({key}, 0) + 1 => counts.get({key}, 1) + 1",
            "set(words) => words",
            "+ 1 => + len(w)",
            draw=lambda r: ([*(chosen := _words(r)[0]), r.choice(chosen)],),
            edges=(edge,),
        )
    two = lambda r: (_counts(r), _counts(r))  # noqa: E731
    for name, says, body, *bugs in (
        (
            "added",
            "Add the numbers of both dictionaries; a key that one of them lacks counts 0 there.",
            "return {key: a.get(key, 0) + b.get(key, 0) for key in {*a, *b}}",
            "{*a, *b} => a",
            "a.get(key, 0) + b => a.get(key, 1) + b",
            "a.get(key, 0) + b => a.get(key, 0) - b",
        ),
        (
            "common",
            "Return the keys of both dictionaries, sorted.",
            "return sorted(key for key in a if key in b)",
            "key in b) => key not in b)",
            "sorted(key for => list(key for",
        ),
        (
            "kept",
            "Return the first dictionary without the keys of the second.",
            "return {key: value for key, value in a.items() if key not in b}",
            "not in b => in b",
            "a.items() => b.items()",
        ),
        (
            "larger",
            "Return the larger number of each key that either dictionary has.",
            "return {key: max(a.get(key, 0), b.get(key, 0)) for key in [*a, *b]}",
            "max( => min(",
            "[*a, *b] => [*a]",
        ),
        (
            "changed",
            "Return the sorted keys whose numbers differ, or that only one dictionary has.",
            "return sorted(key for key in {*a, *b} if a.get(key) != b.get(key))",
            "a.get(key) != b.get(key) => a.get(key, 0) < b.get(key, 0)",
            "{*a, *b} => a",
        ),
    ):
        yield function(
            f"counts_{name}",
            "a, b",
            says,
            body,
            *bugs,
            draw=two,
            edges=(({"b": 3, "a": 1, "e": 5}, {"c": 2, "a": 4, "b": 3}),),
        )
    for name, says, body, *bugs in (
        (
            "inverted",
            "Return a dictionary from each number to the sorted list of the keys that have it.",
            "found = {}\nfor key in sorted(data):\n    found.setdefault(data[key], []).append(key)\nreturn found",
            "sorted(data) => sorted(data, reverse=True)",
            "setdefault(data[key], []) => setdefault(key, [])",
        ),
        (
            "top_two",
            "Return the two keys with the largest numbers, the largest first; of equals the alphabetically first.",
            "return sorted(data, key=lambda key: (-data[key], key))[:2]",
            "-data[key], key => data[key], key",
            "[:2] => [1:3]",
            "[:2] => [:1]",
        ),
        (
            "shares",
            "Return each number as its share of the sum of all.",
            "total = sum(data.values())\nreturn {key: value / total for key, value in data.items()}",
            "value / total => value / len(data)",
            "sum(data.values()) => max(data.values())",
        ),
        (
            "ranked",
            "Return a list of [key, number], by number from small to large, of equals by key.",
            "return sorted(([key, value] for key, value in data.items()), key=lambda pair: (pair[1], pair[0]))",
            "(pair[1], pair[0]) => (pair[0], pair[1])",
            "(pair[1], pair[0]) => (-pair[1], pair[0])",
            "[key, value] => [value, key]",
        ),
    ):
        yield function(
            f"data_{name}",
            "data",
            says,
            body,
            *bugs,
            draw=lambda r: (_counts(r),),
            edges=(({"d": 2, "a": 2, "c": 7, "b": 1},), ({"b": 4, "a": 4, "c": 4},)),
        )


def _entries(random: Random) -> Arguments:
    return (
        [
            {"item": random.choice(_KINDS), "amount": random.randint(1, 5), "price": random.randint(2, 20)}
            for _ in range(random.randint(4, 6))
        ],
    )


def _ledgers() -> Iterator[Template]:
    edge = (
        [
            {"item": "pen", "amount": 3, "price": 2},
            {"item": "lamp", "amount": 1, "price": 20},
            {"item": "pen", "amount": 2, "price": 5},
            {"item": "book", "amount": 10, "price": 1},
        ],
    )
    held = 'Each order is a dictionary with "item", "amount" and "price" (of one).'
    for name, says, body, *bugs in (
        (
            "revenue",
            "Return the sum of amount times price.",
            "return sum(o['amount'] * o['price'] for o in orders)",
            "o['amount'] * o['price'] => o['amount'] + o['price']",
            "o['amount'] * o['price'] => o['price']",
        ),
        (
            "revenue_by_item",
            "Return a dictionary from item to the sum of amount times price.",
            "found = {}\nfor o in orders:\n    found[o['item']] = found.get(o['item'], 0) + o['amount'] * "
            "o['price']\nreturn found",
            "found.get(o['item'], 0) + o['amount'] => o['amount']",
            "o['amount'] * o['price'] => o['price']",
        ),
        (
            "largest",
            "Return the item of the order that is worth most (amount times price), of equals the first.",
            "return max(orders, key=lambda o: o['amount'] * o['price'])['item']",
            "o['amount'] * o['price'] => o['amount']",
            "max(orders => min(orders",
        ),
        (
            "bulk",
            "Return the orders of at least three pieces, with a price lowered by one.",
            "return [{**o, 'price': o['price'] - 1} for o in orders if o['amount'] >= 3]",
            ">= 3 => > 3",
            "'price': o['price'] - 1} => 'price': o['price']}",
            "{**o, 'price' => {'price'",
        ),
        (
            "mean_price",
            "Return the mean price of a piece: the sum of amount times price, divided by the pieces.",
            "pieces = sum(o['amount'] for o in orders)\nreturn sum(o['amount'] * o['price'] for o in orders) / pieces",
            "sum(o['amount'] for o in orders) => len(orders)",
            "o['amount'] * o['price'] => o['price']",
        ),
        (
            "running",
            "Return the list of the worth of all orders so far, after each.",
            "total, found = 0, []\nfor o in orders:\n    total += o['amount'] * o['price']\n    found.append(total)\n"
            "return found",
            "total += => total =",
            "found.append(total) => found.append(o['price'])",
            "total, found = 0 => total, found = 1",
        ),
        (
            "stock",
            "Return what is left of a stock of 10 pieces of each item that is ordered; never below 0.",
            "left = {}\nfor o in orders:\n    left[o['item']] = max(0, left.get(o['item'], 10) - o['amount'])\n"
            "return left",
            "left.get(o['item'], 10) => 10",
            "max(0, => min(9,",
            "- o['amount'] => - o['price']",
        ),
    ):
        yield function(f"orders_{name}", "orders", f"{says} {held}", body, *bugs, draw=_entries, edges=(edge,))


def _settings(random: Random, depth: int = 0) -> dict[str, object]:
    made: dict[str, object] = {}
    for name in random.sample("abcde", random.randint(2, 3)):
        made[name] = _settings(random, depth + 1) if depth < 2 and random.random() < 0.5 else random.randint(-9, 9)
    return made


def _nested() -> Iterator[Template]:
    edge = {"a": 1, "b": {"c": -2, "d": {"e": 3, "a": 0}}, "e": {"a": 7}}
    for name, says, body, *bugs in (
        (
            "total",
            "Return the sum of all numbers.",
            "return sum(settings_total(v) if isinstance(v, dict) else v for v in data.values())",
            "else v for => else 1 for",
            "settings_total(v) if => len(v) if",
        ),
        (
            "leaves",
            "Return how many numbers there are.",
            "return sum(settings_leaves(v) if isinstance(v, dict) else 1 for v in data.values())",
            "else 1 for => else v for",
            "settings_leaves(v) if => 1 if",
        ),
        (
            "paths",
            'Return the sorted list of the paths of all numbers, such as "a.b".',
            "found = []\nfor key, value in data.items():\n    if isinstance(value, dict):\n"
            "        found += [f'{key}.{path}' for path in settings_paths(value)]\n    else:\n        "
            "found.append(key)\n"
            "return sorted(found)",
            "f'{key}.{path}' => path",
            "found += => found =",
            "found.append(key) => found.append(str(value))",
        ),
        (
            "flat",
            'Return one dictionary from paths such as "a/b" to numbers.',
            "found = {}\nfor key, value in data.items():\n    if isinstance(value, dict):\n"
            "        found.update({f'{key}/{path}': n for path, n in settings_flat(value).items()})\n    else:\n"
            "        found[key] = value\nreturn found",
            "f'{key}/{path}' => f'{path}/{key}'",
            "found[key] = value => found[key] = str(value)",
            "f'{key}/{path}': n => path: n",
        ),
        (
            "depth",
            "Return how deep dictionaries lie in each other: 1 where there are only numbers.",
            "return 1 + max((settings_depth(v) for v in data.values() if isinstance(v, dict)), default=0)",
            "return 1 + => return",
            "default=0 => default=1",
            "max(( => sum((".replace("sum((", "max(("),
        ),
        (
            "doubled",
            "Return the same dictionaries with all numbers doubled.",
            "return {key: settings_doubled(v) if isinstance(v, dict) else 2 * v for key, v in data.items()}",
            "2 * v => v ** 2",
            "settings_doubled(v) if => v if",
        ),
        (
            "positive",
            "Return the same dictionaries without the numbers that are not positive.",
            "found = {}\nfor key, value in data.items():\n    if isinstance(value, dict):\n        found[key] = "
            "settings_positive(value)\n"
            "    elif value > 0:\n        found[key] = value\nreturn found",
            "value > 0 => value < 0",
            "found[key] = settings_positive(value) => found[key] = value",
            "value > 0 => value >= 0",
        ),
    ):
        bugs = [bug for bug in bugs if bug.partition(" => ")[0] != bug.partition(" => ")[2]]
        yield function(
            f"settings_{name}",
            "data",
            f"{says} The values are numbers, or such dictionaries.",
            body,
            *bugs,
            draw=lambda r: (_settings(r),),
            edges=((edge,), ({"x": {"y": {"z": -1, "w": 2}}, "v": 4},)),
        )
    yield function(
        "deep_get",
        "data, path, default",
        "Return what lies at the path, a list of keys, or `default` if it is not there.",
        "for key in path:\n    if not isinstance(data, dict) or key not in data:\n        return default\n    data = "
        "data[key]\n"
        "return data",
        "return default => return None",
        "key not in data => key in data",
        "return data => return key",
        draw=lambda r: (_settings(r), r.choices("abcde", k=r.randint(1, 3)), r.randint(90, 99)),
        edges=((edge, ["b", "c"], 95), (edge, ["a", "x"], 96), (edge, ["z"], 97), (edge, ["b", "d", "e"], 98)),
    )
    yield function(
        "deep_merge",
        "a, b",
        "Merge `b` into `a`: dictionaries that both have are merged, else the value of `b` counts.",
        "merged = dict(a)\nfor key, value in b.items():\n    both = isinstance(value, dict) and "
        "isinstance(a.get(key), dict)\n"
        "    merged[key] = deep_merge(a[key], value) if both else value\nreturn merged",
        "deep_merge(a[key], value) if both => deep_merge(value, a[key]) if both",
        "dict(a) => {}",
        "if both else value => if both else a.get(key)",
        draw=lambda r: (_settings(r), _settings(r)),
        edges=((edge, {"b": {"c": 5, "x": 6}, "e": 1}), ({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}})),
    )


FAMILIES = {
    "people": tuple(_of_records()),
    "groups and counts": tuple(_groups()),
    "ledgers": tuple(_ledgers()),
    "nested dictionaries": tuple(_nested()),
}
