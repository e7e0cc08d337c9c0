"""`asyncrl bench gpu`: every piece on a CPU at a tiny shape, and what it refuses. Figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl import cli
from asyncrl.bench.gpu import PIECES
from asyncrl.bench.gpu_settings import SHAPES

TINY = ["bench", "gpu", "--device", "cpu", "--shape", "tiny", "--rounds", "1"]


@pytest.mark.slow
def test_every_piece_does_the_same_work_in_each_of_its_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert cli.main([*TINY, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    found = report["shapes"]["tiny"]
    assert {*found} == {"shape", *PIECES}
    assert report["left_out"] == []
    assert report["device"]["product_flops"] > 0
    step = found["step"]
    assert step["num_tokens"] >= SHAPES["tiny"].step_tokens
    assert step["tokens_per_second"] == pytest.approx(step["num_tokens"] / step["seconds"])
    assert step["utilisation"] is None  # no vendor states a CPU's
    assert step["utilisation_of_product"] > 0
    assert min(step["loss_seconds"], step["diagnostics_seconds"]) > 0
    assert 0 < found["packing"]["gradient_relative_difference"] < 0.05
    assert found["packing"]["padded_tokens"] > found["packing"]["num_tokens"]
    assert 0 < found["sharing"]["gradient_relative_difference"] < 0.05
    assert found["head"]["logprob_difference_max"] < 0.02
    choices = found["attention"]["choices"]
    for name in ("learner", "sdpa_masked", "sdpa_one_by_one"):
        assert choices[name]["seconds"] > 0
        for part in ("result", "grad_q", "grad_k", "grad_v"):
            assert choices[name][f"{part}_relative_difference"] < 0.02
    for name in ("flex", "torch_varlen", "flash_attn"):
        assert choices[name] == {"left_out": "its kernel needs a GPU"}
    copies = found["copies"]
    assert copies["num_bytes"] == 2 * step["num_parameters"]
    assert copies["copies"]["device_to_device"]["of_device_to_device"] == 1
    assert min(copy["bytes_per_second"] for copy in copies["copies"].values()) > 0
    shown = capsys.readouterr()
    assert "tiny: attention" in shown.err
    assert "optimizer step" in shown.out


def test_what_there_is_no_time_for_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert cli.main([*TINY, "--limit-s", "1e-9", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["left_out"] == [f"tiny: {piece}" for piece in PIECES]
    assert "not begun within 1e-09 s: tiny: step" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gpu"]) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "70b"], "--shape must be among 0.5b, 3b, tiny, got '70b'"),
        (["--shape", "tiny", "tiny"], "--shape must name each shape once"),
        (["--device", "tpu"], "--device must be cuda or cpu, got 'tpu'"),
        (["--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["--limit-s", "nan"], "--limit-s must be > 0, got nan"),
        (["--json", "nowhere/gpu.json"], "--json: there is no directory nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "gpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_sizes_are_those_of_the_models_that_they_are_named_after() -> None:
    def parameters(name: str) -> int:
        s = SHAPES[name]
        attended = 2 * s.hidden * s.head_width * (s.heads + s.key_heads)
        return s.layers * (attended + 3 * s.hidden * s.intermediate) + s.vocabulary * s.hidden

    assert parameters("0.5b") == pytest.approx(0.494e9, rel=0.01)
    assert parameters("3b") == pytest.approx(3.09e9, rel=0.01)
