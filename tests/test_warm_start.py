"""The warm start: which demonstrations a step takes, and how the loop goes through it, is stopped and goes on."""

from __future__ import annotations

import io
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console

from asyncrl.buffers import BufferSettings
from asyncrl.checkpoint import CheckpointStore
from asyncrl.demonstrations import Demonstrations
from asyncrl.errors import ConfigError, LearnerError, leaves
from asyncrl.metrics import Source, collector
from asyncrl.progress import Progress
from asyncrl.run import Limits, Parts, Run
from asyncrl.status import RunStatus
from asyncrl.testing import FakeEngine, FakeEnvironment, FakeLearner, MemoryRecorder, Rates
from asyncrl.types import Logprobs, Segment, TokenIds, TokenSpan
from asyncrl.warm_start import WarmStart, WarmStartSettings, is_over, split


def demonstration(number: int) -> Segment:
    return Segment(
        token_ids=TokenIds([1, number, 2]),
        loss_mask=bytes([0, 1, 1]),
        behaviour_logprobs=Logprobs([0.0] * 3),
        spans=(TokenSpan(start=1, end=3, version=0),),
    )


def demonstrations(count: int, digest: str = "d") -> Demonstrations:
    return Demonstrations(segments=tuple(demonstration(i) for i in range(count)), num_dropped=0, digest=digest)


def numbers(segments: Any) -> list[int]:
    return [segment.token_ids[1] for segment in segments]


def settings(**changes: Any) -> WarmStartSettings:
    return WarmStartSettings(path=Path("d.jsonl"), **{"sequences_per_step": 4, "held_out_share": 0.2, **changes})


# --- which demonstrations -------------------------------------------------------------------------------------


def test_every_demonstration_is_trained_on_once_an_epoch_and_the_held_out_never() -> None:
    warm_start = WarmStart(demonstrations(30), settings(epochs=3))
    train, held_out = split(demonstrations(30).segments, share=0.2, seed=0)
    assert (len(train), len(held_out)) == (24, 6)
    assert warm_start.num_steps == 18
    taken = [numbers(warm_start.batch(step)) for step in range(18)]
    assert Counter(n for batch in taken for n in batch) == Counter(numbers(train) * 3)
    first, second = [n for batch in taken[:6] for n in batch], [n for batch in taken[6:12] for n in batch]
    assert set(first) == set(second)
    assert first != second, "each epoch has an order of its own"


def test_an_epochs_rest_shares_a_step_with_the_next_epoch() -> None:
    warm_start = WarmStart(demonstrations(6), settings(epochs=3, held_out_share=0.0))
    assert [len(warm_start.batch(step)) for step in range(warm_start.num_steps)] == [4, 4, 4, 4, 2]
    assert Counter(n for s in range(5) for n in numbers(warm_start.batch(s))) == Counter(list(range(6)) * 3)


def test_steps_replace_epochs() -> None:
    warm_start = WarmStart(demonstrations(3), settings(steps=5, held_out_share=0.0))
    assert [len(warm_start.batch(step)) for step in range(warm_start.num_steps)] == [4] * 5


def test_the_order_is_the_seeds_and_not_the_process() -> None:
    batches = [numbers(WarmStart(demonstrations(30), settings(seed=seed)).batch(2)) for seed in (1, 1, 2)]
    assert batches[0] == batches[1] != batches[2]


