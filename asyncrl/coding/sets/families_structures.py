"""Families over structures: matrices, grids, graphs as dictionaries, trees as lists."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from asyncrl.coding.sets.families import function
from asyncrl.environments.templates import Arguments, Template


def _matrix(random: Random, rows: int, columns: int) -> list[list[int]]:
    return [[random.randint(-5, 9) for _ in range(columns)] for _ in range(rows)]


def _square(random: Random) -> Arguments:
    return (_matrix(random, (n := random.randint(2, 4)), n),)


def _any(random: Random) -> Arguments:
    return (_matrix(random, random.randint(2, 3), random.randint(2, 4)),)


def _matrices() -> Iterator[Template]:
    edge = (([[1, 2], [3, 4]],), ([[2, 7, 1], [0, 5, 3], [4, 4, 6]],), ([[1, 5], [5, 2]],))
    for name, says, body, *bugs in (
        (
            "transposed",
            "Return the matrix with rows and columns exchanged.",
            "return [list(column) for column in zip(*m)]",
            "zip(*m) => zip(*m[::-1])",
            "list(column) for => list(column)[::-1] for",
        ),
        (
            "row_sums",
            "Return the list of the sums of the rows.",
            "return [sum(row) for row in m]",
            "in m] => in zip(*m)]",
            "sum(row) => max(row)",
        ),
        (
            "column_sums",
            "Return the list of the sums of the columns.",
            "return [sum(column) for column in zip(*m)]",
            "in zip(*m)] => in m]",
            "sum(column) => column[0]",
        ),
        (
            "turned",
            "Return the matrix turned by 90 degrees, clockwise.",
            "return [list(row) for row in zip(*m[::-1])]",
            "m[::-1] => m",
            "*m[::-1] => *[r[::-1] for r in m]",
        ),
        (
            "total",
            "Return the sum of all elements.",
            "return sum(sum(row) for row in m)",
            "sum(sum(row) => sum(max(row)",
            "sum(sum(row) => max(sum(row)",
        ),
        (
            "spiral",
            "Return the elements in a spiral: the first row, then down the last column, and so on inwards.",
            "found = []\nm = [list(row) for row in m]\nwhile m:\n    found += m.pop(0)\n    m = [list(row) for row "
            "in zip(*m)][::-1]\nreturn found",
            "zip(*m)][::-1] => zip(*m)]",
            "m.pop(0) => m.pop()",
        ),
    ):
        yield function(f"matrix_{name}", "m", says, body, *bugs, draw=_any, edges=edge)
    for name, says, body, *bugs in (
        (
            "trace",
            "Return the sum of the elements from the top left to the bottom right.",
            "return sum(m[i][i] for i in range(len(m)))",
            "m[i][i] => m[i][-1 - i]",
            "range(len(m)) => range(1, len(m))",
        ),
        (
            "other_diagonal",
            "Return the list of the elements from the top right to the bottom left.",
            "return [m[i][-1 - i] for i in range(len(m))]",
            "m[i][-1 - i] => m[i][i]",
            "m[i][-1 - i] => m[-1 - i][i]",
        ),
        (
            "is_symmetric",
            "Return whether exchanging rows and columns changes nothing.",
            "return m == [list(c) for c in zip(*m)]",
            "m == [ => m != [",
            "zip(*m)] => zip(*m[::-1])]",
        ),
        (
            "upper",
            "Return the matrix with all elements below the diagonal set to 0.",
            "return [[x if j >= i else 0 for j, x in enumerate(row)] for i, row in enumerate(m)]",
            "j >= i => j > i",
            "j >= i => j <= i",
        ),
        (
            "squared",
            "Return the matrix product of the matrix with itself.",
            "n = range(len(m))\nreturn [[sum(m[i][k] * m[k][j] for k in n) for j in n] for i in n]",
            "m[i][k] * m[k][j] => m[i][k] * m[j][k]",
            "m[i][k] * m[k][j] => m[i][j] * m[i][j]",
            "m[i][k] * m[k][j] for => m[i][k] + m[k][j] for",
        ),
        (
            "border",
            "Return the sum of the elements in the first and last row and column, each once.",
            "last = len(m) - 1\nreturn sum(x for i, row in enumerate(m) for j, x in enumerate(row) if {i, j} & {0, "
            "last})",
            "{0, last} => {0}",
            "{i, j} & => {i} &",
        ),
    ):
        yield function(f"square_{name}", "m", says, body, *bugs, draw=_square, edges=edge)


def _field(random: Random) -> list[str]:
    width = random.randint(3, 5)
    return ["".join(random.choice("##..o") for _ in range(width)) for _ in range(random.randint(3, 4))]


def _grids() -> Iterator[Template]:
    edge = (["#.o#", "..##", "o#..", "#..#"],)
    at = lambda r: ((f := _field(r)), r.randrange(len(f)), r.randrange(len(f[0])))  # noqa: E731
    inside = "0 <= r < len(grid) and 0 <= c < len(grid[0])"
    for number, steps in (
        (4, "((0, 1), (1, 0), (0, -1), (-1, 0))"),
        (8, "[(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]"),
    ):
        sides = "beside, above or below" if number == 4 else "around"
        yield function(
            f"walls_around_{number}",
            "grid, row, column",
            f'Return how many of the {number} places {sides} the given one are walls ("#").',
            f"found = 0\nfor a, b in {steps}:\n    r, c = row + a, column + b\n    if {inside} and grid[r][c] == "
            f"'#':\n        found += 1\nreturn found",
            "0 <= r < len(grid) and => r < len(grid) and",
            "== '#' => != '#'",
            "column + b => column - a",
            draw=at,
            edges=((edge[0], 0, 0), (edge[0], 0, 3), (edge[0], 3, 1), (edge[0], 1, 2)),
        )
        yield function(
            f"region_{number}",
            "grid, row, column",
            f"Return how many places can be reached from the given one, which counts, without walls"
            f' ("#"), by steps to the {number} places {sides} each; 0 from a wall.',
            f"seen, left = set(), [(row, column)]\nwhile left:\n    r, c = left.pop()\n    if {inside} and "
            f"grid[r][c] != '#' and (r, c) not in seen:\n"
            f"        seen.add((r, c))\n        left += [(r + a, c + b) for a, b in {steps}]\nreturn len(seen)",
            "grid[r][c] != '#' and => grid[r][c] == '.' and",
            "left += [ => left = [",
            "return len(seen) => return len(seen) + 1",
            draw=at,
            edges=((edge[0], 0, 1), (edge[0], 3, 2), (edge[0], 0, 0), (["oo.", ".o#", "..o"], 0, 0)),
        )
    for name, says, body, *bugs in (
        (
            "count",
            'Return how many places hold "o".',
            "return sum(row.count('o') for row in grid)",
            "sum( => max(",
            "'o' => '.'",
        ),
        (
            "first",
            'Return [row, column] of the first "o", row by row, or None.',
            "for r, row in enumerate(grid):\n    if 'o' in row:\n        return [r, row.index('o')]\nreturn None",
            "[r, row.index('o')] => [row.index('o'), r]",
            "row.index => row.rindex",
            "return None => return []",
        ),
        (
            "dropped",
            'Let every "o" fall down through "." until something is below it; return the rows.',
            "columns = []\nfor column in zip(*grid):\n    parts = [''.join(sorted(p)) for p in "
            "''.join(column).split('#')]\n    columns.append('#'.join(parts))\n"
            "return [''.join(row) for row in zip(*columns)]",
            "sorted(p) => sorted(p, reverse=True)",
            ".split('#') => .split('o')",
        ),
        (
            "mirrored",
            "Return the rows mirrored from left to right.",
            "return [row[::-1] for row in grid]",
            "row[::-1] for row in grid => row for row in grid[::-1]",
            "[::-1] => [::1]",
        ),
        (
            "open_rows",
            'Return the numbers of the rows (from 0 on) without a wall ("#").',
            "return [r for r, row in enumerate(grid) if '#' not in row]",
            "not in => in",
            "enumerate(grid) => enumerate(grid, 1)",
        ),
    ):
        yield function(
            f"field_{name}",
            "grid",
            f"{says} The grid is a list of texts.",
            body,
            *bugs,
            draw=lambda r: (_field(r),),
            edges=(edge, (["...", ".o.", "oo."],), (["##", "#."],)),
        )


def _graph(random: Random) -> dict[str, list[str]]:
    names = "abcdef"[: random.randint(4, 6)]
    return {name: sorted(random.sample([n for n in names if n != name], random.randint(0, 2))) for name in names}


def _graphs() -> Iterator[Template]:
    edge = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": [], "e": ["d", "f"], "f": []}
    two = lambda r: ((g := _graph(r)), *r.sample(sorted(g), 2))  # noqa: E731
    for name, says, body, *bugs in (
        (
            "sinks",
            "the sorted names from which nothing goes on",
            "return sorted(n for n in graph if not graph[n])",
            "if not graph[n] => if graph[n]",
        ),
        (
            "sources",
            "the sorted names to which nothing leads",
            "reached = {m for n in graph for m in graph[n]}\nreturn sorted(set(graph) - reached)",
            "set(graph) - reached => reached",
            "set(graph) - reached => n for n in graph if not graph[n]",
        ),
        (
            "in_degrees",
            "a dictionary from each name to how many lead to it",
            "return {n: sum(n in graph[m] for m in graph) for n in graph}",
            "sum(n in graph[m] for m in graph) => len(graph[n])",
            "n in graph[m] => n not in graph[m]",
        ),
        (
            "reversed",
            "the graph with all directions turned round; the lists are sorted",
            "return {n: sorted(m for m in graph if n in graph[m]) for n in graph}",
            "if n in graph[m] => if m in graph[n]",
        ),
        (
            "mutual",
            "the sorted pairs [x, y], x before y, of names that lead to each other",
            "return sorted([n, m] for n in graph for m in graph[n] if n in graph[m] and n < m)",
            "n in graph[m] and n < m => n < m",
            " and n < m => ",
        ),
        (
            "has_cycle",
            "whether one can come back to a name by going on from it",
            "left = dict(graph)\nwhile True:\n    ends = [n for n in left if not any(m in left for m in left[n])]\n  "
            "  if not ends:\n        return bool(left)\n    for n in ends:\n        del left[n]",
            "return bool(left) => return True",
            "return bool(left) => return not left",
        ),
    ):
        yield function(
            f"graph_{name}",
            "graph",
            f"Return {says}. The graph is a dictionary from each name to the names that it leads to.",
            body,
            *bugs,
            draw=lambda r: (_graph(r),),
            edges=((edge,), ({"a": ["b"], "b": ["a"], "c": ["a"]},), ({"a": ["b", "c"], "b": ["c"], "c": []},)),
        )
    for name, says, body, *bugs in (
        (
            "reaches",
            "whether one can go from `start` to `goal`, in any number of steps, also none",
            "seen, left = set(), [start]\nwhile left:\n    n = left.pop()\n    if n not in seen:\n        "
            "seen.add(n)\n        left += graph[n]\nreturn goal in seen",
            "left += graph[n] => left = list(graph[n])",
            "return goal in seen => return goal in graph[start]",
            "return goal in seen => return goal in graph",
        ),
        (
            "distance",
            "the least number of steps from `start` to `goal`, or -1",
            "layer, seen, steps = [start], {start}, 0\nwhile layer:\n    if goal in layer:\n        return steps\n   "
            " layer = [m for n in layer for m in graph[n] if m not in seen]\n    seen.update(layer)\n    steps += 1\n"
            "return -1",
            "return -1 => return steps",
            "steps += 1 => steps += len(layer)",
            "}, 0 => }, 1",
        ),
        (
            "common_next",
            "the sorted names to which both `start` and `goal` lead",
            "return sorted(set(graph[start]) & set(graph[goal]))",
            "& => |",
            "graph[goal] => graph[start]",
        ),
    ):
        yield function(
            f"graph_{name}",
            "graph, start, goal",
            f"Return {says}. The graph is a dictionary from each name to the names that it leads to.",
            body,
            *bugs,
            draw=two,
            edges=(
                (edge, "a", "d"),
                (edge, "d", "a"),
                (edge, "b", "e"),
                (edge, "c", "d"),
                (edge, "e", "b"),
                (edge, "a", "c"),
            ),
        )


def _tree(random: Random, depth: int = 0) -> list[object]:
    children = (
        [] if depth == 3 else [_tree(random, depth + 1) for _ in range(random.choice((0, 1, 2) if depth else (2, 3)))]
    )
    return [random.randint(-5, 9), *children]


def _trees() -> Iterator[Template]:
    edge = ([1, [-2, [3], [4, [5]]], [6], [7, [-8]]],)
    for name, says, body, *bugs in (
        (
            "size",
            "how many nodes the tree has",
            "return 1 + sum(tree_size(child) for child in tree[1:])",
            "1 + sum => sum",
            "tree[1:] => tree[2:]",
        ),
        (
            "sum",
            "the sum of all values",
            "return tree[0] + sum(tree_sum(child) for child in tree[1:])",
            "tree[0] + => 1 +",
            "tree[1:] => tree[1:2]",
        ),
        (
            "height",
            "the number of nodes on the longest way down",
            "return 1 + max((tree_height(child) for child in tree[1:]), default=0)",
            "max((tree_height(child) for child in tree[1:]), default=0) => sum(tree_height(child) for child in "
            "tree[1:])",
            "default=0 => default=1",
        ),
        (
            "leaves",
            "the values of the nodes without children, from left to right",
            "if len(tree) == 1:\n    return [tree[0]]\nreturn [value for child in tree[1:] for value in "
            "tree_leaves(child)]",
            "in tree[1:] for => in tree[:0:-1] for",
            "tree[1:] for => tree[2:] for",
        ),
        (
            "preorder",
            "all values, each before those of its children",
            "return [tree[0]] + [value for child in tree[1:] for value in tree_preorder(child)]",
            "in tree[1:] for => in tree[:0:-1] for",
            "[tree[0]] + [ => [",
        ),
        (
            "postorder",
            "all values, each after those of its children",
            "return [value for child in tree[1:] for value in tree_postorder(child)] + [tree[0]]",
            "in tree[1:] for => in tree[:0:-1] for",
            " + [tree[0]] => + []",
        ),
        (
            "best_way",
            "the largest sum of values on a way from the root down to a node without children",
            "return tree[0] + max((tree_best_way(child) for child in tree[1:]), default=0)",
            "max(( => min((",
            "tree[0] + => abs(tree[0]) +",
        ),
        (
            "levels",
            "the list of how many nodes there are on each level, from the root down",
            "counts, level = [], [tree]\nwhile level:\n    counts.append(len(level))\n    level = [child for node in "
            "level for child in node[1:]]\nreturn counts",
            "for child in node[1:]] => for child in node[1:2]]",
            "len(level)) => sum(n[0] for n in level))",
        ),
        (
            "mirrored",
            "the tree with the children of every node in reverse order",
            "return [tree[0]] + [tree_mirrored(child) for child in tree[:0:-1]]",
            "tree[:0:-1] => tree[1:]",
            "tree_mirrored(child) for => child for",
        ),
        (
            "doubled",
            "the tree with all values doubled",
            "return [2 * tree[0]] + [tree_doubled(child) for child in tree[1:]]",
            "2 * tree[0] => tree[0] ** 2",
            "tree_doubled(child) for => child for",
        ),
        (
            "largest",
            "the largest value",
            "return max([tree[0]] + [tree_largest(child) for child in tree[1:]])",
            "tree_largest(child) for => child[0] for",
            "max([tree[0]] + => max([0] +",
        ),
    ):
        yield function(
            f"tree_{name}",
            "tree",
            f"Return {says}. A tree is a list: its value, then its children, which are trees.",
            body,
            *bugs,
            draw=lambda r: (_tree(r),),
            edges=(edge, ([-3, [-1, [-9]], [-2]],), ([0, [1, [2, [9]]], [3]],)),
        )


FAMILIES = {
    "matrices": tuple(_matrices()),
    "grids": tuple(_grids()),
    "graphs": tuple(_graphs()),
    "trees": tuple(_trees()),
}
