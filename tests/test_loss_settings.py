"""Names, settings and what is refused; the table without torch; a loss of one's own."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_reference import hard_batch
from test_loss_values import packed, value_and_gradient

import asyncrl.losses
from asyncrl import advantages
from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses import LOSSES, evaluate, resolve

PAGE = Path(__file__).resolve().parent.parent / "losses" / "LOSSES.md"


def test_the_table_is_checked_without_torch() -> None:
    code = (
        "import sys; from asyncrl.losses import resolve, LOSSES, finalise, reduce; from asyncrl.losses import text; "
        "resolve('gspo', clip_high=1e-3); assert len(LOSSES) > 30; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_is_not_importable_by_its_bare_name() -> None:
    code = "import losses"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PAGE.parent.parent, capture_output=True, text=True, check=False
    )
    assert "import this package as asyncrl.losses" in done.stderr


def test_every_public_name_loads_and_is_listed() -> None:
    for name in asyncrl.losses.__all__:
        assert getattr(asyncrl.losses, name) is not None
        assert name in dir(asyncrl.losses)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = asyncrl.losses.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gpso", {}, "did you mean 'gspo'"),
        ("entirely_else", {}, "package.module:function"),
        ("ppo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("ppo", {"aggregation": "token_maen"}, "did you mean 'token_mean'"),
        ("ppo", {"objective": "kl"}, "no setting 'objective'"),
        ("ppo", {"clip_high": "0.3"}, "must be a number"),
        ("ppo", {"clip_high": True}, "must be a number"),
        ("ppo", {"clip_high": float("nan")}, "must be a number"),
        ("ppo", {"clip_low": 1.5}, r"clip_low must be in \[0, 1\], got 1.5"),
        ("ppo", {"clip_high": -0.1}, "clip_high must be in"),
        ("ppo", {"kl_coef": -1}, "kl_coef must be in"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip must be greater than"),
        ("dapo", {"dual_clip": 1.2}, "dual_clip must be greater than 1 . clip_high = 1.28"),
        ("dr_grpo", {"const_length": 0}, "const_length must be > 0"),
        ("icepop", {"ratio_low": 6}, "ratio_low 6 is above ratio_high 5"),
        ("mis", {"correction_low": 9.0}, "correction_low 9 is above correction_high 5"),
        ("ctpo", {"window_dual": 1}, "true or false"),
        # settings that contradict each other
        ("ppo", {"anchor": "proximal"}, "drops the off-policy correction"),
        ("ppo", {"correction": "truncate"}, "counts the behaviour policy twice"),
        ("tis", {"anchor": "behaviour"}, "counts the behaviour policy twice"),
        ("cispo", {"gradient": "ratio"}, "capping a ratio that is differentiated"),
        ("ppo", {"gradient": "logprob"}, "which gradient='logprob' stops"),
        ("reinforce", {"clip": "ppo"}, "without a ratio there is nothing to clip"),
        ("prefix_is", {"gradient": "ratio"}, "weights early tokens by what follows"),
        ("ctpo", {"ratio": "token"}, "belongs to the prefix ratio"),
        ("dppo", {"ratio": "sequence_mean"}, "defined per token"),
        ("ppo", {"renormalise": True}, "nothing drops tokens"),
        ("mis_renorm", {"aggregation": "const"}, "not defined for aggregation='const'"),
        ("kl_k2", {"kl_coef": 0}, "nothing to learn from"),
        ("distillation", {"distillation_coef": 0}, "distillation_coef 0 leaves nothing to learn from"),
        ("distillation", {"distillation_clip": 0}, "distillation_clip must be > 0 nats"),
        ("dapo", {"distillation_clip": 1.0}, "does not use distillation_clip"),
        # settings that would have no effect
        ("reinforce", {"clip_high": 0.3}, "does not use clip_high"),
        ("cispo", {"clip_high": 0.3}, "does not use clip_high"),
        ("ppo", {"const_length": 100}, "does not use const_length"),
        ("ppo", {"kl_estimator": "k2"}, "does not use kl_estimator"),
        ("decoupled_ppo", {"correction_high": 2}, "does not use correction_high"),
        ("dpo", {"aggregation": "sum"}, "does not use aggregation"),
        ("sft", {"dual_clip": 3}, "does not use dual_clip"),
        ("a.b:", {}, "package.module:function"),
        ("a b:c", {}, "package.module:function"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name, **settings)


def test_a_default_may_be_spelled_out() -> None:
    for name, preset in LOSSES.items():
        spelled = {key: value for key, value in preset.items() if key != "objective"}
        assert resolve(name, **spelled) == resolve(name)
    assert resolve("reinforce", clip_high=0.2) == resolve("reinforce")


def test_a_preset_is_only_its_settings() -> None:
    """`mis` made from `ppo`, part by part, is `mis`."""
    inputs = packed(hard_batch(3))
    made = {"anchor": "proximal", "clip_high": 0.28, "correction": "mask", "correction_low": 0.5, "correction_high": 5}
    assert value_and_gradient("ppo", inputs, **made) == value_and_gradient("mis", inputs)


def test_every_loss_stands_in_the_page() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="ascii"), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(LOSSES) <= named


def test_every_public_function_of_credit_stands_in_the_page_and_says_what_it_takes() -> None:
    functions = {n: f for n, f in vars(advantages).items() if inspect.isfunction(f) and not n.startswith("_")}
    ours = {n: f for n, f in functions.items() if f.__module__ == advantages.__name__}
    assert len(ours) > 10
    text = PAGE.read_text(encoding="ascii")
    for name, function in ours.items():
        assert f"`{name}`" in text or f".{name}`" in text, name
        assert re.search(r"\[[TSK](\+1)?\]", function.__doc__ or ""), f"{name} does not give its shapes"


@pytest.fixture
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's own example, importable."""
    block = re.search(r"```python\n(# my_losses\.py\n.*?)```", PAGE.read_text(encoding="ascii"), flags=re.DOTALL)
    assert block is not None
    (tmp_path / "my_losses.py").write_text(block.group(1) + BROKEN, encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return "my_losses"


BROKEN = """

def scalar(inputs: LossInputs) -> torch.Tensor:
    return inputs.policy_logprobs.sum()


def weighed(inputs: LossInputs) -> torch.Tensor:
    return -inputs.policy_logprobs * inputs.token_fields["weight"]
"""


def test_the_pages_example_is_a_loss_like_any_other(my_losses: str) -> None:
    inputs = packed(hard_batch(3))
    name = f"{my_losses}:soft_clip"
    value, gradient = value_and_gradient(name, inputs, temperature=0.5, aggregation="sum")
    assert inputs.behaviour_logprobs is not None
    assert inputs.advantages is not None
    mask = inputs.loss_mask
    policy = inputs.policy_logprobs.detach()[mask].requires_grad_()
    gap = (policy - inputs.behaviour_logprobs[mask]).clamp(-20, 20)
    expected = (-2 * torch.sigmoid(gap / 0.5) * inputs.advantages[mask]).sum()
    (expected_gradient,) = torch.autograd.grad(expected, policy)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert torch.tensor(gradient)[mask].tolist() == pytest.approx(expected_gradient.tolist(), rel=1e-6)
    assert evaluate(name, inputs, kl_coef=0.01).loss.item() != evaluate(name, inputs).loss.item()


def test_a_loss_of_ones_own_finds_what_environments_passed_through(my_losses: str) -> None:
    inputs = packed(hard_batch(3))
    weight = torch.where(inputs.loss_mask, 3.0, math.nan)
    value, gradient = value_and_gradient(
        f"{my_losses}:weighed", replace(inputs, token_fields={"weight": weight}), aggregation="sum"
    )
    assert value == pytest.approx(float(-3.0 * inputs.policy_logprobs.detach()[inputs.loss_mask].sum()), rel=1e-6)
    assert set(torch.tensor(gradient)[~inputs.loss_mask].tolist()) == {0.0}
    with pytest.raises(ShapeError, match=r"token_fields\['weight'\] must be \[T\]"):
        evaluate(f"{my_losses}:weighed", replace(inputs, token_fields={"weight": weight[1:]}))


def test_a_loss_of_ones_own_that_is_not_per_token_or_not_there_is_refused(my_losses: str) -> None:
    inputs = packed(hard_batch(3))
    with pytest.raises(ShapeError, match=r"must return the loss per token, \[T\] = \[71\], got \[\]"):
        evaluate(f"{my_losses}:scalar", inputs)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        evaluate(f"{my_losses}:absent", inputs)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        evaluate("no_such_module:loss", inputs)
