"""A learner whose model is sharded over ranks computes what one process computes, and goes on on any number of them.

Ranks are processes (gloo, on one machine). One process with the whole model is the reference, in the same steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import fork_ranks
from rank_of_learner import learn
from rank_scenes import Scene, assert_alike
from synthetic_groups import random_groups
from tiny_model import build_tiny_model

from asyncrl import wire
from asyncrl.dealing import deal
from asyncrl.errors import ConfigError
from asyncrl.learner.credit import select
from asyncrl.learner.ranks import check_same, device_of
from asyncrl.learner.settings import LearnerSettings
from asyncrl.packing import split


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(scene: Scene) -> list[Any]:
    """The steps of one process: 0 to 1, saved, and 2 to 3."""
    return [
        learn(scene.run("one", ranks=1, seeds=(0, 1))),
        learn(scene.run("one-again", ranks=1, seeds=(2, 3), after="one")),
    ]


@pytest.fixture(scope="module")
def on_two(scene: Scene, alone: list[Any]) -> list[Any]:
    wide = build_tiny_model(scene.directory / "wide", num_layers=3)
    return scene.on_ranks(
        2,
        scene.run("two", ranks=2, seeds=(0, 1)),
        scene.run("two-after-one", ranks=2, seeds=(2, 3), after="one"),
        scene.run("refused", ranks=2, seeds=(2,), after="one", model=wide),
        scene.run("untied", ranks=2, seeds=(0,), model=wide, gradient_checkpointing=True, loss="mis_renorm"),
        scene.run("bfloat16", ranks=2, seeds=(0, 1), dtype="bfloat16"),
        scene.run("taught", ranks=2, seeds=(0, 1), **scene.taught),
        scene.run("held", ranks=2, seeds=(0, 1), **scene.held),
        scene.run("compared", ranks=2, seeds=(0, 1), **scene.compared),
    )


@pytest.fixture(scope="module")
def on_four(scene: Scene, on_two: list[Any]) -> list[Any]:
    return scene.on_ranks(
        4,
        scene.run("four-after-two", ranks=4, seeds=(2, 3), after="two"),
        scene.run("pairs-after-two", ranks=4, seeds=(2, 3), after="two", context_parallel=2),
    )


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_process(alone: list[Any], on_two: list[Any]) -> None:
    for found, wanted in zip(on_two[0]["steps"], alone[0]["steps"], strict=True):
        assert_alike(found, wanted)
        assert found["rank_imbalance"] < 0.25
        assert found["num_segments_idle"] > 0
    assert on_two[0]["supervised"] == pytest.approx(alone[0]["supervised"], abs=1e-6)
    assert on_two[0]["canary"] == pytest.approx(alone[0]["canary"], abs=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(
    scene: Scene, alone: list[Any], on_two: list[Any], on_four: list[Any]
) -> None:
    back = learn(scene.run("one-after-four", ranks=1, seeds=(4,), after="four-after-two"))
    on = learn(scene.run("one-more", ranks=1, seeds=(4,), after="one-again"))
    pairs = on_four[1]  # of ranks, each of which reads its share of a batch between its two
    for found, wanted in ((on_two[1], alone[1]), (on_four[0], alone[1]), (pairs, alone[1]), (back, on)):
        for ours, theirs in zip(found["steps"], wanted["steps"], strict=True):
            assert_alike(ours, theirs)


@pytest.mark.slow
def test_a_checkpoint_of_another_architecture_is_refused_by_name(on_two: list[Any]) -> None:
    assert "master.model.layers.2." in on_two[2]["refused"]
    assert "another architecture" in on_two[2]["refused"]


@pytest.mark.slow
def test_untied_weights_recomputed_activations_and_a_loss_that_looks_first(scene: Scene, on_two: list[Any]) -> None:
    wanted = learn(scene.run("untied-alone", ranks=1, seeds=(0,), model=scene.directory / "wide", loss="mis_renorm"))
    assert_alike(on_two[3]["steps"][0], wanted["steps"][0])


@pytest.mark.slow
def test_reference_and_teacher_are_shared_too(scene: Scene, on_two: list[Any]) -> None:
    for name, settings, found in (("taught", scene.taught, on_two[5]), ("held", scene.held, on_two[6])):
        wanted = learn(scene.run(f"{name}-alone", ranks=1, seeds=(0, 1), **settings))
        for ours, theirs in zip(found["steps"], wanted["steps"], strict=True):
            assert_alike(ours, theirs)
    assert on_two[6]["steps"][1]["reward_kl"] != 0.0


@pytest.mark.slow
def test_pairs_are_dealt_out_whole(scene: Scene, on_two: list[Any]) -> None:
    wanted = learn(scene.run("compared-alone", ranks=1, seeds=(0, 1), **scene.compared))
    for number, (ours, theirs) in enumerate(zip(on_two[7]["steps"], wanted["steps"], strict=True)):
        assert ours["num_pairs"] >= 2
        if not number:  # policy and reference are the same: which side is preferred, and which token pulls most, is
            ours, theirs = ({**step, "pair_accuracy": 0.0, "spikes": []} for step in (ours, theirs))  # rounding
        assert_alike(ours, theirs)


@pytest.mark.slow
def test_masters_are_float32_under_a_bfloat16_model(scene: Scene, on_two: list[Any]) -> None:
    from safetensors.torch import load_file

    wanted = learn(scene.run("bfloat16-alone", ranks=1, seeds=(0, 1), dtype="bfloat16"))
    first, second = on_two[4]["steps"]
    assert first["loss"] == pytest.approx(wanted["steps"][0]["loss"], abs=1e-3)
    assert second["loss"] == pytest.approx(wanted["steps"][1]["loss"], abs=1e-2)
    ours, theirs = (
        load_file(scene.directory / name / "model" / "model.safetensors") for name in ("bfloat16", "bfloat16-alone")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, theirs[name], rtol=0.02, atol=2.5e-3)  # a step moves a weight by 1e-3
    shards = [load_file(path) for path in sorted((scene.directory / "bfloat16" / "learner" / "optimizer").iterdir())]
    assert len(shards) == 2
    whole = {name: sum(shard[name].numel() for shard in shards if name in shard) for shard in shards for name in shard}
    assert all(shard[name].dtype == torch.float32 for shard in shards for name in shard)
    assert whole["master.model.embed_tokens.weight"] == ours["model.embed_tokens.weight"].numel()


@pytest.mark.slow
def test_what_ranks_save_is_loaded_by_transformers_as_it_is(scene: Scene, on_four: list[Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = scene.directory / "four-after-two" / "model"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([[5, 6, 7, 8]])).logits[0], -1)
    said = [float(logprobs[place, token]) for place, token in enumerate((6, 7, 8))]
    assert said == pytest.approx(on_four[0]["canary"], abs=1e-4)
    assert AutoTokenizer.from_pretrained(directory).chat_template


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("share", [True, False])
def test_ranks_read_about_as_many_tokens_each(num_ranks: int, share: bool) -> None:
    """Groups of a batch as runs have them, 32 segments and more for each rank."""
    groups = random_groups(num_ranks, num_groups=16, prompt_tokens=200, completion_tokens=150)
    batch = select(groups, LearnerSettings()).batch
    apart = batch.group_index % 3 == 0
    dealt = deal(batch, num_ranks, max_tokens=1000, share_prefixes=share, apart=apart)
    assert sorted(segment for members in dealt for segment in members) == list(range(batch.num_segments))
    slots = [
        sum(m.num_slots for m in split(batch, max_tokens=1000, share_prefixes=share, apart=apart, members=members))
        for members in dealt
    ]
    assert max(slots) <= 1.05 * sum(slots) / num_ranks
    whole = sum(m.num_slots for m in split(batch, max_tokens=1000, share_prefixes=share, apart=apart))
    assert sum(slots) <= 1.1 * whole, "what segments share is still read once"


def test_fewer_segments_than_ranks_are_dealt_out_all_the_same() -> None:
    batch = select(random_groups(1, num_groups=1, group_size=2), LearnerSettings()).batch
    dealt = deal(batch, 8, max_tokens=1000)
    assert sorted(segment for members in dealt for segment in members) == list(range(batch.num_segments))
    assert max(map(len, dealt)) == 1


def test_ranks_of_different_versions_are_refused_by_name() -> None:
    ours = {"asyncrl": "1.0", "torch": "2.13.0"}
    check_same([wire.encode(ours), wire.encode(ours)])
    with pytest.raises(ConfigError, match=r"rank 2 has torch 2\.12\.0 and not 2\.13\.0"):
        check_same([wire.encode(ours), wire.encode(ours), wire.encode({**ours, "torch": "2.12.0"})])


def test_uneven_devices_are_refused_by_name() -> None:
    ours = {"device": "cuda", "GPU": "H200", "GPU memory": "139.8 GiB"}
    check_same([wire.encode(ours)] * 2, "compute on devices of one kind")
    others = {
        "GPU A100 and not H200, GPU memory 39.4 GiB": {**ours, "GPU": "A100", "GPU memory": "39.4 GiB"},
        "GPU missing and not H200, GPU memory missing and not 139.8 GiB, device cpu and not cuda": device_of(
            torch.device("cpu")
        ),
    }
    for words, theirs in others.items():
        with pytest.raises(ConfigError, match=rf"rank 1 has {words}.* as rank 0 has: .* devices of one kind"):
            check_same([wire.encode(ours), wire.encode(theirs)], "compute on devices of one kind")


@pytest.mark.slow
def test_ranks_of_different_versions_do_not_begin(tmp_path: Path) -> None:
    for said in fork_ranks("rank_of_another_version.py", tmp_path, world_size=2):
        assert said.startswith("learner rank 1 has torch 0.1 and not 2.")
