"""Runs inside the judge's sandbox, as any of the programs that `stand_ins` stands in for."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# (it runs on whatever Python is there, and imports nothing of this project)

import json
import os
import re
import sys

_WITH_VALUE = {"-p", "--python", "-o", "-t", "--index-url", "-i", "--extra-index-url", "--target", "--python-version"}
_ADDS = {"-w", "--with", "--from"}  # of uv and uvx: what follows names a package


class Ctrf:
    """A pytest plugin that takes pytest-json-ctrf's option, and writes a report of that form."""

    def __init__(self):
        self._tests = {}

    def pytest_addoption(self, parser):
        parser.addoption("--ctrf", default=None)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._tests[report.nodeid] = {"name": report.nodeid, "status": report.outcome, "duration": report.duration}

    def pytest_sessionfinish(self, session):
        path = session.config.getoption("--ctrf")
        if path is not None:
            tests = list(self._tests.values())
            summary = {"tests": len(tests), **{name: 0 for name in ("passed", "failed", "skipped", "pending", "other")}}
            for test in tests:
                summary[test["status"]] += 1
            with open(path, "w") as file:
                json.dump({"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": tests}}, file)


class StandIn:
    """One call of a program."""

    def __init__(self, name, provided, missing):
        self.name = name
        with open(provided) as file:
            self._provided = {plain(name) for name in file.read().split()}
        self._missing = missing

    def require(self, names):
        """End with an error where one of `names` is not there, and note it."""
        absent = [name for name in names if plain(name) not in self._provided]
        if absent:
            with open(self._missing, "a") as file:
                file.write("\n".join(absent) + "\n")
            sys.exit(f"{', '.join(absent)} is not provided here, and nothing can be fetched")

    def apt(self, words):
        _, names = split(words)
        if names[:1] == ["install"]:
            self.require(names[1:])

    def pip(self, words):
        _, names = split(words)
        if names[:1] == ["install"]:
            self.require([*names[1:], *(["requirements of a file"] if "-r" in words else [])])

    def download(self, words):
        _, names = split(words)
        for name in names:
            if re.search(r"//(localhost|127\.0\.0\.1)([:/]|$)", name):
                program = "/usr/bin/" + self.name
                os.execv(program, [program, *words])
            if "://" in name:
                self.require(["uv"] if "astral.sh/uv" in name else [name])

    def uv(self, words):
        if words[:1] == ["pip"]:
            self.pip(words[1:])
        elif words[:1] == ["run"]:
            self.uvx(words[1:])
        elif words[:1] == ["add"]:
            self.require(split(words[1:])[1])
        elif words[:1] not in ([], ["init"], ["venv"], ["sync"], ["lock"], ["--version"]):
            self.require(["uv " + words[0]])

    def uvx(self, words):
        added, words = leading(words)
        self.require(added)
        if words:
            self.run(words)

    def run(self, words):
        if words[0] == "pytest" or words[:3] == ["python", "-m", "pytest"] or words[:3] == ["python3", "-m", "pytest"]:
            self.require(["pytest"])
            self.pytest(words[1:] if words[0] == "pytest" else words[3:])
        if words[0] in ("python", "python3"):
            os.execv(sys.executable, [sys.executable, *words[1:]])
        if plain(words[0]) in self._provided:
            os.execvp(words[0], words)
        self.require([words[0]])

    def pytest(self, words):
        import pytest

        sys.exit(pytest.main(words, plugins=[Ctrf()]))


def plain(name):
    """Return a package's name as all of its spellings have it, without versions and extras."""
    return re.split(r"[=<>!~\[;@ ]", name.strip(), maxsplit=1)[0].lower().replace("_", "-")


def split(words):
    """Return options and other words; an option's value is neither."""
    options, others, words = [], [], list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            others.append(word)
            continue
        options.append(word)
        if word in _WITH_VALUE | {"-r"} and words:
            words.pop(0)
    return options, others


def leading(words):
    """Return the packages that uvx's own options add, and the words from the program's name on."""
    added: list[str] = []
    words = list(words)
    while words and words[0].startswith("-"):
        option, separator, value = words.pop(0).partition("=")
        if option in _ADDS or option in _WITH_VALUE:
            value = value if separator else words.pop(0) if words else ""
            added += value.split(",") if option in _ADDS else []
    return added, words


def main():
    name, provided, missing, *words = sys.argv[1:]
    stand_in = StandIn(name, provided, missing)
    if name in ("apt", "apt-get"):
        stand_in.apt(words)
    elif name in ("pip", "pip3"):
        stand_in.pip(words)
    elif name in ("curl", "wget"):
        stand_in.download(words)
    elif name == "pytest":
        stand_in.run(["pytest", *words])
    else:
        getattr(stand_in, name)(words)


if __name__ == "__main__":
    main()
