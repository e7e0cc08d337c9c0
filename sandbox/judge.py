"""The judge: runs a candidate in a sandbox of its own and compares what it answers out here, where it has no hands.

The candidate gets inputs and never an expected answer, so nothing that it does to its own process (patched test
runners, objects that equal everything, early exits, forged reports) can do more than send a wrong answer. What
remains possible: to answer from a list of known cases. Keep the inputs of hidden calls hidden, and vary them.

Calls run in order in one process: state that one call leaves is there for the next, as in an ordinary test.
"""

from __future__ import annotations

import builtins
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.errors import SandboxError
from asyncrl.protocols import ExecResult, Outcome, SandboxBackend, SandboxLimits

_SHOWN_CHARACTERS = 200
_MAX_DEPTH = 64  # as in judge_runner.py; a deeper answer comes from a candidate that wrote to the channel itself
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_RUNNER = Path(__file__).with_name("judge_runner.py")
_PYTHON_FLAGS = ("-I", "-S", "-B")  # no user's or local modules: a candidate's json.py is not what anyone imports

# The token is printed to the private channel after the program's last statement. A program that ends early, however,
# has not printed it; one that searches this process's memory for it can.
_PROGRAM_RUNNER = """
import posix, sys
private = posix.dup(1)
posix.dup2(2, 1)
source, token = eval(sys.stdin.buffer.read().decode())
posix.dup2(posix.open("/dev/null", posix.O_RDONLY), 0)
def run(source):
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
run(source)
sys.stdout.flush()
sys.stderr.flush()
posix.write(private, token.encode())
posix._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the candidate's function, and what it must answer.

    Values are None, bool, int, float, complex, str, bytes, and lists, tuples, sets, frozensets and dicts of them.

    Example:
        >>> Call(arguments=(3, 4), expected=7).expected
        7
    """

    arguments: Sequence[Any] = ()
    keyword_arguments: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None
    """Compared by type and value, at every depth: 1 is neither True nor 1.0, a list is no tuple; nan is nan."""
    expected_error: str | None = None
    """Name of the exception to be raised instead, or of a built-in one that it inherits from."""
    tolerance: float = 0.0
    """Allowed difference of floats, relative or absolute, whichever is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """How one call went."""

    passed: bool
    got: str = ""
    """What was answered, as Python would show it, shortened; empty where nothing was."""
    error: str = ""
    """What was raised, or why there is no answer; empty where there is one."""
    outcome: Outcome = Outcome.OK
    """Which limit kept the call from answering."""


async def run_calls(
    backend: SandboxBackend,
    source: str,
    entry_point: str,
    calls: Sequence[Call],
    *,
    limits: SandboxLimits,
    call_timeout_s: float = 2.0,
) -> tuple[CallResult, ...]:
    """Run `source` in a new sandbox, call `entry_point` (dots allowed) there, and return a result per call.

    A call that takes longer than `call_timeout_s` fails alone as long as it runs Python code; `limits.wall_s` ends all.

    Raises: SandboxError when the sandbox, not the candidate, failed; ValueError for arguments that cannot be sent.
    """
    inputs = [_literal((tuple(call.arguments), dict(call.keyword_arguments))) for call in calls]
    stdin = ascii((source, entry_point, inputs, float(call_timeout_s))).encode()
    # every byte of the answers is needed, not only head and tail
    limits = replace(limits, kept_output_bytes=limits.output_bytes)
    async with await backend.open({}, limits=limits) as sandbox:
        result = await sandbox.exec([*backend.python, *_PYTHON_FLAGS, "-c", _RUNNER.read_text("utf-8")], stdin=stdin)
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise SandboxError(f"the judge's sandbox failed: {result.detail}")
    answers = _answers(result.stdout, len(calls))
    return tuple(_judge(call, answers.get(index), result) for index, call in enumerate(calls))


async def run_program(backend: SandboxBackend, program: str, *, limits: SandboxLimits) -> ExecResult:
    """Run a whole program that carries its own asserts; it passed when `outcome` is OK and `exit_code` is 0.

    Weaker than `run_calls`: the code under test shares the process with its asserts, so it can patch them or answer
    with an object that equals everything. An early exit does not pass: the program's last statement must have been
    reached. What the program prints is in `stderr`, on both streams.

    Raises: SandboxError when the sandbox, not the program, failed.
    """
    token = secrets.token_hex(16)
    stdin = ascii((program, token)).encode()
    async with await backend.open({}, limits=limits) as sandbox:
        result = await sandbox.exec([*backend.python, *_PYTHON_FLAGS, "-c", _PROGRAM_RUNNER], stdin=stdin)
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise SandboxError(f"the judge's sandbox failed: {result.detail}")
    if result.exit_code == 0 and result.stdout != token.encode():
        return replace(result, exit_code=1, stdout=b"", detail="the program ended before its last statement")
    return replace(result, stdout=b"")


def _literal(value: Any) -> str:
    """Return `value` as Python text. Raises ValueError for what is not plain data."""
    _require_plain(value, 0)
    return ascii(value)


def _require_plain(value: Any, depth: int) -> None:
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > _MAX_DEPTH:
        raise ValueError(f"arguments may be nested {_MAX_DEPTH} deep")
    if kind in (list, tuple, set, frozenset):
        items = list(value)
    elif kind is dict:
        items = [part for pair in value.items() for part in pair]
    else:
        raise ValueError(f"arguments must be plain data, got {kind.__name__}")
    for item in items:
        _require_plain(item, depth + 1)


def _answers(output: bytes, num_calls: int) -> dict[int, dict[str, Any] | None]:
    """Return the answers by call; None for a call that was answered twice, which no honest candidate does."""
    answers: dict[int, dict[str, Any] | None] = {}
    for line in output.split(b"\n"):
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if type(answer) is not dict or type(answer.get("index")) is not int or not 0 <= answer["index"] < num_calls:
            continue
        answers[answer["index"]] = None if answer["index"] in answers else answer
    return answers


def _judge(call: Call, answer: dict[str, Any] | None, result: ExecResult) -> CallResult:
    if answer is None:
        if result.outcome is not Outcome.OK:
            return CallResult(passed=False, error=f"ended by the limit on {result.outcome}", outcome=result.outcome)
        text = result.stderr.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
        return CallResult(passed=False, error=f"the program ended without one answer to this call. {text}".strip())
    if answer.get("timeout") is True:
        return CallResult(passed=False, error="the call took too long", outcome=Outcome.WALL)
    if "error" in answer:
        name = str(answer["error"])
        error = _shorten(f"{name}: {answer.get('message', '')}".rstrip(": "))
        return CallResult(passed=_is_error(name, call.expected_error), error=error)
    try:
        got = _shorten(_shown(answer.get("value"), 0))
        passed = call.expected_error is None and "value" in answer and _matches(call.expected, answer["value"], call)
    except (ValueError, TypeError, KeyError):  # not as the runner would have sent it
        return CallResult(passed=False, error="an answer that is no value")
    return CallResult(passed=passed, got=got)


def _is_error(name: str, expected: str | None) -> bool:
    if expected is None:
        return False
    if name == expected:
        return True
    raised, wanted = getattr(builtins, name, None), getattr(builtins, expected, None)
    return isinstance(raised, type) and isinstance(wanted, type) and issubclass(raised, wanted)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _tag(got: Any) -> tuple[str, Any]:
    """Return type name and content of a value as the runner encodes it. Raises ValueError for anything else."""
    if type(got) is not dict:
        return type(got).__name__, got
    name = got.get("type")
    if name == "object":
        return "object", str(got.get("name"))
    items = got.get("items")
    if name not in ("tuple", "set", "frozenset", "bytes", "complex", "dict") or type(items) is not list:
        raise ValueError("unknown type")
    return name, items


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in items]


def _matches(expected: Any, got: Any, call: Call) -> bool:
    """True where `got`, as sent, has the type and the value of `expected`, at every depth."""
    kind = type(expected)
    name, content = _tag(got)
    if name != kind.__name__:
        return False
    if kind is float:
        return _is_close(expected, content, call.tolerance)
    if kind is complex:
        return _is_close(expected.real, content[0], call.tolerance) and _is_close(
            expected.imag, content[1], call.tolerance
        )
    if kind is bytes:
        return bool(list(expected) == content)
    if kind in (list, tuple):
        return len(expected) == len(content) and all(
            _matches(one, other, call) for one, other in zip(expected, content, strict=True)
        )
    if kind in (set, frozenset):
        return sorted(_key(_encoded(one)) for one in expected) == sorted(_key(other) for other in content)
    if kind is dict:
        pairs = _pairs(content)
        by_key = {_key(key): value for key, value in pairs}
        return len(pairs) == len(by_key) == len(expected) and all(
            key in by_key and _matches(value, by_key[key], call)
            for key, value in ((_key(_encoded(key)), value) for key, value in expected.items())
        )
    return bool(expected == content)


def _is_close(expected: float, got: Any, tolerance: float) -> bool:
    if type(got) is not float:
        return False
    if math.isnan(expected):
        return math.isnan(got)
    return expected == got or (tolerance > 0 and math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance))


def _encoded(value: Any) -> Any:
    """Return an expected key or set member as the runner would have sent it."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return {"type": kind.__name__, "items": [_encoded(item) for item in value]}
    if kind is bytes:
        return {"type": "bytes", "items": list(value)}
    if kind is complex:
        return {"type": "complex", "items": [value.real, value.imag]}
    return value


