"""The command line: help that teaches, one clear message and exit code 2 for what cannot be used, JSON for programs."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_byte_tokenizer

from asyncrl import run_directory
from asyncrl.checkpoint import CheckpointStore
from asyncrl.cli import main
from asyncrl.commands import COMMANDS
from asyncrl.configs import load_config
from asyncrl.run_directory import RunDirectory

_CONFIG = """
[model]
path = "{model}"

[environment]
name = "bugfix"

[engine]
urls = ["http://127.0.0.1:9"]
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer and the look of a model; nothing here loads the weights."""
    path = tmp_path / "model"
    path.mkdir()
    write_byte_tokenizer(path)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(_CONFIG.format(model=model))
    return path


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("asyncrl: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*filter(None, [command]), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "asyncrl" in text
    assert len(text) > 400


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lerner.loss=gspo", "unknown section 'lerner'; did you mean 'learner'"),
        ("learner.lr=1", "unknown setting 'lr' in [learner]"),
        ("learner.loss=grp", "grp"),
        ("buffer.max_off_policyness=-1", "max_off_policyness must be >= 0 optimizer steps, got -1"),
        ("buffer.group_size=1", "group_size must be >= 2 with baseline = 'mean'"),
        ("buffer.window=9", "slots, but one step needs"),
        ("buffer.order=newest", "order ([buffer])"),
        ("buffer.slots=99", "slots must be 0, or between"),
        ("sampling.top_p=0.9", "top_p must be 1"),
        ("sampling.top_k=20", "top_k must be 0"),
        ("model.path=nowhere", "there is no model directory nowhere"),
        ("run.steps=0", "steps must be >= 1, got 0 ([run]): only a run with a [warm_start]"),
        ("warm_start.path=none.jsonl", "there is no file of demonstrations none.jsonl ([warm_start])"),
        ("warm_start.epochs=2", "path must be given ([warm_start])"),
        ("warm_start.max_tokens=9999", "max_tokens = 9999 ([warm_start]) must not exceed"),
        ("environment.name=bugfx", "did you mean 'bugfix'"),
        ('environment.options={max_turn=3}', "did you mean 'max_turns'"),
        ("sandbox.backend=docker", "backend must be one of"),
        ("weight_sync.transport=shared", "transport must be one of"),
        ("run.max_minutes=nan", "max_minutes must be >= 0, got nan"),
        ("environment.name=':X'", "environment ':X'"),
        ("engine.max_model_len=100", "max_episode_tokens = 1024 ([environment.options]) must not exceed"),
        ("learner.credit.level=turn", "environment 'bugfix' gives no reward per turn with these options"),
        ("learner.credit.whitn=true", "unknown setting 'whitn' in [learner.credit]; did you mean 'whiten'"),
        ("learner.credit={overlong_filter=true, overlong_max_length=9, overlong_buffer_length=3}",
         "exclude each other"),
        ("metrics.port=99999", "port must be between 0 and 65535, got 99999"),
        ("buffer.slots=3", "slots must be 0, or between groups_per_step = 4 and (max_off_policyness + 1) *"),
        ("buffer.group_deadline_s=179", "group_deadline_s must be 0, or at least the 180 s that an episode of"),
        ("environment.options={grading_timeout_s=3}", "grading_timeout_s must be at least the 4 s after which"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(
    setting: str, words: str, config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    error = _refused(capsys, "train", str(config), "--set", f"run.directory={directory}", "--set", setting)
    assert words in error
    assert not directory.exists(), "nothing may be half-started"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("window=2", "lower window from 2 to at most 1, raise max_off_policyness from 0"),
        ("max_uses=2", "max_uses = 2 needs max_off_policyness >= 1"),
        ("oversample=1", "oversample must be at most max_off_policyness * groups_per_step = 0"),
        ("slots=5", "(max_off_policyness + 1) * groups_per_step = 4 groups, got 5"),
    ],
)
def test_what_needs_staleness_is_refused_at_bound_zero(
    setting: str, words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("check", str(config), "--set", f"buffer.{setting}", "--set")
    assert words in _refused(capsys, *arguments, "buffer.max_off_policyness=0")
    assert main([*arguments, "buffer.max_off_policyness=1"]) == 0


def test_an_episode_has_time_for_what_its_sandbox_allows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("check", str(config), "--set", "environment.options.max_turns=3", "--set")
    error = _refused(capsys, *arguments, "environment.options.episode_timeout_s=11")
    assert "episode_timeout_s must be at least max_turns = 3 times the 4 s after which" in error
    assert main([*arguments, "environment.options.episode_timeout_s=12"]) == 0


def test_an_environment_that_pays_turns_is_taken_for_credit_by_turn(config: Path) -> None:
    settings = ("--set", "learner.credit.level=turn", "--set", "environment.options.turn_weight=0.5")
    assert main(["check", str(config), *settings]) == 0


@pytest.mark.parametrize("learner", ['learner.baseline="none"', 'learner.loss="sft"'])
def test_groups_that_teach_without_an_advantage_are_not_replaced(
    learner: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--set", "buffer.replace_zero_advantage=true", "--set", learner)
    assert "drops groups that teach something" in _refused(capsys, "check", str(config), *settings)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_without_its_files_is_refused(
    missing: str, config: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / missing).unlink()
    error = _refused(capsys, "check", str(config))
    assert "no weights" in error if missing.endswith("safetensors") else missing in error


def test_nothing_is_trained_where_an_attempt_to_break_out_succeeds(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    setting = 'sandbox.backend="bare_sandboxes:open_leaking"'
    assert main(["train", str(config), "--set", setting, "--set", f'run.directory="{tmp_path / "runs"}"']) == 1
    said = capsys.readouterr().err
    assert "the sandbox does not stop what it must, so nothing is trained in it: fork bomb" in said
    assert "daemon" in said


def test_a_port_in_use_is_refused(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        directory = tmp_path / "run"
        arguments = ("--set", f"run.directory={directory}", "--set", f"metrics.port={port}")
        error = _refused(capsys, "train", str(config), *arguments)
    assert f"[metrics] port {port}" in error
    assert not directory.exists()


def test_a_directory_that_holds_something_is_not_written_to(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    error = _refused(capsys, "train", str(config), "--set", f"run.directory={tmp_path / 'run'}")
    assert "is not empty" in error


def test_a_run_of_another_configuration_is_not_resumed(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = ["--set", f"run.directory={tmp_path / 'run'}"]
    original = load_config(config, [settings[1]])
    with run_directory.opened(RunDirectory(tmp_path / "run"), original):
        pass
    error = _refused(capsys, "train", str(config), "--resume", *settings, "--set", "learner.learning_rate=1e-3")
    assert "belongs to another configuration: learner.learning_rate is 0.001 now and was 1e-06" in error
    longer = load_config(config, [settings[1], "run.steps=500", "metrics.port=9", "weight_sync.delta=true"])
    assert run_directory.choose(longer, resume=True).path == tmp_path / "run"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "0"], "samples ([evaluation], --samples) must be >= 1, got 0"),
        (["--tasks", "0"], "--tasks must be >= 1, got 0"),
        (["--version", "3"], "--version 3 is of a run: give --run too"),
        (["--run", "{here}"], "there is no such checkpoint in {here}: kept are none"),
        (["--baseline", "{here}"], "servers that run elsewhere serve a model of their own"),
        (["--out", "{here}/absent/out.json"], "--out: there is no directory {here}/absent"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    given = [argument.format(here=tmp_path) for argument in arguments]
    assert words.format(here=tmp_path) in _refused(capsys, "eval", str(config), *given)


def test_a_run_that_was_killed_as_its_directory_was_made_is_no_older_versions(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    setting = f"run.directory={directory.path}"

    def killed(config: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "dump_config", killed)
        with pytest.raises(KeyboardInterrupt):
            run_directory.opened(directory, load_config(config, [setting])).__enter__()
    assert directory.format.is_file()
    assert "there is no run to resume" in _refused(capsys, "train", str(config), "--resume", "--set", setting)


def test_a_run_directory_of_another_version_is_not_gone_on_with(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    setting = f"run.directory={directory.path}"
    with run_directory.opened(directory, load_config(config, [setting])):
        pass
    assert run_directory.choose(load_config(config, [setting]), resume=True).path == directory.path

    def refused() -> str:
        before = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
        words = _refused(capsys, "train", str(config), "--resume", "--set", setting)
        assert before == {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
        return words

    directory.format.write_text('{"format": 2, "asyncrl": "9.0"}')
    assert "has format 2, written by asyncrl 9.0; this version, 0.1.0, goes on with format 1" in refused()
    directory.format.write_text('{"format"')
    assert "format.json is broken" in refused()
    directory.format.unlink()
    assert "was written by an older asyncrl" in refused()
    with run_directory.opened(directory, load_config(config, [setting])):
        pass
    with directory.config.open("a") as file:
        file.write("[telepathy]\nreach = 3\n")
    assert "config.toml, as the run was begun: unknown section 'telepathy'" in refused()


def test_a_broken_task_file_is_refused_with_its_line_before_anything_starts(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": 1\n')
    settings = [f"run.directory={tmp_path / 'run'}", "environment.name=humanevalfix"]
    settings.append(f'environment.options={{path="{tasks}"}}')
    error = _refused(capsys, "train", str(config), *(part for text in settings for part in ("--set", text)))
    assert "line 1" in error
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_that_would_end_at_once_says_so(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    settings = ["run.steps=3", f"run.directory={directory.path}"]
    with run_directory.opened(directory, load_config(config, settings)):
        store = CheckpointStore(directory.checkpoints, keep=1)
        store.commit(store.begin(3), 3, {"counters": {"steps": 3, "seconds_before": 90.0}})
    arguments = ("train", str(config), "--resume", "--set", settings[1])
    assert "steps = 3 are taken already" in _refused(capsys, *arguments, "--set", "run.steps=3")
    longer = ("--set", "run.steps=9", "--set", "run.max_minutes=1.5")
    assert "max_minutes = 1.5 are used up" in _refused(capsys, *arguments, *longer)


def test_resuming_nothing_is_refused(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = _refused(capsys, "train", str(config), "--resume", "--set", f"run.directory={tmp_path / 'none'}")
    assert "there is no run to resume" in error


def test_a_full_disk_is_refused(config: Path, model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    huge = shutil.disk_usage(tmp_path).free
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(huge)  # sparse: it takes no room
    transport = ("--set", "weight_sync.transport=filesystem", "--set", f"weight_sync.directory={tmp_path}")
    assert "free some, lower keep_checkpoints" in _refused(capsys, "check", str(config), *transport)
    assert "in /dev/shm" in _refused(capsys, "check", str(config))


def test_check_tells_what_a_warm_start_trains_on_and_refuses_a_bad_line(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "demonstrations.jsonl"
    lines = [{"token_ids": [1, number], "loss_mask": [0, 1]} for number in range(20)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("check", str(config), "--json", "--set", f"warm_start.path={file}")
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["warm start"] == "18 demonstrations in 2 steps, 2 held out"
    alone = ("--set", "run.steps=0", "--set", "evaluation.samples=0")
    assert main((*arguments, *alone)) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["engines"] == "none: nothing is sampled"
    with file.open("a") as opened:
        opened.write('{"token_ids": [1, 384], "loss_mask": [0, 1]}\n')
    assert "demonstrations.jsonl, line 21: token 1 has id 384" in _refused(capsys, *arguments)


def test_a_deadline_is_held_against_the_slowest_part_of_a_mixture(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = '{label="quick", name="bugfix"}, {label="slow", name="bugfix", options={episode_timeout_s=300}}'
    arguments = ["check", str(config), "--set", "environment.name=mixed"]
    arguments += ["--set", f"environment.options={{parts=[{parts}]}}", "--set"]
    error = _refused(capsys, *arguments, "buffer.group_deadline_s=359")
    assert "the 360 s that an episode of environment 'mixed', part 'slow' may take" in error
    assert main([*arguments, "buffer.group_deadline_s=360"]) == 0


def test_check_predicts_the_steady_state_from_given_rates_and_refuses_what_they_rule_out(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", str(config), "--json", "--rate", "environment_s=20", "--rate"]
    assert main([*arguments, "failure_share=0"]) == 0
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    assert forecast["staleness_max"] <= 1
    assert 0 < forecast["learner_idle_share"] < 1
    assert 0 < forecast["engine_idle_share"] < 1
    assert forecast["buffer_bytes"] > 1000
    error = _refused(capsys, *arguments, "completion_tokens=11000")
    assert "episode_timeout_s = 120 ([environment.options]) ends most episodes" in error
    assert "completion_tokens / request_tokens_per_second + environment_s = 130.0 s" in error
    deadline = ("--set", "buffer.group_deadline_s=200", "--set", "environment.options={episode_timeout_s=140}")
    error = _refused(capsys, *arguments, "completion_tokens=19000", *deadline)
    assert "group_deadline_s = 200 ([buffer]) ends most episodes" in error


def test_check_predicts_from_a_run_that_has_been(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = {"tokens_trained": 900.0, "step_seconds": 9.0, "sync_seconds": 0.5, "sync_stall_seconds": 0.5}
    step |= {"completion_tokens_mean": 30.0, "solve_rate": 0.5, "generated_tokens_per_second": 300.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    assert main(["check", str(config), "--from", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in ("# staleness: mean ", "# learner: idle ", "# engines: idle ", "MiB of tokens"):
        assert words in printed
    assert "holds no steps to measure rates from" in _refused(capsys, "check", str(config), "--from", "nowhere")


def test_check_counts_the_engines_that_would_be_started(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--rate", "engine_tokens_per_second=100", "--set", "engine.urls=[]", "--set"]
    rates = []
    for count in (1, 4):
        assert main(["check", str(config), "--json", *slow, f"engine.count={count}"]) == 0
        rates.append(json.loads(capsys.readouterr().out)["forecast"]["tokens_per_second"])
    assert rates[1] > 2 * rates[0]


def test_check_prints_the_plan_as_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config), "--json", "--set", "buffer.max_off_policyness=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["buffer"]["max_off_policyness"] == 2
    assert report["plan"]["staleness"].startswith("at most 2 optimizer steps")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("dapo", "part of the ratio of loss dapo, and clipped"),
        ("tis", "the correction of loss tis weighs tokens by it"),
        ("reinforce", "loss reinforce does not correct it"),
    ],
)
def test_check_says_what_quantised_engines_do_to_training(
    config: Path, capsys: pytest.CaptureFixture[str], loss: str, words: str
) -> None:
    settings = ["--set", "engine.extra.quantization=fp8", "--set", f"learner.loss={loss}"]
    assert main(["check", str(config), *settings]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("# engine mismatch"))
    assert "weights fp8" in line
    assert "asyncrl_engine_mismatch_nats" in line
    assert words in line
    assert main(["check", str(config)]) == 0
    assert "# engine mismatch" not in capsys.readouterr().out


def test_suffix_speculation_without_its_package_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "engine.urls=[]", "--set", "engine.extra.speculative_config.method=suffix"]
    assert "needs the package arctic-inference" in _refused(capsys, "check", str(config), *settings)


def test_new_runs_take_the_next_number(config: Path, tmp_path: Path) -> None:
    settings = load_config(config)
    assert run_directory.choose(settings, resume=False, root=tmp_path).path == tmp_path / "run-1"
    with run_directory.opened(RunDirectory(tmp_path / "run-1"), settings):
        pass
    assert run_directory.choose(settings, resume=False, root=tmp_path).path == tmp_path / "run-2"
    assert run_directory.choose(settings, resume=True, root=tmp_path).path == tmp_path / "run-1"


def test_one_run_directory_has_one_orchestrator(config: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with run_directory.opened(directory, load_config(config)):
        assert run_directory.is_running(directory)
        with pytest.raises(ValueError, match="in use by another"), directory.locked():
            raise AssertionError("entered twice")
    assert not run_directory.is_running(directory)


@pytest.mark.slow
def test_a_killed_orchestrator_blocks_nobody_though_what_it_started_still_runs(config: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    code = f"""
import subprocess, sys
from pathlib import Path
from asyncrl import run_directory
from asyncrl.configs import load_config
directory = run_directory.RunDirectory(Path({str(directory.path)!r}))
with run_directory.opened(directory, load_config(Path({str(config)!r}))):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
    print("locked", flush=True)
    child.wait()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="in use by another"), run_directory.opened(directory, load_config(config)):
            raise AssertionError("entered twice")
        holder.kill()
        holder.wait()
        with run_directory.opened(directory, load_config(config)):  # its child lives until the input is closed
            assert run_directory.is_running(directory)


def test_status_of_a_crashed_run_tells_what_is_known(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    with run_directory.opened(directory, load_config(config)):
        pass
    directory.metrics.write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "rew')
    assert main(["status", str(directory.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["state"] == "stopped without a summary"
    assert report["last_step"] == {"step": 1, "reward_mean": 0.5}
    assert main(["status", str(directory.path)]) == 0
    assert "stopped without a summary" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_drawn_and_an_empty_one_refused(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    with run_directory.opened(directory, load_config(config)):
        pass
    picture = tmp_path / "run.svg"
    assert "holds no steps" in _refused(capsys, "plot", str(directory.path), str(picture))
    line = {"step": 1, "solve_rate": 0.5, "importance_ratio_max": 1.2, "staleness_max": 1, "step_seconds": 9.0}
    lines = [line | {"step": step, "version": step} for step in (1, 2, 3)]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plot", str(directory.path), str(picture)]) == 0
    assert "<svg" in picture.read_text()
    assert "must end in" in _refused(capsys, "plot", str(directory.path), str(tmp_path / "run.txt"))


def test_status_of_no_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is no run directory" in _refused(capsys, "status", str(tmp_path))
