"""The shape of the source: imports point down, the orchestrator carries no torch, names say what is inside."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tree import FOLDERS, ROOT, module_files

FOUNDATION = ("asyncrl.types", "asyncrl.protocols", "asyncrl.errors")
"""Standard library only, so that every layer may import them."""

LAYERS = (
    ("asyncrl.__main__", "asyncrl.cli"),
    ("asyncrl.commands",),
    ("asyncrl.bench", "asyncrl.dashboards", "asyncrl.report"),
    # What a command puts around the loop: its files, its processes, who watches it.
    (
        "asyncrl.preflight",
        "asyncrl.run_directory",
        "asyncrl.card_memory",
        "asyncrl.processes",
        "asyncrl.engine_processes",
        "asyncrl.hosts",
        "asyncrl.on_ray",
        "asyncrl.run_gateway",
        "asyncrl.run_roles",
        "asyncrl.role_services",
        "asyncrl.tinker.running",
        "asyncrl.metrics",
        "asyncrl.progress",
        "asyncrl.recording",
        "asyncrl.export",
        "asyncrl.live",
        "asyncrl.timeline",
        "asyncrl.trace",
        "asyncrl.simulation",
    ),
    ("asyncrl.run",),
    ("asyncrl.configs",),
    # All else stands below these.
)
"""From the top down: a module may import its own layer and those below, never one above."""

FREE_OF_TORCH = ("asyncrl.run", "asyncrl.cli", "asyncrl.configs", "asyncrl.metrics", "asyncrl.wire", "asyncrl.testing")
"""Imported by the orchestrator, which must start fast and hold little memory."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}

MAX_LINES = 500


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, imported module) for every import of a module, those for type checking left out."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, source]) if source else ".".join(above)
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                yield node.lineno, whole if whole in module_files() else source


def within(module: str, packages: tuple[str, ...]) -> str | None:
    """Return the package of `packages` that `module` is or lies in."""
    return next((p for p in packages if module == p or module.startswith(p + ".")), None)


def rank(module: str) -> int:
    """Return how many layers stand above a module."""
    return next((i for i, layer in enumerate(LAYERS) if within(module, layer)), len(LAYERS))


def assert_none(found: list[str]) -> None:
    """Fail with one complaint a line."""
    assert not found, "\n".join(["", *found])


def assert_imports(check: Callable[[str, str], str | None]) -> None:
    """Fail with "file:line: words" for every import that `check(importer, imported)` has words for."""
    found: list[str] = []
    for module, path in module_files().items():
        for line, imported in imports(module, path):
            words = check(module, imported)
            if words:
                found.append(f"{path.relative_to(ROOT)}:{line}: {words}")
    assert_none(sorted(set(found)))


def test_the_foundation_imports_only_the_standard_library_and_itself() -> None:
    def check(importer: str, imported: str) -> str | None:
        if importer not in FOUNDATION or imported in FOUNDATION or imported.split(".")[0] in sys.stdlib_module_names:
            return None
        return f"{importer} imports {imported}"

    assert_imports(check)


def test_folders_of_one_layer_never_import_each_other() -> None:
    siblings = tuple(f"asyncrl.{folder}" for folder in FOLDERS if folder != "configs")

    def check(importer: str, imported: str) -> str | None:
        ours, theirs = within(importer, siblings), within(imported, siblings)
        return f"{ours} imports its sibling {theirs}" if ours and theirs and ours != theirs else None

    assert_imports(check)


def test_the_folders_below_import_nothing_of_asyncrl_but_the_foundation() -> None:
    siblings = tuple(f"asyncrl.{folder}" for folder in FOLDERS if folder != "configs")

    def check(importer: str, imported: str) -> str | None:
        ours = within(importer, siblings)
        if ours is None or imported.split(".")[0] != "asyncrl" or imported in FOUNDATION or within(imported, (ours,)):
            return None
        return f"{ours} imports {imported}, which stands above it"

    assert_imports(check)