def test_the_held_out_ones_are_chosen_by_content_and_equal_ones_stay_together() -> None:
    segments = [demonstration(i % 10) for i in range(40)]
    train, held_out = split(segments, share=0.3, seed=0)
    assert not set(numbers(train)) & set(numbers(held_out))
    again = split(segments[::-1], share=0.3, seed=0)[1]
    assert set(numbers(again)) == set(numbers(held_out))
    assert len(split([demonstration(i) for i in range(9)], share=0.01, seed=0)[1]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs must be >= 1"),
        ({"steps": -1}, "steps must be >= 0"),
        ({"sequences_per_step": 0}, "sequences_per_step must be >= 1"),
        ({"measure_every_steps": 0}, "measure_every_steps must be >= 1"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be > 0"),
        ({"held_out_share": 1.0}, "held_out_share must be from 0 to below 1"),
        ({"too_long": "cut"}, "too_long must be one of refuse, drop"),
        ({"steps": 3, "epochs": 2}, "give one of them"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**changes)


def test_holding_out_everything_and_a_changed_file_are_refused() -> None:
    with pytest.raises(ConfigError, match="leaves none to train on"):
        WarmStart(demonstrations(1), settings(held_out_share=0.5))
    state = WarmStart(demonstrations(30), settings()).state()
    with pytest.raises(ConfigError, match=r"d\.jsonl is not the file that the run was started with"):
        WarmStart(demonstrations(30, digest="other"), settings(), state=state)


# --- the loop -------------------------------------------------------------------------------------------------


class Warmed:
    """A run over fakes that begins with demonstrations."""

    def __init__(
        self, directory: Path, *, limits: Limits, resume: bool = False, rates: Rates | None = None, **changes: Any
    ) -> None:
        rates = rates or Rates()
        checkpoint = CheckpointStore(directory, keep=2).newest() if resume else None
        version = checkpoint.version if checkpoint else 0
        self.engine = FakeEngine(rates, random.Random(0), version=version)
        self.pulled: list[int] = []
        self.learner = FakeLearner(rates, version=version)
        self.recorder = MemoryRecorder()
        self.stop = trio.Event()
        environment = FakeEnvironment(rates, random.Random(1))
        self.run = Run(
            Parts(environment=environment, sampler=self.engine, learner=self.learner, engines=self),
            BufferSettings(max_off_policyness=1, groups_per_step=2, group_size=2),
            limits,
            recorder=self.recorder,
            checkpoints=CheckpointStore(directory, keep=2),
            status=RunStatus(),
            stop=self.stop,
            warm_start=WarmStart(
                demonstrations(30),
                settings(**changes),
                state=checkpoint.state["warm_start"] if checkpoint else None,
            ),
            resume_from=checkpoint,
        )

    async def make_room(self) -> Any:
        return await self.engine.make_room()

    async def pull_all(self, manifest: Any) -> Any:
        self.pulled.append(manifest.version)
        return await self.engine.pull_all(manifest)

    def train(self, *, stop_after_s: float | None = None) -> Warmed:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                if stop_after_s is not None:
                    nursery.start_soon(self._stop_later, stop_after_s)
                await self.run.train()
                nursery.cancel_scope.cancel()

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        return self

    async def _stop_later(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.stop.set()


def test_the_version_counts_every_step_and_the_engines_are_synced_once_before_the_first_rollout(tmp_path: Path) -> None:
    warmed = Warmed(tmp_path, limits=Limits(steps=3, evaluation_samples=1), epochs=2).train()
    status = warmed.run.status
    assert (status.steps, status.version) == (3, 12 + 3)
    assert warmed.pulled == [12, 13, 14, 15]
    assert min(group.admitted_version for group in warmed.learner.trained) == 12
    assert min(v for g in warmed.learner.trained if (v := g.oldest_version) is not None) == 12
    assert status.max_staleness_trained <= 1
    assert [result.version for result in warmed.recorder.evaluations] == [0, 12, 15]


def test_every_step_is_recorded_with_the_held_out_loss_where_it_is_due(tmp_path: Path) -> None:
    changes = {"measure_every_steps": 4, "learning_rate": 1e-3, "warmup_steps": 2}
    warmed = Warmed(tmp_path, limits=Limits(steps=0), **changes).train()
    records = warmed.recorder.warm_steps
    assert [record["step"] for record in records] == [record["version"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens_trained"] for record in records] == [8] * 6
    assert [record["learning_rate"] for record in records] == [5e-4] + [1e-3] * 5
    assert [record["step"] for record in records if "held_out_perplexity" in record] == [4, 6]
    assert "held_out_perplexity_before" in records[0]
    done = warmed.run.status.warm_start
    assert (done["steps"], done["tokens"]) == (6, 48)
    assert done["held_out_perplexity_after"] < done["held_out_perplexity_before"]


def test_no_steps_on_rollouts_trains_on_demonstrations_alone(tmp_path: Path) -> None:
    warmed = Warmed(tmp_path, limits=Limits(steps=0, evaluation_samples=1)).train()
    assert (warmed.run.status.steps, warmed.run.status.version) == (0, 6)
    assert warmed.recorder.groups == []
    assert [result.version for result in warmed.recorder.evaluations] == [0, 6]
    longer = Warmed(tmp_path, limits=Limits(steps=2), resume=True).train()
    assert (longer.run.status.steps, longer.run.status.version) == (2, 8)
    assert longer.learner.demonstrated == []
    assert longer.pulled == [7, 8]


@pytest.mark.parametrize("every", [0, 1, 4])
def test_stopped_in_the_middle_it_saves_and_goes_on_with_the_next_demonstration(tmp_path: Path, every: int) -> None:
    limits = Limits(steps=2, checkpoint_every_steps=every)
    whole = Warmed(tmp_path / "whole", limits=limits, epochs=2).train()
    first = Warmed(tmp_path / "cut", limits=limits, epochs=2).train(stop_after_s=23.0)
    assert first.run.status.phase == "stopped"
    assert first.pulled == []
    assert 0 < len(first.recorder.warm_steps) < 12
    second = Warmed(tmp_path / "cut", limits=limits, epochs=2, resume=True).train()
    demonstrated = numbers([*first.learner.demonstrated, *second.learner.demonstrated])
    assert demonstrated == numbers(whole.learner.demonstrated)
    steps = [record["step"] for record in [*first.recorder.warm_steps, *second.recorder.warm_steps]]
    assert steps == list(range(1, 13))
    assert second.pulled[0] == 12
    assert second.run.status.warm_start == pytest.approx(whole.run.status.warm_start)


def test_killed_in_the_middle_it_repeats_what_its_last_checkpoint_does_not_hold(tmp_path: Path) -> None:
    limits = Limits(steps=0, checkpoint_every_steps=4)
    whole = Warmed(tmp_path / "whole", limits=limits, epochs=2).train()
    first = Warmed(tmp_path / "cut", limits=limits, epochs=2)
    first.learner.dies_after = 6
    with pytest.raises((LearnerError, BaseExceptionGroup)) as caught:
        first.train()
    assert any(isinstance(error, LearnerError) for error in leaves(caught.value))
    second = Warmed(tmp_path / "cut", limits=limits, epochs=2, resume=True).train()
    kept = numbers(first.learner.demonstrated)[: 4 * 4]
    assert kept + numbers(second.learner.demonstrated) == numbers(whole.learner.demonstrated)
    assert second.recorder.warm_steps[0]["step"] == 5


def test_the_time_limit_ends_it_and_what_it_learned_is_measured_in_the_engines(tmp_path: Path) -> None:
    limits = Limits(steps=5, max_seconds=12.0, evaluation_samples=1, evaluate_before=False)
    warmed = Warmed(tmp_path, limits=limits, epochs=2).train()
    assert len(warmed.recorder.warm_steps) == 3
    assert warmed.pulled == [3]
    assert [result.version for result in warmed.recorder.evaluations] == [3]
    checkpoint = CheckpointStore(tmp_path, keep=2).newest()
    assert checkpoint is not None
    assert not is_over(checkpoint.state["warm_start"])


def test_its_last_step_is_saved_whatever_the_distance_to_the_last_checkpoint(tmp_path: Path) -> None:
    Warmed(tmp_path, limits=Limits(steps=3, checkpoint_every_steps=100)).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-9"]
    resumed = Warmed(tmp_path, limits=Limits(steps=4), resume=True).train()
    assert resumed.learner.demonstrated == []
    assert resumed.run.status.version == 10


def test_a_terminal_shows_the_steps_and_a_scrape_the_phase(tmp_path: Path) -> None:
    warmed = Warmed(tmp_path, limits=Limits(steps=0))
    output = io.StringIO()
    progress = Progress(Console(file=output, force_terminal=True, width=160), title="shown", max_steps=0)
    progress.watch(warmed.run)

    async def main() -> None:
        async with progress.shown():
            await warmed.run.train()
            for record in warmed.recorder.warm_steps:
                progress.warm_step(record)
            await trio.sleep(10.0)
        warmed.run.status.phase = "warm start"
        samples.update(
            ((sample.name, sample.labels.get("phase", "")), sample.value)
            for family in collector(Source(run=warmed.run)).collect()
            for sample in family.samples
        )

    samples: dict[tuple[str, str], float] = {}
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    said = output.getvalue()
    assert "Traceback" not in said
    assert "warm start: step 6 of 6" in said, "it is drawn again while it goes"
    assert "shown, warm start" in said
    assert "held-out perplexity" in said
    assert samples["asyncrl_phase", "warm start"] == 1
    assert samples["asyncrl_warm_start_steps_total", ""] == 6
    assert samples["asyncrl_warm_start_tokens_total", ""] == 48
    assert samples["asyncrl_warm_start_loss_nats", ""] > 0
