"""The implementations of attention compute the same, as far as a CPU can tell, and the choice is the settings'."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from synthetic_groups import random_groups
from tiny_model import build_tiny_model

from asyncrl.errors import ConfigError
from asyncrl.learner import attention_kinds
from asyncrl.learner.attention import tree_attention
from asyncrl.learner.attention_kinds import by_runs, choose, flex_tree_attention, masked_attention, seen_until
from asyncrl.learner.credit import select
from asyncrl.learner.model import load_model
from asyncrl.learner.settings import LearnerSettings
from asyncrl.packing import Batch, Microbatch, split

_SCALE = 0.2
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


def some_batch() -> Batch:
    return select(random_groups(3, num_groups=3, prompt_tokens=60), LearnerSettings()).batch


@pytest.fixture(params=[True, False], ids=["shared", "apart"])
def where(request: pytest.FixtureRequest) -> Microbatch:
    (microbatch,) = split(some_batch(), max_tokens=2000, share_prefixes=request.param)
    assert any(block.before for block in microbatch.blocks) == request.param
    return microbatch


def tensors(where: Microbatch) -> list[torch.Tensor]:
    """Return float64 queries of 4 heads, keys and values of 2."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, where.num_slots, 16) for heads in (4, 2, 2)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_edges: torch.Tensor,
    key_edges: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
) -> torch.Tensor:
    """A kernel for runs of variable length: each sequence by itself, its last query beside its last key."""
    heads = q.shape[1] // k.shape[1]
    results = []
    for (a, b), (c, d) in zip(pairwise(query_edges.tolist()), pairwise(key_edges.tolist()), strict=True):
        assert b - a <= longest_query
        assert d - c <= longest_key
        keys, values = (t[c:d].repeat_interleave(heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        results.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), values))
    return torch.cat(results)


@pytest.mark.parametrize("kind", ["sdpa", "runs"])
def test_results_and_gradients_are_those_of_the_tiles(kind: str, where: Microbatch) -> None:
    given, theirs = tensors(where), tensors(where)
    wanted, _ = tree_attention(torch.nn.Module(), *theirs, None, scaling=_SCALE, blocks=where.blocks)
    if kind == "sdpa":
        found, _ = masked_attention(torch.nn.Module(), *given, None, scaling=_SCALE, blocks=where.blocks)
    else:
        found = by_runs(*given, where.blocks, _SCALE, one_by_one)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for ours, exact in zip(given, theirs, strict=True):
        torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_through_the_trees_mask_what_the_tiles_see(where: Microbatch) -> None:
    """It has no backward pass on a CPU."""
    with torch.no_grad():
        given = [tensor.float() for tensor in tensors(where)]
        wanted, _ = tree_attention(torch.nn.Module(), *given, None, scaling=_SCALE, blocks=where.blocks)
        found, _ = flex_tree_attention(torch.nn.Module(), *given, None, scaling=_SCALE, blocks=where.blocks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_where_a_branch_ends_says_the_whole_mask(where: Microbatch) -> None:
    slots = where.num_slots
    sees = torch.zeros(slots, slots, dtype=torch.bool)
    for block in where.blocks:
        for part in block.before:
            sees[block.queries, part] = True
        sees[block.queries, block.queries] = torch.ones(block.num_queries, block.num_queries, dtype=torch.bool).tril()
    until, slot = seen_until(where.blocks, slots, _CPU), torch.arange(slots)
    assert torch.equal((slot <= slot[:, None]) & (slot[:, None] < until), sees)


@pytest.mark.slow
def test_a_models_logprobs_do_not_depend_on_the_choice(tmp_path: Path) -> None:
    directory = build_tiny_model(tmp_path, tied=True)
    (microbatch,) = split(some_batch(), max_tokens=2000)
    found = []
    for kind in ("auto", "tiles", "sdpa"):
        model = load_model(directory, dtype=torch.float32, device=_CPU, attention=kind)
        assert model.model.config._attn_implementation == f"asyncrl_{'sdpa' if kind == 'sdpa' else 'tiles'}"
        found.append(model.logprobs(microbatch)[0].detach())
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=1e-5)


def test_auto_takes_the_fastest_that_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", _CPU, torch.bfloat16) == "tiles"
    assert choose("auto", _CUDA, torch.float32) == "flex"
    for installed, name in ((True, "flash_attn"), (False, "varlen")):
        monkeypatch.setattr(attention_kinds, "_has_flash_attn", lambda installed=installed: installed)
        assert choose("auto", _CUDA, torch.bfloat16) == name


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "words"),
    [
        ("varlen", _CPU, torch.bfloat16, "needs a CUDA device"),
        ("flex", _CPU, torch.float32, "needs a CUDA device"),
        ("varlen", _CUDA, torch.float32, 'needs dtype = "bfloat16"'),
        ("flash_attn", _CUDA, torch.bfloat16, "flash-attn is not installed"),
    ],
)
def test_what_does_not_run_there_is_refused_by_name(
    kind: str, device: torch.device, dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kinds, "_has_flash_attn", lambda: False)
    with pytest.raises(ConfigError, match=rf'attention = "{kind}".*{words}'):
        choose(kind, device, dtype)


def test_the_setting_names_what_it_allows() -> None:
    with pytest.raises(ConfigError, match=r"attention must be one of auto, flash_attn, varlen, flex, tiles, sdpa"):
        LearnerSettings(attention="xformers")
