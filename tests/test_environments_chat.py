"""An environment's own template, its variables and end tokens: in a class, at the gateway, and two ways in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gateway_rig
import pytest
import trio
from gateway_rig import Scripted
from scripted import NoSandboxes, write_chat_files

from asyncrl.configs import dump_config, load_config
from asyncrl.environments import EnvironmentSettings, load_environment, resolve_options
from asyncrl.environments.chat import ChatSettings
from asyncrl.environments.mixed import MixedEnvironment, MixedPart, MixedSettings
from asyncrl.errors import ConfigError
from asyncrl.tokens import ChatRenderer
from asyncrl.types import TokenIds, Trajectory

THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
CODE = {"role": "user", "content": "def add(a, b):"}


def rendered(directory: Path, **chat: Any) -> str:
    renderer = ChatSettings(**chat).rendering(ChatRenderer.load(write_chat_files(directory)))
    return renderer.decode(renderer.start([CODE]), keep_special=True)


def test_a_template_is_a_name_a_file_or_its_text(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert rendered(tmp_path) == "<|user|>def add(a, b):</s>\n<|assistant|>"
    assert rendered(tmp_path, template="raw") == "def add(a, b):"
    assert rendered(tmp_path, template="plain") == "<s>### User\ndef add(a, b):\n\n### Assistant\n"
    assert rendered(tmp_path, template=str(path)) == "[def add(a, b):]"
    assert rendered(tmp_path, template=THINKING) == "def add(a, b):"


def test_variables_reach_the_template(tmp_path: Path) -> None:
    assert rendered(tmp_path, template=THINKING, variables={"enable_thinking": True}) == "def add(a, b):<think>"
    assert rendered(tmp_path, variables={"add_generation_prompt": False}) == "<|user|>def add(a, b):</s>\n"
    assert rendered(tmp_path, template="plain", variables={"bos_token": ""}).startswith("### User")


def test_an_end_token_is_one_of_the_renderers_that_engines_must_be_told(tmp_path: Path) -> None:
    own = ChatRenderer.load(write_chat_files(tmp_path))
    renderer = ChatSettings(end_tokens=("\n", "</s>")).rendering(own)
    assert (own.stop_token_ids, renderer.stop_token_ids) == ((), (10,))  # the model's own need not be told
    assert renderer.end_token_ids == own.end_token_ids | {10}
    same = ChatRenderer.of_record(renderer.record()).with_template(THINKING).with_tools([])
    assert (same.stop_token_ids, same.end_token_ids) == ((10,), renderer.end_token_ids)


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ({"template": "no/such/file"}, "neither raw, plain, the text of a template, nor a file"),
        ({"template": "{% for"}, "cannot be read"),
        ({"end_tokens": ("two words",)}, "end_tokens must be single tokens.*'two words' is 9"),
        ({"end_tokens": ("",)}, "'' is 0"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(chat: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        rendered(tmp_path, **chat)


def score(reply: str, row: Any) -> float:
    return float(len(reply))


def files(directory: Path) -> tuple[ChatRenderer, dict[str, Any]]:
    path = directory / "questions.jsonl"
    path.write_text('{"id": "one", "prompt": "def add(a, b):"}\n')
    renderer = ChatRenderer.load(write_chat_files(directory))
    options = {"path": str(path), "reward": f"{__name__}:score", "held_out_percent": 0}
    return renderer, options


def test_one_run_samples_as_a_base_model_and_as_an_instruct_model(tmp_path: Path) -> None:
    renderer, options = files(tmp_path)
    raw = ChatSettings(template="raw", end_tokens=("\n",))
    parts = (
        MixedPart(label="base", name="single_turn", options=options, chat=raw),
        MixedPart(label="instruct", name="single_turn", options=options),
    )
    sampler, found = Scripted(renderer), dict[str, Trajectory]()

    async def main() -> None:
        environment = MixedEnvironment(MixedSettings(parts=parts), renderer=renderer, sandboxes=NoSandboxes())
        while len(found) < 2:
            task = environment.get_item()
            (trajectory,) = await environment.collect_trajectories(task, sampler, group_id="0", group_size=1)
            found[task.environment] = trajectory

    trio.run(main)
    context = {
        label: renderer.decode(
            [t for t, trained in zip(one.segments[0].token_ids, one.segments[0].loss_mask, strict=True) if not trained],
            keep_special=True,
        )
        for label, one in found.items()
    }
    assert context == {"base": "def add(a, b):", "instruct": "<|user|>def add(a, b):</s>\n<|assistant|>"}
    assert {asked["stop"] for asked in sampler.asked_with} == {(10,), ()}


def test_a_configuration_names_it_for_the_run_and_for_each_part(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\npath = 'model'\n[environment]\nname = 'mixed'\n"
        "[environment.chat]\nvariables = { enable_thinking = false }\n[environment.options]\nparts = [\n"
        "{ label = 'a', name = 'bugfix', chat = { template = 'raw', end_tokens = ['x'] } },\n"
        "{ label = 'b', name = 'bugfix' },\n]\n"
    )
    config = load_config(path)
    assert config.environment.chat == ChatSettings(variables={"enable_thinking": False})
    first, second = resolve_options(config.environment).parts
    assert (first.chat, second.chat) == (ChatSettings(template="raw", end_tokens=("x",)), ChatSettings())
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_options_of_environments_do_not_hide_the_section(tmp_path: Path) -> None:
    renderer, options = files(tmp_path)
    settings = EnvironmentSettings(name="single_turn", options=options, chat=ChatSettings(template="raw"))
    environment: Any = load_environment(settings, renderer=renderer, sandboxes=NoSandboxes(), seed=0)
    assert environment.renderer.start([CODE]) == renderer.encode("def add(a, b):")


def test_a_session_of_the_gateway_speaks_as_its_environment_does(tmp_path: Path) -> None:
    async def body(rig: gateway_rig.Rig) -> None:
        raw = ChatSettings(template="raw", end_tokens=("\n",)).rendering(rig.renderer)
        opened = rig.gateway.session(rig.sampler, task=gateway_rig.TASK, trajectory_id="8-0", renderer=raw)
        async with opened as session:
            head = {"authorization": f"Bearer {session.token}"}
            body = {"messages": [CODE]}
            answer = await rig.client.post(f"{session.base_url}/chat/completions", json=body, headers=head)
            assert answer.status_code == 200
            assert rig.sampler.asked == [raw.encode("def add(a, b):")]
            assert rig.sampler.asked_with[0]["stop"] == (10,)
            counted = await rig.client.post(f"{session.url}/tokenize", json=body, headers=head)
            assert TokenIds(counted.json()["tokens"]) == rig.sampler.asked[0]
        await rig.chat(CODE)
        assert rig.renderer.decode(rig.sampler.asked[1]) == "user: def add(a, b):assistant: "

    gateway_rig.run(tmp_path, body)
