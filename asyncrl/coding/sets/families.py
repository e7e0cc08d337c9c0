"""Families of functions beyond the basic templates: what one is, and the table of them.

The functions of a family do related things; a family is held out or trained on as a whole, so that held-out tasks ask
for something that was not practised under another name. Parametrised families are written once for many functions, each
of which computes something else.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Mapping
from functools import cache

from asyncrl.environments.templates import Arguments, Draw, Template

_MODULES = ("numbers", "pipelines", "records", "text", "lists", "sequences", "structures", "classes", "machines")

HELD_OUT_FAMILIES = frozenset(
    {"digits", "intervals", "text pipelines", "brackets", "matrices", "trees", "windows", "ledgers", "cases", "routes"}
)
"""Never trained on: about a fifth of the functions, of every kind, chosen by hand; "routes" is a package."""


def function(
    name: str,
    parameters: str,
    says: str,
    body: str,
    *bugs: str,
    draw: Draw,
    edges: tuple[Arguments, ...] = (),
    above: str = "",
) -> Template:
    """Return a template; each of `bugs` is "text => text that replaces it".

    Args: `body` is the function's, not indented; `above` stands before it: a class, an import, a helper.

    Example:
        >>> double = function("double", "n", "Double it.", "return n * 2", "n * 2 => n + 2", draw=lambda r: (3,))
        >>> print(double.buggy(0))
        def double(n):
            return n + 2
        <BLANKLINE>
    """
    code = f"{above}def {name}({parameters}):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
    pairs = []
    for bug in bugs:
        old, separator, new = bug.partition(" => ")
        assert separator, bug
        assert old in code, f"{name}: {old!r} is not in the reference"
        pairs.append((old, new))
    return Template(name=name, says=says, code=code, bugs=tuple(pairs), draw=draw, edges=edges)


@cache
def families() -> Mapping[str, tuple[Template, ...]]:
    """Return the functions of every family, by the family's name."""
    found: dict[str, tuple[Template, ...]] = {}
    for name in _MODULES:
        module = importlib.import_module(f"asyncrl.coding.sets.families_{name}")
        found.update(module.FAMILIES)
    return found


@cache
def family_of() -> Mapping[str, str]:
    """Return the family of every function, by the function's name."""
    return {template.name: family for family, templates in families().items() for template in templates}
