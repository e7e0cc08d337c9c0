"""Runs inside the sandbox: calls a candidate's function and reports what came back. It knows no expected answer.

Its text is given to the interpreter by `-c`. It imports nothing but modules that are built in, since importing `json`
or `signal` takes longer than everything else together. Whatever the candidate does to this process, all it can do is
to send other answers, which the judge compares outside.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# (annotations would be evaluated inside, by whatever Python is there)

import _signal  # type: ignore[import-not-found]
import posix
import sys

_MAX_DEPTH = 64
_MAX_TEXT = 300


class CallTimeout(BaseException):
    """Not an Exception, so that a candidate's `except Exception` lets it pass."""


def main() -> None:
    answers = posix.dup(1)  # the private channel; what the candidate prints goes to the error stream
    posix.dup2(2, 1)
    request = eval(sys.stdin.buffer.read().decode(), {"nan": float("nan"), "inf": float("inf")})
    devnull = posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(devnull, 0)
    source, entry_point, calls, timeout_s = request

    def expire(number, frame):
        raise CallTimeout

    _signal.signal(_signal.SIGALRM, expire)
    module = type(sys)("candidate")
    sys.modules["candidate"] = module
    try:
        with_alarm(timeout_s, exec, compile(source, "candidate.py", "exec"), module.__dict__)
        function = module
        for name in entry_point.split("."):
            function = getattr(function, name)
    except BaseException as error:  # noqa: BLE001 - as below
        for index in range(len(calls)):
            send(answers, index, failure(error))
        finish()
    for index, text in enumerate(calls):
        try:
            arguments, keywords = eval(text, {"nan": float("nan"), "inf": float("inf")})
            answer = '"value":' + encode(with_alarm(timeout_s, function, *arguments, **keywords), 0)
        except BaseException as error:  # noqa: BLE001 - whatever the candidate raises is its answer
            answer = failure(error)
        send(answers, index, answer)
    finish()


def with_alarm(timeout_s, action, /, *arguments, **keywords):
    # repeated, for a candidate that catches the first one
    _signal.setitimer(_signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        return action(*arguments, **keywords)
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)


def finish():
    sys.stderr.flush()
    sys.stdout.flush()
    posix._exit(0)


def send(descriptor, index, answer):
    data = ('{"index":' + repr(index) + "," + answer + "}\n").encode()
    while data:
        data = data[posix.write(descriptor, data) :]


def failure(error):
    if isinstance(error, CallTimeout):
        return '"timeout":true'
    try:
        message = str(error)[:_MAX_TEXT]
    except BaseException:  # noqa: BLE001 - its text is the candidate's code too
        message = ""
    return '"error":' + quote(type(error).__name__) + ',"message":' + quote(message)


def quote(text):
    parts = []
    for character in str(text):
        code = ord(character)
        if 32 <= code < 127 and character not in '"\\':
            parts.append(character)
        elif code < 0x10000:
            parts.append(f"\\u{code:04x}")
        else:
            code -= 0x10000
            parts.append(f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}")
    return '"' + "".join(parts) + '"'


def encode(value, depth):
    # by exact type: a subclass may lie about what it is and what it equals
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise ValueError(f"the answer is nested more than {_MAX_DEPTH} deep")
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int:
        return repr(value)
    if kind is float:
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(value), repr(value))
    if kind is str:
        return quote(value)
    if kind is list:
        return "[" + ",".join([encode(item, depth + 1) for item in value]) + "]"
    if kind in (tuple, set, frozenset):
        return tagged(kind.__name__, [encode(item, depth + 1) for item in value])
    if kind is bytes:
        return tagged("bytes", [repr(item) for item in value])
    if kind is complex:
        return tagged("complex", [encode(value.real, depth), encode(value.imag, depth)])
    if kind is dict or (
        kind.__module__ == "collections" and kind.__name__ in ("defaultdict", "OrderedDict", "Counter")
    ):
        pairs = dict.items(value)
        return tagged(
            "dict", ["[" + encode(key, depth + 1) + "," + encode(item, depth + 1) + "]" for key, item in pairs]
        )
    return '{"type":"object","name":' + quote(kind.__name__[:_MAX_TEXT]) + "}"


def tagged(name, items):
    return '{"type":' + quote(name) + ',"items":[' + ",".join(items) + "]}"


main()
