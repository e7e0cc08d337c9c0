"""The ball on a line: five positions from -2 to 2, start at 0, reward 10 at 2, -5 at 1, else -1; it ends at 2.

To reach 2 one must pass 1. The same advantage and loss code as for language models learns that with a critic, which
carries the 10 back; on immediate rewards alone it learns to stay away from 1.
"""

from __future__ import annotations

import random

import pytest
import torch

from asyncrl.advantages import gae
from asyncrl.losses import LossInputs, clipped_value_loss, evaluate

MAX_MOVES = 8
REWARDS = {2: 10.0, 1: -5.0}


def play(right: list[float], rng: random.Random) -> list[tuple[int, int, float]]:
    """Return one episode as (position, 1 for right, reward); `right` is the probability by position."""
    position, moves = 0, []
    while position != 2 and len(moves) < MAX_MOVES:
        action = int(rng.random() < right[position + 2])
        landed = max(-2, min(2, position + (1 if action else -1)))
        moves.append((position, action, REWARDS.get(landed, -1.0)))
        position = landed
    return moves


def learn(gamma: float, lam: float, steps: int = 40, episodes: int = 24) -> list[float]:
    """Return the probability of moving right by position, after PPO with a tabular critic."""
    rng = random.Random(0)
    logits = torch.zeros(5, 2, dtype=torch.float64, requires_grad=True)
    values = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        right = logits.detach().softmax(1)[:, 1].tolist()
        played = [play(right, rng) for _ in range(episodes)]
        state = torch.tensor([move[0] + 2 for episode in played for move in episode])
        action = torch.tensor([move[1] for episode in played for move in episode])
        reward = torch.tensor([move[2] for episode in played for move in episode], dtype=torch.float64)
        cu_seqlens = torch.tensor([0, *(len(episode) for episode in played)]).cumsum(0)
        mask = torch.ones_like(action, dtype=torch.bool)
        advantages, returns = gae(reward, values[state], mask, cu_seqlens, gamma=gamma, lam=lam)
        behaviour = logits.detach().log_softmax(1)[state, action]
        for _ in range(3):
            inputs = LossInputs(
                policy_logprobs=logits.log_softmax(1)[state, action],
                behaviour_logprobs=behaviour,
                advantages=advantages,
                loss_mask=mask,
                cu_seqlens=cu_seqlens,
            )
            (gradient,) = torch.autograd.grad(evaluate("ppo", inputs).loss, logits)
            with torch.no_grad():
                logits -= 0.5 * gradient
        old_values = values.detach()[state]
        for _ in range(3):
            critic = clipped_value_loss(values[state], returns, mask, old_values=old_values, clip=5.0)
            (gradient,) = torch.autograd.grad(critic.loss, values)
            with torch.no_grad():
                values -= 0.5 * gradient
    return logits.detach().softmax(1)[:, 1].tolist()


@pytest.mark.slow
def test_with_a_critic_the_ball_learns_to_reach_2() -> None:
    right = learn(gamma=0.99, lam=0.95)
    assert right[2] > 0.9
    assert right[3] > 0.9


@pytest.mark.slow
def test_on_immediate_reward_alone_it_stays_away() -> None:
    right = learn(gamma=0.0, lam=0.0)
    assert right[2] < 0.1
