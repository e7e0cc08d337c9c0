"""Where an agent's code runs, and who judges it.

`open_backend` yields what opens sandboxes; `run_calls` and `run_program` score a candidate in one of its own.
"""

if __name__ == "sandbox":
    raise ImportError("import this package as asyncrl.sandbox")

from asyncrl.sandbox.backends import SANDBOXES, open_backend, probe
from asyncrl.sandbox.collecting import Collected, CollectLimits, collect
from asyncrl.sandbox.judge import Call, CallResult, run_calls, run_program
from asyncrl.sandbox.leases import reap_below as reap
from asyncrl.sandbox.self_test import names as abuse_names
from asyncrl.sandbox.self_test import self_test
from asyncrl.sandbox.self_test_deeds import AbuseResult
from asyncrl.sandbox.settings import SandboxSettings
from asyncrl.sandbox.verifier import PytestVerdict, PytestVerifier, TestOutcome

__all__ = [
    "SANDBOXES",
    "AbuseResult",
    "Call",
    "CallResult",
    "CollectLimits",
    "Collected",
    "PytestVerdict",
    "PytestVerifier",
    "SandboxSettings",
    "TestOutcome",
    "abuse_names",
    "collect",
    "open_backend",
    "probe",
    "reap",
    "run_calls",
    "run_program",
    "self_test",
]
