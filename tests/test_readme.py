"""What the documents tell people to type exists, and what they show works."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tiny_model import write_byte_tokenizer
from tree import ROOT, module_files

from asyncrl.cli import main
from asyncrl.configs import load_config

README = (ROOT / "README.md").read_text(encoding="utf-8")

# Their import needs vLLM, or ends a process: nothing a reader of their examples would do.
WITHOUT_EXAMPLES = ("asyncrl.__main__", "asyncrl.weight_sync.vllm_engine")


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Return every command of the README's shell blocks, in words."""
    return [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines() if line.strip()]


def make_targets() -> set[str]:
    """Return what can be made."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `model_directory` of the docstrings: a tokenizer and a chat template in the usual form."""
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def test_every_shell_command_is_of_a_kind_that_is_tested_here() -> None:
    assert {words[0] for words in commands()} == {"make", ".venv/bin/asyncrl", "pip"}


def test_make_targets_of_the_documents_exist() -> None:
    documents = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {words[1] for words in commands() if words[0] == "make"} | set(re.findall(r"`make ([a-z]+)`", documents))
    assert named
    assert named <= make_targets()


def test_every_make_target_is_phony_and_explained() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(phony.split()) == make_targets()
    explained = set(re.findall(r"^# make (\w+)", text, re.MULTILINE))
    assert {"demo", "test", "check", "setup", "clean"} <= explained


@pytest.mark.parametrize("words", [words for words in commands() if words[0] == ".venv/bin/asyncrl"], ids=" ".join)
def test_asyncrl_commands_of_the_readme_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words[1:], "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in words[2:]:
        if word.startswith("--"):
            assert word in said


def test_files_of_the_readme_exist() -> None:
    named = set(re.findall(r"(?:configs|asyncrl|buffers)/[\w./-]+\.\w+", README))
    assert "configs/demo.toml" in named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, missing


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text(encoding="utf-8")):
            assert "://" in target or (ROOT / target).exists(), f"{document}: {target}"


def test_extras_of_the_readme_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra for words in commands() if words[0] == "pip" for extra in re.findall(r"\[(\w+)\]", " ".join(words))}
    assert named
    assert named <= set(extras)


def test_configurations_of_the_readme_load(tmp_path: Path) -> None:
    shown = blocks("toml")
    assert shown
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        load_config(path)


def test_python_of_the_readme_runs() -> None:
    shown = blocks("python")
    assert shown
    for text in shown:
        exec(compile(text, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.slow
@pytest.mark.parametrize("module", [name for name in module_files() if name not in WITHOUT_EXAMPLES])
def test_examples_in_docstrings_work(module: str, model_directory: Path) -> None:
    if ">>>" not in module_files()[module].read_text(encoding="utf-8"):
        return
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE
    names = {"model_directory": model_directory}
    result = doctest.testmod(importlib.import_module(module), extraglobs=names, optionflags=flags)
    assert not result.failed
