"""Every recipe that trains, run for two real steps: the whole command, real vLLM, the real learner process, tiny model.

The bug-fix tasks, which a random model never solves, are replaced by an environment that pays it; every model is the
tiny one; sizes are cut down; everything else is the recipe's own. A recipe that is put into configs/ is run here
without a word; what it must show besides, or needs instead, goes into the tables below.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_server import Server, running_server
from safetensors.torch import load_file
from tiny_model import state_of
from tree import ROOT
from verifiers_python import MODULES, verifiers_python

from asyncrl.cli import main
from asyncrl.configs import load_config, to_table
from asyncrl.demonstrations import write_demonstrations
from asyncrl.engines import EngineSettings
from asyncrl.recording import read_metrics, read_warm_start
from asyncrl.run_directory import RunDirectory

ENGINE = EngineSettings(dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gib=0.1, threads=1)

RECIPES = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml")) if path.stem not in ("demo", "gpu")}
"""The demo is run by other tests, and the GPU's recipe needs one."""

STEPS = 2

SHOWS: Mapping[str, tuple[str, ...]] = {
    "cispo": ("capped_frac",),
    "coding_agent": ("reward_variance_share_parity", "reward_part_malformed_mean"),
    "ctpo": ("clipped_low_frac", "clipped_dual_frac"),
    "dapo": ("clipped_low_frac", "clipped_high_frac", "clipped_dual_frac"),
    "decoupled_ppo": ("dropped_frac", "clipped_high_frac"),
    "echo": ("observation_loss",),
    "grpo": ("reference_kl",),
    "gspo": ("clipped_high_frac", "geo_weight_max"),
    "lora": ("reference_kl",),
    "ppo_value_head": ("value_loss", "critic_grad_norm"),
    "ppo_yes_no": ("value_loss", "value_mean"),
    "self_distillation": ("teacher_divergence", "divergence_clipped_frac"),
    "sft_then_rl": ("clipped_high_frac",),
}
"""recipe -> metrics that each of its steps must have; a recipe that is missing here has nothing of its own to show."""

NEEDS: Mapping[str, Mapping[str, Any]] = {
    # the environment is its own, but for a reward that a random model earns too
    "agent": {
        "environment.name": '"agent"',
        "environment.options.reward": '"parity_environment:odd_answer"',
        "environment.options.max_tokens": 8,
        "buffer.group_size": 2,  # each episode starts a program, which takes longer than all that it asks for
    },
    # the environment is its own, but for a reward that a random model earns too, and a prompt that fits
    "coding_agent": {
        "environment.name": '"parity_environment:ParityAgent"',
        "environment.options": f"{{tasks='templates', calls='fenced', begin_in_call=true, max_turns=2, max_tokens=8, "
        f"max_episode_tokens=192, template='{ROOT}/tests/short_template.jinja'}}",
    },
    "ppo_yes_no": {"learner.critic.yes": '"Y"', "learner.critic.no": '"N"'},  # the tiny model's tokens are bytes
}
"""recipe -> further settings that it needs to run on the tiny model."""

SMALL: Mapping[str, Any] = {
    "run.steps": STEPS,
    "run.max_minutes": 0,
    "run.checkpoint_every_steps": 0,
    "environment.name": '"parity_environment:ParityEnvironment"',
    "environment.options": "{max_turns=2, max_tokens=8, max_episode_tokens=192, teacher_prompts=TEACHER_PROMPTS}",
    "buffer.groups_per_step": 2,
    "buffer.group_size": 4,
    "engine.max_model_len": ENGINE.max_model_len,
    "engine.max_num_seqs": ENGINE.max_num_seqs,
    "learner.dtype": "float32",
    "learner.threads": 1,
    "evaluation.samples": 0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("tiny"), ENGINE) as started:
        yield started


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    """Twenty conversations about odd bytes."""
    path = tmp_path / "demonstrations.jsonl"
    letters = "acegikmoqsuwy"
    write_demonstrations(
        path,
        (
            [
                {"role": "user", "content": f"{place}: write odd bytes."},
                {"role": "assistant", "content": letters[place % 13 :] + letters[: place % 5]},
            ]
            for place in range(20)
        ),
    )
    return path


