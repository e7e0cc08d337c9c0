"""LoRA in the learner: the numbers of peft's own model, adapters alone trained, sent and saved, and what is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rank_of_learner import learn
from rank_scenes import Scene, assert_alike
from safetensors.torch import load_file
from synthetic_groups import random_groups
from test_learner_numerics import with_exact_norms
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM

from asyncrl.checkpoint import Checkpoint
from asyncrl.commands.evaluate import _whole
from asyncrl.configs import Config, build
from asyncrl.engine_processes import model_to_serve
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.credit import select
from asyncrl.learner.critic_settings import CriticSettings
from asyncrl.learner.lora import LoraModel, add_adapter, load_lora
from asyncrl.learner.lora_settings import LoraSettings, check_lora, version_bytes
from asyncrl.learner.merged import is_adapter, write_whole
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.process import Learner
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.learner.teacher_settings import TeacherSettings
from asyncrl.packing import Batch, split
from asyncrl.types import Group
from asyncrl.weight_sync.settings import WeightSyncSettings
from asyncrl.wire import PublishReply, PublishRequest, SaveRequest, StepReply, StepRequest

LORA = LoraSettings(enabled=True, rank=4, alpha=8)
CPU = torch.device("cpu")


@cache
def model_directory() -> Path:
    return build_tiny_model(Path(mkdtemp()), tied=True)


def load(settings: LoraSettings = LORA, dtype: torch.dtype = torch.float64, **options: Any) -> LoraModel:
    torch.manual_seed(1)
    model = load_lora(model_directory(), settings, dtype=dtype, device=CPU, **options)
    if dtype == torch.float64:
        with_exact_norms(model.model)
    return model


def fill(model: LoraModel, seed: int = 2) -> None:
    """Give the second factors, which begin as zeros, some values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, factor in model.tensors().items():
            if "lora_B" in name:
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.05)


def batch_of(groups: Sequence[Group]) -> Batch:
    return select(groups, LearnerSettings()).batch


BATCH = batch_of(random_groups(1, num_groups=2))


def logprobs(model: PolicyModel, batch: Batch = BATCH, max_tokens: int = 10_000) -> torch.Tensor:
    """Return [T] with a graph, of microbatches whose prompts are shared."""
    parts = [(m.token_index, model.logprobs(m)[0]) for m in split(batch, max_tokens=max_tokens)]
    where = torch.cat([index for index, _ in parts]).argsort()
    return torch.cat([values for _, values in parts])[where]


def padded_logprobs(model: Any, batch: Batch = BATCH) -> torch.Tensor:
    """Return [T] of transformers' forward pass over rows that are padded on the right."""
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    width = max(end - start for start, end in bounds)
    rows = torch.zeros(len(bounds), width, dtype=torch.int64)
    mask = torch.zeros_like(rows)
    for row, (start, end) in enumerate(bounds):
        rows[row, : end - start], mask[row, : end - start] = batch.token_ids[start:end], 1
    every = torch.log_softmax(model(input_ids=rows, attention_mask=mask).logits[:, :-1], -1)
    found = every.gather(2, rows[:, 1:, None])[:, :, 0]
    zero = found.new_zeros(1)
    return torch.cat([torch.cat([zero, found[row, : b - a - 1]]) for row, (a, b) in enumerate(bounds)])


