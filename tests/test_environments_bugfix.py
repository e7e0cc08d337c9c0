"""The bundled bug-fix tasks: what is asked, what is read from a reply, and what is paid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandboxes import with_backend
from scripted import ScriptedSampler, write_chat_files

from asyncrl.environments.bugfix import BugFixEnvironment, BugFixSettings, prompt, train_tasks
from asyncrl.environments.bugfix_tasks import HARD, HELD_OUT, TEMPLATES, build_task
from asyncrl.environments.replies import extract_code
from asyncrl.environments.validate import validate
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxBackend
from asyncrl.rollout import Episode
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

BUGS = [(name, bug) for name, template in TEMPLATES.items() for bug in range(len(template.bugs))]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


# --- tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_bug_is_seen_by_hidden_tests_that_no_example_shows(seed: int) -> None:
    for name, bug in BUGS:
        data = build_task(TEMPLATES[name], bug, seed=seed).data
        hidden = [json.dumps(test["arguments"]) for test in data["hidden"]]
        visible = [json.dumps(test["arguments"]) for test in data["visible"]]
        where = f"{name}-{bug}"
        assert data["source"] != data["reference"], where
        assert data["base_passed"] < len(hidden), where
        assert len(hidden) == len(set(hidden)) >= (4 if name == "retries" else 6), where
        assert len(visible) >= 2, where
        assert not set(hidden) & set(visible), where
        assert len({repr(test["expected"]) for test in data["hidden"]}) >= 2, f"{where}: a constant would pass"
        assert json.loads(json.dumps(data)) == data, f"{where}: not JSON-like"


@pytest.mark.slow
def test_most_prompts_show_an_example_that_fails() -> None:
    shown = 0
    for name, bug in BUGS:
        data = build_task(TEMPLATES[name], bug, seed=0).data
        namespace: dict[str, Any] = {}
        exec(data["source"], namespace)
        for test in data["visible"]:
            try:
                fails = namespace[name](*json.loads(json.dumps(test["arguments"]))) != test["expected"]
            except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError):
                fails = True
            if fails:
                shown += 1
                break
    assert shown >= 0.9 * len(BUGS)


def test_a_seed_gives_the_same_task_and_another_seed_other_inputs() -> None:
    template = TEMPLATES["add"]
    assert build_task(template, 0, seed=1) == build_task(template, 0, seed=1)
    assert build_task(template, 0, seed=1).data["hidden"] != build_task(template, 0, seed=2).data["hidden"]


def test_there_are_enough_functions_in_both_splits_and_none_in_both() -> None:
    names = {task.data["function"] for task in train_tasks(0, 0)}
    assert len(names) >= 56
    assert len(HELD_OUT) >= 16
    assert not names & set(HELD_OUT)
    assert not names & set(HARD)
    assert set(HELD_OUT) | set(HARD) | names == set(TEMPLATES)
    assert "retries" in names
    assert len({template.code.partition("(")[2] for template in TEMPLATES.values()}) == len(TEMPLATES)


def test_the_lectures_task_is_zero_that_must_disable_retrying() -> None:
    data = build_task(TEMPLATES["retries"], 0, seed=0).data
    assert [(test["arguments"], test["expected"]) for test in data["hidden"]] == [
        ([None], 3),
        ([0], 0),
        ([1], 1),
        ([40], 40),
    ]
    assert data["base_passed"] == 3


def test_epochs_differ_in_bugs_and_inputs() -> None:
    first, second = train_tasks(5, 0), train_tasks(5, 1)
    assert [t.data["function"] for t in first] == [t.data["function"] for t in second]
    assert not {t.task_id for t in first} & {t.task_id for t in second}
    assert sum(a.data["bug"] != b.data["bug"] for a, b in zip(first, second, strict=True)) > 10


# --- replies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        ("Sure!\n```\ndef f(x):\n    return x\n```\nIt works.", "def f(x):\n    return x\n"),
        ("```python\ndef f(x):\n    return x\n", "def f(x):\n    return x\n"),
        ("def f(x):\n    return x", "def f(x):\n    return x\n"),
        ("```python\ndef f(x):\n    return x\n\nprint(f(1))\nf(\n", "def f(x):\n    return x\n"),
        ("```python\ndef f(x):\n    y = x\n    return y +\n", "def f(x):\n    y = x\n"),
        (
            "```python\nimport math\nexit()\ndef f(x):\n    return math.pi\n```",
            "import math\ndef f(x):\n    return math.pi\n",
        ),
        (
            "```python\ndef g():\n    return 1\ndef f(x):\n    return g()\n```",
            "def g():\n    return 1\ndef f(x):\n    return g()\n",
        ),
        ("```python\ndef f(x):\n    return 1\ndef f(x):\n    return 2\n```", "def f(x):\n    return 1\n"),
        ("```python\nf(1)\n```\n```python\ndef f(x):\n    return 2\n```", "def f(x):\n    return 2\n"),
        ("```python\ndef f(x): return '\\d'\n```", "def f(x):\n    return '\\\\d'\n"),
        ("```python\ndef ff(x):\n    return x\n```", None),
        ("I do not know.", None),
        ("```python\ndef f(x):\n", None),
        ("```python\n" + "(" * 5000, None),
        ("\0def f(x):\n    return x", None),
        ("", None),
    ],
)
def test_the_first_complete_function_is_read_from_a_reply(text: str, expected: str | None) -> None:
    assert extract_code(text, "f") == expected


# --- episodes, in real sandboxes ------------------------------------------------------------------------------


def fenced(source: str) -> str:
    # what follows the environment's prefix
    return source + "```"


def play(
    renderer: ChatRenderer,
    directory: Path,
    script: Callable[[Task], Callable[[str, int], str]],
    *,
    name: str = "add",
    bug: int = 0,
    size: int = 1,
    **options: Any,
) -> Sequence[Trajectory]:
    """Return the trajectories of one task, and check that their rewards are in range."""
    found: list[Trajectory] = []

    async def body(backend: SandboxBackend) -> None:
        settings = BugFixSettings(max_tokens=400, max_episode_tokens=4096, **options)
        environment = BugFixEnvironment(settings, renderer=renderer, sandboxes=backend, seed=0)
        task = build_task(TEMPLATES[name], bug, seed=0)
        sampler = ScriptedSampler(renderer, script(task))
        found.extend(await environment.collect_trajectories(task, sampler, group_id="1", group_size=size))

    with_backend(body, directory)
    most = 1 + options.get("turn_weight", 0.0)
    assert all(t.reward is not None and 0 <= t.reward <= most for t in found)
    return found


@pytest.mark.slow
def test_the_reference_earns_all_and_unchanged_code_nothing(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        return lambda trajectory_id, turn: fenced(task.data["reference" if trajectory_id == "1-0" else "source"])

    for name in ("add", "retries", "is_empty"):
        good, unchanged = play(renderer, tmp_path, script, name=name, size=2)
        assert (good.reward, good.status, good.num_turns) == (1.0, TrajectoryStatus.COMPLETED, 1)
        assert unchanged.reward == 0.0
        assert unchanged.reward_parts["partial"] == 0.0
        assert good.extras["wall"].startswith("bubblewrap"), "what held the agent in is written down"


@pytest.mark.slow
def test_a_failed_attempt_sees_its_visible_output_and_may_answer_again(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        return lambda trajectory_id, turn: fenced(task.data[["source", "reference"][turn]])

    (trajectory,) = play(renderer, tmp_path, script)
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 2)
    text = renderer.decode(trajectory.segments[0].token_ids)
    assert "returned" in text
    assert "expected" in text
    task = build_task(TEMPLATES["add"], 0, seed=0)
    for test in task.data["hidden"]:
        assert f"add({test['arguments'][0]}, {test['arguments'][1]})" not in text


@pytest.mark.slow
def test_partial_credit_counts_from_what_the_unfixed_code_passes(renderer: ChatRenderer, tmp_path: Path) -> None:
    def half_fixed(task: Task) -> Callable[[str, int], str]:
        keep = {repr(t["arguments"]): t["expected"] for t in task.data["hidden"][:-1]}
        return lambda trajectory_id, turn: fenced(f"def add(a, b):\n    return {keep!r}.get(repr([a, b]))\n")

    (trajectory,) = play(renderer, tmp_path, half_fixed, max_turns=1, partial_weight=0.5)
    data = build_task(TEMPLATES["add"], 0, seed=0).data
    total, base = len(data["hidden"]), data["base_passed"]
    expected = (total - 1 - base) / (total - base)
    assert trajectory.reward_parts["partial"] == pytest.approx(expected)
    assert trajectory.reward == pytest.approx(0.5 * expected)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TURNS


@pytest.mark.slow
def test_a_reply_without_code_is_unsolved_and_counted(renderer: ChatRenderer, tmp_path: Path) -> None:
    (trajectory,) = play(renderer, tmp_path, lambda task: lambda trajectory_id, turn: "I am not sure.")
    assert trajectory.reward == 0.0
    assert trajectory.num_turns == 2
    assert trajectory.extras["malformed"] == 2
    assert trajectory.reward_parts["malformed"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        "def add(a, b):\n    import os\n    os._exit(0)\n",
        "def add(a, b):\n    while True:\n        pass\n",
        "class A:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return A()\n",
        "def add(a, b):\n    return [0] * 10 ** 12\n",
        "def add(a, b):\n    import sys\n    return sys._getframe(1).f_locals\n",
    ],
)
def test_what_does_not_add_earns_nothing(renderer: ChatRenderer, tmp_path: Path, attack: str) -> None:
    (trajectory,) = play(renderer, tmp_path, lambda task: lambda trajectory_id, turn: fenced(attack))
    assert trajectory.reward == 0.0


@pytest.mark.slow
def test_a_rambling_solution_is_paid_less_where_that_is_asked_for(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        return lambda trajectory_id, turn: task.data["reference"] + "\n# and so on" * 99

    (trajectory,) = play(renderer, tmp_path, script, rambling_penalty=0.25)
    assert trajectory.truncated
    assert trajectory.reward == 0.75


@pytest.mark.slow
def test_a_solution_at_the_second_turn_is_paid_less_where_that_is_asked_for(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        first = {"1-0": "reference", "1-1": "source"}
        return lambda trajectory_id, turn: fenced(task.data[first[trajectory_id] if turn == 0 else "reference"])

    at_once, later = play(renderer, tmp_path, script, size=2, retry_weight=0.5)
    assert (at_once.reward, at_once.num_turns) == (1.0, 1)
    assert (later.reward, later.num_turns) == (0.5, 2)
    assert later.reward_parts["solved"] == 1.0


@pytest.mark.slow
def test_a_turn_is_paid_for_the_examples_that_it_passes_first(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        shown = task.data["visible"][0]
        first = f"def add(a, b):\n    return {shown['expected']!r} if [a, b] == {shown['arguments']!r} else None\n"
        return lambda trajectory_id, turn: fenced([first, task.data["reference"]][turn])

    (trajectory,) = play(renderer, tmp_path, script, turn_weight=0.5)
    num_visible = len(build_task(TEMPLATES["add"], 0, seed=0).data["visible"])
    first, second = (turn.reward for turn in trajectory.segments[0].turns)
    assert first == pytest.approx(0.5 / num_visible)
    assert second == pytest.approx(0.5 - 0.5 / num_visible)
    assert (trajectory.reward, trajectory.reward_parts["solved"]) == (1.5, 1.0)
    (silent,) = play(renderer, tmp_path / "silent", script)
    assert [turn.reward for turn in silent.segments[0].turns] == [None, None]
    assert silent.reward == 1.0


@pytest.mark.slow
def test_without_a_prefix_the_model_answers_as_it_likes(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        code = task.data["reference"]
        return lambda trajectory_id, turn: f"The operator is wrong:\n```python\n{code}```\nNow it adds."

    (trajectory,) = play(renderer, tmp_path, script, begin_in_code=False, stop_at_fence=False)
    assert trajectory.reward == 1.0
    prompt = renderer.decode([t for t, m in zip(*_prompt(trajectory), strict=True) if not m])
    assert not prompt.rstrip().endswith("```python"), "nothing is put into the model's mouth"


@pytest.mark.slow
def test_a_teacher_reads_the_solution_where_that_is_asked_for(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(task: Task) -> Callable[[str, int], str]:
        return lambda trajectory_id, turn: fenced(task.data["reference"])

    task = build_task(TEMPLATES["add"], 0, seed=0)
    (trajectory,) = play(renderer, tmp_path, script, teacher_prompts=True)
    told = trajectory.segments[0].teacher_prompt_token_ids
    assert told is not None
    wanted = f"{prompt(task.data)}\n\nThis is correct:\n```python\n{task.data['reference'].strip()}\n```"
    assert wanted in renderer.decode(told)
    assert renderer.decode(told).endswith("```python\n"), "the reply begins for the teacher as for the policy"


def _prompt(trajectory: Trajectory) -> tuple[Sequence[int], bytes]:
    segment = trajectory.segments[0]
    return segment.token_ids, segment.loss_mask


class EveryTwelfth(BugFixEnvironment):
    """All of them take half a minute: `asyncrl environments validate` is for that."""

    def all_tasks(self) -> Sequence[Task]:
        return super().all_tasks()[::12]


@pytest.mark.slow
def test_the_bundled_tasks_can_be_trained_on(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def body(backend: SandboxBackend) -> None:
        environment = EveryTwelfth(BugFixSettings(), renderer=renderer, sandboxes=backend, seed=0)
        verdicts = await validate(environment, backend)
        assert len(verdicts) > 20
        assert {verdict.held_out for verdict in verdicts} == {True, False}
        assert [verdict for verdict in verdicts if not verdict.good] == []

    with_backend(body, tmp_path)


@pytest.mark.slow
def test_demonstrations_are_solutions_of_training_functions_and_of_no_held_out_one(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async def body(backend: SandboxBackend) -> None:
        for hard in (False, True):
            settings = BugFixSettings(hard=hard)
            environment = BugFixEnvironment(settings, renderer=renderer, sandboxes=backend, seed=3)
            shown = list(environment.demonstrations())
            texts = "\n".join(str(message["content"]) for messages in shown for message in messages)
            functions = set(re.findall(r"^def (\w+)", texts, re.MULTILINE))
            assert functions == set(TEMPLATES) - set(HELD_OUT) - (set() if hard else set(HARD))
        for task in environment.all_tasks()[::30]:
            asked = environment.start(Episode(trajectory_id="0", task=task))
            replies = [messages[-1] for messages in shown if list(messages[:-1]) == list(asked)]
            assert [reply["role"] for reply in replies] == ["assistant"] * (task.data["function"] not in HELD_OUT)
            for reply in replies:
                code = extract_code(reply["content"], task.data["function"])
                assert code is not None
                assert await environment.accepts(task, code, backend)

    with_backend(body, tmp_path)


class Leaky(EveryTwelfth):
    """Shows what it should hide."""

    def all_tasks(self) -> Sequence[Task]:
        task = build_task(TEMPLATES["add"], 0, seed=0)
        return [replace(task, data={**task.data, "visible": task.data["hidden"][:2]})]


@pytest.mark.slow
def test_a_task_that_shows_what_it_hides_is_refused(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def body(backend: SandboxBackend) -> None:
        environment = Leaky(BugFixSettings(), renderer=renderer, sandboxes=backend, seed=0)
        (verdict,) = await validate(environment, backend)
        told = [str(problem) for problem in verdict.problems]
        assert told == ["a visible call is among the hidden ones", "the instruction holds a hidden call"]

    with_backend(body, tmp_path)


def test_a_prompt_holds_instruction_examples_and_code_and_nothing_hidden() -> None:
    task = build_task(TEMPLATES["largest"], 0, seed=0)
    text = prompt(task.data)
    assert "Return the largest number in the list." in text
    assert "return min(numbers)" in text
    assert "return max(numbers)" not in text
    assert text.count("largest([") == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"partial_weight": 1.0},
        {"partial_weight": -0.1},
        {"epochs": -1},
        {"max_turns": 0},
        {"retry_weight": 0.0},
        {"turn_weight": -0.1},
        {"begin_in_code": False},
    ],
)
def test_settings_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        BugFixSettings(**bad)
