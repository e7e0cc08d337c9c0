"""Steps of the optimizer: what they change, what they refuse, what they report, and that they go on after a restart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups
from tiny_model import build_tiny_model

from asyncrl.errors import CheckpointError, ConfigError, StalenessError
from asyncrl.learner.checkpoint import load as load_checkpoint
from asyncrl.learner.credit import select
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.process import Learner
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.packing import split
from asyncrl.protocols import PLAIN_STEP, StepOptions, StepResult
from asyncrl.types import Group, Logprobs, Trajectory
from asyncrl.weight_sync.settings import WeightSyncSettings
from asyncrl.wire import SaveRequest, StepRequest


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, dtype=torch.float32)


def job_for(model: Path, published: Path, *, resume_from: Path | None = None, **settings: object) -> LearnerJob:
    options: dict[str, object] = {"dtype": "float32", "learning_rate": 1e-3, "threads": 1, **settings}
    return LearnerJob(
        model=model,
        run_id="test",
        resume_from=str(resume_from or ""),
        max_off_policyness=1,
        weight_sync=WeightSyncSettings(transport="filesystem", directory=published),
        learner=LearnerSettings(**options),  # type: ignore[arg-type]
    )


def step(learner: Learner, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
    reply = learner.answer(StepRequest(groups=list(groups), options=options))
    return reply.result  # type: ignore[attr-defined, no-any-return]


def policy_logprobs(learner: Learner, groups: Sequence[Group]) -> list[list[float]]:
    """Return the learner's log-probs of every segment's tokens, 0.0 where nothing is scored."""
    batch = select(groups, LearnerSettings(scale="none")).batch
    flat = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        for microbatch in split(batch, max_tokens=10_000):
            flat[microbatch.token_index] = learner._model.logprobs(microbatch)[0].float()
    bounds = batch.cu_seqlens.tolist()
    return [flat[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]  # noqa: RUF007


def on_policy(learner: Learner, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with the learner's own log-probs as the behaviour's."""
    rows = iter(policy_logprobs(learner, groups))

    def renewed(trajectory: Trajectory) -> Trajectory:
        segments = tuple(replace(s, behaviour_logprobs=Logprobs(next(rows))) for s in trajectory.segments)
        return replace(trajectory, segments=segments)

    return [replace(g, trajectories=tuple(renewed(t) for t in g.trajectories)) for g in groups]


