"""One loss from its parts: ratio, anchor, clip, correction, aggregation, and the terms beside it. `T` packed tokens."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.aggregation import denominator, observation_weight, prompt_counts, token_weights
from asyncrl.losses.clips import ppo_clip, probability_moved, sqrt_window, within
from asyncrl.losses.corrections import correction_weight, drifted
from asyncrl.losses.inputs import LossInputs, LossOutput, Prepared, prepare
from asyncrl.losses.presets import LossSettings, resolve
from asyncrl.losses.ratios import action_position, aggregate_log_ratio, bounded_exp, log_ratio, stopped_form
from asyncrl.losses.recording import Recorder
from asyncrl.losses.regularisers import pair_losses, reference_kl


def evaluate(name: str, inputs: LossInputs, /, **settings: Any) -> LossOutput:
    """Return the loss `name` of one packed (micro)batch, with `settings` put over the preset's.

    `name` is a key of `LOSSES`, or "package.module:function" of your own loss (losses/LOSSES.md). Computed in float64;
    log-probs in nats. With nothing active the loss is 0 and still differentiable. A non-finite policy log-prob on an
    active token makes the loss or its gradient non-finite: whoever steps must check.
    Raises: ConfigError for an unknown name or setting, settings that contradict each other, a missing input;
    ShapeError for shapes that contradict each other; EngineError where `bad_logprobs="raise"` finds one.
    """
    resolved = resolve(name, **settings)
    prepared = prepared_for(inputs, resolved)
    term = _main_term(inputs, prepared, resolved)
    record = Recorder()
    loss = prepared.policy[:0].sum()  # 0 with a graph, so that every rank runs backward
    token_loss = torch.zeros_like(prepared.policy, requires_grad=False)
    if resolved.objective == "pairs":
        pair_loss, token_loss = _pairs(inputs, prepared, resolved, record)
        loss = loss + pair_loss
    elif resolved.objective not in ("kl", "distillation"):
        weights = _weights(inputs, prepared, resolved, term.kept if resolved.renormalise else None)
        loss = loss + (weights * term.loss).sum()
        token_loss = token_loss + term.loss.detach()
        record.mean("policy_loss", term.loss, prepared.mask)
    for label, coef, values in _side_terms(prepared, resolved, term):
        loss = loss + coef * (_weights(inputs, prepared, resolved) * values).sum()
        token_loss = token_loss + coef * torch.where(prepared.mask, values.detach(), 0.0)
        record.mean(label, values, prepared.mask)
    if resolved.observation_coef:
        assert prepared.observation is not None
        observed = torch.where(prepared.observation, -prepared.policy, 0.0)
        loss = loss + resolved.observation_coef * (observation_weight(inputs, prepared) * observed).sum()
        token_loss = token_loss + resolved.observation_coef * observed.detach()
        record.mean("observation_loss", observed, prepared.observation)
    record.sum("num_loss_tokens", prepared.lengths.sum())
    record.sum("policy_logprobs_nonfinite", (~prepared.policy.isfinite()).sum())
    for label, count in prepared.counts.items():
        record.sum(label, count)
    for label, flags in (term.flags | _clipped_divergence(prepared, resolved)).items():
        record.mean(label, flags, prepared.mask)
    dtype = inputs.policy_logprobs.dtype
    return LossOutput(loss=loss.to(dtype), token_loss=token_loss.to(dtype), metrics=record.records())


def denominators(name: str, inputs: LossInputs, /, **settings: Any) -> dict[str, Any]:
    """Return the denominators that loss `name` needs, counted over `inputs`: fields of `LossInputs` by name.

    Call it on the whole optimizer batch and pass the result to every microbatch (`num_prompt_tokens` [S] cut like the
    sequences). Over ranks add the numbers; a prompt must not be cut by ranks. Values are float64 tensors.
    Raises: as `evaluate` does.
    """
    resolved = resolve(name, **settings)
    with torch.no_grad():
        prepared = prepared_for(inputs, resolved)
        found: dict[str, Any] = {
            "num_loss_tokens": prepared.lengths.sum(),
            "num_sequences": (prepared.lengths > 0).double().sum(),
            "num_all_sequences": torch.tensor(float(prepared.segments.num_sequences), dtype=torch.float64),
        }
        if prepared.observation is not None:
            found["num_observation_tokens"] = prepared.observation.double().sum()
        if inputs.group_index is not None:
            per_sequence, prompts = prompt_counts(inputs, prepared.segments, prepared.lengths)
            found |= {"num_prompt_tokens": per_sequence, "num_prompts": prompts}
        if inputs.pairs is not None:
            found["num_pairs"] = torch.tensor(float(len(inputs.pairs)), dtype=torch.float64)
        if resolved.renormalise:
            kept_S = prepared.segments.sum(_main_term(inputs, prepared, resolved).kept.double())
            found |= {"num_kept_tokens": kept_S.sum(), "num_kept_sequences": (kept_S > 0).double().sum()}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """The main term of a loss, per token."""

    loss: torch.Tensor
    """[T] 0 where not kept."""
    kept: torch.Tensor
    """[T] bool; active tokens that the loss has not dropped."""
    log_ratio: torch.Tensor | None = None
    """[T] the per-token log ratio to the anchor, with its gradient."""
    flags: dict[str, torch.Tensor] = field(default_factory=dict)


def prepared_for(inputs: LossInputs, settings: LossSettings) -> Prepared:
    """Return the inputs checked for what this loss reads.

    Raises: ConfigError naming the input that is missing and what needs it.
    """
    s, policy = settings, settings.objective == "policy"
    needs_behaviour = policy and (s.ratio != "none" or s.advantage == "teacher")
    needs_behaviour |= s.kl_coef > 0 and s.kl_estimator == "k3_is"
    needs = {
        "teacher_divergence": s.distillation_coef > 0,
        "behaviour_logprobs": needs_behaviour,
        "advantages": policy and s.advantage != "teacher",
        "teacher_logprobs": policy and s.advantage == "teacher",
        "proximal_logprobs": policy and s.anchor == "proximal",
        "reference_logprobs": s.kl_coef > 0 or s.objective in ("kl", "pairs"),
        "observation_mask": s.observation_coef > 0,
        "entropy": s.entropy_coef > 0,
        "pairs": s.objective == "pairs",
        "rewards": s.min_reward is not None,
        "group_index": s.aggregation == "prompt_mean",
    }
    for name, needed in needs.items():
        if needed and getattr(inputs, name) is None:
            raise ConfigError(f"loss {s.name!r} needs {name}, and LossInputs.{name} is None")
    prepared = prepare(
        inputs,
        bad_logprobs=s.bad_logprobs,
        min_reward=s.min_reward,
        reads_behaviour=needs_behaviour or s.objective == "custom",
    )
    if prepared.observation is not None and s.observation_coef and bool((prepared.observation & prepared.mask).any()):
        raise ConfigError("observation_mask and loss_mask are both True on a token: it is either sampled or observed")
    return prepared


def _main_term(inputs: LossInputs, prepared: Prepared, s: LossSettings) -> _Term:
    if s.objective == "policy":
        return _policy_term(prepared, s)
    if s.objective == "custom":
        return _custom_term(inputs, prepared, s)
    likelihood = torch.where(prepared.mask, -prepared.policy, 0.0)
    return _Term(loss=likelihood, kept=prepared.mask)


def _policy_term(p: Prepared, s: LossSettings) -> _Term:
    advantages = _advantages(p, s)
    if s.ratio == "none":
        return _Term(loss=torch.where(p.mask, -advantages * p.policy, 0.0), kept=p.mask)
    anchor = p.behaviour if s.anchor == "behaviour" else p.proximal
    assert anchor is not None
    token_log_ratio = log_ratio(p.policy, anchor, p.usable)
    through = token_log_ratio if s.gradient == "ratio" else token_log_ratio.detach()
    aggregated = aggregate_log_ratio(through, p, s.ratio)
    ratio = stopped_form(p.policy, aggregated) if s.gradient == "token" else bounded_exp(aggregated)
    kept, flags = p.usable, {}
    if s.clip == "ppo":
        loss = ppo_clip(ratio, advantages, 1.0 - s.clip_low, 1.0 + s.clip_high, s.dual_clip)
        flags["clipped_low_frac"] = (ratio < 1.0 - s.clip_low) & (advantages < 0)
        flags["clipped_high_frac"] = (ratio > 1.0 + s.clip_high) & (advantages > 0)
        if s.dual_clip is not None:
            flags["clipped_dual_frac"] = (ratio > s.dual_clip) & (advantages < 0)
    elif s.clip == "sqrt_window":
        position = action_position(p)
        loss = sqrt_window(ratio, advantages, position, s)
        flags["clipped_low_frac"] = (aggregated < -s.window_low * position.sqrt()) & (advantages < 0)
        above = aggregated > s.window_high * position.sqrt()
        flags["clipped_high_frac"] = above & (advantages > 0)
        if s.window_dual:
            flags["clipped_dual_frac"] = above & (advantages < 0)
    else:
        if s.clip == "mask":
            kept = kept & within(ratio, s.ratio_low, s.ratio_high)
        elif s.clip == "probability":
            assert p.behaviour is not None
            kept = kept & ~probability_moved(p.policy, p.behaviour, advantages, s.max_probability_change)
        elif s.clip == "cap":
            flags["capped_frac"] = ~within(ratio, s.ratio_low, s.ratio_high) & p.usable
            ratio = ratio.clamp(s.ratio_low, s.ratio_high)
        loss = -ratio * advantages * (p.policy if s.gradient == "logprob" else 1.0)
    if s.correction != "none":
        weight, inside = correction_weight(p, s)
        loss, kept = weight * loss, kept & inside
    if s.sequence_drift is not None:
        kept = kept & ~drifted(token_log_ratio, advantages, p, s.sequence_drift)
    flags["dropped_frac"] = p.mask & ~kept
    return _Term(loss=torch.where(kept, loss, 0.0), kept=kept, log_ratio=token_log_ratio, flags=flags)


def _advantages(p: Prepared, s: LossSettings) -> torch.Tensor:
    if s.advantage == "teacher":
        assert p.teacher is not None
        assert p.behaviour is not None
        return log_ratio(p.teacher, p.behaviour, p.usable)
    assert p.advantages is not None
    if s.advantage == "token":
        return p.advantages
    return p.segments.spread(p.segments.sum(p.advantages) / p.lengths.clamp(min=1.0))


def _side_terms(p: Prepared, s: LossSettings, term: _Term) -> list[tuple[str, float, torch.Tensor]]:
    """Return (metric, coefficient, [T] values) of the terms that are aggregated over the active tokens."""
    terms = []
    if s.kl_coef:
        terms.append(("reference_kl", s.kl_coef, reference_kl(p, s.kl_estimator)))
    if s.log_ratio_sq_coef and term.log_ratio is not None:
        terms.append(("log_ratio_sq", s.log_ratio_sq_coef, term.log_ratio.square()))
    if s.entropy_coef:
        assert p.entropy is not None
        terms.append(("entropy", -s.entropy_coef, p.entropy))
    if s.distillation_coef:
        assert p.divergence is not None
        limit = math.inf if s.distillation_clip is None else s.distillation_clip
        terms.append(("teacher_divergence", s.distillation_coef, p.divergence.clamp(max=limit)))
    return terms


def _clipped_divergence(p: Prepared, s: LossSettings) -> dict[str, torch.Tensor]:
    """Return the flags [T] of tokens whose divergence is cut, where the loss cuts any."""
    if not s.distillation_coef or s.distillation_clip is None:
        return {}
    assert p.divergence is not None
    return {"divergence_clipped_frac": p.divergence > s.distillation_clip}


def _weights(inputs: LossInputs, p: Prepared, s: LossSettings, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return the aggregation's weight of every active token, or of every token that is `kept`, [T]."""
    return token_weights(
        inputs,
        p,
        p.mask if kept is None else kept,
        aggregation=s.aggregation,
        const_length=s.const_length,
        kept=kept is not None,
    )


