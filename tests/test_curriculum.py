"""Which tasks a curriculum draws, and that it goes on from its state with the same ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing
from part_contract import check_environment

from asyncrl.configs.schema import load_config
from asyncrl.curriculum import Curriculum, CurriculumEnvironment, CurriculumSettings, TaskOrder, with_curriculum
from asyncrl.environments.mixed import MixedEnvironment, MixedPart, MixedSettings, shares
from asyncrl.errors import ConfigError
from asyncrl.testing import FakeEngine, FakeEnvironment, Rates
from asyncrl.types import Task, Trajectory, TrajectoryStatus

_SIZE = 4


def _tasks(epoch: int, count: int = 6) -> list[Task]:
    return [Task(task_id=f"{epoch}/{place}", environment="e") for place in range(count)]


def _curriculum(order: TaskOrder, *, epochs: int = 0, seed: int = 0, **settings: Any) -> Curriculum:
    return Curriculum(_tasks, CurriculumSettings(order=order, **settings), seed=seed, group_size=_SIZE, epochs=epochs)


def _place(task: Task) -> int:
    return int(task.task_id.split("/")[1])


def _play(curriculum: Curriculum, draws: int, chances: Sequence[float], rng: Random) -> Counter[int]:
    """Draw and observe groups whose episodes succeed by chance; return place -> draws."""
    counts: Counter[int] = Counter()
    for _ in range(draws):
        task = curriculum.next()
        counts[place := _place(task)] += 1
        solved = sum(rng.random() < chances[place] for _ in range(_SIZE))
        curriculum.observe(task, num_solved=solved, num_scored=_SIZE)
    return counts


def test_the_estimate_is_laplaces_rule_with_exponential_forgetting() -> None:
    curriculum = _curriculum(TaskOrder.VARIANCE, memory=0.5)
    task = _tasks(0)[2]
    assert curriculum.success(2) == 0.5
    curriculum.observe(task, num_solved=4, num_scored=4)
    assert curriculum.success(2) == pytest.approx((4 + 1) / (4 + 2))
    curriculum.observe(task, num_solved=1, num_scored=3)
    assert curriculum.success(2) == pytest.approx((0.5 * 4 + 1 + 1) / (0.5 * 4 + 3 + 2))


@pytest.mark.parametrize("solved", [0, 1, 5, 50])
def test_weights_are_the_formulas(solved: int) -> None:
    task, p = _tasks(0)[0], (solved + 1) / (50 + 2)
    for order, weight in (
        (TaskOrder.VARIANCE, p * (1 - p) / 0.25),
        (TaskOrder.MIXED_OUTCOMES, (1 - p**_SIZE - (1 - p) ** _SIZE) / (1 - 2 * 0.5**_SIZE)),
    ):
        curriculum = _curriculum(order, floor=0.01)
        curriculum.observe(task, num_solved=solved, num_scored=50)
        assert curriculum.weight(0) == pytest.approx(max(weight, 0.01))
        assert curriculum.weight(1) == pytest.approx(1.0)


@pytest.mark.parametrize("order", [TaskOrder.VARIANCE, TaskOrder.MIXED_OUTCOMES])
def test_tasks_that_teach_are_drawn_more_often_and_the_others_measured_again(order: TaskOrder) -> None:
    counts = _play(_curriculum(order, floor=0.05), 600, [0.0, 1.0, 0.5, 0.5, 0.0, 1.0], Random(3))
    assert min(counts[2], counts[3]) > 150
    assert all(10 < counts[place] < 80 for place in (0, 1, 4, 5)), counts
    assert _play(_curriculum(order, floor=1.0), 600, [0, 1, 0.5, 0.5, 0, 1], Random(3))[0] > 70


def test_a_task_that_was_forgotten_how_to_solve_is_found_again() -> None:
    curriculum = _curriculum(TaskOrder.VARIANCE)
    _play(curriculum, 200, [1.0] * 6, Random(0))
    assert curriculum.statistics().mean_weight < 0.2
    counts = _play(curriculum, 300, [0.5] + [1.0] * 5, Random(1))
    assert counts[0] > 2 * max(counts[place] for place in range(1, 6))


def test_easy_to_hard_asks_every_task_once_an_epoch_the_easiest_first() -> None:
    curriculum = _curriculum(TaskOrder.EASY_TO_HARD, epochs=3)
    chances = [0.1, 0.9, 0.5, 0.7, 0.0, 1.0]
    for epoch in range(3):
        drawn = [curriculum.next() for _ in range(6)]
        assert sorted(map(_place, drawn)) == list(range(6))
        assert {task.task_id.split("/")[0] for task in drawn} == {str(epoch)}
        if epoch:
            assert [_place(task) for task in drawn] == [5, 1, 3, 2, 0, 4]
        for task in drawn:
            curriculum.observe(task, num_solved=round(100 * chances[_place(task)]), num_scored=100)
    with pytest.raises(StopIteration):
        curriculum.next()


@pytest.mark.parametrize("order", [o for o in TaskOrder if o is not TaskOrder.SHUFFLED])
def test_it_goes_on_from_its_state_with_the_same_draws(order: TaskOrder) -> None:
    for stop in (0, 5, 6, 17):
        whole, before = _curriculum(order), _curriculum(order)
        chances, rngs = [0.1, 0.9, 0.5, 0.7, 0.0, 1.0], (Random(1), Random(1))
        _play(whole, stop, chances, rngs[0])
        _play(before, stop, chances, rngs[1])
        left = [before.next(), before.next()], [whole.next(), whole.next()]
        after = _curriculum(order)
        after.restore(json.loads(json.dumps(before.state())))
        for task, same in zip(*left, strict=True):
            after.observe(task, num_solved=1, num_scored=4)
            whole.observe(same, num_solved=1, num_scored=4)
        assert _play(after, 20, chances, rngs[1]) == _play(whole, 20, chances, rngs[0])
        assert after.state() == whole.state()


def test_seeds_differ() -> None:
    first, second = ([_place(_draw.next()) for _ in range(30)] for _draw in (
        _curriculum(TaskOrder.VARIANCE, seed=0), _curriculum(TaskOrder.VARIANCE, seed=1)))  # fmt: skip
    assert first != second


def test_a_checkpoint_of_other_tasks_is_refused() -> None:
    state = _curriculum(TaskOrder.VARIANCE).state()
    other = Curriculum(lambda epoch: _tasks(epoch, 7), CurriculumSettings(order=TaskOrder.VARIANCE), seed=0)
    with pytest.raises(ConfigError, match="knows 6 tasks and the environment has 7"):
        other.restore(state)


class _Pool(FakeEnvironment):
    """Has tasks to choose from."""

    task_epochs = 2

    def __init__(self, name: str = "pool") -> None:
        super().__init__(Rates(), Random(0))
        self.name = name

    def training_tasks(self, epoch: int) -> Sequence[Task]:
        return [Task(task_id=f"{self.name}-{epoch}-{i}", environment=self.name) for i in range(3)]


def _trajectory(task: Task, reward: float | None) -> Trajectory:
    status = TrajectoryStatus.COMPLETED if reward is not None else TrajectoryStatus.FAILED_SANDBOX
    return Trajectory(
        trajectory_id="t", task_id=task.task_id, environment=task.environment, segments=(), reward=reward, status=status
    )


def test_an_environment_is_wrapped_learns_from_its_groups_and_resumes() -> None:
    settings = CurriculumSettings(order=TaskOrder.VARIANCE)
    first, second = (with_curriculum(_Pool(), settings, seed=0, group_size=4) for _ in range(2))
    assert isinstance(first, CurriculumEnvironment)
    task = first.get_item()
    first.observe(task, [_trajectory(task, 1.0), _trajectory(task, 0.0), _trajectory(task, None)])
    place = int(task.task_id[-1])
    assert first.curriculum.success(place) == (1 + 1) / (2 + 2)
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.get_item() for _ in range(5)] == [first.get_item() for _ in range(5)]
    with pytest.raises(StopIteration):
        first.get_item()
    assert [task.task_id for task in first.held_out()] == ["held-out-0", "held-out-1", "held-out-2"]


def test_an_environment_without_a_pool_is_refused_and_shuffled_changes_nothing() -> None:
    plain = FakeEnvironment(Rates(), Random(0))
    assert with_curriculum(plain, CurriculumSettings(), seed=0, group_size=4) is plain
    with pytest.raises(ConfigError, match=r"'fake' has not: set order = \"shuffled\" \(\[curriculum\]\)"):
        with_curriculum(plain, CurriculumSettings(order=TaskOrder.VARIANCE), seed=0, group_size=4)


@pytest.mark.parametrize(("name", "value"), [("memory", 0.0), ("memory", 1.1), ("floor", 0.0), ("floor", float("nan"))])
def test_settings_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be above 0 and at most 1, got {value} \(\[curriculum\]\)"):
        CurriculumSettings(**{name: value})


# --- mixtures -------------------------------------------------------------------------------------------------


def test_shares_sum_to_one_and_none_is_below_the_minimum() -> None:
    rng = Random(0)
    for _ in range(200):
        weights = {str(i): rng.lognormvariate(0, 3) * rng.choice([0, 1]) for i in range(rng.randrange(1, 6))}
        minimum = rng.uniform(0, 1 / len(weights))
        found = shares(weights, minimum)
        assert sum(found.values()) == pytest.approx(1.0)
        assert min(found.values()) >= minimum - 1e-12
        free = [label for label in weights if found[label] > minimum + 1e-9]
        for label in free:  # those that were not raised keep their proportion
            assert found[label] * weights[free[0]] == pytest.approx(found[free[0]] * weights[label])


def _mixed(*, minimum_share: float = 0.0, follow_signal: bool = False) -> MixedEnvironment:
    """Return a mixture of two pools of this file."""
    here = f"{__name__}:MixablePool"
    settings = MixedSettings(
        parts=(MixedPart(label="a", name=here, weight=3.0), MixedPart(label="b", name=here)),
        minimum_share=minimum_share,
        follow_signal=follow_signal,
    )
    nothing: Any = None
    return MixedEnvironment(settings, renderer=nothing, sandboxes=nothing, seed=1)


class MixablePool(_Pool):
    """As the loader builds it."""

    task_epochs = 1000

    def __init__(self, settings: Any, **parts: Any) -> None:
        super().__init__("pool")


def test_mixtures_and_curricula_pass_on_what_they_are_told() -> None:
    async def main() -> None:
        engine = FakeEngine(Rates(), Random(0))
        await check_environment(_mixed(), engine)
        await check_environment(CurriculumEnvironment(_Pool(), _curriculum(TaskOrder.VARIANCE)), engine)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_mixture_draws_by_weight_and_resumes_with_the_same_draws() -> None:
    mixed, resumed = _mixed(), _mixed()
    counts = Counter(mixed.get_item().environment for _ in range(400))
    assert 250 < counts["a"] < 350
    resumed.restore(json.loads(json.dumps(mixed.state())))
    assert [resumed.get_item() for _ in range(20)] == [mixed.get_item() for _ in range(20)]
    assert {task.environment for task in mixed.held_out()} == {"a", "b"}


def test_a_part_that_teaches_nothing_falls_to_the_minimum_share_and_comes_back() -> None:
    mixed = _mixed(minimum_share=0.1, follow_signal=True)
    for rewards, share in (([1.0, 1.0], 0.1), ([1.0, 0.0], 0.75)):
        for _ in range(200):
            for label in ("a", "b"):
                task = Task(task_id="t", environment=label)
                mixed.observe(task, [_trajectory(task, r) for r in (rewards if label == "a" else [0.0, 1.0])])
        assert mixed.shares()["a"] == pytest.approx(share, abs=0.01)


def test_each_part_of_a_mixture_gets_its_own_curriculum() -> None:
    mixed = with_curriculum(_mixed(), CurriculumSettings(order=TaskOrder.EASY_TO_HARD), seed=0, group_size=4)
    assert isinstance(mixed, MixedEnvironment)
    task = mixed.get_item()
    mixed.observe(task, [_trajectory(task, 1.0)])
    curricula = {
        label: part.curriculum for label, part in mixed.parts.items() if isinstance(part, CurriculumEnvironment)
    }
    assert {label: curriculum.statistics().num_measured for label, curriculum in curricula.items()} == {
        "a": int(task.environment == "a"),
        "b": int(task.environment == "b"),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": []}, "at least two environments with different labels, got []"),
        ({"parts": [("a", 1.0), ("a", 1.0)]}, "different labels, got ['a', 'a']"),
        ({"parts": [("a", 1.0), ("b", 0.0)]}, "weight of part 'b' must be above 0, got 0.0"),
        ({"parts": [("a", 1.0), ("b", 1.0)], "minimum_share": 0.6}, "must be from 0 to 1 / 2 with 2 parts, got 0.6"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    parts = tuple(MixedPart(label=label, name="bugfix", weight=weight) for label, weight in options.pop("parts"))
    with pytest.raises(ConfigError) as caught:
        MixedSettings(parts=parts, **options)
    assert words in str(caught.value)


def test_a_mixture_and_a_curriculum_are_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        """
        [model]
        path = "model"
        [environment]
        name = "mixed"
        [environment.options]
        minimum_share = 0.2
        parts = [
            { label = "easy", name = "bugfix", weight = 2.0, options = { max_episode_tokens = 512 } },
            { label = "hard", name = "bugfix", options = { hard = true, max_episode_tokens = 1000 } },
        ]
        [curriculum]
        order = "mixed_outcomes"
        """
    )
    config = load_config(path)
    assert config.curriculum.order is TaskOrder.MIXED_OUTCOMES
    with pytest.raises(ConfigError, match="max_episode_tokens = 1000"):
        load_config(path, ["engine.max_model_len=900"])
    with pytest.raises(ConfigError, match="ordr"):
        load_config(path, ["curriculum.ordr=x"])
