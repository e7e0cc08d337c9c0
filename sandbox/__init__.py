"""Where an agent's code runs, and who judges it.

`open_backend` yields what opens sandboxes; `run_calls` and `run_program` score a candidate in one of its own.
"""

if __name__ == "sandbox":
    raise ImportError("import this package as asyncrl.sandbox")

from asyncrl.sandbox.backends import SANDBOXES, open_backend, probe
from asyncrl.sandbox.judge import Call, CallResult, run_calls, run_program
from asyncrl.sandbox.self_test import AbuseResult, self_test
from asyncrl.sandbox.settings import SandboxSettings

__all__ = [
    "SANDBOXES",
    "AbuseResult",
    "Call",
    "CallResult",
    "SandboxSettings",
    "open_backend",
    "probe",
    "run_calls",
    "run_program",
    "self_test",
]
