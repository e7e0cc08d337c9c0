"""Runs inside the sandbox: calls a candidate's function and reports what came back. It knows no expected answer.

Its text is given to the interpreter by `-c`. It imports nothing but modules that are built in, since importing `json`
or `signal` takes longer than everything else together. Whatever the candidate does to this process, all it can do is
to send other answers, which the judge compares outside.
"""

import _signal
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
        with_alarm(timeout_s, lambda: exec(compile(source, "candidate.py", "exec"), module.__dict__))
        function = module
        for name in entry_point.split("."):
            function = getattr(function, name)
    except BaseException as error:
        for index in range(len(calls)):
            send(answers, index, failure(error))
        finish()
    for index, text in enumerate(calls):
        try:
            arguments, keywords = eval(text, {"nan": float("nan"), "inf": float("inf")})
            answer = '"value":' + encode(with_alarm(timeout_s, lambda: function(*arguments, **keywords)), 0)
        except BaseException as error:
            answer = failure(error)
        send(answers, index, answer)
    finish()


def with_alarm(timeout_s, action):
    # repeated, for a candidate that catches the first one
    _signal.setitimer(_signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        return action()
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)


def finish():
    sys.stderr.flush()
    sys.stdout.flush()
    posix._exit(0)


def send(descriptor, index, answer):
    data = ('{"index":%d,%s}\n' % (index, answer)).encode()
    while data:
        data = data[posix.write(descriptor, data) :]


def failure(error):
    if isinstance(error, CallTimeout):
        return '"timeout":true'
    try:
        message = str(error)[:_MAX_TEXT]
    except BaseException:
        message = ""
    return '"error":%s,"message":%s' % (quote(type(error).__name__), quote(message))


def quote(text):
    parts = []
    for character in str(text):
        code = ord(character)
        if 32 <= code < 127 and character not in '"\\':
            parts.append(character)
        elif code < 0x10000:
            parts.append("\\u%04x" % code)
        else:
            code -= 0x10000
            parts.append("\\u%04x\\u%04x" % (0xD800 + (code >> 10), 0xDC00 + (code & 0x3FF)))
    return '"' + "".join(parts) + '"'


def encode(value, depth):
    # by exact type: a subclass may lie about what it is and what it equals
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise ValueError("the answer is nested more than %d deep" % _MAX_DEPTH)
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
    if kind is tuple or kind is set or kind is frozenset:
        items = ",".join([encode(item, depth + 1) for item in value])
        return '{"type":"%s","items":[%s]}' % (kind.__name__, items)
    if kind is bytes:
        return '{"type":"bytes","items":[%s]}' % ",".join(map(repr, value))
    if kind is complex:
        return '{"type":"complex","items":[%s,%s]}' % (encode(value.real, depth), encode(value.imag, depth))
    if kind is dict or kind.__module__ == "collections" and kind.__name__ in ("defaultdict", "OrderedDict", "Counter"):
        pairs = ",".join(
            ["[%s,%s]" % (encode(key, depth + 1), encode(item, depth + 1)) for key, item in dict.items(value)]
        )
        return '{"type":"dict","items":[%s]}' % pairs
    return '{"type":"object","name":%s}' % quote(kind.__name__[:_MAX_TEXT])


main()