def _key(got: Any) -> str:
    """Return text that is the same for equal values of one type and differs otherwise."""
    name, content = _tag(got)
    if name in ("set", "frozenset"):
        content = sorted(_key(item) for item in content)
    elif name in ("list", "tuple"):
        content = [_key(item) for item in content]
    elif name == "dict":
        content = sorted([_key(key), _key(value)] for key, value in _pairs(content))
    return json.dumps([name, content])


def _shown(got: Any, depth: int) -> str:
    """Return a value as Python shows it. Raises ValueError for what the runner would not have sent."""
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("nested too deep")
    name, content = _tag(got)
    if name == "object":
        return f"<an object of type {content}>"
    if name == "bytes":
        return repr(bytes(content))
    if name == "complex":
        return repr(complex(*content))
    if name == "dict":
        pairs = [f"{_shown(key, depth + 1)}: {_shown(value, depth + 1)}" for key, value in _pairs(content)]
        return "{" + ", ".join(pairs) + "}"
    if name in ("list", "tuple", "set", "frozenset"):
        text = ", ".join(_shown(item, depth + 1) for item in content)
        if name == "list":
            return f"[{text}]"
        if name == "tuple":
            return f"({text},)" if len(content) == 1 else f"({text})"
        braces = f"{{{text}}}" if content else ""
        return braces or "set()" if name == "set" else f"frozenset({braces})"
    return repr(content)
