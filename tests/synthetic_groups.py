"""Groups as rollouts make them, from a seed: shared prompts, ragged completions, several turns, known versions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.types import Group, Logprobs, Segment, Task, TokenIds, TokenSpan, Trajectory, TrajectoryStatus


def make_segment(
    prompt: Sequence[int],
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    version: int = 0,
    logprob: float = -5.0,
    teacher_prompt: Sequence[int] | None = None,
) -> Segment:
    """Return prompt, then (completion, environment's answer) of each turn; completions are trained on."""
    tokens, mask, spans = list(prompt), [0] * len(prompt), []
    for completion, answer in turns:
        if completion:
            spans.append(TokenSpan(start=len(tokens), end=len(tokens) + len(completion), version=version))
        tokens += [*completion, *answer]
        mask += [1] * len(completion) + [0] * len(answer)
    return Segment(
        token_ids=TokenIds(tokens),
        loss_mask=bytes(mask),
        behaviour_logprobs=Logprobs([logprob * m for m in mask]),
        spans=tuple(spans),
        teacher_prompt_token_ids=None if teacher_prompt is None else TokenIds(teacher_prompt),
    )


def make_group(
    group_id: int, segments: Sequence[Segment], rewards: Sequence[float | None], *, environment: str = "synthetic"
) -> Group:
    """Return one group of one-segment trajectories; a reward of None is a failed sandbox."""
    task_id = f"task-{group_id}"
    return Group(
        group_id=group_id,
        task=Task(task_id=task_id, environment=environment),
        trajectories=tuple(
            Trajectory(
                trajectory_id=f"{task_id}/{place}",
                task_id=task_id,
                environment=environment,
                segments=(segment,),
                reward=reward,
                status=TrajectoryStatus.COMPLETED if reward is not None else TrajectoryStatus.FAILED_SANDBOX,
                num_turns=1,
            )
            for place, (segment, reward) in enumerate(zip(segments, rewards, strict=True))
        ),
    )


def random_groups(
    seed: int,
    *,
    num_groups: int = 2,
    group_size: int = 4,
    prompt_tokens: int = 12,
    completion_tokens: int = 9,
    vocab_size: int = 300,
    versions: Sequence[int] = (0,),
    turns: int = 2,
) -> list[Group]:
    """Return groups whose segments share their prompt and in part their first completion."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    system = words(4)
    groups = []
    for group_id in range(num_groups):
        prompt = system + words(rng.randint(prompt_tokens // 2, prompt_tokens))
        opening = words(3)
        segments = []
        for place in range(group_size):
            pieces = []
            for turn in range(rng.randint(1, turns)):
                completion = words(rng.randint(1, completion_tokens))
                if turn == 0 and place % 2:
                    completion = opening + completion
                pieces.append((completion, words(rng.randint(0, 4))))
            version = versions[place % len(versions)]
            segments.append(make_segment(prompt, pieces, version=version, logprob=-rng.uniform(1.0, 8.0)))
        rewards = [float(rng.random() < 0.5) for _ in segments]
        rewards[0], rewards[-1] = 0.0, 1.0  # spread in every group
        groups.append(make_group(group_id, segments, rewards))
    return groups
