"""Multi-turn episodes: the loop between sampler and environment."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import trio

from asyncrl.boundary import boundary
from asyncrl.conversation import Conversation
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault
from asyncrl.protocols import KeepsTrajectories, Sampler
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task, TokenIds, Trajectory, TrajectoryStatus, Turn

_NOTHING = contextlib.nullcontext()  # one for all episodes that hold nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Limits of one episode."""

    max_turns: int = 2
    """Model calls."""
    max_tokens: int = 64
    """Sampled tokens of one turn."""
    max_episode_tokens: int = 1024
    """Of the whole sequence, prompts included; at most the engine's longest context."""
    episode_timeout_s: float = 120.0
    """From the first request, retries included; the episode is then graded as it stands."""
    grading_timeout_s: float = 60.0
    """Of the last grading alone; longer counts as a failed environment."""
    max_retries: int = 1
    """How often an episode that infrastructure ended is started again."""
    teacher_prompts: bool = False
    """Whether a teacher is told what `teacher_note` says, as its own longer prompt; [learner.teacher] reads it."""

    @property
    def command_s(self) -> float:
        """Seconds after which a sandbox of the environment ends one command; 0 where it runs none.

        An environment that runs the agent's code says it here, so that no deadline ends what the sandbox would judge.
        """
        return 0.0

    @property
    def longest_episode_s(self) -> float:
        """Seconds that an episode may take by its own deadlines."""
        return self.episode_timeout_s + self.grading_timeout_s

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        least = {"max_turns": 1, "max_tokens": 1, "max_episode_tokens": 2, "max_retries": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ([environment.options])")
        for name in ("episode_timeout_s", "grading_timeout_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name} must be > 0 and finite seconds, got {seconds} ([environment.options])")
        if self.grading_timeout_s < self.command_s:
            raise ConfigError(
                f"grading_timeout_s must be at least the {self.command_s:g} s after which the sandbox ends a command, "
                f"or code that never ends counts as a failed environment, got {self.grading_timeout_s:g} "
                "([environment.options])"
            )
        if self.episode_timeout_s < self.max_turns * self.command_s:
            raise ConfigError(
                f"episode_timeout_s must be at least max_turns = {self.max_turns} times the {self.command_s:g} s after "
                f"which the sandbox ends a command, {self.max_turns * self.command_s:g} s, got "
                f"{self.episode_timeout_s:g} ([environment.options])"
            )


@dataclass(slots=True, kw_only=True)
class Episode:
    """What one running episode has seen; owned by the loop, read by the environment, which may keep notes on it."""

    trajectory_id: str
    task: Task
    turns: list[Turn] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    """The text of each completion, reply prefix included, special tokens left out."""
    notes: dict[str, Any] = field(default_factory=dict)
    """The environment's own."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Goes into the trajectory's extras. JSON-like."""
    time_limit_s: float = math.inf
    """Seconds that the agent may take where that is less than `episode_timeout_s`; set while `holding` opens."""
    deadline: float = math.inf
    """On trio's clock, when the agent's time is over; set by the loop before `start`."""
    teacher_prompt_token_ids: TokenIds | None = None
    """The first prompt with the teacher's note in it, where teachers are told one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What an episode is worth."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Figures by name, for the metrics. Those called paid_NAME are the terms whose sum the reward is; their shares of
    its variance are then reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What the environment answers to one reply."""

    done: bool
    reward: float | None = None
    """Of the episode's result, where `done`; None asks `grade` for it."""
    turn_reward: float | None = None
    """What the reply that is answered earned by itself. The episode's reward is that of its result plus those of its
    turns; `[learner.credit] level = "turn"` tells which turn earned what. Settings of an environment may say by a
    property `pays_turns` whether there will be any, so that a run which needs them is refused before it starts."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    status: TrajectoryStatus | None = None
    """Where `done`; None is `completed`, or `truncated_length` where the last reply was cut at its limit."""
    messages: Sequence[Message] = ()
    """What the agent reads next, where not `done`."""


async def collect_episodes(
    episode: Callable[[str], Awaitable[Trajectory]],
    sampler: Sampler,
    *,
    group_id: str,
    group_size: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Sequence[Trajectory]:
    """Return `group_size` trajectories, in order, each played by `episode` beside the others, by its trajectory id.

    What the sampler has kept of an interrupted run is not played again. `on_trajectory` is told of each as it ends.
    """
    trajectories: dict[int, Trajectory] = {}

    async def run(index: int) -> None:
        trajectory_id = f"{group_id}-{index}"
        kept = sampler.kept_trajectory(trajectory_id) if isinstance(sampler, KeepsTrajectories) else None
        trajectories[index] = kept or await episode(trajectory_id)
        if on_trajectory:
            on_trajectory(trajectories[index])

    async with trio.open_nursery() as nursery:
        for index in range(group_size):
            nursery.start_soon(run, index)
    return tuple(trajectories[index] for index in range(group_size))


async def play_again(attempt: Callable[[], Awaitable[Trajectory]], *, max_retries: int) -> Trajectory:
    """Return the first trajectory of `attempt` that is worth something, or the last of `max_retries` further ones.

    What the failed ones sampled is in its extras (`discarded_tokens`), beside how many there were (`retries`).
    """
    discarded, retries = 0, 0
    while True:
        trajectory = await attempt()
        discarded += trajectory.extras.get("discarded_tokens", 0)
        if trajectory.reward is not None or retries == max_retries:
            break
        retries += 1
    if not retries:
        return trajectory
    return replace(trajectory, extras={**trajectory.extras, "retries": retries, "discarded_tokens": discarded})


def refuse_bad_numbers(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory, or one that failed in its environment where a reward is not a number."""
    if trajectory.bad_number is None:
        return trajectory
    detail = f"EnvironmentFault: {trajectory.bad_number}"
    return replace(trajectory, segments=(), reward=None, status=TrajectoryStatus.FAILED_ENVIRONMENT, detail=detail)


class TaskSource:
    """Tasks in shuffled epochs: the same seed gives the same order, from any saved position.

    Example:
        >>> source = TaskSource(lambda epoch: [Task(task_id="a", environment="demo")], seed=0, epochs=1)
        >>> source.next().task_id
        'a'
    """

    def __init__(self, tasks: Callable[[int], Sequence[Task]], *, seed: int, epochs: int = 0) -> None:
        """`tasks` returns the tasks of an epoch (0, 1, ...), never none; 0 `epochs` never ends."""
        self.tasks = tasks
        self.epochs = epochs
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order: list[Task] | None = None

    def next(self) -> Task:
        """Return the next task. Raises: StopIteration after the last epoch."""
        if self._order is not None and self._position == len(self._order):
            self._epoch, self._position, self._order = self._epoch + 1, 0, None
        if self.epochs and self._epoch >= self.epochs:
            raise StopIteration
        if self._order is None:
            self._order = list(self.tasks(self._epoch))
            Random(f"{self._seed}/{self._epoch}").shuffle(self._order)
        task = self._order[self._position]
        self._position += 1
        return task

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs (JSON-like)."""
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the task that was last returned before `state`."""
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = list(self.tasks(self._epoch))
        Random(f"{self._seed}/{self._epoch}").shuffle(self._order)


class EpisodeEnvironment(abc.ABC):
    """Asks the tasks of a source, and plays the episodes of a group each by itself.

    Fulfils `protocols.ReportsTrajectories`.
    """

    name: str

    def __init__(self, *, tasks: TaskSource, held_out: Sequence[Task] = ()) -> None:
        """`held_out` are the tasks that are never trained on."""
        self._tasks = tasks
        self._held_out = tuple(held_out)

    @abc.abstractmethod
    async def run_episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """Return the trajectory of one episode; a failed one has a failure status and no reward."""

    def get_item(self) -> Task:
        """Return the next task to train on. Raises StopIteration when the tasks are used up."""
        return self._tasks.next()

    @property
    def task_epochs(self) -> int:
        """Times that the training tasks are asked; 0 never ends."""
        return self._tasks.epochs

    def training_tasks(self, epoch: int) -> Sequence[Task]:
        """Return the tasks of an epoch, for a curriculum to choose from."""
        return self._tasks.tasks(epoch)

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on."""
        return self._held_out

    def state(self) -> Mapping[str, Any]:
        """Return the position in the tasks."""
        return self._tasks.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._tasks.restore(state)

    async def aclose(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release what the environment holds: nothing, here."""

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Play `group_size` episodes beside each other; a failed one has a failure status and no reward."""
        return await collect_episodes(
            lambda trajectory_id: self.run_episode(task, sampler, trajectory_id),
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory,
        )


class MultiTurnEnvironment(EpisodeEnvironment):
    """An environment of turns: `start` asks, `step` answers each reply. Fulfils `protocols.ReportsTrajectories`.

    Example:
        >>> class Parrot(MultiTurnEnvironment):
        ...     name = "parrot"
        ...     def start(self, episode):
        ...         return [{"role": "user", "content": "Say yes."}]
        ...     async def step(self, episode, text):
        ...         return StepOutcome(done=True, reward=float("yes" in text))
    """

    reply_prefix: str = ""
    """How each reply begins: context that is put into the model's mouth, never trained on."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply besides the model's own end token; sampled, and trained on."""

    def __init__(
        self,
        *,
        renderer: ChatRenderer,
        tasks: TaskSource,
        held_out: Sequence[Task] = (),
        settings: RolloutSettings | None = None,
    ) -> None:
        """Raises: ConfigError where there is no template to ask with, or no note that teachers could be told."""
        renderer.require_template()
        self.renderer = renderer
        self.limits = settings or RolloutSettings()
        if self.limits.teacher_prompts and type(self).teacher_note is MultiTurnEnvironment.teacher_note:
            raise ConfigError(
                f"teacher_prompts must be false: environment {self.name!r} has no note for a teacher "
                "([environment.options])"
            )
        super().__init__(tasks=tasks, held_out=held_out)

    @abc.abstractmethod
    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the messages that ask `episode.task`."""

    @abc.abstractmethod
    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Answer the reply `text`, which is the last of `episode.replies`.

        Raises: SandboxError, EnvironmentFault where infrastructure failed; the episode is then retried or masked.
        """

    async def grade(self, episode: Episode) -> Grade:
        """Return what the episode is worth as it stands; asked where `step` gave no reward."""
        return Grade(reward=0.0)

    def spoken(self, episode: Episode) -> str:
        """Return the last reply with its special tokens, which calls of tools may be made of; end tokens left out."""
        if not episode.turns:
            return episode.replies[-1] if episode.replies else ""
        token_ids = list(episode.turns[-1].completion.token_ids)
        while token_ids and token_ids[-1] in self.renderer.end_token_ids:
            token_ids.pop()
        return self.reply_prefix + self.renderer.decode(token_ids, keep_special=True)

    def holding(self, episode: Episode) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return what holds open what one episode needs, its sandbox say; it is left once the episode is graded.

        Entered once for each attempt, before `start`. Waiting for it is not the agent's time.
        Raises as `step` does.
        """
        return _NOTHING

    def teacher_note(self, episode: Episode) -> str:
        """Return what a teacher is told beside the first prompt and the policy is not: the answer, say.

        Asked at the start of each episode where `teacher_prompts` is set. The teacher reads the policy's own replies
        and what answered them, in later turns too, behind the prompt with this note.
        """
        return ""

    async def run_episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """See `EpisodeEnvironment.run_episode`. What infrastructure ended is started again, `max_retries` times."""
        started, deadline = trio.current_time(), math.inf
        retries = discarded = 0
        while True:
            talk = self._talk(task, sampler, trajectory_id)
            episode = Episode(trajectory_id=trajectory_id, task=task, turns=talk.turns, replies=talk.replies)
            async with boundary() as caught:
                async with self.holding(episode):
                    now = trio.current_time()
                    deadline = min(deadline, now + self.limits.episode_timeout_s)
                    episode.deadline = min(deadline, now + episode.time_limit_s)
                    outcome = await self._converse(episode, talk)
                    if retries:
                        episode.extras |= {"retries": retries, "discarded_tokens": discarded}
                    trajectory = _finished(episode, talk, outcome, trio.current_time() - started)
                return trajectory
            assert caught.status is not None
            discarded += sum(len(turn.completion.token_ids) for turn in episode.turns)
            if retries == self.limits.max_retries or trio.current_time() >= deadline:
                break
            retries += 1
        seconds = trio.current_time() - started
        extras = {**episode.extras, "retries": retries, "discarded_tokens": discarded}
        return talk.failure(caught.status, caught.detail, seconds=seconds, extras=extras)

    def _talk(self, task: Task, sampler: Sampler, trajectory_id: str) -> Conversation:
        return Conversation(
            self.renderer,
            sampler,
            task=task if task.environment == self.name else replace(task, environment=self.name),
            trajectory_id=trajectory_id,
            max_tokens=self.limits.max_tokens,
            max_episode_tokens=self.limits.max_episode_tokens,
            stop_token_ids=self.stop_token_ids,
        )

    async def _converse(self, episode: Episode, talk: Conversation) -> StepOutcome:
        # Returns an outcome that is done, with reward and status.
        outcome: StepOutcome | None = None
        with trio.move_on_at(episode.deadline) as scope:
            outcome = await self._take_turns(episode, talk)
        if scope.cancelled_caught or outcome is None:
            if not episode.turns:
                limit = min(self.limits.episode_timeout_s, episode.time_limit_s)
                raise EngineError(f"no completion arrived within {limit} s (episode_timeout_s)")
            outcome = StepOutcome(done=True, status=TrajectoryStatus.TIMED_OUT)
        if outcome.reward is None:
            grade = await self._grade(episode)
            outcome = StepOutcome(done=True, reward=grade.reward, reward_parts=grade.parts, status=outcome.status)
        return outcome

    async def _take_turns(self, episode: Episode, talk: Conversation) -> StepOutcome:
        messages = self.start(episode)
        if self.limits.teacher_prompts:
            note = self.teacher_note(episode)
            told = self.renderer.start(messages, reply_prefix=self.reply_prefix, note=note)
            episode.teacher_prompt_token_ids = told
        while True:
            text = await talk.ask(messages, reply_prefix=self.reply_prefix)
            if text is None:
                return StepOutcome(done=True, status=TrajectoryStatus.TRUNCATED_LENGTH)
            outcome = await self.step(episode, text)
            episode.turns[-1] = replace(episode.turns[-1], reward=outcome.turn_reward)
            if outcome.done:
                return outcome
            if len(episode.turns) >= self.limits.max_turns:
                return StepOutcome(
                    done=True,
                    reward=outcome.reward,
                    reward_parts=outcome.reward_parts,
                    status=TrajectoryStatus.TRUNCATED_TURNS,
                )
            messages = outcome.messages

    async def _grade(self, episode: Episode) -> Grade:
        with trio.move_on_after(self.limits.grading_timeout_s):
            return await self.grade(episode)
        raise EnvironmentFault(f"grading took longer than {self.limits.grading_timeout_s} s (grading_timeout_s)")


def _finished(episode: Episode, talk: Conversation, outcome: StepOutcome, seconds: float) -> Trajectory:
    assert outcome.reward is not None
    parts = dict(outcome.reward_parts)
    earned = [turn.reward for turn in episode.turns if turn.reward is not None]
    if earned:
        parts["turns"] = float(sum(earned))
    return talk.trajectory(
        reward=float(outcome.reward + sum(earned)),
        reward_parts=parts,
        status=outcome.status,
        seconds=seconds,
        extras=episode.extras,
        teacher_prompt_token_ids=episode.teacher_prompt_token_ids,
    )
