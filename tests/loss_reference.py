"""Every loss again, from the papers: plain floats, one token at a time, gradients derived by hand.

Shares no code with asyncrl.losses. `batch` is a list of sequences; a sequence is a list of `Token`.
Each loss returns its value and d loss / d policy_logprob for every token, in packed order.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Token:
    policy: float
    behaviour: float
    proximal: float
    reference: float
    teacher: float
    advantage: float
    active: bool
    observed: bool
    entropy: float = 1.0
    divergence: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Batch:
    sequences: list[list[Token]]
    rewards: list[float]
    groups: list[int]
    pairs: list[tuple[int, int]]

    @property
    def tokens(self) -> list[Token]:
        return [token for sequence in self.sequences for token in sequence]


def clamp(x: float) -> tuple[float, float]:
    """Return the clamped value and the derivative of the clamp."""
    return (x, 1.0) if -LIMIT <= x <= LIMIT else (math.copysign(LIMIT, x), 0.0)


def hard_batch(seed: int, lengths: tuple[int, ...] = (0, 1, 7, 3, 0, 12, 40, 1, 5, 2)) -> Batch:
    """Return a ragged batch with empty and fully masked sequences, holes in the masks and extreme log ratios."""
    rng = random.Random(seed)
    sequences = []
    for index, length in enumerate(lengths):
        sequence = []
        spread = rng.choice([1e-4, 0.02, 0.3])
        for _ in range(length):
            kind = rng.random()
            active, observed = kind < 0.65, 0.65 <= kind < 0.85
            if length == 1:
                active, observed = True, False
            if index == 3:
                active = False  # a sequence with no active token
            policy = -rng.expovariate(0.7)
            behaviour = policy + rng.gauss(0, spread)
            proximal = behaviour + rng.gauss(0, 0.4)
            reference = policy + rng.gauss(0, 0.5)
            teacher = policy + rng.gauss(0, 0.7)
            extreme = rng.random()
            if extreme < 0.05:
                behaviour = policy + rng.choice([-45.0, -21.0, 25.0, 60.0])
            elif extreme < 0.1:
                behaviour = policy  # exactly on-policy
            elif extreme < 0.15:
                proximal = behaviour + rng.choice([-30.0, 22.0, 1.7])
            elif extreme < 0.2:
                reference = policy + rng.choice([-33.0, 24.0])
            elif extreme < 0.25:
                teacher = behaviour + rng.choice([-50.0, 21.0])
            sequence.append(
                Token(
                    policy=policy,
                    behaviour=behaviour,
                    proximal=proximal,
                    reference=reference,
                    teacher=teacher,
                    advantage=rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1), rng.gauss(0, 1)]),
                    active=active,
                    observed=observed,
                    entropy=rng.random(),
                    divergence=(teacher - policy) ** 2,
                )
            )
        sequences.append(sequence)
    rewards = [rng.choice([0.0, 0.5, 1.0, 0.7]) for _ in lengths]
    groups = [index // 3 * 10 for index in range(len(lengths))]
    return Batch(sequences=sequences, rewards=rewards, groups=groups, pairs=[(2, 5), (6, 7), (8, 9), (5, 1)])


# --- aggregation: the weight of each token's loss ---------------------------------------------------------------


def weights(batch: Batch, aggregation: str, active: list[list[bool]], const_length: float = 64.0) -> list[list[float]]:
    counts = [sum(row) for row in active]
    nonempty = max(1, sum(count > 0 for count in counts))
    result = []
    for i, row in enumerate(active):
        per_prompt = sum(c for c, g in zip(counts, batch.groups, strict=True) if g == batch.groups[i])
        prompts = len({g for c, g in zip(counts, batch.groups, strict=True) if c})
        weight = {
            "token_mean": 1.0 / max(1, sum(counts)),
            "seq_mean_token_mean": 1.0 / (nonempty * max(1, counts[i])),
            "seq_mean_token_sum": 1.0 / nonempty,
            "const": 1.0 / (max(1, len(counts)) * const_length),
            "prompt_mean": 1.0 / (max(1, prompts) * max(1, per_prompt)),
            "sum": 1.0,
        }[aggregation]
        result.append([weight if on else 0.0 for on in row])
    return result


def active_of(batch: Batch) -> list[list[bool]]:
    return [[token.active for token in sequence] for sequence in batch.sequences]


# --- pieces -----------------------------------------------------------------------------------------------------


def clipped(r: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """Return the PPO loss of ratio r and its derivative by r."""
    plain, bounded = r * a, min(max(r, low), high) * a
    loss, slope = (-bounded, 0.0) if bounded < plain else (-plain, -a)
    if dual is not None and a < 0 and -dual * a < loss:
        loss, slope = -dual * a, 0.0
    return loss, slope


def token_ratio(token: Token, anchor: str = "behaviour") -> tuple[float, float]:
    """Return r and dr / d policy."""
    d, gate = clamp(token.policy - getattr(token, anchor))
    return math.exp(d), math.exp(d) * gate


TokenLoss = Callable[[Token], tuple[float, float]]
Rows = tuple[list[list[float]], list[list[float]]]


def each_token(batch: Batch, loss: TokenLoss) -> Rows:
    """Apply a loss that looks at one token; 0 where inactive."""
    rows = [[loss(t) if t.active else (0.0, 0.0) for t in sequence] for sequence in batch.sequences]
    return [[x[0] for x in row] for row in rows], [[x[1] for x in row] for row in rows]


def total(rows: Rows, w: list[list[float]]) -> tuple[float, list[float]]:
    value = math.fsum(a * b for lr, wr in zip(rows[0], w, strict=True) for a, b in zip(lr, wr, strict=True))
    return value, [a * b for gr, wr in zip(rows[1], w, strict=True) for a, b in zip(gr, wr, strict=True)]


def plus(first: tuple[float, list[float]], coef: float, second: tuple[float, list[float]]) -> tuple[float, list[float]]:
    grads = [a + coef * b for a, b in zip(first[1], second[1], strict=True)]
    return first[0] + coef * second[0], grads


# --- losses of one token ----------------------------------------------------------------------------------------


def reinforce(t: Token) -> tuple[float, float]:
    return -t.advantage * t.policy, -t.advantage


def importance_sampling(t: Token) -> tuple[float, float]:
    r, dr = token_ratio(t)
    return -r * t.advantage, -dr * t.advantage


def ppo(low: float, high: float, dual: float | None = None, anchor: str = "behaviour") -> TokenLoss:
    def loss(t: Token) -> tuple[float, float]:
        r, dr = token_ratio(t, anchor)
        value, slope = clipped(r, t.advantage, low, high, dual)
        return value, slope * dr

    return loss


def stopped(weight: Callable[[float], float]) -> TokenLoss:
    def loss(t: Token) -> tuple[float, float]:
        w = weight(token_ratio(t)[0])
        return -w * t.advantage * t.policy, -w * t.advantage

    return loss


def dppo(t: Token) -> tuple[float, float]:
    d, gate = clamp(t.policy - t.behaviour)
    r, a = math.exp(d), t.advantage
    p, q = math.exp(t.policy), math.exp(t.behaviour)
    keep = 0.0 if (a > 0 and p - q > 0.2) or (a < 0 and p - q < -0.2) else 1.0
    return -keep * a * r + 1e-3 * d * d, gate * (-keep * a * r + 2e-3 * d)


def kl(kind: str) -> TokenLoss:
    def loss(t: Token) -> tuple[float, float]:
        d, gate = clamp(t.reference - t.policy)
        k3, k3_slope = math.expm1(d) - d, 1.0 - math.exp(d)
        if kind == "k1":
            return -d, gate
        if kind == "k2":
            return d * d / 2, -d * gate
        if kind == "k3":
            return k3, k3_slope * gate
        if kind == "k3_value_k2_grad":
            return k3, -d * gate
        r, dr = token_ratio(t)
        return r * k3, dr * k3 + r * k3_slope * gate

    return loss


def opd(t: Token) -> tuple[float, float]:
    r, dr = token_ratio(t)
    a = clamp(t.teacher - t.behaviour)[0]
    return -r * a, -dr * a


def likelihood(t: Token) -> tuple[float, float]:
    return -t.policy, -1.0


# --- losses of one sequence -------------------------------------------------------------------------------------


def actives(sequence: list[Token]) -> list[int]:
    return [i for i, t in enumerate(sequence) if t.active]


def sequence_log_ratio(sequence: list[Token], top: str = "policy", bottom: str = "behaviour") -> float:
    """Return the sum over active tokens of the clamped differences, not yet clamped itself."""
    return math.fsum(clamp(getattr(sequence[i], top) - getattr(sequence[i], bottom))[0] for i in actives(sequence))


def per_sequence(batch: Batch, rows: Callable[[list[Token]], list[tuple[float, float]]]) -> Rows:
    """Apply `rows`, which returns loss and gradient for the active tokens of one sequence."""
    losses, grads = [], []
    for sequence in batch.sequences:
        found = iter(rows(sequence))
        pairs = [next(found) if t.active else (0.0, 0.0) for t in sequence]
        losses.append([p[0] for p in pairs])
        grads.append([p[1] for p in pairs])
    return losses, grads


def gspo(sequence: list[Token]) -> list[tuple[float, float]]:
    on = actives(sequence)
    if not on:
        return []
    log_s, gate = clamp(sequence_log_ratio(sequence) / len(on))
    a = math.fsum(sequence[i].advantage for i in on) / len(on)
    s = math.exp(log_s)
    value, slope = clipped(s, a, 1 - 3e-4, 1 + 4e-4)
    # n tokens each carry the sequence's loss, each with d s / d logp_t = s / n: together s per token and mean.
    return [(value, slope * s * gate * clamp(sequence[i].policy - sequence[i].behaviour)[1]) for i in on]


def gspo_token(sequence: list[Token]) -> list[tuple[float, float]]:
    on = actives(sequence)
    if not on:
        return []
    return _straight(sequence, on, [sequence_log_ratio(sequence) / len(on)] * len(on), 1 - 3e-4, 1 + 4e-4)


def sequence_clip(sequence: list[Token]) -> list[tuple[float, float]]:
    on = actives(sequence)
    return _straight(sequence, on, [sequence_log_ratio(sequence)] * len(on), 0.8, 1.28)


def prefix_is(sequence: list[Token]) -> list[tuple[float, float]]:
    on = actives(sequence)
    return _straight(sequence, on, _prefixes(sequence, on), 0.0, math.inf)


def _prefixes(sequence: list[Token], on: list[int]) -> list[float]:
    differences = [clamp(sequence[i].policy - sequence[i].behaviour)[0] for i in on]
    return [math.fsum(differences[: k + 1]) for k in range(len(on))]


def _straight(
    sequence: list[Token], on: list[int], logs: list[float], low: float, high: float
) -> list[tuple[float, float]]:
    found = []
    for i, log in zip(on, logs, strict=True):
        x, gate = clamp(log)
        value, slope = clipped(math.exp(x), sequence[i].advantage, low, high)
        found.append((value, slope * math.exp(x) * gate))
    return found


def ctpo(dual: bool) -> Callable[[list[Token]], list[tuple[float, float]]]:
    def rows(sequence: list[Token]) -> list[tuple[float, float]]:
        on = actives(sequence)
        found = []
        for t, (i, log) in enumerate(zip(on, _prefixes(sequence, on), strict=True), start=1):
            x, gate = clamp(log)
            top = math.exp(0.05 * math.sqrt(t))
            value, slope = clipped(
                math.exp(x), sequence[i].advantage, math.exp(-0.025 * math.sqrt(t)), top, top if dual else None
            )
            found.append((value, slope * math.exp(x) * gate))
        return found

    return rows


def sequence_is(cap: float) -> Callable[[list[Token]], list[tuple[float, float]]]:
    def rows(sequence: list[Token]) -> list[tuple[float, float]]:
        product = min(cap, math.exp(clamp(sequence_log_ratio(sequence))[0]))
        return [(-product * t.advantage * t.policy, -product * t.advantage) for t in sequence if t.active]

    return rows


def corrected(batch: Batch, weight: Callable[[float], float], level: str, high: float) -> Rows:
    """Return proximal / behaviour, bounded by `weight`, times PPO on policy / proximal."""
    losses, grads = [], []
    objective = ppo(0.8, high, anchor="proximal")
    for sequence in batch.sequences:
        product = math.exp(clamp(sequence_log_ratio(sequence, "proximal", "behaviour"))[0])
        row = []
        for t in sequence:
            w = weight(product if level == "sequence" else math.exp(clamp(t.proximal - t.behaviour)[0]))
            value, slope = objective(t) if t.active else (0.0, 0.0)
            row.append((w * value, w * slope))
        losses.append([x[0] for x in row])
        grads.append([x[1] for x in row])
    return losses, grads


def opsm(sequence: list[Token]) -> list[tuple[float, float]]:
    on = actives(sequence)
    drift = -sequence_log_ratio(sequence) / max(1, len(on))
    objective = ppo(0.8, 1.28)
    return [(0.0, 0.0) if sequence[i].advantage < 0 and drift > 0.1 else objective(sequence[i]) for i in on]


def dpo(batch: Batch) -> tuple[float, list[float]]:
    offsets = [0]
    for sequence in batch.sequences:
        offsets.append(offsets[-1] + len(sequence))
    grads, losses = [0.0] * offsets[-1], []
    for chosen, rejected in batch.pairs:
        margin = math.fsum(
            sign * (t.policy - t.reference)
            for sign, i in ((1, chosen), (-1, rejected))
            for t in batch.sequences[i]
            if t.active
        )
        x = 0.1 * margin
        losses.append(math.log1p(math.exp(-abs(x))) + max(-x, 0.0))
        pull = 0.1 / (1.0 + math.exp(x)) if x < 500 else 0.0
        for sign, i in ((1, chosen), (-1, rejected)):
            for k, t in enumerate(batch.sequences[i]):
                if t.active:
                    grads[offsets[i] + k] -= sign * pull / len(batch.pairs)
    return math.fsum(losses) / len(losses), grads


def observations(batch: Batch) -> tuple[float, list[float]]:
    number = max(1, sum(t.observed for t in batch.tokens))
    return (
        math.fsum(-t.policy for t in batch.tokens if t.observed) / number,
        [-1.0 / number if t.observed else 0.0 for t in batch.tokens],
    )


def entropies(batch: Batch, aggregation: str) -> tuple[float, list[float]]:
    """Return the aggregated entropy; its gradient goes to `entropy`, not to the policy's log-probs."""
    value, _ = total(each_token(batch, lambda t: (t.entropy, 0.0)), weights(batch, aggregation, active_of(batch)))
    return value, [0.0] * len(batch.tokens)


