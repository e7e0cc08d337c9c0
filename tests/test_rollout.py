"""Episodes: limits, deadlines, and the one boundary where failures become data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from part_contract import check_environment
from scripted import END, FENCE, Reply, ScriptedSampler, write_chat_files

from asyncrl.boundary import boundary
from asyncrl.errors import CheckpointError, ConfigError, EngineError, EnvironmentFault, SandboxError
from asyncrl.protocols import Environment, Sampler
from asyncrl.rollout import (
    Episode,
    Grade,
    MultiTurnEnvironment,
    RolloutSettings,
    StepOutcome,
    TaskSource,
)
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task, TokenIds, Trajectory, TrajectoryStatus

T = TypeVar("T")
TASK = Task(task_id="t", environment="guess")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


@dataclass
class Guess(MultiTurnEnvironment):
    """Done when the reply is "yes"; each step takes `step_s`; what `faults` says is raised by its step."""

    renderer: ChatRenderer
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    step_s: float = 0.0
    grade_s: float = 0.0
    faults: Callable[[str, str], Exception | None] = lambda trajectory_id, text: None
    reward: float | None = None
    turn_reward: float | None = None

    def __post_init__(self) -> None:
        tasks = TaskSource(lambda epoch: [TASK], seed=0)
        self.name = "guess"
        super().__init__(renderer=self.renderer, tasks=tasks, settings=self.settings)
        self.started = 0

    def start(self, episode: Episode) -> Sequence[Message]:
        self.started += 1
        return [{"role": "user", "content": "go"}]

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        await trio.sleep(self.step_s)
        fault = self.faults(episode.trajectory_id, text)
        if fault is not None:
            raise fault
        if "yes" in text:
            reward = 1.0 if self.reward is None else self.reward
            return StepOutcome(done=True, reward=reward, turn_reward=self.turn_reward)
        messages = [{"role": "user", "content": "no"}]
        return StepOutcome(done=False, turn_reward=self.turn_reward, messages=messages)

    async def grade(self, episode: Episode) -> Grade:
        await trio.sleep(self.grade_s)
        return Grade(reward=0.1 * len(episode.replies), parts={"replies": float(len(episode.replies))})


def always(reply: Reply) -> Callable[[str, int], Reply]:
    return lambda trajectory_id, turn: reply


def run(main: Callable[[], Awaitable[T]]) -> T:
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[no-any-return]


def collect(environment: MultiTurnEnvironment, sampler: Sampler, size: int = 1) -> Sequence[Trajectory]:
    async def main() -> Sequence[Trajectory]:
        return await environment.collect_trajectories(TASK, sampler, group_id="7", group_size=size)

    return run(main)


def test_an_environment_of_turns_fulfils_the_protocol(renderer: ChatRenderer) -> None:
    assert isinstance(Guess(renderer), Environment)


def test_each_episode_is_told_of_when_it_ends_and_those_told_of_survive_a_cancellation(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, step_s=10)
    told: list[str] = []

    async def main() -> None:
        await check_environment(environment, ScriptedSampler(renderer, always("yes")))
        slow = ScriptedSampler(renderer, lambda trajectory_id, turn: "no" if trajectory_id == "9-0" else "yes")
        with trio.move_on_after(15) as scope:
            await environment.collect_trajectories(
                TASK, slow, group_id="9", group_size=3, on_trajectory=lambda t: told.append(t.trajectory_id)
            )
        assert scope.cancelled_caught

    run(main)
    assert sorted(told) == ["9-1", "9-2"]


def test_trajectories_of_a_group_are_named_in_order_and_run_at_once(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(renderer, always("yes"), seconds=10)
    trajectories = collect(Guess(renderer), sampler, size=4)
    assert [t.trajectory_id for t in trajectories] == ["7-0", "7-1", "7-2", "7-3"]
    assert [t.seconds for t in trajectories] == [10, 10, 10, 10]
    assert {t.status for t in trajectories} == {TrajectoryStatus.COMPLETED}
    assert [(t.reward, t.num_turns, t.task_id, t.environment) for t in trajectories] == [(1.0, 1, "t", "guess")] * 4


class _Keeping(ScriptedSampler):
    """Knows one episode from before."""

    def __init__(self, renderer: ChatRenderer, known: Trajectory) -> None:
        super().__init__(renderer, always("yes"))
        self.known = {known.trajectory_id: known}

    def kept_trajectory(self, trajectory_id: str) -> Trajectory | None:
        return self.known.get(trajectory_id)


def test_an_episode_that_is_known_is_not_run_again(renderer: ChatRenderer) -> None:
    (first, known, third) = collect(Guess(renderer), ScriptedSampler(renderer, always("yes")), size=3)
    sampler = _Keeping(renderer, known)
    trajectories = collect(Guess(renderer), sampler, size=3)
    assert trajectories[1] is known
    assert sorted(sampler.prompts) == [first.trajectory_id, third.trajectory_id]


def test_what_is_sampled_from_next_extends_what_was_sampled(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(renderer, lambda trajectory_id, turn: ["maybe", "yes"][turn])
    (trajectory,) = collect(Guess(renderer), sampler)
    first, second = sampler.prompts["7-0"]
    said = [*renderer.encode("maybe"), END]
    assert list(second[: len(first) + len(said)]) == [*first, *said]
    (segment,) = trajectory.segments
    assert list(segment.token_ids) == [*second, *renderer.encode("yes"), END]
    trained = [t for t, m in zip(segment.token_ids, segment.loss_mask, strict=True) if m]
    assert trained == [*said, *renderer.encode("yes"), END]
    assert trajectory.num_turns == 2


def test_a_reply_without_end_token_is_closed_before_the_next_turn(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(renderer, lambda trajectory_id, turn: ["maybe", "yes"][turn], ends=False)
    (trajectory,) = collect(Guess(renderer), sampler)
    text = renderer.decode(trajectory.segments[0].token_ids, keep_special=True)
    assert text == "<|user|>go</s>\n<|assistant|>maybe</s>\n<|user|>no</s>\n<|assistant|>yes"
    assert trajectory.num_sampled_tokens == len("maybe") + len("yes")


def test_prefix_and_stop_tokens_of_an_environment_reach_the_sampler(renderer: ChatRenderer) -> None:
    environment = Guess(renderer)
    environment.reply_prefix, environment.stop_token_ids = "I say ", (FENCE,)
    sampler = ScriptedSampler(renderer, always("yes```never said"))
    seen: list[str] = []
    environment.faults = lambda trajectory_id, text: seen.append(text)  # type: ignore[func-returns-value]
    (trajectory,) = collect(environment, sampler)
    assert renderer.decode(sampler.prompts["7-0"][0]).endswith("I say ")
    assert sampler.stops == {(FENCE,)}
    assert seen[0] == "I say yes```"
    assert trajectory.segments[0].token_ids[-1] == FENCE
    assert trajectory.num_sampled_tokens == len("yes") + 1


class Told(Guess):
    def teacher_note(self, episode: Episode) -> str:
        return f"{episode.task.task_id}: the word is yes."


@pytest.mark.parametrize("told", [True, False])
def test_a_teacher_is_told_the_note_and_the_policy_is_not(renderer: ChatRenderer, told: bool) -> None:
    environment = Told(renderer, RolloutSettings(teacher_prompts=told))
    environment.reply_prefix = "I say "
    sampler = ScriptedSampler(renderer, lambda trajectory_id, turn: ["maybe", "yes"][turn])
    (trajectory,) = collect(environment, sampler)
    (segment,) = trajectory.segments
    assert "the word" not in renderer.decode(segment.token_ids)
    if not told:
        assert segment.teacher_prompt_token_ids is None
        return
    assert segment.teacher_prompt_token_ids is not None
    text = renderer.decode(segment.teacher_prompt_token_ids, keep_special=True)
    assert text == "<|user|>go\n\nt: the word is yes.</s>\n<|assistant|>I say "


def test_an_environment_without_a_note_refuses_to_tell_one(renderer: ChatRenderer) -> None:
    with pytest.raises(ConfigError, match="teacher_prompts must be false: environment 'guess' has no note"):
        Guess(renderer, RolloutSettings(teacher_prompts=True))


def test_turns_used_up_are_graded_as_they_stand(renderer: ChatRenderer) -> None:
    (trajectory,) = collect(
        Guess(renderer, settings=RolloutSettings(max_turns=3)), ScriptedSampler(renderer, always("no"))
    )
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TURNS
    assert trajectory.num_turns == 3
    assert trajectory.reward == pytest.approx(0.3)
    assert trajectory.reward_parts == {"replies": 3.0}


def test_a_cut_reply_is_flagged_and_its_reward_counts(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, settings=RolloutSettings(max_tokens=3))
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("yes")))
    assert trajectory.status is TrajectoryStatus.TRUNCATED_LENGTH
    assert trajectory.truncated
    assert trajectory.reward == 1.0


def test_the_limit_on_tokens_is_of_the_whole_episode(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(renderer, always("n" * 100), ends=False)
    start = len(renderer.start([{"role": "user", "content": "go"}]))
    limits = RolloutSettings(max_turns=9, max_tokens=10, max_episode_tokens=start + 25)
    (trajectory,) = collect(Guess(renderer, settings=limits), sampler)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_LENGTH
    assert len(trajectory.segments[0].token_ids) <= start + 25
    assert trajectory.num_turns >= 2


def test_a_prompt_without_room_for_a_reply_is_a_failure(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, settings=RolloutSettings(max_episode_tokens=3))
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("yes")))
    assert trajectory.status is TrajectoryStatus.FAILED_ENVIRONMENT
    assert "no room" in trajectory.detail


def test_a_deadline_is_graded_as_it_stands(renderer: ChatRenderer) -> None:
    limits = RolloutSettings(max_turns=9, episode_timeout_s=25)
    (trajectory,) = collect(Guess(renderer, settings=limits), ScriptedSampler(renderer, always("no"), seconds=10))
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert trajectory.seconds == 25
    assert trajectory.num_turns == 2
    assert trajectory.reward == pytest.approx(0.2)


def test_a_deadline_in_a_step_keeps_the_reply_that_it_was_about(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, settings=RolloutSettings(episode_timeout_s=25), step_s=100)
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("yes"), seconds=10))
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert trajectory.num_turns == 1
    assert trajectory.reward == pytest.approx(0.1)


def test_no_reply_before_the_deadline_is_the_engines_failure(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, settings=RolloutSettings(episode_timeout_s=25))
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("yes"), seconds=30))
    assert trajectory.status is TrajectoryStatus.FAILED_ENGINE
    assert trajectory.reward is None
    assert environment.started == 1, "there is no time left for a retry"


class Held(Guess):
    """Each attempt holds something that takes `open_s` to get; `events` says what happened when."""

    open_s: float = 0.0
    time_limit_s: float = math.inf
    broken: int = 0
    events: list[tuple[str, float]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events = []

    @contextlib.asynccontextmanager
    async def holding(self, episode: Episode) -> AsyncIterator[None]:
        await trio.sleep(self.open_s)
        episode.time_limit_s = self.time_limit_s
        self.events.append(("open", trio.current_time()))
        if len(self.events) <= self.broken:
            raise SandboxError("none to be had")
        try:
            yield
        finally:
            self.events.append(("closed", trio.current_time()))

    async def grade(self, episode: Episode) -> Grade:
        self.events.append(("graded", trio.current_time()))
        return await super().grade(episode)


def test_what_an_episode_holds_is_left_after_its_grading_and_waiting_for_it_is_not_its_time(
    renderer: ChatRenderer,
) -> None:
    environment = Held(renderer, settings=RolloutSettings(max_turns=9, episode_timeout_s=25))
    environment.open_s = 1000
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("no"), seconds=10))
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert trajectory.num_turns == 2
    start = environment.events[0][1]
    assert [(what, when - start) for what, when in environment.events] == [("open", 0), ("graded", 25), ("closed", 25)]


def test_a_task_may_leave_its_agent_less_time(renderer: ChatRenderer) -> None:
    environment = Held(renderer, settings=RolloutSettings(max_turns=9, episode_timeout_s=25))
    environment.time_limit_s = 15
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("no"), seconds=10))
    assert (trajectory.status, trajectory.num_turns) == (TrajectoryStatus.TIMED_OUT, 1)


def test_every_attempt_holds_its_own_and_leaves_it_on_every_path(renderer: ChatRenderer) -> None:
    environment = Held(renderer, faults=lambda trajectory_id, text: EnvironmentFault("odd"))
    (failed,) = collect(environment, ScriptedSampler(renderer, always("yes")))
    assert failed.status is TrajectoryStatus.FAILED_ENVIRONMENT
    assert [what for what, _ in environment.events] == ["open", "closed"] * 2

    environment = Held(renderer)
    environment.broken = 1
    (second,) = collect(environment, ScriptedSampler(renderer, always("yes")))
    assert second.status is TrajectoryStatus.COMPLETED
    assert second.extras["retries"] == 1

    environment = Held(renderer)
    environment.broken = 2
    (failed,) = collect(environment, ScriptedSampler(renderer, always("yes")))
    assert (failed.status, failed.detail) == (TrajectoryStatus.FAILED_SANDBOX, "SandboxError: none to be had")


def test_an_environment_needs_a_template_to_ask_with(tmp_path: Path) -> None:
    without = ChatRenderer.load(write_chat_files(tmp_path, template=None))
    with pytest.raises(ConfigError, match="has no chat template"):
        Guess(without)


def test_a_grading_without_end_is_a_failure(renderer: ChatRenderer) -> None:
    limits = RolloutSettings(max_turns=1, grading_timeout_s=5, max_retries=0)
    (trajectory,) = collect(Guess(renderer, settings=limits, grade_s=100), ScriptedSampler(renderer, always("no")))
    assert trajectory.status is TrajectoryStatus.FAILED_ENVIRONMENT
    assert "grading took longer" in trajectory.detail


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SandboxError("full"), TrajectoryStatus.FAILED_SANDBOX),
        (EnvironmentFault("odd"), TrajectoryStatus.FAILED_ENVIRONMENT),
        (EngineError("gone"), TrajectoryStatus.FAILED_ENGINE),
    ],
)
def test_a_failed_episode_has_a_reason_and_no_reward_and_its_siblings_go_on(
    renderer: ChatRenderer, error: Exception, status: TrajectoryStatus
) -> None:
    environment = Guess(renderer, faults=lambda trajectory_id, text: error if trajectory_id == "7-1" else None)
    trajectories = collect(environment, ScriptedSampler(renderer, always("yes")), size=3)
    assert [t.status for t in trajectories] == [TrajectoryStatus.COMPLETED, status, TrajectoryStatus.COMPLETED]
    failed = trajectories[1]
    assert failed.reward is None
    assert failed.segments == ()
    assert str(error) in failed.detail
    assert failed.extras["retries"] == 1
    assert failed.extras["discarded_tokens"] == 2 * (len("yes") + 1)


def test_a_failed_episode_is_started_again_from_its_beginning(renderer: ChatRenderer) -> None:
    def script(trajectory_id: str, turn: int) -> Reply:
        return EngineError("gone") if turn == 1 else ("no" if turn == 0 else "yes")

    sampler = ScriptedSampler(renderer, script)
    (trajectory,) = collect(Guess(renderer), sampler)
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert trajectory.reward == 1.0
    prompts = sampler.prompts["7-0"]
    assert prompts[2] == prompts[0]
    assert trajectory.extras == {"retries": 1, "discarded_tokens": len("no") + 1}


def test_without_retries_the_first_failure_stands(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, settings=RolloutSettings(max_retries=0))
    sampler = ScriptedSampler(renderer, always(EngineError("gone")))
    (trajectory,) = collect(environment, sampler)
    assert trajectory.status is TrajectoryStatus.FAILED_ENGINE
    assert len(sampler.prompts["7-0"]) == 1


def test_a_completion_that_contradicts_itself_is_a_failed_environment(renderer: ChatRenderer) -> None:
    class Broken(ScriptedSampler):
        async def sample(self, token_ids: TokenIds, **more: Any) -> Any:
            from dataclasses import replace

            return replace(await super().sample(token_ids, **more), spans=())

    (trajectory,) = collect(Guess(renderer), Broken(renderer, always("yes")))
    assert trajectory.status is TrajectoryStatus.FAILED_ENVIRONMENT
    assert "spans cover 0" in trajectory.detail


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["reward", "turn_reward"])
def test_a_reward_that_is_no_number_is_a_failed_environment(renderer: ChatRenderer, which: str, reward: float) -> None:
    (trajectory,) = collect(Guess(renderer, **{which: reward}), ScriptedSampler(renderer, always("yes")))  # type: ignore[arg-type]
    assert trajectory.status is TrajectoryStatus.FAILED_ENVIRONMENT
    assert trajectory.reward is None
    assert f"must be a finite number, got {reward}" in trajectory.detail


def test_what_turns_earn_is_part_of_the_reward_and_kept_by_turn(renderer: ChatRenderer) -> None:
    sampler = ScriptedSampler(renderer, lambda trajectory_id, turn: ["maybe", "yes"][turn])
    (trajectory,) = collect(Guess(renderer, turn_reward=0.25), sampler)
    assert trajectory.reward == 1.5
    assert trajectory.reward_parts == {"turns": 0.5}
    assert [turn.reward for turn in trajectory.segments[0].turns] == [0.25, 0.25]
    (silent,) = collect(Guess(renderer), ScriptedSampler(renderer, always("yes")))
    assert silent.reward_parts == {}
    assert [turn.reward for turn in silent.segments[0].turns] == [None]


def test_a_turn_whose_answer_came_too_late_has_no_reward(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, step_s=1000, turn_reward=0.25, settings=RolloutSettings(episode_timeout_s=10))
    (trajectory,) = collect(environment, ScriptedSampler(renderer, always("yes")))
    assert trajectory.status is TrajectoryStatus.TIMED_OUT
    assert [turn.reward for turn in trajectory.segments[0].turns] == [None]
    assert trajectory.reward == pytest.approx(0.1)


@pytest.mark.parametrize("error", [KeyError("a typing mistake"), CheckpointError("no part of an episode")])
def test_a_programmers_error_ends_the_group(renderer: ChatRenderer, error: Exception) -> None:
    environment = Guess(renderer, faults=lambda trajectory_id, text: error)
    with pytest.raises(BaseExceptionGroup) as caught:
        collect(environment, ScriptedSampler(renderer, always("yes")))
    assert caught.group_contains(type(error))


def test_a_cancelled_group_leaves_at_once_and_grades_nothing(renderer: ChatRenderer) -> None:
    environment = Guess(renderer, grade_s=1000)

    async def main() -> float:
        with trio.move_on_after(5):
            await environment.collect_trajectories(
                TASK, ScriptedSampler(renderer, always("no"), seconds=100), group_id="7", group_size=3
            )
        return trio.current_time()

    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(main, clock=clock) == pytest.approx(5)


# --- boundary -------------------------------------------------------------------------------------------------


def test_a_boundary_stops_only_the_kinds_it_names() -> None:
    async def main() -> None:
        async with boundary(SandboxError) as caught:
            raise SandboxError("full")
        assert (caught.status, caught.detail) == (TrajectoryStatus.FAILED_SANDBOX, "SandboxError: full")
        with pytest.raises(EngineError):
            async with boundary(SandboxError):
                raise EngineError("gone")
        async with boundary() as untouched:
            pass
        assert untouched.status is None

    trio.run(main)


def test_a_boundary_stops_a_group_only_where_all_of_it_is_failure() -> None:
    async def main() -> None:
        async with boundary() as caught:
            raise ExceptionGroup("two", [ExceptionGroup("one", [EngineError("gone")]), SandboxError("full")])
        assert caught.status is TrajectoryStatus.FAILED_ENGINE
        with pytest.raises(ExceptionGroup):
            async with boundary():
                raise ExceptionGroup("two", [EngineError("gone"), KeyError("a mistake")])
        with pytest.raises(BaseExceptionGroup):
            async with boundary():
                raise BaseExceptionGroup("two", [EngineError("gone"), KeyboardInterrupt()])

    trio.run(main)


@pytest.mark.parametrize(
    "bad",
    [{"max_turns": 0}, {"max_tokens": 0}, {"max_retries": -1}, {"episode_timeout_s": 0}, {"max_episode_tokens": 1}],
)
def test_limits_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RolloutSettings(**bad)
