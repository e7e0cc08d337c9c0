"""Ranks that read one microbatch between them find what one process finds: log-probs, gradients and whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_of_learner import learn
from rank_scenes import Scene, assert_alike
from synthetic_groups import make_segment
from test_learner_attention import one_by_one, some_batch, tensors

from asyncrl.errors import ConfigError
from asyncrl.learner.attention_kinds import by_runs, implementation
from asyncrl.learner.context import part_of
from asyncrl.learner.critic_settings import CriticSettings
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.teacher_settings import TeacherSettings
from asyncrl.packing import AttentionBlock, lay_out, nothing, split

SETTINGS: dict[str, dict[str, Any]] = {
    "tiles": {"loss": "gspo", "gradients": True},
    "sdpa": {
        "loss": "dapo",
        "attention": "sdpa",
        "gradient_checkpointing": True,
        "loss_settings": {"entropy_coef": 0.1},
    },
    "pairs": {"loss": "dpo", "pairs": {"per_group": 2}, "microbatch_tokens": 200},
    "renormalised": {"loss": "mis_renorm"},
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="module")
def found(scene: Scene) -> dict[str, Any]:
    """Two steps of each kind by one process, and by two ranks that share each microbatch."""
    kinds = {**SETTINGS, "taught": scene.taught, "held": scene.held}
    results = {name: learn(scene.run(name, ranks=1, seeds=(0, 1), **settings)) for name, settings in kinds.items()}
    runs = [
        scene.run(f"{name}-2", ranks=2, seeds=(0, 1), context_parallel=2, **settings)
        for name, settings in kinds.items()
    ]
    results |= dict(zip([run["job"]["run_id"] for run in runs], scene.on_ranks(2, *runs), strict=True))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, "taught", "held"])
def test_two_ranks_take_the_steps_of_one_process(found: dict[str, Any], name: str) -> None:
    for ours, theirs in zip(found[f"{name}-2"]["steps"], found[name]["steps"], strict=True):
        assert_alike(ours, theirs)
        assert ours["tokens_forwarded"] == theirs["tokens_forwarded"]
    assert found[f"{name}-2"]["supervised"] == pytest.approx(found[name]["supervised"], abs=1e-6)
    assert found[f"{name}-2"]["canary"] == pytest.approx(found[name]["canary"], abs=1e-5)


@pytest.mark.slow
def test_log_probs_and_gradients_are_those_of_one_process(found: dict[str, Any]) -> None:
    ours, theirs = found["tiles-2"]["measured"], found["tiles"]["measured"]
    assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)
    largest = max(abs(value) for values in theirs["gradients"].values() for value in values)
    assert largest > 1e-3
    for name, values in theirs["gradients"].items():
        assert ours["gradients"][name] == pytest.approx(values, rel=1e-4, abs=1e-6 * largest), name


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["tiles", "sdpa", "runs"])
def test_parts_hold_every_slot_once_and_see_what_the_whole_sees(kind: str, count: int) -> None:
    (whole,) = split(some_batch(), max_tokens=2000)
    q, k, v = (tensor.double() for tensor in tensors(whole))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[AttentionBlock, ...]) -> torch.Tensor:
        if kind == "runs":
            return by_runs(q, k, v, blocks, 0.25, one_by_one)
        return implementation(kind)(torch.nn.Module(), q, k, v, None, scaling=0.25, blocks=blocks)[0]

    wanted = attend(q, k, v, whole.blocks)
    parts = [part_of(whole, place, count) for place in range(count)]
    rows = [torch.cat([torch.arange(b.queries.start, b.queries.stop) for b in p.microbatch.blocks]) for p in parts]
    assert torch.cat(rows).sort().values.tolist() == list(range(sum(map(len, rows))))
    assert len(set(map(len, rows))) == 1, "all ranks have as many"
    most = len(torch.cat(rows))
    q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, most - whole.num_slots)) for t in (q, k, v))
    for part, mine in zip(parts, rows, strict=True):
        found = attend(q[:, :, mine], k, v, part.microbatch.blocks)
        real = mine < whole.num_slots
        torch.testing.assert_close(found[:, real], wanted[:, mine[real]], rtol=1e-12, atol=1e-12)
    for slot, made_by, place, target in zip(
        whole.predict_slot, parts[0].made_by, parts[0].place, whole.target_ids, strict=True
    ):
        part, mine = parts[int(made_by)].microbatch, rows[int(made_by)]
        assert int(mine[part.predict_slot[place]]) == int(slot)
        assert part.target_ids[place] == target


def test_parts_of_a_long_segment_are_as_much_work_each() -> None:
    segment = make_segment(range(204), [(range(180), [])])
    batch = lay_out([segment], trajectory_index=[0], group_index=[0], rewards=[1.0])
    (whole,) = split(batch, max_tokens=2000)
    work = []
    for place in range(4):
        blocks = part_of(whole, place, 4).microbatch.blocks
        before = [sum(part.stop - part.start for part in block.before) for block in blocks]
        pairs = zip(blocks, before, strict=True)
        work.append(sum(block.num_queries * (seen + block.num_queries / 2) for block, seen in pairs))
    assert max(work) < 1.05 * min(work)


def test_a_microbatch_of_nothing_has_a_slot_for_each() -> None:
    assert [part_of(nothing(), place, 4).microbatch.num_slots for place in range(4)] == [2, 2, 2, 2]
    assert [len(part_of(nothing(), place, 4).microbatch.target_ids) for place in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks": 3}, "must divide ranks = 3"),
        ({"critic": CriticSettings(kind="head")}, r'kind = "head" \(\[learner.critic\]\)'),
        (
            {"loss": "distillation", "teacher": TeacherSettings(source="self", ema_rate=0.1)},
            "distillation_coef = .* of loss 'distillation'",
        ),
    ],
)
def test_what_a_context_does_not_share_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    LearnerSettings(**{"ranks": 2, **settings})
    with pytest.raises(ConfigError, match=rf"context_parallel = 2 \(\[learner\]\) .*{words}"):
        LearnerSettings(**{"ranks": 2, **settings}, context_parallel=2)
