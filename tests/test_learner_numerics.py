"""Log-probs, entropy and gradients against plain transformers, one segment at a time with whole logits.

transformers' norms round to float32 inside a float64 model, which hides everything below 1e-7. So the float64 tests put
torch's own norm of the same formula into both models, and see 1e-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups
from tiny_model import build_tiny_model

from asyncrl.errors import ConfigError
from asyncrl.learner.credit import select
from asyncrl.learner.head import logprobs_and_entropy
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.step import Stepper
from asyncrl.packing import Batch, Microbatch, split
from asyncrl.types import Group

_TEMPERATURE = 0.7


@cache
def model_directory(tied: bool = True) -> Path:
    return build_tiny_model(Path(mkdtemp()), tied=tied, dtype=torch.float32)


def load(dtype: torch.dtype = torch.float64, *, tied: bool = True, checkpointing: bool = False) -> PolicyModel:
    model = load_model(
        model_directory(tied),
        dtype=dtype,
        device=torch.device("cpu"),
        temperature=_TEMPERATURE,
        gradient_checkpointing=checkpointing,
    )
    with_exact_norms(model.model)
    return model


def with_exact_norms(model: torch.nn.Module) -> None:
    """Replace every norm by one that computes in its input's dtype, with the same weight."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                exact = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                exact.weight = child.weight
                setattr(parent, name, exact)


def batch_of(groups: Sequence[Group]) -> Batch:
    return select(groups, LearnerSettings()).batch


def plain(batch: Batch, dtype: torch.dtype, *, tied: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Return ([T] log-probs, [T] entropy, model) of transformers' own model, 0.0 at each segment's first token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory(tied), dtype=dtype, attn_implementation="sdpa")
    with_exact_norms(model)
    logprobs, entropies = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        tokens = batch.token_ids[start:end]
        every = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / _TEMPERATURE, -1)
        zero = every.new_zeros(1)
        logprobs += [zero, every.gather(1, tokens[1:, None])[:, 0]]
        entropies += [zero, -(every.exp() * every).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies), model


def forward(model: PolicyModel, batch: Batch, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([T], [T]) of the learner's model, with a graph."""
    parts = [(m.token_index, *model.logprobs(m)) for m in split(batch, **options)]
    where = torch.cat([index for index, _, _ in parts]).argsort()
    return torch.cat([a for _, a, _ in parts])[where], torch.cat([b for _, _, b in parts])[where]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "share", "max_tokens", "checkpointing"),
    [(True, True, 10_000, False), (False, True, 60, False), (True, False, 100, False), (False, True, 10_000, True)],
)
def test_logprobs_entropy_and_gradients_are_those_of_plain_transformers(
    tied: bool, share: bool, max_tokens: int, checkpointing: bool
) -> None:
    groups = random_groups(1, num_groups=2, prompt_tokens=150)
    assert_as_plain(batch_of(groups), tied=tied, share=share, max_tokens=max_tokens, checkpointing=checkpointing)


@pytest.mark.slow
def test_a_segment_that_begins_with_another_whole_one_changes_nothing() -> None:
    """Each first turn is continued by a longer segment, which sees all of it."""
    groups = []
    for group_id, first_turn in enumerate((50, 48)):
        prompt, opening = range(group_id, 30), range(60, 30 + first_turn + group_id)
        turns = [(opening, []), (range(100, 110 + group_id), [])]
        groups.append(make_group(group_id, [make_segment(prompt, turns[:1]), make_segment(prompt, turns)], [0.0, 1.0]))
    batch = batch_of(groups)
    (microbatch,) = split(batch, max_tokens=1000)
    assert len(microbatch.blocks) == 4
    assert microbatch.blocks[1].before == (microbatch.blocks[0].queries,)
    assert_as_plain(batch)


def assert_as_plain(
    batch: Batch, *, tied: bool = True, share: bool = True, max_tokens: int = 1000, checkpointing: bool = False
) -> None:
    """Compare log-probs, entropy and the gradient of a random sum of both with transformers' own, in float64."""
    weights = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted_logprobs, wanted_entropy, plain_model = plain(batch, torch.float64, tied=tied)
    model = load(tied=tied, checkpointing=checkpointing)
    logprobs, entropy = forward(model, batch, max_tokens=max_tokens, share_prefixes=share)
    mask = batch.loss_mask
    torch.testing.assert_close(logprobs[mask], wanted_logprobs[mask], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy[mask], wanted_entropy[mask], rtol=1e-10, atol=1e-10)
    ((weights[0] * logprobs + weights[1] * entropy)[mask]).sum().backward()
    ((weights[0] * wanted_logprobs + weights[1] * wanted_entropy)[mask]).sum().backward()
    gradients = {name: p.grad for name, p in plain_model.named_parameters()}
    for name, parameter in model.tensors().items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10, msg=lambda m: f"{name}: {m}")  # noqa: B023


