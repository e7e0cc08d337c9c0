"""Runs inside the judge's sandbox: runs pytest with nothing of the candidate's in its way, and reports test by test.

Its text is given to the interpreter by `-c`, with the places of pytest, of the tests, of the candidate and of the
report as arguments. The tests import the candidate's modules into this process, so they can reach all of it: what this
keeps out is everything that needs a file of the right name, and what it cannot keep out a tripwire has to tell.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# (annotations would be evaluated inside, by whatever Python is there)

import json
import os
import sys


class Report:
    """A pytest plugin: one line a test, written as soon as it is known."""

    def __init__(self, path):
        self._path = path
        self._outcomes = {}

    def pytest_runtest_logreport(self, report):
        before = self._outcomes.get(report.nodeid, "passed")
        outcome = report.outcome if before == "passed" else before
        self._outcomes[report.nodeid] = outcome
        if report.when == "teardown":
            self._write({"id": report.nodeid, "outcome": outcome})

    def pytest_collectreport(self, report):
        if report.failed:
            self._write({"id": report.nodeid, "outcome": "not collected", "message": str(report.longrepr)[-500:]})

    def _write(self, line):
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def main():
    packages, tests, candidate, report = sys.argv[1:5]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, packages)
    import pytest

    sys.path.append(candidate)  # last: a pytest.py of the candidate's is not what anyone imports
    options = ["--noconftest", "-c", "/dev/null", f"--rootdir={tests}", "--import-mode=importlib", "-q", "--tb=line"]
    options += ["-p", "no:cacheprovider", "-p", "no:doctest"]
    return pytest.main([*options, tests], plugins=[Report(report)])


if __name__ == "__main__":
    sys.exit(main())
