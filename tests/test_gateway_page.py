"""What the page on the gateway shows is what runs: its files, configurations, classes and commands."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import gateway_rig
import pytest
import trio
from gateway_rig import Scripted
from scripted import NoSandboxes
from tree import ROOT

from asyncrl.cli import main
from asyncrl.configs.loader import build
from asyncrl.environments.loading import EnvironmentSettings, load_environment
from asyncrl.gateway import Gateway, GatewaySettings, NeedsGateway
from asyncrl.serving import listen
from asyncrl.types import Trajectory

PAGE = (ROOT / "asyncrl" / "gateway" / "GATEWAY.md").read_text(encoding="ascii")


def blocks(language: str) -> list[str]:
    """Return the page's blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The page's Python files by name, importable here and by a command's Python."""
    monkeypatch.syspath_prepend(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent)])
    monkeypatch.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = {}
    for block in blocks("python"):
        name = re.match(r"# (\w+)\.py\n", block)
        assert name is not None, f"a block without a file name: {block[:60]}"
        (tmp_path / f"{name[1]}.py").write_text(block)
        monkeypatch.delitem(sys.modules, name[1], raising=False)
        found[name[1]] = importlib.import_module(name[1])
    return found


def play(
    directory: Path, settings: EnvironmentSettings, replies: list[str], size: int = 1, *, max_model_len: int = 1000
) -> list[Trajectory]:
    """Play a group of an environment's next task as a run does, with a gateway before a scripted sampler."""
    renderer = gateway_rig.make_renderer(directory)
    found: list[Trajectory] = []

    async def body() -> None:
        environment: Any = load_environment(settings, renderer=renderer, sandboxes=NoSandboxes(), seed=0)
        assert isinstance(environment, NeedsGateway)
        assert environment.needs_gateway
        gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=max_model_len)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
                environment.use_gateway(gateway)
                sampler = Scripted(renderer, list(replies))
                task = environment.get_item()
                found.extend(await environment.collect_trajectories(task, sampler, group_id="0", group_size=size))
                nursery.cancel_scope.cancel()

    trio.run(body)
    return found


@pytest.mark.slow
def test_the_agent_of_the_page_is_run_by_its_configuration(tmp_path: Path, modules: dict[str, ModuleType]) -> None:
    (rows,) = blocks("json")
    (tmp_path / "sums.jsonl").write_text(rows.splitlines()[0] + "\n")
    config, _ = blocks("toml")
    settings = build(EnvironmentSettings, tomllib.loads(config)["environment"], section="environment")
    settings = EnvironmentSettings(name=settings.name, options={**settings.options, "held_out_percent": 0})
    (trajectory,) = play(tmp_path, settings, ["Well, 17 + 25.", "Yes.", " 42 "])
    assert (trajectory.reward, trajectory.reward_parts, trajectory.num_turns) == (1.0, {"exit_code": 0.0}, 3)
    assert len(trajectory.segments) == 1
    assert json.loads(rows.splitlines()[0])["answer"] == 42


def mini_swe_agent() -> Path:
    """Return the program, or skip the test."""
    variable, default = "ASYNCRL_MINI_SWE_AGENT", ROOT / ".venv-mini" / "bin" / "mini"
    program = Path(os.environ.get(variable, str(default)))
    if program.is_file():
        return program
    pytest.skip(
        f"no mini-swe-agent at {program}: python3 -m venv .venv-mini && .venv-mini/bin/pip install mini-swe-agent, or "
        f"name it in {variable}"
    )


@pytest.mark.slow  # another process imports litellm
def test_a_program_that_others_wrote_is_run_an_episode(tmp_path: Path, modules: dict[str, ModuleType]) -> None:
    program = mini_swe_agent()
    (script,) = [block for block in blocks("sh") if block.startswith("# solve.sh")]
    (tmp_path / "solve.sh").write_text(script)
    (tmp_path / "issues.jsonl").write_text('{"id": "one", "question": "Write 42 into answer.txt.", "answer": 42}\n')
    _, config = blocks("toml")
    table = tomllib.loads(
        config.replace("/home/me/.venv-mini/bin/mini", str(program)).replace("/home/me", str(tmp_path))
    )
    options = {**table["environment"]["options"], "held_out_percent": 0, "max_retries": 0}
    options["command"] = f"BOX=local {options['command']}"
    replies = [
        "THOUGHT: I write.\n\n```mswea_bash_command\necho 42 > answer.txt\n```",
        "I forgot to say how.",
        "THOUGHT: Done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
    ]
    settings = EnvironmentSettings(name="agent", options=options)
    (trajectory,) = play(tmp_path, settings, replies, max_model_len=12_000)
    assert (trajectory.detail, trajectory.reward, trajectory.num_turns) == ("", 1.0, 3)
    assert trajectory.extras["exit_code"] == 0
    assert len(trajectory.segments) == 2, "it leaves a reply that it cannot read out of its history"


def test_the_environment_of_the_page_opens_a_session_for_each_episode(
    tmp_path: Path, modules: dict[str, ModuleType]
) -> None:
    settings = EnvironmentSettings(name="my_gateway_environment:Echo")
    found = play(tmp_path, settings, ["tea and oak"] * 2, size=2)
    assert [(t.trajectory_id, t.reward, len(t.segments)) for t in found] == [("0-0", 1.0, 1), ("0-1", 1.0, 1)]


def test_commands_of_the_page_parse(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("asyncrl ")]
    commands = [shlex.split(line) for line in shown]
    assert commands
    for words in commands:
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert all(word in said for word in words if word.startswith("--"))


def test_settings_and_routes_of_the_page_exist(tmp_path: Path) -> None:
    names = {field for field in GatewaySettings.__dataclass_fields__}
    shown = set(re.findall(r"`(\w+)`", PAGE)) & {
        "max_cache_use", "request_timeout_s", "public_url", "tool_format", "port", "host"
    }  # fmt: skip
    assert shown <= names
    assert 'foreign_sampling = "ignore"' in PAGE
    renderer = gateway_rig.make_renderer(tmp_path)
    paths = {r.path for r in Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=9).routes()}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate", "/inference/v1/generate"):
        assert path in PAGE
        assert {path, f"/sessions/{{session}}{path}"} <= paths


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml", "--access-file", "a.json"], "there is no configuration file"),
        (["{config}", "--access-file", "nowhere/a.json"], "--access-file: there is no directory"),
        (["{config}", "--access-file", "a.json", "--set", "gateway.max_requests=0"], "max_requests must be"),
    ],
)
def test_serving_is_refused_before_anything_is_started(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    gateway_rig.make_renderer(model)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    config = tmp_path / "serve.toml"
    config.write_text(f'[model]\npath = "{model}"\n[environment]\nname = "bugfix"\n')
    assert main(["serve", "gateway", *(word.format(config=config) for word in arguments)]) == 2
    assert words in capsys.readouterr().err
