"""What of a step's hidden checks and its reference an agent could read in its own files, or in what it is told."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from asyncrl.coding.tasks import CallChecks, PytestChecks, Reference, ScriptChecks, TaskStep
from asyncrl.sandbox.judge import Call

_MIN_BYTES = 40  # of a text that is looked for as a whole; a shorter one stands in other files by chance
_ANSWER_WITHIN = 24  # characters between a call and its answer, as in `f(2) == 4`, `f(2)  # 4` or a doctest


def shown_call(function: str, call: Call) -> str:
    """Return the Python text of a call.

    Example:
        >>> shown_call("add", Call(arguments=[1], keyword_arguments={"b": 2}))
        'add(1, b=2)'
    """
    keywords = (f"{name}={value!r}" for name, value in call.keyword_arguments.items())
    return f"{function}({', '.join([*map(repr, call.arguments), *keywords])})"


def exposed(step: TaskStep, files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield, in words, what of the step's hidden checks and reference stands in `files` or in the instruction.

    Args: `files` are those that the agent finds, by path, whatever they hold.
    """
    match step.checks:
        case CallChecks() as checks:
            yield from _calls(checks, step.instruction, files)
        case PytestChecks() as checks:
            yield from _tests(checks, step.instruction, files)
        case ScriptChecks() as checks:
            yield from _texts("the hidden file", checks.files, step.instruction, files)
    if step.reference is not None:
        yield from _reference(step.reference, step.instruction, files)


def _calls(checks: CallChecks, instruction: str, files: Mapping[str, bytes]) -> Iterator[str]:
    visible = {repr((call.arguments, call.keyword_arguments)) for call in checks.visible}
    if any(repr((call.arguments, call.keyword_arguments)) in visible for call in checks.hidden):
        yield "a visible call is among the hidden ones"
    hidden = {shown_call(checks.function, call): _shown_answer(call) for call in checks.hidden}
    if any(call in instruction for call in hidden):
        yield "the instruction holds a hidden call"
    for path, data in files.items():
        text = data.decode(errors="replace")
        if any(_is_answered(text, call, answer) for call, answer in hidden.items()):
            yield f"{path} holds a hidden call with its answer"


def _shown_answer(call: Call) -> str:
    return repr(call.expected) if call.expected_error is None else call.expected_error


def _is_answered(text: str, call: str, answer: str) -> bool:
    start = text.find(call)
    while start >= 0:
        end = start + len(call)
        if answer in text[end : end + len(answer) + _ANSWER_WITHIN]:
            return True
        start = text.find(call, end)
    return False


def _tests(checks: PytestChecks, instruction: str, files: Mapping[str, bytes]) -> Iterator[str]:
    yield from _texts("the hidden test file", checks.tests, instruction, files)
    for test in checks.expected:
        for path in [path for path, data in files.items() if test.encode() in data]:
            yield f"{path} names the hidden test {test}"
        if test in instruction:
            yield f"the instruction names the hidden test {test}"
    hidden = {
        body: name for data in checks.tests.values() for name, body in _functions(data) if name.startswith("test")
    }
    stems = {PurePosixPath(path).stem for path in checks.tests}
    for path, data in files.items():
        if path.endswith(".pyc") and PurePosixPath(path).name.partition(".")[0] in stems:
            yield f"{path} is a hidden test file as Python compiled it"
        elif path.endswith(".py") and data not in checks.tests.values():
            shown = [hidden[body] for _, body in _functions(data) if body in hidden]
            if shown:
                yield f"{path} holds the hidden test {shown[0]}"


def _functions(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and body of every function, free of layout and comments; none of what does not parse."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, "\n".join(map(ast.unparse, node.body))


def _texts(what: str, hidden: Mapping[str, bytes], instruction: str, files: Mapping[str, bytes]) -> Iterator[str]:
    for name, data in hidden.items():
        wanted = data.strip()
        if len(wanted) < _MIN_BYTES:
            continue
        for path in [path for path, found in files.items() if wanted in found]:
            yield f"{path} holds {what} {name}"
        if wanted in instruction.encode():
            yield f"the instruction holds {what} {name}"


def _reference(reference: Reference, instruction: str, files: Mapping[str, bytes]) -> Iterator[str]:
    # the unfixed code may begin with the whole reference, where the bug was added to a line's end
    told = instruction.encode()
    for data in _longest_first(files.values()):
        told = told.replace(data.strip(), b"")
    for path, data in reference.files.items():
        wanted = data.strip()
        others = [other for other, found in files.items() if other != path and wanted and wanted in found]
        if len(wanted) >= _MIN_BYTES and others:
            yield f"{others[0]} holds the reference solution"
        if wanted and wanted in told:
            yield "the instruction holds the reference solution"


def _longest_first(texts: Iterable[bytes]) -> list[bytes]:
    return sorted((text for text in texts if text.strip()), key=len, reverse=True)