def gradients_of(
    model: PolicyModel, groups: Sequence[Group], settings: LearnerSettings, *, apart: torch.Tensor | None = None
) -> tuple[float, torch.Tensor]:
    """Return the batch's loss and its whole gradient, flat; segments marked in `apart` get their own microbatches."""
    optimizer = Optimizer(model.tensors(), settings)
    stepper = Stepper(model, optimizer, settings, max_off_policyness=1)
    batch = select(groups, settings).batch
    observations = settings.resolved_loss.observation_coef > 0
    microbatches = split(
        batch,
        max_tokens=settings.microbatch_tokens,
        share_prefixes=settings.share_prefixes,
        observations=observations,
        apart=apart,
    )
    loss, _, _ = stepper.accumulate(batch, microbatches)
    flat = torch.cat([g.flatten() for _, g in sorted(optimizer.gradients().items())]).clone()
    for parameter in model.tensors().values():
        parameter._post_accumulate_grad_hooks = None
    return loss, flat


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "gspo", "dr_grpo", "mis_renorm", "echo", "ctpo"])
def test_neither_split_nor_sharing_nor_order_change_loss_or_gradient(loss: str) -> None:
    groups = random_groups(5, num_groups=3)
    model = load()
    wanted_loss, wanted = gradients_of(model, groups, LearnerSettings(loss=loss, microbatch_tokens=10_000))
    assert wanted.abs().max() > 0
    for variant, order in (
        ({"microbatch_tokens": 40}, groups),
        ({"share_prefixes": False, "microbatch_tokens": 10_000}, groups),
        ({"microbatch_tokens": 70}, groups[::-1]),
    ):
        found_loss, found = gradients_of(model, order, LearnerSettings(loss=loss, **variant))  # type: ignore[arg-type]
        assert found_loss == pytest.approx(wanted_loss, abs=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("loss", ["dapo", "gspo", "dr_grpo", "echo"])
def test_ranks_that_share_a_batch_add_up_to_one_learner(loss: str, num_ranks: int) -> None:
    """Each rank has a model and a stepper of its own, its share of the microbatches and the whole batch's counts."""
    groups = random_groups(8, num_groups=4)
    settings = LearnerSettings(loss=loss, microbatch_tokens=60)
    wanted_loss, wanted = gradients_of(load(), groups, settings)
    batch = select(groups, settings).batch
    microbatches = split(
        batch, max_tokens=settings.microbatch_tokens, observations=settings.resolved_loss.observation_coef > 0
    )
    assert len(microbatches) > num_ranks
    losses, total = [], torch.zeros_like(wanted)
    for rank in range(num_ranks):
        model = load()
        optimizer = Optimizer(model.tensors(), settings)
        stepper = Stepper(model, optimizer, settings, max_off_policyness=1)
        losses.append(stepper.accumulate(batch, microbatches[rank::num_ranks])[0])
        total += torch.cat([g.flatten() for _, g in sorted(optimizer.gradients().items())])
    assert all(abs(part - wanted_loss) > 1e-6 for part in losses)
    assert sum(losses) == pytest.approx(wanted_loss, abs=1e-12)
    assert (total - wanted).norm() < 1e-9 * wanted.norm()


class GradNoting(PolicyModel):
    """A model that notes which of its forwards are to be differentiated."""

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        self.grad_enabled = [*getattr(self, "grad_enabled", []), torch.is_grad_enabled()]
        return super().hidden(microbatch)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "gspo", "echo", "dppo"])
def test_groups_without_an_advantage_are_left_out_of_the_backward_pass_and_change_nothing(loss: str) -> None:
    groups = random_groups(7, num_groups=3)
    same = [replace(trajectory, reward=1.0) for trajectory in groups[1].trajectories]
    groups[1] = replace(groups[1], trajectories=tuple(same))
    settings = LearnerSettings(loss=loss, microbatch_tokens=10_000)
    model = load()
    batch = select(groups, settings).batch
    idle = batch.group_index == 1
    assert bool(idle.any())
    wanted_loss, wanted = gradients_of(model, groups, settings)
    noting = GradNoting(model.model, temperature=model.temperature, head_dtype=torch.float32)
    found_loss, found = gradients_of(noting, groups, settings, apart=idle)
    assert noting.grad_enabled == ([True, True] if loss in ("echo", "dppo") else [True, False])
    assert found_loss == pytest.approx(wanted_loss, abs=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.slow
def test_sharing_changes_float32_gradients_by_rounding_only() -> None:
    groups = random_groups(6, num_groups=2)
    model = load(torch.float32)
    _, apart = gradients_of(model, groups, LearnerSettings(dtype="float32", share_prefixes=False))
    _, shared = gradients_of(model, groups, LearnerSettings(dtype="float32"))
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-5 * float(apart.abs().max()))


def test_the_head_passes_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 6, 2])
    assert torch.autograd.gradcheck(lambda h, w: logprobs_and_entropy(h, w, targets, temperature=0.6), (hidden, weight))


@pytest.mark.slow
def test_a_vocabulary_of_several_tiles_gives_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 8, dtype=torch.float64, generator=generator)
    weight = torch.randn(9000, 8, dtype=torch.float64, generator=generator)
    targets = torch.randint(9000, (700,), generator=generator)
    wanted = torch.log_softmax(hidden @ weight.T / 1.3, -1)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, temperature=1.3)
    torch.testing.assert_close(logprobs, wanted.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(-1))


def test_the_logits_never_exist_as_a_whole() -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                Watch.largest = max(Watch.largest, result.numel())
            return result

    hidden = torch.randn(2000, 4, requires_grad=True)
    weight = torch.randn(10_000, 4, requires_grad=True)
    with Watch():
        logprobs, _ = logprobs_and_entropy(hidden, weight, torch.zeros(2000, dtype=torch.int64))
        logprobs.sum().backward()
    assert 0 < Watch.largest < 2000 * 10_000 / 4


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "none", dtype=torch.float32, device=torch.device("cpu"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights"):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