def _pairs(inputs: LossInputs, p: Prepared, s: LossSettings, record: Recorder) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over pairs [], and each pair's loss divided evenly over its active tokens [T]."""
    assert inputs.pairs is not None
    pairs = inputs.pairs.long().reshape(-1, 2)
    losses = pair_losses(p, pairs, s.dpo_beta)
    record.mean("pair_loss", losses, torch.ones_like(losses, dtype=torch.bool))
    record.mean("pair_accuracy", (losses < 0.6931471805599453).double(), torch.ones_like(losses, dtype=torch.bool))
    tokens_P = p.lengths[pairs].sum(1).clamp(min=1.0)
    per_token_S = torch.zeros_like(p.lengths)
    for side in (0, 1):
        per_token_S = per_token_S.index_add(0, pairs[:, side], losses.detach() / tokens_P)
    count = denominator(inputs, "num_pairs", losses.new_tensor(float(len(losses))))
    return losses.sum() / count, torch.where(p.mask, p.segments.spread(per_token_S), 0.0)


def _custom_term(inputs: LossInputs, p: Prepared, s: LossSettings) -> _Term:
    """Call the user's function with checked inputs, float64, 0 in every unread slot."""
    module_name, _, function_name = s.function.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"loss {s.name!r} cannot be loaded: {error}") from error
    view = replace(
        inputs,
        policy_logprobs=p.policy,
        loss_mask=p.mask,
        behaviour_logprobs=p.behaviour,
        advantages=p.advantages,
        proximal_logprobs=p.proximal,
        reference_logprobs=p.reference,
        teacher_logprobs=p.teacher,
        teacher_divergence=p.divergence,
        observation_mask=p.observation,
        entropy=p.entropy,
        token_fields={name: torch.where(p.mask, values.double(), 0.0) for name, values in inputs.token_fields.items()},
    )
    loss = function(view, **s.options)
    if not isinstance(loss, torch.Tensor) or loss.shape != p.policy.shape:
        found = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ShapeError(f"loss {s.name!r} must return the loss per token, [T] = {list(p.policy.shape)}, got {found}")
    return _Term(
        loss=torch.where(p.usable, loss.double(), 0.0), kept=p.usable, flags={"dropped_frac": p.mask & ~p.usable}
    )
