"""How coding agents are asked: formats of calls, templates, settings, demonstrations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from coding_agent_rig import SUBMIT, environment_of, play, run
from coding_tasks import FIXED, TASKS, UNFIXED
from sandboxes import with_backend
from scripted import TEMPLATE, ScriptedSampler, write_chat_files

from asyncrl.coding.tools import CallFormat, ToolCall, write_call
from asyncrl.configs import Config
from asyncrl.configs.loader import build
from asyncrl.demonstrations import first, write_demonstrations
from asyncrl.environments import EnvironmentSettings
from asyncrl.environments.validate import task_set_of
from asyncrl.errors import ConfigError
from asyncrl.preflight import load_demonstrations
from asyncrl.protocols import SandboxBackend
from asyncrl.rollout import Episode
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, TrajectoryStatus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


# --- how it is asked ------------------------------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{{ tools | tojson }}</s>\n{% endif %}{% for message in messages %}"
    "<|{{ 'user' if message.role == 'tool' else message.role }}|>{% if message.role == 'tool' %}TOOL {% endif %}"
    "{{ message.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def native(name: str, **arguments: str) -> str:
    return write_call(ToolCall(name=name, arguments=arguments), CallFormat.NATIVE)


@pytest.mark.parametrize("takes_tools", [True, False])
def test_calls_may_be_in_the_models_own_format(tmp_path: Path, takes_tools: bool) -> None:
    template = TOOL_TEMPLATE if takes_tools else TEMPLATE
    renderer = ChatRenderer.load(write_chat_files(tmp_path / "model", template=template))
    script = [f"Look.{native('run', command='echo a')}{native('read', path='notes.txt')}", native("submit")]
    (played,) = play(renderer, tmp_path, script, calls="native", system="")
    assert played.trajectory.status is TrajectoryStatus.COMPLETED
    if takes_tools:
        assert '"parameters"' in played.text.partition("<|user|>")[0]
        assert played.text.count("<tool_call>") == 3, "the template alone tells how"
        assert played.answers == ["TOOL exit code 0\na\n", "TOOL x * 2\n"]
    else:
        assert "run(command): Runs commands" in played.text
        answers = "<tool_response>\nexit code 0\na\n\n</tool_response>\n<tool_response>\nx * 2\n\n</tool_response>"
        assert played.answers == [answers]


def test_a_base_model_is_asked_by_a_template_that_the_environment_brings(tmp_path: Path) -> None:
    renderer = ChatRenderer.load(write_chat_files(tmp_path / "model", template=None))
    script = [f"write double.py\n{FIXED}``` and so on", "submit```"]
    (played,) = play(renderer, tmp_path, script, template="plain", begin_in_call=True, shown_file_characters=40)
    assert played.trajectory.reward == 1.0
    wrote = f"```write double.py\n{FIXED}```</s>\n\n### User\nwrote {len(FIXED)} bytes to double.py\n\n### Assistant\n"
    assert played.text.startswith("<s>### System\nYou work on code")
    assert f"double.py:\n{UNFIXED}" in played.text
    assert "notes.txt:" in played.text
    assert played.text.endswith(f"### Assistant\n{wrote}```submit```")
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    (played,) = play(renderer, tmp_path, script, template=str(own), begin_in_call=True)
    assert played.trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"calls": "xml"}, "calls = 'xml'"),
        ({"tasks": "nothing"}, "unknown task set 'nothing'"),
        ({"task_options": {"hardd": True}}, "unknown option 'hardd' of task set 'templates'"),
        ({"max_tool_calls": 0}, "max_tool_calls must be >= 1, got 0"),
        ({"output_characters": 10}, "output_characters must be >= 80, got 10"),
        ({"tool_timeout_s": 601.0}, "tool_timeout_s must be > 0 and at most episode_timeout_s = 600, got 601"),
        ({"reward": {"partial_weight": -1.0}}, "partial_weight must be >= 0, got -1"),
        ({"reward": {"formatweight": 1.0}}, "did you mean 'format_weight'? ([environment.options.reward])"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        EnvironmentSettings(name="coding_agent", options=options)


def test_a_template_that_cannot_be_read_or_is_missing_is_refused(renderer: ChatRenderer, tmp_path: Path) -> None:
    without = ChatRenderer.load(write_chat_files(tmp_path / "model", template=None))

    async def use(backend: SandboxBackend) -> None:
        with pytest.raises(ConfigError, match=r"template = '/nowhere\.jinja' is neither"):
            environment_of(backend, renderer, template="/nowhere.jinja")
        with pytest.raises(ConfigError, match="has no chat template"):
            environment_of(backend, without)
        alternating = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tool') }}{% endfor %}"
        picky = renderer.with_template(alternating + TOOL_TEMPLATE)
        with pytest.raises(ConfigError, match='refuses the messages: no tool; set calls = "fenced"'):
            environment_of(backend, picky, calls="native")
        assert environment_of(backend, picky).renderer.takes_tools

    with_backend(use, tmp_path)


def test_tasks_that_are_left_out_are_not_asked(renderer: ChatRenderer, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("steps\npytest\n")

    async def use(backend: SandboxBackend) -> None:
        environment = environment_of(backend, renderer, leave_out=str(out), epochs=1)
        asked = [environment.get_item().task_id for _ in range(len(TASKS) - 2)]
        assert sorted(asked) == sorted({*TASKS} - {"steps", "pytest"})
        with pytest.raises(StopIteration):
            environment.get_item()
        assert environment.held_out() == ()
        assert task_set_of(environment).all_ids() == list(TASKS), "they are validated still"

    with_backend(use, tmp_path)


def test_more_sandboxes_held_than_there_are_is_refused() -> None:
    def config(held: int, name: str = "coding_agent") -> Config:
        options: dict[str, Any] = {"max_open": held}
        if name == "mixed":
            part = {"name": "coding_agent", "options": options}
            options = {"parts": [{"label": "a", **part}, {"label": "b", **part}]}
        return build(
            Config,
            {
                "model": {"path": "x"},
                "engine": {"max_model_len": 4096},
                "environment": {"name": name, "options": options},
                "sandbox": {"max_open": 8},
            },
        )

    assert config(7).sandbox.max_open == 8
    assert config(3, "mixed").sandbox.max_open == 8
    for held, name in ((8, "coding_agent"), (4, "mixed")):
        with pytest.raises(ConfigError, match=r"max_open = 8 .* must be above the 8 that episodes hold"):
            config(held, name)


@pytest.mark.parametrize("form", CallFormat)
def test_demonstrations_are_episodes_that_solve_their_tasks(
    renderer: ChatRenderer, tmp_path: Path, form: CallFormat
) -> None:
    async def use(backend: SandboxBackend) -> None:
        environment = environment_of(backend, renderer, calls=form.value, check_command="cat double.py; false")
        (shown,) = await first(environment.demonstrations(), 1)
        replies = [message["content"] for message in shown if message["role"] == "assistant"]
        sampler = ScriptedSampler(renderer, lambda trajectory_id, turn: replies[turn])
        task = Task(task_id="calls", environment="coding_agent")
        (trajectory,) = await environment.collect_trajectories(task, sampler, group_id="7", group_size=1)
        assert trajectory.reward == 1.0
        assert (trajectory.extras["tool_calls"], trajectory.num_turns) == (2, 2), "the check is not the agent's call"
        played = renderer.decode(trajectory.segments[0].token_ids, keep_special=True)
        assert f"exit code 1\n{FIXED}" in played
        told = renderer.decode(renderer.start(shown), keep_special=True)
        assert told.startswith(played), "the conversation is what an episode is"
        note = environment.teacher_note(Episode(trajectory_id="", task=task))
        assert write_call(ToolCall(name="write", arguments={"path": "double.py", "content": FIXED}), form) in note
        await environment.aclose()

    with_backend(use, tmp_path)


def test_every_other_demonstration_shows_a_mistake_without_weight_where_it_can_be_seen(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async def use(backend: SandboxBackend) -> None:
        options = {"tasks": "templates", "check_command": "python3 examples.py"}
        for check, mistakes in (
            ("python3 examples.py", [False, True, False, True]),
            ("true", [False] * 4),  # it would show no mistake
            ("", [False] * 4),
        ):
            environment = environment_of(backend, renderer, **{**options, "check_command": check})
            shown = await first(environment.demonstrations(), 4)
            assert [any(message.get("weight") == 0 for message in one) for one in shown] == mistakes
            for one, has_mistake in zip(shown, mistakes, strict=True):
                said = [message for message in one if message["role"] == "assistant"]
                assert [message.get("weight", 1) for message in said] == [0] * has_mistake + [1, 1]
                if has_mistake:
                    (before, after) = (one[place]["content"] for place in (3, 5))
                    assert "exit code 1" in before
                    assert after.endswith("exit code 0\nthe examples pass\n")
            await environment.aclose()

    with_backend(use, tmp_path)


def test_demonstrations_are_rendered_as_episodes_are(tmp_path: Path) -> None:
    model = write_chat_files(tmp_path / "model", template=None)
    path = tmp_path / "demonstrations.jsonl"
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": run("ls")}]
    write_demonstrations(path, [messages])
    settings = {
        "model": {"path": str(model)},
        "engine": {"max_model_len": 4096},
        "warm_start": {"path": str(path)},
        "environment": {"name": "coding_agent", "options": {"calls": "fenced", "template": "plain"}},
    }
    demonstrations = load_demonstrations(build(Config, settings))
    assert demonstrations is not None
    (segment,) = demonstrations.segments
    text = ChatRenderer.load(model).decode(segment.token_ids, keep_special=True)
    assert text == f"<s>### User\nLook.\n\n### Assistant\n{run('ls')}</s>"


def test_a_check_is_made_after_changes_and_only_then(renderer: ChatRenderer, tmp_path: Path) -> None:
    script = [run("ls"), "```edit double.py\nnothing\n=======\nx\n```", "```edit double.py\n+\n=======\n*\n```", SUBMIT]
    (played,) = play(renderer, tmp_path, script, check_command="echo checked")
    assert ["checked" in answer for answer in played.answers] == [False, False, True]
    assert played.answers[2] == "edited double.py\nexit code 0\nchecked\n"
    assert played.trajectory.reward == 1.0
