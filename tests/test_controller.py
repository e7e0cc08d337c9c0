"""What the guards' controller does to learning: a policy gradient on stale samples, where the sample size is thin.

32 softmax bandits of 64 arms, samples three steps old, importance weights that nothing clips. At a learning rate that
keeps the sample size the controller never acts; at one four times as large it helps, though less than the right
learning rate does. With clipped weights it hardly matters, and fewer stale tokens cost more than they bring: so it is
off unless it is asked for. The figures of all cases, mean of 5 seeds, as shares of the best reward:

    loss       rate   off    learning_rate   max_off_policyness
    unclipped   0.5   0.917  0.917           0.917
    unclipped   2     0.798  0.830           0.826
    unclipped   8     0.683  0.719           0.698
    clipped     2     0.926  0.926           0.926
    clipped     8     0.824  0.846           0.755
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from asyncrl.guards import Controller, Guards, GuardSettings

_STATES, _ARMS, _SAMPLES, _STEPS, _LAG = 32, 64, 256, 300, 3
Floats = npt.NDArray[np.float64]


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of every state's arms."""
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def train(learning_rate: float, controller: Controller, seed: int, clip: float | None = None) -> float:
    """Return the reward of the trained policy as a share of the best."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(_STATES, _ARMS))
    logits = np.zeros((_STATES, _ARMS))
    past = [logits]
    guards = Guards(GuardSettings(controller=controller, ess_target=0.7))
    for _ in range(_STEPS):
        slots = guards.slots(1, _LAG + 1)  # one group a step: staleness is the slots beyond the first
        behaviour, policy = softmax(past[max(0, len(past) - slots)]), softmax(logits)
        state = rng.integers(_STATES, size=_SAMPLES)
        draws = rng.random((_SAMPLES, 1))
        arm = np.minimum((behaviour[state].cumsum(axis=1) < draws).sum(axis=1), _ARMS - 1)
        advantage = rewards[state, arm] + rng.normal(size=_SAMPLES) - (policy * rewards).sum(axis=1)[state]
        weight = policy[state, arm] / behaviour[state, arm]
        credit = weight * advantage
        if clip is not None:
            clipped = np.where(advantage > 0, weight > 1 + clip, weight < 1 - clip)
            credit = np.where(clipped, 0.0, credit)
        gradient = np.zeros_like(logits)
        np.add.at(gradient, state, -policy[state] * credit[:, None])
        np.add.at(gradient, (state, arm), credit)
        scale = guards.options().learning_rate_scale
        logits = logits + learning_rate * scale * gradient / _SAMPLES * _STATES
        past = [*past[-_LAG:], logits]
        guards.check({"ess_token": float(weight.sum() ** 2 / (weight**2).sum() / _SAMPLES)}, stepped=True)
    return float((softmax(logits) * rewards).sum(axis=1).mean() / rewards.max(axis=1).mean())


def final(learning_rate: float, controller: Controller, clip: float | None = None) -> float:
    """Return the mean over seeds."""
    return float(np.mean([train(learning_rate, controller, seed, clip) for seed in range(5)]))


@pytest.mark.slow
def test_the_controller_helps_where_the_learning_rate_is_too_large_and_is_silent_where_it_is_not() -> None:
    right, too_large = final(0.5, Controller.OFF), final(2.0, Controller.OFF)
    assert right > too_large + 0.05
    for controller in (Controller.LEARNING_RATE, Controller.MAX_OFF_POLICYNESS):
        assert final(0.5, controller) == right
        assert too_large + 0.01 < final(2.0, controller) < right