@pytest.mark.slow
def test_a_loss_of_ones_own_reads_what_environments_passed_through(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def weighed(inputs):\n    return -inputs.policy_logprobs * inputs.token_fields['weight']\n"
    (tmp_path / "losses_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def weigh(trajectory: Trajectory, weight: float) -> Trajectory:
        (segment,) = trajectory.segments
        fields = {"weight": Logprobs([weight] * len(segment.token_ids))}
        return replace(trajectory, segments=(replace(segment, token_fields=fields),))

    def norm(weight: float) -> float:
        settings = {"loss": "losses_of_a_test:weighed", "baseline": "none", "microbatch_tokens": 64}
        groups = [
            replace(group, trajectories=tuple(weigh(t, weight) for t in group.trajectories))
            for group in random_groups(1)
        ]
        return step(Learner(job_for(model_path, tmp_path / f"{weight}", **settings)), groups).metrics["grad_norm"]

    light, heavy = norm(1.0), norm(3.0)
    assert heavy == pytest.approx(3.0 * light, rel=1e-4)
    assert light > 0.0


@pytest.mark.slow
def test_on_policy_every_ratio_is_one(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    result = step(learner, on_policy(learner, random_groups(1)))
    for name in ("max", "min", "mean", "p99"):
        assert result.metrics[f"importance_ratio_{name}"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["ess_token"] == pytest.approx(1.0, abs=1e-6)
    assert result.metrics["kl_k3"] == pytest.approx(0.0, abs=1e-9)
    assert result.metrics["staleness_max"] == 0
    assert result.version == 1
    learner.close()


@pytest.mark.slow
def test_steps_make_rewarded_completions_likelier(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    segments = [make_segment([1, 2, 3], [([10 + i, 20 + i, 30 + i], [])]) for i in range(4)]
    groups = [make_group(0, segments, [1.0, 0.0, 0.0, 1.0])]
    before = policy_logprobs(learner, groups)
    for version in range(3):
        renewed = [
            make_group(
                0,
                [make_segment([1, 2, 3], [([10 + i, 20 + i, 30 + i], [])], version=version) for i in range(4)],
                [1.0, 0.0, 0.0, 1.0],
            )
        ]
        result = step(learner, on_policy(learner, renewed))
        assert result.stepped
        assert result.metrics["grad_norm"] > 0
    change = [sum(b) - sum(a) for a, b in zip(before, policy_logprobs(learner, groups), strict=True)]
    assert change[0] > 0.05
    assert change[3] > 0.05
    assert change[1] < -0.05
    assert change[2] < -0.05
    learner.close()


def test_tokens_outside_the_bound_are_refused(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    learner._stepper.version = 5
    with pytest.raises(StalenessError, match="2 steps old"):
        step(learner, random_groups(1, versions=(5, 3)))
    with pytest.raises(StalenessError, match="claims version 6"):
        step(learner, random_groups(1, versions=(6,)))
    assert step(learner, random_groups(1, versions=(4, 5))).metrics["staleness_max"] == 1
    learner.close()


def test_a_gradient_that_is_not_finite_skips_the_step_and_the_version_counts(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    before = {name: tensor.clone() for name, tensor in learner._optimizer.masters.items()}
    weight = next(iter(learner._model.tensors().values()))
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.nan
    result = step(learner, random_groups(1))
    assert not result.stepped
    assert result.version == 1
    assert result.metrics["grad_norm_nonfinite"] == 1.0
    assert "grad_norm" not in result.metrics
    assert all(torch.equal(before[name], tensor) for name, tensor in learner._optimizer.masters.items())
    assert learner._optimizer.updates == 0
    with torch.no_grad():
        weight.copy_(kept)
    assert step(learner, random_groups(1)).stepped  # nothing of the bad gradient is left
    learner.close()


def test_failed_trajectories_are_masked_and_counted(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    segments = [make_segment([1, 2], [([3 + i], [])]) for i in range(4)]
    result = step(learner, [make_group(0, segments, [1.0, None, 0.0, None])])
    assert result.metrics["num_failed_trajectories"] == 2
    assert result.metrics["tokens_trained"] == 2
    assert result.metrics["reward_mean"] == 0.5
    nothing = step(learner, [make_group(1, segments, [None] * 4)])
    assert not nothing.stepped
    assert nothing.version == 2
    learner.close()


def test_gradients_are_clipped_and_the_norm_before_is_reported(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path, max_grad_norm=1e-3))
    seen: list[float] = []
    adam_step = learner._optimizer._adam.register_step_pre_hook(
        lambda *_: seen.append(learner._optimizer.gradient_norm())
    )
    result = step(learner, random_groups(2))
    adam_step.remove()
    assert result.metrics["grad_norm"] > 0.01
    assert seen == [pytest.approx(1e-3, rel=1e-4)]
    learner.close()


def test_the_learning_rate_warms_up_and_scales(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path, learning_rate=1.0, warmup_steps=4))
    assert [learner._optimizer.learning_rate(), learner._optimizer.learning_rate(0.5)] == [0.25, 0.125]
    assert step(learner, random_groups(2), StepOptions(learning_rate_scale=0.0)).metrics["learning_rate"] == 0.0
    assert learner._optimizer.learning_rate() == 0.5
    learner.close()


def test_without_diagnostics_the_step_is_the_same_and_says_less(model_path: Path, tmp_path: Path) -> None:
    """Pins what users train on: watching changes no bit of the weights."""
    results, weights = [], []
    for diagnostics in (True, False):
        learner = Learner(job_for(model_path, tmp_path / str(diagnostics), diagnostics=diagnostics))
        results.append(step(learner, random_groups(3, num_groups=2)))
        weights.append({name: tensor.clone() for name, tensor in learner._optimizer.masters.items()})
        learner.close()
    seen, unseen = results
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert {"loss", "grad_norm", "reward_mean", "tokens_trained", "seconds_step"} <= unseen.metrics.keys()
    assert {key: unseen.metrics[key] for key in ("loss", "grad_norm")} == {
        key: seen.metrics[key] for key in ("loss", "grad_norm")
    }
    assert {"importance_ratio_max", "ess_token", "entropy", "kl_k3"} <= seen.metrics.keys() - unseen.metrics.keys()
    assert all([seen.spikes, seen.top_ratios, seen.shown, seen.histograms])
    assert not any([unseen.spikes, unseen.top_ratios, unseen.shown, unseen.histograms])


def test_the_largest_ratios_are_kept_with_where_they_come_from(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    result = step(learner, random_groups(3, num_groups=4))
    rows = result.top_ratios
    assert len(rows) == min(64, int(result.metrics["num_loss_tokens"]))
    assert [row["ratio"] for row in rows] == sorted((row["ratio"] for row in rows), reverse=True)
    first = rows[0]
    assert first["ratio"] == pytest.approx(result.metrics["importance_ratio_max"])
    assert first["ratio"] == pytest.approx(math.exp(first["policy_logprob"] - first["behaviour_logprob"]), rel=1e-5)
    assert {"token_id", "position_in_segment", "version", "trajectory_id"} <= set(first)
    assert sum(result.histograms["staleness_tokens"]["counts"]) == result.metrics["num_loss_tokens"]
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_takes_bitwise_the_same_next_step(model_path: Path, tmp_path: Path, dtype: str) -> None:
    learner = Learner(job_for(model_path, tmp_path / "a", dtype=dtype, warmup_steps=5))
    step(learner, random_groups(1))
    (tmp_path / "saved").mkdir()
    files = learner.answer(SaveRequest(directory=str(tmp_path / "saved"))).files  # type: ignore[attr-defined]
    assert all((tmp_path / "saved" / name).stat().st_size == size for name, size in files.items())
    wanted = step(learner, random_groups(2, versions=(1,)))
    again = Learner(job_for(model_path, tmp_path / "b", dtype=dtype, warmup_steps=5, resume_from=tmp_path / "saved"))
    assert again.hello().version == 1
    found = step(again, random_groups(2, versions=(1,)))
    assert {k: v for k, v in found.metrics.items() if "second" not in k} == {
        k: v for k, v in wanted.metrics.items() if "second" not in k
    }
    ours, theirs = learner._optimizer.state(), again._optimizer.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for one in (learner, again):
        one.close()


@pytest.mark.slow
def test_a_saved_model_loads_in_transformers_as_it_is(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = Learner(job_for(model_path, tmp_path / "a", dtype="bfloat16"))
    step(learner, random_groups(1))
    (tmp_path / "saved").mkdir()
    learner.answer(SaveRequest(directory=str(tmp_path / "saved")))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "model", dtype=torch.bfloat16)
    ours = learner._model.tensors()
    assert all(torch.equal(ours[name], parameter) for name, parameter in saved.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved" / "model").chat_template
    learner.close()


def test_a_checkpoint_with_a_file_missing_says_which(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path / "a"))
    saved = tmp_path / "saved"
    saved.mkdir()
    learner.answer(SaveRequest(directory=str(saved)))
    (saved / "learner" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"learner/optimizer\.safetensors is missing"):
        load_checkpoint(saved)
    (saved / "learner" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"learner/state\.json is missing"):
        load_checkpoint(saved)
    learner.close()


@pytest.mark.slow
def test_a_reference_kl_is_zero_before_the_first_step_and_positive_after(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path, loss="grpo", learning_rate=1e-2))
    first = step(learner, random_groups(1))
    second = step(learner, random_groups(1, versions=(1,)))
    assert first.metrics["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.metrics["reference_kl"] > 1e-4
    learner.close()


@pytest.mark.slow
def test_the_entropy_coefficient_follows_its_target_and_survives_a_restart(model_path: Path, tmp_path: Path) -> None:
    """A random model's entropy is near log 384 = 5.95 nats: a target above it is never reached."""
    options = {"entropy_target": 20.0, "entropy_coef_step": 0.25, "loss_settings": {"entropy_coef": 0.5}}
    learner = Learner(job_for(model_path, tmp_path / "a", **options))
    seen = [step(learner, random_groups(1, versions=(version,))).metrics["entropy_coef"] for version in range(2)]
    (tmp_path / "saved").mkdir()
    learner.answer(SaveRequest(directory=str(tmp_path / "saved")))
    again = Learner(job_for(model_path, tmp_path / "b", resume_from=tmp_path / "saved", **options))
    seen += [step(again, random_groups(1, versions=(version,))).metrics["entropy_coef"] for version in (2, 3)]
    assert seen == [0.5, 0.75, 1.0, 1.0]
    low = Learner(job_for(model_path, tmp_path / "c", **{**options, "entropy_target": 0.1}))
    groups = [random_groups(1, versions=(version,)) for version in range(4)]
    found = [step(low, group).metrics for group in groups]
    assert [metrics["entropy_coef"] for metrics in found] == [0.5, 0.25, 0.0, 0.0]
    for one in (learner, again, low):
        one.close()


@pytest.mark.slow
def test_a_coefficient_that_begins_at_0_reaches_groups_without_an_advantage(model_path: Path, tmp_path: Path) -> None:
    """Where there is nothing else to learn from, such groups have no gradient; under an entropy term they have."""
    learner = Learner(job_for(model_path, tmp_path, entropy_target=20.0))
    alike = make_group(0, [make_segment([1, 2], [([3 + i], [])]) for i in range(2)], [1.0, 1.0])
    later = make_group(0, [make_segment([1, 2], [([3 + i], [])], version=1) for i in range(2)], [1.0, 1.0])
    before, after = step(learner, [alike]).metrics, step(learner, [later]).metrics
    assert (before["grad_norm"], before["num_segments_idle"], before["entropy_coef"]) == (0.0, 2.0, 0.0)
    assert after["grad_norm"] > 0
    assert (after["num_segments_idle"], after["entropy_coef"]) == (0.0, 0.005)
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("loss_settings", [{}, {"kl_coef": 0.1}])
def test_a_kl_in_the_reward_is_measured_against_the_starting_weights(
    model_path: Path, tmp_path: Path, loss_settings: dict[str, float]
) -> None:
    credit = CreditSettings(reward_kl_coef=0.01)
    learner = Learner(job_for(model_path, tmp_path, credit=credit, loss_settings=loss_settings, microbatch_tokens=40))
    groups = random_groups(1)
    reference = [value for row in policy_logprobs(learner, groups) for value in row]
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    behaviour = [value for s in segments for value in s.behaviour_logprobs]
    trained = [bool(bit) for s in segments for bit in s.loss_mask]
    gaps = [b - r for b, r, bit in zip(behaviour, reference, trained, strict=True) if bit]
    for version in range(2):  # the second time the weights have moved, and the reference has not
        result = step(learner, random_groups(1, versions=(version,)))
        assert result.metrics["reward_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
        assert result.metrics["reward_kl_penalty_mean"] == pytest.approx(-0.01 * sum(gaps) / len(segments), abs=1e-5)
        if loss_settings:
            assert (result.metrics["reference_kl"] > 1e-6) == (version > 0)
    learner.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "dapoo"}, "did you mean 'dapo'"),
        ({"loss_settings": {"clip_hihg": 0.3}}, "clip_high"),
        (
            {"loss": "sft", "credit": CreditSettings(whiten=True)},
            r"\[learner.credit\] is set and not read by loss 'sft'",
        ),
        ({"baseline": "median"}, "baseline must be one of"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"learning_rate": -1.0}, "learning_rate must be >= 0"),
        ({"learning_rate": math.nan}, "learning_rate must be >= 0"),
        ({"entropy_target": -0.1}, "entropy_target must be >= 0"),
        ({"adam_betas": (0.9, 1.0)}, r"adam_betas must lie in \[0, 1\)"),
        ({"microbatch_tokens": 0}, "microbatch_tokens must be >= 1 tokens"),
    ],
)
def test_settings_that_cannot_run_are_refused_by_name(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LearnerSettings(**settings)  # type: ignore[arg-type]
