"""Turns and episodes in the journal: an interrupted episode is answered from it and goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from asyncrl.buffers import Fsync, GroupCommit, Journal
from asyncrl.protocols import KeepsTrajectories, Sampler, Watch
from asyncrl.run_history import Attempt, read_history
from asyncrl.run_journal import GroupAdmitted, JournalledSampler, KeptWork, Kind, RunJournal
from asyncrl.testing import run_inline
from asyncrl.types import (
    Completion,
    FinishReason,
    Group,
    Logprobs,
    Task,
    TokenIds,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
)

_TASK = Task(task_id="task", environment="e", data={"words": ["a", 1, None]})


class Counting:
    """Answers with the number of the request. A `Sampler`."""

    def __init__(self, first: int = 100) -> None:
        self.asked: list[TokenIds] = []
        self._next = first

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        self.asked.append(token_ids)
        self._next += 1
        return Completion(
            token_ids=TokenIds([self._next, 1]),
            behaviour_logprobs=Logprobs([-0.5, -0.25]),
            spans=(TokenSpan(start=0, end=1, version=3), TokenSpan(start=1, end=2, version=4)),
            finish_reason=FinishReason.STOP,
        )


async def talk(sampler: Sampler, turns: int, *, said: int = 0, trajectory_id: str = "7-0") -> TokenIds:
    """Let an environment answer with 10, 11, ... after each reply; return the whole episode."""
    tokens = TokenIds([5, 6, 7])
    for turn in range(said, turns):
        completion = await sampler.sample(tokens, max_tokens=9, trajectory_id=trajectory_id)
        tokens = TokenIds([*tokens, *completion.token_ids, 10 + turn])
    return tokens


def _journalled(directory: Path, body: object, kept: KeptWork | None = None) -> Counting:
    """Run `body(sampler, journal)` on group 7 with a real journal; return the engine's side."""
    engine = Counting(100 if kept is None else 200)
    with Journal(directory, run_id="test", fsync=Fsync.GROUP) as file:
        journal = RunJournal(GroupCommit(file, run_blocking=run_inline))
        journal.note_weights({3: "three", 4: "four"}, forget_before=3)
        if kept is None:
            admitted = GroupAdmitted(draw_id=7, task=_TASK, version=3, fresh=True)
            journal.append_nowait(Kind.GROUP_ADMITTED, admitted, group_id=7)
        sampler = JournalledSampler(engine, journal, 7, kept)
        trio.run(body, sampler, journal)  # type: ignore[arg-type]
    return engine


def _attempt(directory: Path) -> Attempt:
    history = read_history(directory, run_id="test", state={})
    assert history.damage == []
    return history.attempts[7]


def test_turns_come_back_with_their_prompts_versions_and_digests(tmp_path: Path) -> None:
    async def body(sampler: JournalledSampler, journal: RunJournal) -> None:
        await talk(sampler, 3)
        await talk(sampler, 1)  # an attempt that starts again
        await talk(sampler, 2, trajectory_id="7-1")

    engine = _journalled(tmp_path, body)
    attempt = _attempt(tmp_path)
    assert attempt.draw.task == _TASK
    turns = [turn for name in ("7-0", "7-1") for turn in attempt.work.turns[name]]
    assert [turn.prompt for turn in turns] == engine.asked
    assert [turn.completion.token_ids[0] for turn in turns] == [101, 102, 103, 104, 105, 106]
    assert turns[0].completion.behaviour_logprobs == Logprobs([-0.5, -0.25])
    assert {(version, digest) for version, digest, _ in attempt.sampled_under} == {(3, "three"), (4, "four")}


def test_an_interrupted_episode_is_answered_from_the_journal_and_goes_on(tmp_path: Path) -> None:
    told: list[TokenIds] = []

    async def first(sampler: JournalledSampler, journal: RunJournal) -> None:
        told.append(await talk(sampler, 2))

    async def again(sampler: JournalledSampler, journal: RunJournal) -> None:
        told.append(await talk(sampler, 4))

    _journalled(tmp_path, first)
    engine = _journalled(tmp_path, again, _attempt(tmp_path).work)
    assert told[1][: len(told[0])] == told[0]
    assert len(engine.asked) == 2, "the first two turns cost the engine nothing"
    assert len(_attempt(tmp_path).work.turns["7-0"]) == 4, "and are not written twice"
    third = _journalled(tmp_path, again, _attempt(tmp_path).work)
    assert third.asked == []
    assert told[2] == told[1]


def test_an_environment_that_answers_otherwise_is_answered_by_the_engine(tmp_path: Path) -> None:
    async def first(sampler: JournalledSampler, journal: RunJournal) -> None:
        await talk(sampler, 3)

    async def otherwise(sampler: JournalledSampler, journal: RunJournal) -> None:
        completion = await sampler.sample(TokenIds([5, 6, 7]), max_tokens=9, trajectory_id="7-0")
        assert completion.token_ids[0] == 101
        completion = await sampler.sample(TokenIds([5, 6, 7, 101, 1, 99]), max_tokens=9, trajectory_id="7-0")
        assert completion.token_ids[0] == 201
        completion = await sampler.sample(TokenIds([5, 6, 7]), max_tokens=9, trajectory_id="7-1")
        assert completion.token_ids[0] == 202, "another episode's turns are its own"

    _journalled(tmp_path, first)
    _journalled(tmp_path, otherwise, _attempt(tmp_path).work)


def _episode(trajectory_id: str, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id,
        task_id="task",
        environment="e",
        segments=(),
        reward=reward,
        status=TrajectoryStatus.COMPLETED if reward is not None else TrajectoryStatus.FAILED_SANDBOX,
        extras={"deep": {"x": [1, 2.5, None]}},
    )


def test_episodes_and_groups_come_back_as_they_were_and_a_later_record_replaces_an_earlier(tmp_path: Path) -> None:
    episodes = [_episode("7-0"), _episode("7-1", reward=None), _episode("7-2", reward=0.25)]

    async def body(sampler: JournalledSampler, journal: RunJournal) -> None:
        assert isinstance(sampler, KeepsTrajectories)
        assert sampler.kept_trajectory("7-0") is None
        await talk(sampler, 2)
        sampler.keep_nowait(episodes[0])
        sampler.keep_nowait(_episode("7-1"))
        group = Group(group_id=7, task=_TASK, trajectories=tuple(episodes), admitted_version=3)
        before = journal.position
        sampler.finish_nowait(group)
        assert journal.position == before + 3, "two episodes that are not there as they are, and the group"
        await journal.flush()

    _journalled(tmp_path, body)
    attempt = _attempt(tmp_path)
    assert attempt.finished == Group(group_id=7, task=_TASK, trajectories=tuple(episodes), admitted_version=3)
    assert attempt.work.turns == {}, "a finished episode's turns are not needed any more"

    async def check(sampler: JournalledSampler, journal: RunJournal) -> None:
        assert sampler.kept_trajectory("7-2") == episodes[2]

    _journalled(tmp_path, check, attempt.work)
