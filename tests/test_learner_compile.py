"""Layers that torch.compile made programs of give what they give without, for any tree of tokens, sharded by FSDP2.

The programs here are those that PyTorch's compiler is given, run as they are: to make machine code of them takes a
minute, and is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_groups import random_groups
from tiny_model import build_tiny_model
from torch import distributed
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError
from asyncrl.learner.compiling import check_compiler
from asyncrl.learner.credit import select
from asyncrl.learner.lora_settings import LoraSettings
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.ranks import ALONE
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.sharded import load_sharded
from asyncrl.packing import Microbatch, split


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def some_microbatch(num_groups: int) -> Microbatch:
    groups = random_groups(num_groups, num_groups=num_groups, prompt_tokens=60)
    (microbatch,) = split(select(groups, LearnerSettings()).batch, max_tokens=2000)
    return microbatch


def found_by(model: PolicyModel, microbatch: Microbatch) -> list[torch.Tensor]:
    """Return log-probs, and the gradient of each weight."""
    logprobs, _ = model.logprobs(microbatch)
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in model.tensors().values()]
    model.model.zero_grad(set_to_none=True)
    return [logprobs.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients if g is not None)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's compiler imports all of torch
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # and looks at any attribute
def test_compiled_layers_give_what_they_give_without(tmp_path: Path, one_rank: None) -> None:
    from torch._dynamo.utils import counters

    directory = build_tiny_model(tmp_path / "model", tied=True, num_layers=1)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    shared = {"temperature": 1.0, "head_dtype": None, "gradient_checkpointing": False, "attention": "auto"}
    eager = load_model(directory, **options)
    model = load_sharded(directory, ALONE, compiled="aot_eager", **shared, **options)
    counters.clear()
    microbatches = [some_microbatch(3), some_microbatch(2)]
    assert len({len(microbatch.blocks) for microbatch in microbatches}) == 2
    for microbatch in microbatches:
        wanted, found = found_by(eager, microbatch), found_by(model, microbatch)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
        assert len(found) == len(wanted) == len(eager.tensors()) + 1
        for ours, theirs in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    assert counters["stats"]["unique_graphs"] == 4, "around the attention of a layer, for every tree the same"


@pytest.mark.parametrize(
    ("on_cuda", "compiler", "words"),
    [(False, "/nowhere/c++", "a C.. compiler, and /nowhere/c.. is not found"), (True, "g++", "the package triton")],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, on_cuda: bool, compiler: str, words: str) -> None:
    import importlib.util

    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"compile = true needs {words}.*set compile = false \(\[learner\]\)"):
        check_compiler(on_cuda)


def test_adapters_are_not_compiled() -> None:
    with pytest.raises(ConfigError, match=r"compile = true .* enabled = true \(\[learner.lora\]\)"):
        LearnerSettings(compile=True, lora=LoraSettings(enabled=True))
