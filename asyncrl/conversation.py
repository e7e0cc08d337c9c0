"""One agent's side of an episode, for environments in which several play, or that lead their episodes themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import EnvironmentFault
from asyncrl.protocols import Sampler
from asyncrl.tokens import ChatRenderer, Message, build_segments
from asyncrl.types import FinishReason, Task, TokenIds, Trajectory, TrajectoryStatus, Turn


class Conversation:
    """What one agent was told and what it said, as literal tokens; becomes one trajectory.

    Example:
        >>> async def play(renderer, sampler, task):
        ...     side = Conversation(renderer, sampler, task=task, trajectory_id="0-0", max_tokens=16)
        ...     reply = await side.ask([{"role": "user", "content": "Heads or tails?"}])
        ...     return side.trajectory(reward=float(reply == "heads"), agent="guesser")
    """

    __slots__ = (
        "_max_episode_tokens",
        "_max_tokens",
        "_renderer",
        "_sampler",
        "_stop_token_ids",
        "replies",
        "task",
        "trajectory_id",
        "turns",
    )

    def __init__(
        self,
        renderer: ChatRenderer,
        sampler: Sampler,
        *,
        task: Task,
        trajectory_id: str,
        max_tokens: int,
        max_episode_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """`max_tokens` of one reply; `max_episode_tokens` of all together, at most the engine's longest context."""
        self.task = task
        self.trajectory_id = trajectory_id
        self.turns: list[Turn] = []
        self.replies: list[str] = []
        """The text of each reply, its prefix included, special tokens left out."""
        self._renderer = renderer
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._max_episode_tokens = max_episode_tokens or math.inf
        stops = renderer.stop_token_ids
        self._stop_token_ids = (*stops, *stop_token_ids) if stop_token_ids else stops

    @property
    def token_ids(self) -> TokenIds:
        """All tokens so far, in order."""
        return TokenIds(self._said())

    def _said(self) -> list[int]:
        return [
            token_id
            for turn in self.turns
            for part in (turn.context_token_ids, turn.completion.token_ids)
            for token_id in part
        ]

    async def ask(self, messages: Sequence[Message], *, reply_prefix: str = "") -> str | None:
        """Return what the agent says to `messages`, which follow all that was said; None where no room is left.

        Raises: EngineError when no engine could answer, EnvironmentFault for a first prompt that is too long.
        """
        if self.turns:
            last = self.turns[-1].completion.token_ids
            ended = bool(last) and last[-1] in self._renderer.end_token_ids
            context = self._renderer.extend(messages, ended=ended, reply_prefix=reply_prefix)
        else:
            context = self._renderer.start(messages, reply_prefix=reply_prefix)
        prompt = TokenIds([*self._said(), *context])
        room = self._max_episode_tokens - len(prompt)
        if room < 1:
            if not self.turns:
                limit = self._max_episode_tokens
                raise EnvironmentFault(f"a prompt of {len(context)} tokens leaves no room below {limit}")
            return None
        completion = await self._sampler.sample(
            prompt,
            max_tokens=int(min(room, self._max_tokens)),
            trajectory_id=self.trajectory_id,
            stop_token_ids=self._stop_token_ids,
        )
        self.turns.append(Turn(context_token_ids=context, completion=completion))
        self.replies.append(reply_prefix + self._renderer.decode(completion.token_ids))
        return self.replies[-1]

    def trajectory(
        self,
        *,
        reward: float,
        agent: str = "",
        reward_parts: Mapping[str, float] | None = None,
        status: TrajectoryStatus | None = None,
        seconds: float = 0.0,
        extras: Mapping[str, Any] | None = None,
        teacher_prompt_token_ids: TokenIds | None = None,
    ) -> Trajectory:
        """Return the agent's trajectory; its status is `completed`, or `truncated_length` after a reply that was cut.

        `reward` is all that it is worth, what single turns earned included. Raises: EnvironmentFault where the engine's
        answers contradict themselves, or a reward is no number.
        """
        reasons = [turn.completion.finish_reason for turn in self.turns]
        cut = bool(reasons) and reasons[-1] is FinishReason.LENGTH
        trajectory = Trajectory(
            trajectory_id=self.trajectory_id,
            task_id=self.task.task_id,
            environment=self.task.environment,
            segments=build_segments(
                self.turns,
                end_token_ids=self._renderer.end_token_ids,
                vocab_size=self._renderer.vocab_size,
                teacher_prompt_token_ids=teacher_prompt_token_ids,
            ),
            reward=reward,
            status=status or (TrajectoryStatus.TRUNCATED_LENGTH if cut else TrajectoryStatus.COMPLETED),
            reward_parts=reward_parts or {},
            agent=agent,
            num_turns=len(self.turns),
            seconds=seconds,
            truncated=FinishReason.LENGTH in reasons,
            extras=extras or {},
        )
        if trajectory.bad_number is not None:
            raise EnvironmentFault(trajectory.bad_number)
        return trajectory

    def failure(
        self,
        status: TrajectoryStatus,
        detail: str,
        *,
        agent: str = "",
        seconds: float = 0.0,
        extras: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return what stands for the agent's trajectory where infrastructure ended the episode: masked, no reward."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task_id=self.task.task_id,
            environment=self.task.environment,
            segments=(),
            reward=None,
            status=status,
            agent=agent,
            num_turns=len(self.turns),
            seconds=seconds,
            detail=detail,
            extras=extras or {},
        )