def test_nothing_imports_what_stands_above_it() -> None:
    def check(importer: str, imported: str) -> str | None:
        return f"{importer} imports {imported}, which stands above it" if rank(importer) > rank(imported) else None

    assert_imports(check)


FOREIGN_PROGRAM = "asyncrl.environments.verifiers_process"
"""Runs by itself in another Python, for a library that is built on asyncio; nothing imports it."""


def test_nothing_imports_asyncio_or_threading() -> None:
    def check(importer: str, imported: str) -> str | None:
        if importer == FOREIGN_PROGRAM and imported == "asyncio":
            return None
        if imported == FOREIGN_PROGRAM:
            return f"imports {FOREIGN_PROGRAM}"
        return f"imports {imported}" if imported.split(".")[0] in {"asyncio", "threading", "_thread"} else None

    assert_imports(check)


DATES = {
    "asyncrl.recording",
    "asyncrl.timeline",
    "asyncrl.commands.status",
    "asyncrl.tokens",
    "asyncrl.sandbox.layers",
    "asyncrl.gateway.openai",
    "asyncrl.roles.clocks",
    "asyncrl.tinker.passages",
}
"""Modules that read the wall clock: for the date of a record, of an answer, of a chat template that shows one, of a
copied file, of a saved model, and to say how far another host's is off."""

WALL_CLOCK = ("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime")
WALL_CLOCK += ("time.CLOCK_REALTIME", "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "getmtime")
WALL_CLOCK += (".st_mtime", ".st_ctime", ".st_atime", ".st_mtime_ns", ".st_ctime_ns", ".st_atime_ns")


def test_nothing_is_timed_or_ordered_by_a_clock_that_jumps() -> None:
    """Clocks are set forward and back while a run goes on; durations and orders are of monotonic clocks and numbers."""
    found: list[str] = []
    for module, path in module_files().items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(WALL_CLOCK) and module not in DATES:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: import the module, so that clocks are seen")
    assert_none(found)


def test_the_packages_are_never_imported_bare() -> None:
    def check(importer: str, imported: str) -> str | None:
        return f"imports {imported} instead of asyncrl.{imported}" if imported.split(".")[0] in FOLDERS else None

    assert_imports(check)


@pytest.mark.slow
def test_the_orchestrator_imports_no_torch() -> None:
    modules = [module for module in FREE_OF_TORCH if module in module_files()]
    code = (
        f"import {', '.join(modules)}, sys\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'vllm', 'transformers', 'ray'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert_none([module for module in module_files() if FORBIDDEN_NAMES & set(module.split("."))])


def test_every_module_says_what_it_is() -> None:
    silent = []
    for module, path in module_files().items():
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            silent.append(module)
    assert_none(silent)


def test_source_and_documents_are_ascii() -> None:
    paths = [*module_files().values(), *ROOT.glob("*.md"), *(ROOT / "tests").glob("*.py")]
    paths += [path for folder in FOLDERS for pattern in ("*.md", "*.toml") for path in (ROOT / folder).rglob(pattern)]
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.isascii():
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert_none(found)


def test_a_long_file_gives_its_reason() -> None:
    """A file over 500 lines has a docstring in which a line begins with "Long because"."""
    unexplained = []
    for path in module_files().values():
        text = path.read_text(encoding="utf-8")
        length = text.count("\n")
        if length > MAX_LINES and "\nLong because" not in (ast.get_docstring(ast.parse(text)) or ""):
            unexplained.append(f"{path.relative_to(ROOT)}: {length} lines")
    assert_none(unexplained)


def test_the_folders_beside_asyncrl_are_flat() -> None:
    nested = [
        module
        for module in module_files()
        if within(module, tuple(f"asyncrl.{f}" for f in FOLDERS)) and module.count(".") > 2
    ]
    assert_none(nested)


def test_the_top_level_is_the_layout_and_nothing_else() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {"asyncrl", "buffers", "sandbox", "weight_sync", "losses", "configs", "tests", ".ci"}
    files = {"pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".gitignore"}
    assert {path.split("/")[0] for path in tracked.splitlines()} == folders | files