def plain_model(dtype: torch.dtype = torch.float64) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=dtype, attn_implementation="sdpa")
    with_exact_norms(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_leaves_every_logprob_as_it_was(dtype: torch.dtype) -> None:
    with torch.no_grad():
        bare = logprobs(load_model(model_directory(), dtype=dtype, device=CPU))
        assert torch.equal(logprobs(load(dtype=dtype)), bare)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "checkpointing", "max_tokens"),
    [(("all-linear",), False, 10_000), (("q_proj", "mlp.down_proj"), True, 100)],
)
def test_logprobs_and_gradients_are_those_of_peft_with_padding(
    targets: tuple[str, ...], checkpointing: bool, max_tokens: int
) -> None:
    ours = load(
        LoraSettings(enabled=True, rank=4, alpha=8, target_modules=targets), gradient_checkpointing=checkpointing
    )
    fill(ours)
    named = targets[0] if targets == ("all-linear",) else list(targets)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=named, task_type="CAUSAL_LM")
    theirs = get_peft_model(plain_model(), config, autocast_adapter_dtype=False)
    their_factors = {name.replace(".default.", "."): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert their_factors.keys() == ours.tensors().keys()
    with torch.no_grad():
        for name, factor in ours.tensors().items():
            their_factors[name].copy_(factor)
    weights = torch.randn(BATCH.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, wanted = logprobs(ours, max_tokens=max_tokens), padded_logprobs(theirs)
    mask = BATCH.loss_mask
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-10, atol=1e-10)
    (weights * found)[mask].sum().backward()
    (weights * wanted)[mask].sum().backward()
    for name, factor in ours.tensors().items():
        torch.testing.assert_close(factor.grad, their_factors[name].grad, rtol=1e-8, atol=1e-10)
    frozen = [p for name, p in ours.model.named_parameters() if "lora_" not in name]
    assert frozen
    assert all(p.grad is None and not p.requires_grad for p in frozen)


@pytest.mark.slow
def test_the_model_below_is_left_when_an_adapter_has_learned() -> None:
    with torch.no_grad():
        model = load()
        before = logprobs(model)
        fill(model)
        base = model.base()
        assert base is not None
        assert torch.equal(logprobs(base), before)
        assert not torch.equal(logprobs(model), before)


@pytest.mark.slow
def test_adapters_of_one_model_do_not_meet() -> None:
    """Kills: an adapter that stays on in another's pass, and gradients that are lost when another one is asked."""
    first = load()
    config = add_adapter(first.model, LoraSettings(enabled=True, rank=2, alpha=2), "second")
    second = LoraModel(first.model, config, temperature=1.0, head_dtype=torch.float32, adapter="second")
    fill(first)
    alone = logprobs(first)
    fill(second, seed=3)
    base = first.base()
    assert base is not None
    found = logprobs(first)
    assert torch.equal(found, alone)
    with torch.no_grad():
        assert not torch.equal(logprobs(second), alone)
        logprobs(base)
    found.sum().backward()
    assert all(factor.grad is not None for factor in first.tensors().values())
    assert all(factor.grad is None for factor in second.tensors().values())


@pytest.mark.slow
def test_dropout_is_for_passes_with_a_gradient_alone() -> None:
    model = load(LoraSettings(enabled=True, rank=4, alpha=8, dropout=0.5))
    fill(model)
    with torch.no_grad():
        asked = logprobs(model)
        assert torch.equal(asked, logprobs(model))
    assert not torch.equal(asked, logprobs(model))


# --- the learner -------------------------------------------------------------------------------------------------


def learner(directory: Path, lora: LoraSettings = LORA, *, resume_from: Path | None = None, **settings: Any) -> Learner:
    options: dict[str, Any] = {"dtype": "float32", "learning_rate": 1e-2, "threads": 1, "lora": lora, **settings}
    return Learner(
        LearnerJob(
            model=model_directory(),
            run_id="test",
            resume_from=str(resume_from or ""),
            max_off_policyness=9,
            weight_sync=WeightSyncSettings(transport="filesystem", directory=directory / "published"),
            learner=LearnerSettings(**options),
        )
    )


def step(one: Learner, seed: int) -> dict[str, float]:
    reply = one.answer(StepRequest(groups=random_groups(seed)))
    assert isinstance(reply, StepReply)
    return dict(reply.result.metrics)


def save(one: Learner, directory: Path) -> Path:
    directory.mkdir()
    one.answer(SaveRequest(directory=str(directory)))
    return directory


@pytest.mark.slow
def test_adapters_alone_are_trained_sent_and_saved_as_peft_reads_them(tmp_path: Path) -> None:
    one = learner(tmp_path, loss="grpo", loss_settings={"kl_coef": 0.1})
    frozen = {n: p.detach().clone() for n, p in one._model.model.named_parameters() if "lora_" not in n}
    assert step(one, 1)["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert step(one, 2)["reference_kl"] > 1e-4, "relative to the model below the adapter"
    assert all(torch.equal(frozen[n], p) for n, p in one._model.model.named_parameters() if n in frozen)
    reply = one.answer(PublishRequest())
    assert isinstance(reply, PublishReply)
    sent = load_file(reply.manifest.location)
    assert reply.manifest.adapter_scale == LORA.scale
    saved = save(one, tmp_path / "checkpoint")
    assert sorted(path.name for path in (saved / "model").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    kept = load_file(saved / "model" / "adapter_model.safetensors")
    assert kept.keys() == sent.keys() == one._model.tensors().keys()
    assert all(torch.equal(kept[name], sent[name]) for name in kept)
    assert any(bool(kept[name].any()) for name in kept if "lora_B" in name)
    size = sum(factor.nbytes for factor in kept.values())
    assert version_bytes(LORA, model_directory(), number_bytes=4) == size, "what room is looked for before the start"
    masters = {n for n in load_file(saved / "learner" / "optimizer.safetensors") if n.startswith("master.")}
    assert masters == {f"master.{name}" for name in kept}
    read = PeftModel.from_pretrained(plain_model(torch.float32), str(saved / "model"))
    mask = BATCH.loss_mask
    with torch.no_grad():
        ours = logprobs(one._model)[mask]
        torch.testing.assert_close(padded_logprobs(read)[mask], ours, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded_logprobs(read.merge_and_unload())[mask], ours, rtol=1e-5, atol=1e-5)
        assert _whole(model_directory(), tmp_path / "whole") == model_directory(), "what asyncrl eval serves"
        assert _whole(saved / "model", tmp_path / "whole") == tmp_path / "whole"
        whole = load_model(tmp_path / "whole", dtype=torch.float32, device=CPU)
        torch.testing.assert_close(logprobs(whole)[mask], ours, rtol=1e-5, atol=1e-5)
    assert sorted(os.listdir(tmp_path / "whole")) == sorted(os.listdir(model_directory()))
    one.close()


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    one = learner(tmp_path / "one")
    step(one, 1)
    saved = save(one, tmp_path / "checkpoint")
    other = learner(tmp_path / "other", resume_from=saved)
    found, wanted = step(other, 2), step(one, 2)
    assert found["loss"] == wanted["loss"]
    for name, factor in one._model.tensors().items():
        assert torch.equal(factor, other._model.tensors()[name]), name
    one.close()
    other.close()


@pytest.mark.slow
def test_a_checkpoint_of_another_adapter_is_refused_by_what_differs(tmp_path: Path) -> None:
    one = learner(tmp_path / "one")
    adapted = save(one, tmp_path / "adapted")
    one.close()
    bare = learner(tmp_path / "bare", LoraSettings())
    whole = save(bare, tmp_path / "whole")
    bare.close()
    few = ("q_proj", "down_proj")
    for lora, saved, words in (
        (
            LoraSettings(enabled=True, rank=8, alpha=8),
            adapted,
            r"with rank = 4, and cannot go on with rank = 8 \(\[lear",
        ),
        (LoraSettings(enabled=True, rank=4, alpha=4), adapted, "with alpha = 8, and cannot go on with alpha = 4"),
        (
            LoraSettings(enabled=True, rank=4, alpha=8, target_modules=few),
            adapted,
            r"mlp\.gate_proj.* cannot go on with",
        ),
        (LoraSettings(), adapted, "with alpha = 8, and cannot go on without LoRA"),
        (LORA, whole, "was written without LoRA, and cannot go on with alpha = 8"),
    ):
        with pytest.raises(CheckpointError, match=words):
            learner(tmp_path / "again", lora, resume_from=saved)


@pytest.mark.slow
def test_a_value_head_trains_the_adapters_where_its_gradient_is_not_stopped(tmp_path: Path) -> None:
    factors = {}
    for stop in (True, False):
        critic = CriticSettings(kind="head", stop_gradient=stop, value_coef=100.0)
        one = learner(tmp_path / str(stop), critic=critic)
        assert step(one, 1)["value_loss"] > 0
        step(one, 2)  # the head is zeros before the first step, and passes nothing on
        factors[stop] = {name: factor.detach().clone() for name, factor in one._model.tensors().items()}
        one.close()
    assert any(not torch.equal(factors[True][name], factors[False][name]) for name in factors[True])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"base_model_name_or_path": "/gone"}, "is an adapter of /gone, where there is no model any more"),
        ({"use_rslora": True}, "has use_rslora, and only plain LoRA is merged"),
        ({"peft_type": "IA3"}, "is of type IA3"),
    ],
)
def test_an_adapter_that_cannot_be_made_whole_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    model = load()
    model.write_config(tmp_path, model_directory())
    assert is_adapter(tmp_path)
    assert not is_adapter(model_directory())
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(CheckpointError, match=words):
        write_whole(tmp_path, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_engines_of_a_resumed_run_begin_with_the_model_below_its_adapters(tmp_path: Path) -> None:
    checkpoint = Checkpoint(directory=tmp_path, version=3, state={})
    tables = {"model": {"path": "base"}, "environment": {"name": "bugfix"}}
    for lora, served in ((False, (tmp_path / "model", 3)), (True, (Path("base"), 0))):
        config = build(Config, {**tables, "learner": {"lora": {"enabled": lora}}})
        assert model_to_serve(config, checkpoint) == served
        assert model_to_serve(config, None) == (Path("base"), 0)


# --- several ranks ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_hold_model_and_adapters_between_them_learn_what_one_process_does(tmp_path: Path) -> None:
    """And either goes on from the other's checkpoint, which are the same files in peft's form."""
    scene = Scene(tmp_path)
    how: dict[str, Any] = {
        "loss": "grpo",
        "loss_settings": {"kl_coef": 0.1},
        "learning_rate": 1e-2,
        "lora": {"enabled": True, "rank": 4, "alpha": 8},
        "gradients": True,
    }
    alone = learn(scene.run("alone", ranks=1, seeds=(0, 1), **how))
    learn(scene.run("begun", ranks=1, seeds=(0,), **how))
    narrow = {**how, "dtype": "bfloat16", "gradient_checkpointing": True, "gradients": False}
    first, after, mixed = scene.on_ranks(
        2,
        scene.run("two", ranks=2, seeds=(0, 1), **how),
        scene.run("two-after", ranks=2, seeds=(1,), after="begun", **how),
        scene.run("two-narrow", ranks=2, seeds=(0, 1), **narrow),
    )
    wanted = learn(scene.run("narrow", ranks=1, seeds=(0, 1), **narrow))
    for ours, theirs in zip(mixed["steps"], wanted["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-3), "masters are float32 over a model in bfloat16"
    measured = first["measured"]
    assert measured["logprobs"] == pytest.approx(alone["measured"]["logprobs"], abs=1e-5)
    assert measured["gradients"].keys() == alone["measured"]["gradients"].keys()
    for name, numbers in measured["gradients"].items():
        assert numbers == pytest.approx(alone["measured"]["gradients"][name], rel=1e-3, abs=1e-6), name
    for found, wanted in zip(first["steps"], alone["steps"], strict=True):
        assert_alike(found, wanted)
    assert_alike(after["steps"][0], alone["steps"][1])
    kept = [load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("alone", "two")]
    assert kept[0].keys() == kept[1].keys()
    for name, factor in kept[0].items():
        torch.testing.assert_close(kept[1][name], factor, rtol=1e-3, atol=1e-5)
    back = learn(scene.run("back", ranks=1, seeds=(2,), after="two", **how))
    assert math.isfinite(back["steps"][0]["loss"])


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, r"rank must be >= 1, got 0 \(\[learner.lora\]\)"),
        ({"alpha": 0}, "alpha must be >= 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"target_modules": ()}, r"target_modules must name layers, got \[\]"),
        ({"target_modules": ("all-linear", "q_proj")}, '"all-linear" stands alone'),
        ({"enabled": False, "rank": 4}, "rank = 4 is not read with enabled = false"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoraSettings(**{"enabled": True, **settings})


def test_what_needs_the_whole_model_is_refused_beside_adapters() -> None:
    from asyncrl.learner.critic_settings import CriticSettings

    with pytest.raises(ConfigError, match=r'kind = "model" \(\[learner.critic\]\) needs the weights of a whole model'):
        LearnerSettings(lora=LORA, critic=CriticSettings(kind="model"))
    teacher = TeacherSettings(source="self", ema_rate=0.1)
    with pytest.raises(ConfigError, match=r"ema_rate = 0.1 \(\[learner.teacher\]\) needs the weights"):
        LearnerSettings(lora=LORA, loss="distillation", teacher=teacher)


def test_a_target_that_the_model_does_not_have_is_named_before_anything_starts() -> None:
    unknown = LoraSettings(enabled=True, target_modules=("q_proj", "query"))
    words = r"no layer 'query'; it has .*down_proj, .*q_proj.* \(\[learner.lora\]\)"
    with pytest.raises(ConfigError, match=words):
        check_lora(unknown, model_directory())
    with pytest.raises(ConfigError, match=words):
        load(unknown)


@pytest.mark.parametrize(
    ("target", "words"), [("embed_tokens", "embed_tokens is a Embedding"), ("lm_head", "lm_head is the LM head")]
)
def test_a_layer_that_cannot_have_an_adapter_is_named(target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(LoraSettings(enabled=True, target_modules=(target,)))


def test_the_configuration_of_an_adapter_is_in_pefts_words(tmp_path: Path) -> None:
    load(LoraSettings(enabled=True, rank=4, alpha=8, target_modules=("q_proj",))).write_config(
        tmp_path, model_directory()
    )
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (found["peft_type"], found["r"], found["lora_alpha"], found["target_modules"]) == ("LORA", 4, 8, ["q_proj"])
    assert found["base_model_name_or_path"] == str(model_directory())
