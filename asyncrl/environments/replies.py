"""Reads the agent's code out of its reply, and says to a teacher what a good one holds."""

from __future__ import annotations

import ast
import re
import warnings

_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def extract_code(text: str, function: str) -> str | None:
    """Return the source of the first complete `function` in a fenced block of `text`, or in bare text; None without.

    Imports and other functions of the same block are kept; statements that would run something are not.
    """
    for block in [*_FENCE.findall(text), text]:
        code = _definitions(block, function)
        if code is not None:
            return code
    return None


def fenced(code: str) -> str:
    """Return the reply that is just `code` in a fenced block: what `extract_code` reads back."""
    return f"```python\n{code.strip()}\n```"


def solution_note(reference: str) -> str:
    """Return the words in which a teacher is told the solution `reference`."""
    return f"This is correct:\n{fenced(reference)}"


def _definitions(block: str, function: str) -> str | None:
    tree = _parse(block)
    if tree is None:
        block = _first_function(block, function)
        tree = _parse(block)
    if tree is None:
        return None
    kept: list[ast.stmt] = []
    found = False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            if found:
                continue
            found = True
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)):
            continue
        kept.append(node)
    if not found:
        return None
    try:
        return "\n".join(map(ast.unparse, kept)) + "\n"
    except RecursionError:
        return None


def _first_function(block: str, function: str) -> str:
    # The lines of the function alone, without a last line that was cut off; empty where it is not there.
    lines = block.split("\n")
    starts = [i for i, line in enumerate(lines) if re.match(rf"def {re.escape(function)}\s*\(", line)]
    if not starts:
        return ""
    body = [lines[starts[0]]]
    for line in lines[starts[0] + 1 :]:
        if line.strip() and not line[0].isspace():
            break
        body.append(line)
    while len(body) > 1 and _parse("\n".join(body)) is None:
        body.pop()
    return "\n".join(body)


def _parse(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the agent wrote is not ours to warn about
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
