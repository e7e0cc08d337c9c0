"""The learner's own code on a model of random weights under `asyncrl bench gpu`: steps, packing, head, loss."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from asyncrl.bench.gpu_device import Device
from asyncrl.bench.gpu_settings import Shape
from asyncrl.bench.learner_batches import ragged_groups, ragged_lengths, sharing_groups
from asyncrl.bench.learner_parts import diagnostics_alone, loss_alone
from asyncrl.bench.timing import Report
from asyncrl.learner import norm
from asyncrl.learner.attention_kinds import choose, register
from asyncrl.learner.credit import select
from asyncrl.learner.head import logprobs_and_entropy
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.step import Stepper
from asyncrl.packing import Batch, split
from asyncrl.protocols import StepResult

_PROMPT_TOKENS = 16


class RandomTokens:
    """Token ids drawn evenly from a vocabulary: nothing measured here depends on what they say."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._chance = random.Random(0)

    def take(self, count: int) -> list[int]:
        """Return the next `count`."""
        return [self._chance.randrange(self._vocabulary) for _ in range(count)]


class GpuModel:
    """A model of a shape with random weights, its optimizer, and what is timed on them."""

    def __init__(self, device: Device, shape: Shape) -> None:
        self._device = device
        self._shape = shape
        self._settings = LearnerSettings(
            loss="dapo",
            baseline="none",
            scale="none",
            microbatch_tokens=shape.microbatch_tokens,
            gradient_checkpointing=shape.gradient_checkpointing,
        )
        torch.manual_seed(0)
        self.policy = PolicyModel(_random_model(device, shape), temperature=1.0, head_dtype=torch.float32)
        self._optimizer = Optimizer(self.policy.tensors(), self._settings)
        self._stepper = Stepper(self.policy, self._optimizer, self._settings, max_off_policyness=10**6)
        plain = replace(self._settings, loss="reinforce")  # whose gradient does not depend on what was sampled
        self._plain = Stepper(self.policy, self._optimizer, plain, max_off_policyness=10**6)
        self._tokens = RandomTokens(shape.vocabulary)

    def step(self) -> Report:
        """Whole optimizer steps: tokens and operations a second, and the loss's share."""
        shape = self._shape
        lengths = self._lengths(shape.step_tokens)
        groups = ragged_groups(self._tokens, lengths, prompt_tokens=_PROMPT_TOKENS)
        done: list[StepResult] = []
        report = self._device.measure(lambda: done.append(self._stepper.step(groups)))
        report |= {"num_parameters": self.policy.num_parameters, "num_tokens": sum(lengths)}
        if "seconds" not in report:
            return report
        flops = step_flops(shape, self.policy.num_parameters, lengths)
        report |= {"tokens_per_second": sum(lengths) / report["seconds"], "flops": flops}
        report |= {"flops_per_second": flops / report["seconds"], "grad_norm": done[-1].metrics["grad_norm"]}
        batch = select(groups, self._settings).batch
        microbatches = split(batch, max_tokens=shape.microbatch_tokens)
        for name, run in (
            ("loss", lambda: loss_alone(self._settings, batch, microbatches)),
            ("diagnostics", lambda: diagnostics_alone(batch)),
        ):
            report[f"{name}_seconds"] = self._device.measure(run)["seconds"]
        return report

    def packing(self) -> Report:
        """Forward and backward of one microbatch of ragged segments: packed, and padded to the longest."""
        lengths = self._lengths(self._shape.microbatch_tokens)
        groups = ragged_groups(self._tokens, lengths, prompt_tokens=_PROMPT_TOKENS)
        batch = select(groups, self._settings).batch
        self._optimizer.discard()
        packed = self._device.measure(lambda: self._packed(batch, share=False))
        packed_gradient = self._gradient(packed)
        padded = self._device.measure(lambda: self._padded(batch))
        report: Report = {"num_tokens": batch.num_tokens, "padded_tokens": len(lengths) * max(lengths)}
        report |= {"packed": packed, "padded": padded}
        if packed_gradient is not None and "seconds" in padded:
            report["gradient_relative_difference"] = _distance(self._gradient(padded), packed_gradient)
        return report

    def sharing(self) -> Report:
        """Forward and backward of groups with a common prompt, read once a group and once a segment."""
        shape = self._shape
        per_group = shape.prompt_tokens + shape.group_size * (shape.prompt_tokens // 4)
        groups = sharing_groups(
            self._tokens,
            max(1, shape.microbatch_tokens // per_group),
            size=shape.group_size,
            prompt_tokens=shape.prompt_tokens,
            completion_tokens=shape.prompt_tokens // 4,
        )
        batch = select(groups, self._settings).batch
        self._optimizer.discard()
        shared = self._device.measure(lambda: self._packed(batch, share=True))
        shared_gradient = self._gradient(shared)
        apart = self._device.measure(lambda: self._packed(batch, share=False))
        report: Report = {"num_tokens": batch.num_tokens, "shared": shared, "apart": apart}
        if shared_gradient is not None and "seconds" in apart:
            report["gradient_relative_difference"] = _distance(self._gradient(apart), shared_gradient)
        return report

    def head(self) -> Report:
        """The LM head alone, forward and backward: tile by tile, and with the whole logits."""
        rows, weight = self._shape.head_rows, self.policy.head.detach().clone().requires_grad_()
        hidden = torch.randn(rows, self._shape.hidden, device=weight.device, dtype=weight.dtype, requires_grad=True)
        targets = torch.randint(self._shape.vocabulary, (rows,), device=weight.device)

        def tiled() -> torch.Tensor:
            logprobs, _ = logprobs_and_entropy(hidden, weight, targets)
            return _finish(logprobs)

        def whole() -> torch.Tensor:
            logits = torch.nn.functional.linear(hidden, weight).float()
            return _finish(torch.log_softmax(logits, -1).gather(1, targets.unsqueeze(1)).squeeze(1))

        def _finish(logprobs: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(logprobs.sum(), (hidden, weight))
            return logprobs.detach()

        report: Report = {"num_predictions": rows}
        report |= {"tiled": self._device.measure(tiled), "whole": self._device.measure(whole)}
        if all("seconds" in report[name] for name in ("tiled", "whole")):
            report["logprob_difference_max"] = float((tiled() - whole()).abs().max())
            report["memory_of_whole"] = report["tiled"]["peak_bytes"] / max(1, report["whole"]["peak_bytes"])
        return report

    def _lengths(self, total: int) -> list[int]:
        longest = self._shape.longest
        return ragged_lengths(0, shortest=longest // 8, longest=longest, total=total)

    def _packed(self, batch: Batch, *, share: bool) -> None:
        microbatches = split(batch, max_tokens=self._shape.microbatch_tokens, share_prefixes=share)
        self._plain.accumulate(batch, microbatches)

    def _padded(self, batch: Batch) -> None:
        """The same sum of log-probs times advantages as `_packed` comes to where the policy is the behaviour's."""
        rows = [slice(*run) for run in pairwise(batch.cu_seqlens.tolist())]

        def padded(values: torch.Tensor) -> torch.Tensor:
            lines = torch.nn.utils.rnn.pad_sequence([values[row] for row in rows], batch_first=True)
            return lines.to(self._device.torch)

        tokens, trained = padded(batch.token_ids), padded(batch.loss_mask)[:, 1:]
        before = self.policy.model.config._attn_implementation  # type: ignore[union-attr]
        self.policy.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        try:
            # What is padded lies behind all that is real, so causal attention needs no mask of its own.
            states = self.policy.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state  # type: ignore[operator]
            logprobs, _ = logprobs_and_entropy(states[:, :-1][trained], self.policy.head, tokens[:, 1:][trained])
            weights = padded(batch.advantages)[:, 1:][trained]
            (-(logprobs * weights).sum() / batch.num_loss_tokens).backward()
        finally:
            self.policy.model.set_attn_implementation(before)  # type: ignore[operator]

    def _gradient(self, figures: Report) -> torch.Tensor | None:
        """Return the gradient that was summed up, flat, scaled to norm 1; None of a measurement that had no room."""
        found = None
        if "seconds" in figures:
            found = torch.cat([total.flatten() for total in self._optimizer.gradients().values()])
            found /= found.norm()
        self._optimizer.discard()
        return found


def step_flops(shape: Shape, num_parameters: int, lengths: list[int]) -> float:
    """Return the operations of a forward and backward pass that an ideal learner needs, none done twice.

    Six for each parameter and token (tied embeddings count once, as the head; untied ones are only looked up), and for
    attention twelve for each layer, head, width and pair of a token with one that it sees, itself among them.
    Source: PaLM, arXiv:2204.02311, appendix B, with causal attention counted by pairs.

    Example:
        >>> shape = Shape(hidden=8, intermediate=8, layers=1, heads=2, key_heads=1, head_width=4, vocabulary=16)
        >>> step_flops(shape, 1000, [2]) == 6 * 1000 * 2 + 12 * 2 * 4 * 3
        True
    """
    looked_up = 0 if shape.tied else shape.vocabulary * shape.hidden
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attended = 12 * shape.layers * shape.heads * shape.head_width * pairs
    return 6.0 * (num_parameters - looked_up) * sum(lengths) + attended


def _random_model(device: Device, shape: Shape) -> torch.nn.Module:
    attention = register(choose("auto", device.torch, torch.bfloat16))
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_width,
        max_position_embeddings=shape.longest,
        tie_word_embeddings=shape.tied,
    )
    with device.torch:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    norm.install(model)
    if not shape.gradient_checkpointing:
        return model.eval()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def _distance(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    assert found is not None
    return float((found - wanted).norm() / wanted.norm())