# --- by name ----------------------------------------------------------------------------------------------------

TOKEN_LOSSES: dict[str, TokenLoss] = {
    "reinforce": reinforce,
    "importance_sampling": importance_sampling,
    "ppo": ppo(0.8, 1.2),
    "grpo": ppo(0.8, 1.2),
    "dapo": ppo(0.8, 1.28),
    "dapo_dual": ppo(0.8, 1.28, 3.0),
    "dr_grpo": ppo(0.8, 1.2),
    "cispo": stopped(lambda r: min(r, 5.0)),
    "cispo_two_sided": stopped(lambda r: min(max(r, 0.8), 1.28)),
    "icepop": stopped(lambda r: r if 0.5 <= r <= 5.0 else 0.0),
    "dppo": dppo,
    "kl_k1": kl("k1"),
    "kl_k2": kl("k2"),
    "kl_k3": kl("k3"),
    "kl_k3_is": kl("k3_is"),
    "kl_k3_value_k2_grad": kl("k3_value_k2_grad"),
    "sft": likelihood,
    "opd": opd,
    "distillation": lambda t: (t.divergence, 0.0),  # its gradient goes to `divergence`
    "echo": ppo(0.8, 1.28),
}
SEQUENCE_LOSSES = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "ctpo": ctpo(dual=True),
    "ctpo_no_dual": ctpo(dual=False),
    "prefix_is": prefix_is,
    "sequence_is": sequence_is(math.inf),
    "sequence_tis": sequence_is(5.0),
    "sequence_clip": sequence_clip,
    "opsm": opsm,
}
CORRECTED: dict[str, tuple[Callable[[float], float], str, float]] = {
    "tis": (lambda w: min(w, 2.0), "token", 1.28),
    "tis_sequence": (lambda w: min(w, 5.0), "sequence", 1.28),
    "mis": (lambda w: w if 0.5 <= w <= 5.0 else 0.0, "token", 1.28),
    "mis_sequence": (lambda w: w if w <= 3.0 else 0.0, "sequence", 1.28),
    "decoupled_ppo": (lambda w: w, "token", 1.2),
    "decoupled_ppo_mask": (lambda w: w if w <= 5.0 else 0.0, "token", 1.2),
}
AGGREGATION = {
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "const",
    "gspo": "seq_mean_token_mean",
    "gspo_token": "seq_mean_token_mean",
    "sequence_is": "seq_mean_token_sum",
    "sequence_tis": "seq_mean_token_sum",
}
"""Where it is not token_mean."""


