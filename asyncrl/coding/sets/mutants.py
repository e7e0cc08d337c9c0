"""One-edit changes of a Python function, each a mistake that people make; the text around the edit stays as it is.

Which of them are bugs that tests see, only running them tells (`mutation_checks`).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

RULES = 1
"""Raised when a source has other mutants than before; what was found out about them is then void."""

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.FloorDiv,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLS = {
    name: other
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("append", "extend"),
        ("lower", "upper"),
        ("startswith", "endswith"),
        ("find", "rfind"),
        ("lstrip", "rstrip"),
        ("floor", "ceil"),
        ("keys", "values"),
        ("isalpha", "isalnum"),
        ("add", "discard"),
    )
    for name, other in (pair, pair[::-1])
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A source with one edit."""

    kind: str
    """Which kind of mistake it is."""
    line: int
    """From 1 on, of the edit."""
    source: str


def mutants(source: str, function: str) -> list[Mutant]:
    """Return every mutant of a function of `source`, each text once; the same source has always the same.

    Args: `function` may have dots, for a method. They come one of each kind in turn, in an order that the source's hash
    gives, so that the first few are as different as they can be.
    Raises: ValueError where the source has no such function or cannot be parsed.

    Example:
        >>> found = mutants("def double(x):\\n    return x * 2\\n", "double")
        >>> sorted({mutant.kind for mutant in found})
        ['arithmetic', 'constant', 'return']
        >>> print(next(mutant.source for mutant in found if mutant.kind == "arithmetic"))
        def double(x):
            return x + 2
        <BLANKLINE>
    """
    target = find_function(source, function)
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    by_kind: dict[str, list[Mutant]] = {}
    seen = {source}
    for kind, node, text in _edits(target):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        mutated = (data[:begin] + text.encode() + data[end:]).decode()
        if mutated not in seen and _parses(mutated):
            seen.add(mutated)
            by_kind.setdefault(kind, []).append(Mutant(kind=kind, line=node.lineno, source=mutated))
    random = Random(hashlib.sha256(f"{RULES}/{function}/{source}".encode()).hexdigest())
    queues = [random.sample(found, len(found)) for _, found in sorted(by_kind.items())]
    random.shuffle(queues)
    ordered: list[Mutant] = []
    while queues:
        ordered += [queue.pop() for queue in queues]
        queues = [queue for queue in queues if queue]
    return ordered