def settings_of(recipe: str, directory: Path, model: Path, demonstrations: Path, **more: Any) -> list[str]:
    """Return the arguments that make `recipe` small."""
    own = to_table(load_config(RECIPES[recipe]))
    settings = {**SMALL, "run.directory": directory, **dict.fromkeys(model_settings(own), model)}
    told = own["environment"]["options"].get("teacher_prompts", False)
    settings["environment.options"] = SMALL["environment.options"].replace("TEACHER_PROMPTS", str(told).lower())
    if any(key.startswith("environment.options.") for key in NEEDS.get(recipe, {})):
        del settings["environment.options"]  # all others are the recipe's own
    if own["warm_start"]["path"]:
        settings |= {"warm_start.path": demonstrations, "warm_start.sequences_per_step": 4}
    settings |= {**NEEDS.get(recipe, {}), **more}
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def model_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every setting that names a model below models/."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from model_settings(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value.startswith("models/"):
            yield f"{prefix}{key}"


def check_trained(directory: RunDirectory, model: Path, *, warm_steps: int, bound: int) -> Sequence[Mapping[str, Any]]:
    """Check what every training run must have done, and return its steps."""
    summary = json.loads(directory.summary.read_text())
    assert (summary["steps"], summary["policy_version"]) == (STEPS, warm_steps + STEPS)
    assert summary["max_staleness_trained"] <= bound
    published = STEPS + bool(warm_steps)
    assert summary["weight_syncs"] == summary["weight_syncs_verified"] == published - summary["versions_superseded"] > 0
    assert summary["steps_skipped"] == 0
    steps = read_metrics(directory)
    assert [step["version"] for step in steps] == [warm_steps + 1, warm_steps + 2]
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0
        assert step["staleness_max"] <= bound
        assert step["tokens_trained"] > 0
    before, trained = state_of(model), directory.checkpoints / f"step-{warm_steps + STEPS}" / "model"
    if load_config(directory.config).learner.lora.enabled:
        factors = load_file(trained / "adapter_model.safetensors")
        changed = {
            name.removeprefix("base_model.model.").replace(".lora_B", "") for name in factors if "lora_B" in name
        }
        assert changed <= before.keys()
        assert any(bool(factor.any()) for name, factor in factors.items() if "lora_B" in name)
        return steps
    after = state_of(trained)
    assert after.keys() == before.keys()
    assert any(not after[name].equal(before[name]) for name in before)
    return steps


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(
    recipe: str, server: Server, demonstrations: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, model = RunDirectory(tmp_path / "run"), server.model_directory
    settings = settings_of(recipe, directory.path, model, demonstrations, **{"engine.urls": f'["{server.url}"]'})
    assert main(["train", str(RECIPES[recipe]), *settings]) == 0, capfd.readouterr()
    config = load_config(directory.config)
    warm_steps = read_warm_start(directory)
    assert bool(warm_steps) == config.warm_start.enabled
    bound = config.buffer.max_off_policyness
    steps = check_trained(directory, model, warm_steps=len(warm_steps), bound=bound)
    for name in SHOWS.get(recipe, ()):
        assert all(math.isfinite(step[name]) for step in steps), name
    if warm_steps:
        first, last = warm_steps[0], warm_steps[-1]
        assert last["held_out_perplexity"] < first["held_out_perplexity_before"]
        assert all(math.isfinite(step["loss"]) and step["tokens_trained"] > 0 for step in warm_steps)


@pytest.mark.slow
@pytest.mark.engine
def test_an_environment_of_verifiers_trains(
    server: Server,
    demonstrations: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = verifiers_python()
    monkeypatch.setenv("PYTHONPATH", str(MODULES))
    more = {
        "engine.urls": f'["{server.url}"]',
        "environment.name": '"verifiers"',
        "environment.options": f'{{taskset="vf_plain", python="{python}", held_out_percent=0, max_tokens=8}}',
    }
    directory, model = RunDirectory(tmp_path / "run"), server.model_directory
    settings = settings_of("grpo", directory.path, model, demonstrations, **more)
    assert main(["train", str(RECIPES["grpo"]), *settings]) == 0, capfd.readouterr()
    for step in check_trained(directory, model, warm_steps=0, bound=1):
        assert step["turns_mean"] == 2.0
        assert step["reward_part_odd_mean"] > 0


@pytest.mark.slow
@pytest.mark.engine
def test_credit_by_turn_trains_with_all_that_can_be_added_to_it(
    server: Server, demonstrations: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, model = RunDirectory(tmp_path / "run"), server.model_directory
    more = {
        "engine.urls": f'["{server.url}"]',
        "environment.name": '"parity_environment:ParityByTurn"',
        "learner.credit": '{level="turn", turn_discount=0.9, overlong_max_length=16, overlong_buffer_length=8, '
        "reward_kl_coef=0.01, whiten=true}",
        "learner.entropy_target": 20.0,
    }
    settings = settings_of("dapo", directory.path, model, demonstrations, **more)
    assert main(["train", str(RECIPES["dapo"]), *settings]) == 0, capfd.readouterr()
    steps = check_trained(directory, model, warm_steps=0, bound=load_config(directory.config).buffer.max_off_policyness)
    assert [step["entropy_coef"] for step in steps] == [0.0, 0.005]
    for step in steps:
        assert step["overlong_shaped_share"] > 0  # two turns of at most 8 tokens: most have more than 8
        assert step["reward_part_turns_mean"] > 0
        assert math.isfinite(step["reward_kl"])
        assert 0 <= step["repetition_mean"] < 1


def test_the_tables_name_recipes_that_exist() -> None:
    assert set(SHOWS) | set(NEEDS) <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_is_particular_about_it(recipe: str) -> None:
    assert RECIPES[recipe].read_text().startswith("# ")
    assert load_config(RECIPES[recipe]).run.name == recipe
    readme = (ROOT / "README.md").read_text()
    assert f"`{recipe}`" in readme


# --- a warm start that is stopped, killed and resumed -----------------------------------------------------------


def lines_until(run: subprocess.Popen[str], words: str) -> None:
    """Read what the run writes until a line begins with `words`."""
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith(words):
            return
    raise AssertionError(f"no line began with {words!r}:\n{''.join(lines)}")


def train(arguments: Sequence[str], *, words: str, number: int) -> int:
    """Run the command in a process of its own, send it signal `number` when it has said `words`; return its exit."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "asyncrl", "train", *arguments]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines_until(run, words)
        run.send_signal(number)
        return run.wait(120)
    finally:
        run.kill()
        run.wait()
        assert run.stdout is not None
        run.stdout.close()


@pytest.mark.slow
@pytest.mark.engine
def test_a_warm_start_that_is_stopped_and_killed_goes_on_as_if_nothing_had_happened(
    server: Server, demonstrations: Path, tmp_path: Path
) -> None:
    def arguments(directory: Path, **more: Any) -> list[str]:
        settings = {
            "engine.urls": f'["{server.url}"]',
            "warm_start.epochs": 3,
            "run.checkpoint_every_steps": 2,
            "learner.warmup_steps": 4,
            **more,
        }
        recipe = "sft_then_rl"
        return [
            str(RECIPES[recipe]),
            *settings_of(recipe, directory, server.model_directory, demonstrations, **settings),
        ]

    whole = RunDirectory(tmp_path / "whole")
    assert main(["train", *arguments(whole.path, **{"run.steps": 0})]) == 0
    wanted = read_warm_start(whole)
    assert len(wanted) == 14
    summary = json.loads(whole.summary.read_text())
    assert (summary["tokens_generated"], summary["weight_syncs"]) == (0, 0), "no engine takes part"

    cut = RunDirectory(tmp_path / "cut")
    assert train(arguments(cut.path), words="warm start step 3", number=signal.SIGINT) == 130
    stopped = len(read_warm_start(cut))
    assert 3 <= stopped < 14
    assert (cut.checkpoints / f"step-{stopped}" / "manifest.json").exists()
    resume = [*arguments(cut.path), "--resume"]
    assert train(resume, words=f"warm start step {stopped + 4}", number=signal.SIGKILL) == -signal.SIGKILL
    saved = max(int(path.name.removeprefix("step-")) for path in cut.checkpoints.glob("step-*"))
    assert stopped < saved < 14
    assert main(["train", *resume]) == 0
    found = read_warm_start(cut)
    assert [step["step"] for step in found] == [step["step"] for step in wanted] == list(range(1, 15))
    for key in ("loss", "grad_norm", "tokens_trained", "learning_rate"):
        assert [step[key] for step in found] == pytest.approx([step[key] for step in wanted], rel=1e-5), key
    assert found[-1]["held_out_perplexity"] == pytest.approx(wanted[-1]["held_out_perplexity"], rel=1e-5)
    steps = check_trained(cut, server.model_directory, warm_steps=14, bound=1)
    rate = load_config(cut.config).learner.learning_rate
    assert [step["learning_rate"] for step in steps] == pytest.approx([rate / 4, rate / 2])