def reference(name: str, batch: Batch, aggregation: str | None = None) -> tuple[float, list[float]]:
    """Return the loss `name` with its default settings, and its gradient."""
    if name == "dpo":
        return dpo(batch)
    how = aggregation or AGGREGATION.get(name, "token_mean")
    active = active_of(batch)
    if name == "rejection_sft":
        kept = [
            [replace(t, active=t.active and reward > 0.5) for t in sequence]
            for sequence, reward in zip(batch.sequences, batch.rewards, strict=True)
        ]
        return reference("sft", replace(batch, sequences=kept), aggregation)
    if name == "mis_renorm":
        rows = corrected(batch, *CORRECTED["mis"])
        active = [
            [t.active and 0.5 <= math.exp(clamp(t.proximal - t.behaviour)[0]) <= 5.0 for t in sequence]
            for sequence in batch.sequences
        ]
    elif name in CORRECTED:
        rows = corrected(batch, *CORRECTED[name])
    elif name in SEQUENCE_LOSSES:
        rows = per_sequence(batch, SEQUENCE_LOSSES[name])
    else:
        rows = each_token(batch, TOKEN_LOSSES[name])
    w = weights(batch, how, active)
    result = total(rows, w)
    if name == "grpo":
        result = plus(result, 0.04, total(each_token(batch, kl("k3")), w))
    if name == "echo":
        result = plus(result, 0.1, observations(batch))
    return result


NAMES = sorted({*TOKEN_LOSSES, *SEQUENCE_LOSSES, *CORRECTED, "mis_renorm", "rejection_sft", "dpo"})