def find_function(source: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return a function of a module, or a method. Raises: ValueError."""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    *classes, last = name.split(".")
    for wanted in classes:
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == wanted), None)
        body = found.body if found is not None else []
    for node in reversed(body):  # the last definition is the one that counts
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == last:
            return node
    raise ValueError(f"there is no function {name!r}")


def functions_of(source: str) -> list[str]:
    """Return the names of a module's functions and methods, special ones left out. Raises: ValueError."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    names = []
    for node in tree.body:
        for name, one in (
            [("", node)] if not isinstance(node, ast.ClassDef) else [(node.name + ".", n) for n in node.body]
        ):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("__"):
                names.append(name + one.name)
    return list(dict.fromkeys(names))


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


# --- edits: (kind, what is replaced, its new text) ------------------------------------------------------------

_Edit = tuple[str, ast.AST, str]


def _edits(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Edit]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # what it says it does
        body = body[1:]
    names = _locals(function)
    for statement in body:
        for node in _walk(statement):
            yield from _of_expression(node, names)
            yield from _of_statement(node)


def _of_expression(node: ast.AST, names: list[str]) -> Iterator[_Edit]:
    match node:
        case ast.Compare(left=left, ops=operators, comparators=right):
            for index, operator in enumerate(operators):
                for new in _COMPARISONS[type(operator)]:
                    yield "comparison", node, _comparison(left, operators, right, index, new)
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC:
            yield "arithmetic", node, _with(node, op=_ARITHMETIC[type(operator)]())
        case ast.BoolOp(op=operator):
            yield "boolean", node, _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "boolean" if isinstance(node.op, ast.Not) else "arithmetic", node, _text(operand)
        case ast.Constant(value=bool(value)):
            yield "constant", node, repr(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, repr(value + 1)
            yield "constant", node, f"({value - 1})" if value < 1 else repr(value - 1)
        case ast.Constant(value=str(value)) if value:
            yield "constant", node, repr("" if len(value) == 1 else value[:-1])
        case ast.Subscript(slice=ast.Slice() as bounds):
            yield from _of_slice(bounds)
        case ast.Subscript(slice=ast.Name() as index, ctx=ast.Load()):
            yield "off by one", index, f"{index.id} - 1"
        case ast.Call(func=ast.Name(id="range"), args=arguments):
            last = arguments[-1] if len(arguments) < 3 else arguments[1]
            yield "off by one", last, f"{_text(last)} - 1"
            yield "off by one", last, f"{_text(last)} + 1"
    if isinstance(node, ast.Call):
        if len(node.args) > 1 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            yield "swapped arguments", node, _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in _CALLS:
            new = _CALLS[called]
            function = ast.Name(new) if isinstance(node.func, ast.Name) else _changed(node.func, attr=new)
            yield "wrong call", node, _with(node, func=function)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
        yield "wrong variable", node, names[(names.index(node.id) + 1) % len(names)]


def _of_slice(bounds: ast.Slice) -> Iterator[_Edit]:
    for bound in (bounds.lower, bounds.upper):
        if bound is not None and not isinstance(bound, ast.Constant):
            yield "off by one", bound, f"{_text(bound)} + 1"
            yield "off by one", bound, f"{_text(bound)} - 1"


def _of_statement(node: ast.AST) -> Iterator[_Edit]:
    match node:
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Delete() | ast.Raise():
            yield "dropped statement", node, "pass"
            if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
                yield "arithmetic", node, _with(node, op=_ARITHMETIC[type(node.op)]())
        case ast.Return(value=value) if value is not None:
            yield "return", node, "return" if not isinstance(value, ast.Constant) else "pass"
        case ast.Break():
            yield "loop", node, "continue"
        case ast.Continue():
            yield "loop", node, "break"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            plain = isinstance(test, ast.Compare | ast.BoolOp)  # those have mutants of their own
            if not plain:
                yield "condition", test, f"not ({_text(test)})"


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of the parameters and of what is assigned, in order of appearance."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if one.arg != "self"]
    stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.id for node in sorted(stored, key=lambda node: (node.lineno, node.col_offset))]
    return list(dict.fromkeys(names))


def _comparison(left: ast.expr, operators: list[ast.cmpop], right: list[ast.expr], index: int, new: str) -> str:
    parts = [_text(left)]
    for position, (operator, operand) in enumerate(zip(operators, right, strict=True)):
        sign = new if position == index else _sign(operator)
        parts += [sign, _text(operand)]
    return " ".join(parts)


def _sign(operator: ast.cmpop) -> str:
    return ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))[2:-2]


def _text(node: ast.expr) -> str:
    """Return an expression's text, in parentheses where it would not hold together beside an operator."""
    text = ast.unparse(node)
    loose = isinstance(
        node, ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Lambda | ast.NamedExpr | ast.UnaryOp
    )
    return f"({text})" if loose else text


def _changed(node: ast.AST, **fields: object) -> Any:
    return type(node)(**{**{name: getattr(node, name, None) for name in node._fields}, **fields})


def _with(node: ast.AST, **fields: object) -> str:
    """Return the text of a node with other fields.

    Without parentheses of its own: where its place makes it bind otherwise, it is another mistake, and as good a one.
    """
    text: str = ast.unparse(_changed(node, **fields))
    return text


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it; not what stands in f-strings, whose places Python 3.11 does not know."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)
