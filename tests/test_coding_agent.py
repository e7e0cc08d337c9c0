"""Episodes of coding agents: a script says what the model says, everything else is real."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_judge
import test_verifier
import trio
from coding_agent_rig import FIX, HALF, SUBMIT, WRONG, Recording, environment_of, play, run
from coding_tasks import FIXED, UNFIXED
from sandboxes import processes_with, with_backend
from scripted import Reply, ScriptedSampler, write_chat_files

from asyncrl.coding.tools import CallFormat, ToolCall, write_call
from asyncrl.errors import EngineError, SandboxError
from asyncrl.protocols import Sandbox, SandboxBackend
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


# --- what is paid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["calls", "pytest", "script"])
def test_a_solution_is_paid_whatever_judges_it(renderer: ChatRenderer, tmp_path: Path, task: str) -> None:
    (played,) = play(renderer, tmp_path, [run("cat double.py"), FIX, SUBMIT], task=task)
    assert played.trajectory.status is TrajectoryStatus.COMPLETED
    assert played.trajectory.reward == 1.0
    assert (played.parts["solved"], played.parts["paid_solved"], played.parts["tool_calls"]) == (1.0, 1.0, 3.0)
    assert played.answers == [f"exit code 0\n{UNFIXED}", f"wrote {len(FIXED)} bytes to double.py"]
    assert played.extras["wall"].startswith("bubblewrap")
    assert played.extras["behaviour"] == {}


def test_what_the_untouched_files_pass_is_not_paid_and_is_found_out_once(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    def script(trajectory_id: str, turn: int) -> Reply:
        return [{"7-0": WRONG, "7-1": "```read notes.txt\n```"}.get(trajectory_id, FIX), SUBMIT][turn]

    opened = []

    async def use(backend: SandboxBackend) -> Sequence[Trajectory]:
        environment = environment_of(backend, renderer, reward={"partial_weight": 0.3})
        task = Task(task_id="calls", environment="coding_agent")
        for group_id in ("7", "8"):
            before = backend.statistics().opened
            found = await environment.collect_trajectories(
                task, ScriptedSampler(renderer, script), group_id=group_id, group_size=3
            )
            opened.append(backend.statistics().opened - before)
            if group_id == "7":
                trajectories = found
        await environment.aclose()
        return trajectories

    wrong, nothing, fixed = with_backend(use, tmp_path)
    assert wrong.reward == pytest.approx(0.3 / 3)  # one of three checks that fail at first
    assert wrong.reward_parts["partial"] == pytest.approx(1 / 3)
    assert (nothing.reward, fixed.reward) == (0.0, 1.0)
    assert opened == [3 + 3 + 2, 3 + 3], (
        "an agent's and a judge's each, and the untouched files in the first group only"
    )


def test_auxiliary_parts_are_paid_by_their_weights(renderer: ChatRenderer, tmp_path: Path) -> None:
    weights = {"partial_weight": 0.0, "checks_weight": 0.1, "format_weight": 0.2, "brevity_weight": 0.4}
    solved, failed = play(
        renderer,
        tmp_path,
        lambda trajectory_id, turn: [FIX if trajectory_id == "7-0" else "no call", SUBMIT][turn],
        group_size=2,
        max_turns=5,
        reward={**weights, "length_weight": 0.8},
    )
    parts = solved.parts
    assert parts["brevity"] == pytest.approx(3 / 4)
    assert 0 < parts["shortness"] < 1
    assert solved.trajectory.reward == pytest.approx(1 + 0.1 + 0.2 + 0.4 * 0.75 + 0.8 * parts["shortness"])
    # a quarter of the checks pass as they were; half of the calls were well formed; brevity of a failure is no merit
    assert failed.trajectory.reward == pytest.approx(0.1 * 0.25 + 0.2 * 0.5)
    for played in (solved, failed):
        paid = {name: value for name, value in played.parts.items() if name.startswith("paid_")}
        assert sum(paid.values()) == pytest.approx(played.trajectory.reward)
        assert set(paid) == {"paid_solved", "paid_checks", "paid_format", "paid_brevity", "paid_length"}


# --- how an episode ends --------------------------------------------------------------------------------------


def test_what_is_malformed_is_answered_and_counted(renderer: ChatRenderer, tmp_path: Path) -> None:
    script = ["I think it is wrong.", "```run\nls", f"```edit double.py\nx\n```\n{run('echo here')}"]
    (played,) = play(renderer, tmp_path, [*script, f"{FIX}\n{SUBMIT}\n{run('echo never')}"])
    assert played.trajectory.reward == 1.0
    assert played.answers == [
        "error: no tool was called; the tools are run, read, write, edit, submit",
        "error: the block of run is not closed",
        "error: the block of edit must hold one line ======= between old and new text\nexit code 0\nhere\n",
    ]
    assert (played.extras["malformed"], played.extras["tool_calls"]) == (3, 3)
    assert played.parts["format"] == 0.5


def test_each_limit_ends_the_episode_which_is_graded_as_it_stands(renderer: ChatRenderer, tmp_path: Path) -> None:
    (by_turns,) = play(renderer, tmp_path, [FIX, run("ls")], max_turns=3)
    assert by_turns.trajectory.status is TrajectoryStatus.TRUNCATED_TURNS
    (by_calls,) = play(renderer, tmp_path, [f"{FIX}\n{run('echo one')}\n{run('rm double.py')}"], max_tool_calls=2)
    assert by_calls.trajectory.status is TrajectoryStatus.TRUNCATED_TURNS
    assert by_calls.extras["tool_calls"] == 2
    prompt = len(by_turns.text.encode())
    (by_tokens,) = play(renderer, tmp_path, [FIX, run("seq 500")], max_episode_tokens=prompt + 200)
    assert by_tokens.trajectory.status is TrajectoryStatus.TRUNCATED_LENGTH
    for played in (by_turns, by_calls, by_tokens):
        assert played.trajectory.reward == 1.0


def test_a_command_in_the_middle_of_which_the_time_is_over_leaves_its_files_to_be_graded(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    asleep = f"{10**9 + os.getpid()}"  # seconds; no other test's command has this one's
    (played,) = play(
        renderer, tmp_path, [FIX, run(f"sleep {asleep}; rm double.py")], task="hurried", episode_timeout_s=600
    )
    assert played.trajectory.status is TrajectoryStatus.TIMED_OUT
    assert (played.trajectory.reward, played.trajectory.num_turns) == (1.0, 2)
    assert processes_with(asleep) == []


def test_a_command_has_the_shorter_of_its_two_limits(renderer: ChatRenderer, tmp_path: Path) -> None:
    script = [f"{run('sleep 60')}\n{FIX}", SUBMIT]
    (by_setting,) = play(renderer, tmp_path, script, tool_timeout_s=0.2)
    (by_task,) = play(renderer, tmp_path, script, task="hasty")
    assert by_setting.answers[0].startswith("ended after 0.2 s\nwrote")
    assert by_task.answers[0].startswith("ended after 0.3 s\nwrote")
    assert "A command may take 0.2 s." in by_setting.text
    assert "A command may take 0.3 s." in by_task.text
    assert by_setting.trajectory.reward == 1.0


def test_outputs_are_shortened_and_what_floods_is_ended(renderer: ChatRenderer, tmp_path: Path) -> None:
    (played,) = play(
        renderer,
        tmp_path,
        [run("seq 100000"), run("printf '\\377'"), run("yes"), FIX + "\n" + SUBMIT],
        output_characters=200,
    )
    long, odd, flooded = played.answers
    assert long.startswith("exit code 0\n1\n2\n")
    assert "the middle is left out; 588895 bytes in all" in long
    assert odd == "exit code 0\n\\xff"
    assert flooded.startswith("ended by the limit on output")
    assert "more than 200 characters" in played.text
    assert played.trajectory.reward == 1.0


# --- infrastructure -------------------------------------------------------------------------------------------


def closes(times: int) -> Callable[[Recording], Awaitable[None]]:
    """Return what closes the newest sandbox, `times` times, while its agent sleeps."""

    async def close(backend: Recording) -> None:
        for number in range(times):
            while len(backend.opened) <= number or "started" not in await backend.opened[number].list():  # noqa: ASYNC110
                await trio.sleep(0.005)  # it is another process's doing
            await backend.opened[number].aclose()

    return close


@pytest.mark.parametrize("times", [1, 2])
def test_a_sandbox_that_is_lost_is_replaced_and_masked_when_that_happens_too_often(
    renderer: ChatRenderer, tmp_path: Path, times: int
) -> None:
    waiting = run("touch started; sleep 60")
    script = [*[waiting] * times, FIX, SUBMIT]
    (played,) = play(renderer, tmp_path, script, beside=closes(times), reward={"partial_weight": 0.0})
    assert played.extras["retries"] == 1
    if times == 1:
        assert (played.trajectory.status, played.trajectory.reward) == (TrajectoryStatus.COMPLETED, 1.0)
    else:
        assert (played.trajectory.status, played.trajectory.reward) == (TrajectoryStatus.FAILED_SANDBOX, None)
        assert "a command could not be run" in played.trajectory.detail


def test_a_judge_whose_sandbox_fails_is_asked_again_and_the_episode_is_kept(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    class Failing(Recording):
        async def open(self, *args: Any, **more: Any) -> Sandbox:
            if len(self.opened) == 1:
                self.opened.append(self.opened[0])
                raise SandboxError("no judge to be had")
            return await super().open(*args, **more)

    (played,) = play(renderer, tmp_path, [FIX, SUBMIT], recording=Failing, reward={"partial_weight": 0.0})
    assert (played.trajectory.status, played.trajectory.reward) == (TrajectoryStatus.COMPLETED, 1.0)
    assert "retries" not in played.extras


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("slow-checks", "its checks may take 5000 s, and grading_timeout_s = 900 must be more"),
        ("broken-setup", "the set-up of step '' failed: ok, exit code 3"),
        ("blocked", "'notes.txt/x' of step 'second' cannot be written"),
        ("unknown", "task 'unknown' cannot be built: no task 'unknown'"),
    ],
)
def test_a_task_that_cannot_be_asked_is_masked_with_the_reason(
    renderer: ChatRenderer, tmp_path: Path, task: str, says: str
) -> None:
    reward = {"partial_weight": 0.2 if task == "blocked" else 0.0}
    (played,) = play(renderer, tmp_path, [SUBMIT], task=task, reward=reward)
    assert played.trajectory.status is TrajectoryStatus.FAILED_ENVIRONMENT
    assert says in played.trajectory.detail


def test_no_more_places_are_held_than_may_be_and_none_waits_for_ever(renderer: ChatRenderer, tmp_path: Path) -> None:
    played = play(renderer, tmp_path, [FIX, SUBMIT], group_size=6, max_open=2, sandboxes={"max_open": 3})
    assert [one.trajectory.reward for one in played] == [1.0] * 6


# --- several steps --------------------------------------------------------------------------------------------


def test_the_steps_of_a_task_go_on_in_one_sandbox_and_their_mean_is_paid(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    script = [
        run("X=kept"),
        f"{FIX}\n{SUBMIT}\n{run('echo never')}",
        run("cat begun.txt double.py; echo $X"),
        HALF,
        SUBMIT,
    ]
    (both,) = play(renderer, tmp_path, script, task="steps")
    assert both.trajectory.reward == 1.0
    assert both.answers[1] == f"wrote {len(FIXED)} bytes to double.py\nNow write half.py."
    assert both.answers[2].endswith(f"begun\n{FIXED}\n"), "judging ended the shell, and left the files"
    assert both.extras["steps"] == 2
    (first,) = play(renderer, tmp_path, [FIX + "\n" + SUBMIT, SUBMIT], task="steps")
    assert (first.trajectory.reward, first.parts["solved"]) == (0.5, 0.0)
    (second,) = play(renderer, tmp_path, [SUBMIT, HALF, SUBMIT], task="last")
    assert (second.trajectory.reward, second.parts["solved"]) == (1.0, 1.0)


def test_a_step_that_came_to_too_little_is_the_last(renderer: ChatRenderer, tmp_path: Path) -> None:
    (gated,) = play(renderer, tmp_path, [SUBMIT, HALF, SUBMIT], task="gated")
    assert (gated.trajectory.reward, gated.trajectory.num_turns, gated.extras["steps"]) == (0.0, 1, 1)


def test_an_agent_that_leaves_the_next_step_no_room_has_only_the_steps_before(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    for blocking in ("cat /dev/zero > zeros; ls", "mkdir half_notes.txt"):
        (played,) = play(renderer, tmp_path, [FIX, run(blocking), SUBMIT], task="steps")
        assert (played.trajectory.status, played.trajectory.reward) == (TrajectoryStatus.COMPLETED, 0.5)
        assert played.extras["steps"] == 1


def test_a_step_whose_time_is_over_is_graded_and_the_next_one_asked(renderer: ChatRenderer, tmp_path: Path) -> None:
    (played,) = play(renderer, tmp_path, [FIX, HALF, SUBMIT], task="hurried-steps")
    assert (played.trajectory.reward, played.extras["steps"]) == (1.0, 2)


# --- what agents try ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["calls", "pytest", "script"])
def test_hidden_tests_and_solutions_are_nowhere_in_the_agents_sandbox(
    renderer: ChatRenderer, tmp_path: Path, task: str
) -> None:
    look = run(
        "ls -A / /tmp /logs /tests /solution 2>/dev/null; find / -xdev \\( -name 'test_double*' -o -name 'test.sh' \\) "
        "2>/dev/null | grep -v ^/usr; grep -rl 'x \\* 2$\\|test_secret' /task /tmp /dev/shm; "
        "env; tr '\\0' '\\n' < /proc/1/environ; cat /proc/*/cmdline | tr '\\0' '\\n' | grep secret; git log"
    )
    (played,) = play(renderer, tmp_path, [look, SUBMIT], task=task)
    (answer,) = played.answers
    listed = answer.partition("PWD=")[0]
    for name in ("/tests", "/solution", "test_double", "test.sh"):
        assert name not in listed
    assert "/task/notes.txt" in answer, "the search finds what is there"
    assert "/task/double.py" not in answer
    assert "test_secret" not in answer
    assert "GREETING=hello" in answer
    assert "not a git repository" in answer or "git: command not found" in answer
    assert played.trajectory.reward == 0.0


def test_what_is_tried_besides_the_task_is_counted_also_where_the_episode_fails(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    tried = [run("git log; git log -p"), run("cat /proc/1/environ; curl http://example.com"), run("git log")]
    script = [*tried, EngineError("gone")]
    (failed,) = play(renderer, tmp_path, script, max_retries=0)
    assert failed.trajectory.status is TrajectoryStatus.FAILED_ENGINE
    assert failed.extras["behaviour"] == {"git_history": 2, "credentials": 1, "network": 1}
    assert json.loads(json.dumps(failed.extras))


def test_what_runs_on_in_the_background_is_gone_before_anything_is_judged(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    racing = run(
        f"(while true; do printf {FIXED!r} > double.py; printf {UNFIXED!r} > double.py; done) >/dev/null 2>&1 &\n"
        "setsid sh -c 'sleep 987654322' >/dev/null 2>&1 & echo on"
    )
    undone = run("kill %1; printf 'def double(x):\\n    return 0\\n' > double.py; (sleep 2; cp /tmp/x double.py) &")
    alive: list[int] = []

    async def watch(backend: Recording) -> None:
        while len(backend.opened) < 2:  # noqa: ASYNC110 - the second one is the judge's
            await trio.sleep(0.001)
        alive.extend(processes_with("987654322"))

    (played,) = play(renderer, tmp_path, [racing, undone, SUBMIT], beside=watch, reward={"partial_weight": 0.0})
    assert played.answers[0] == "exit code 0\non\n"
    assert played.trajectory.reward == 0.0
    assert alive == []


@pytest.mark.parametrize("kind", ["calls", "pytest"])
def test_attacks_on_verifiers_are_worth_nothing(renderer: ChatRenderer, tmp_path: Path, kind: str) -> None:
    attacks: dict[str, str] = {}
    if kind == "calls":
        attacks = {
            name: write({"retries.py": test_judge.UNFIXED + attack}) for name, attack in test_judge.ATTACKS.items()
        }
    else:
        attacks = {
            name: write({"retries.py": test_verifier.UNFIXED + attack, **beside})
            for name, (attack, beside) in test_verifier.ATTACKS.items()
        }
    attacks["fixed"] = write({"retries.py": test_judge.FIXED})
    names = list(attacks)
    played = play(
        renderer,
        tmp_path,
        lambda trajectory_id, turn: [attacks[names[int(trajectory_id.partition("-")[2])]], SUBMIT][turn],
        task=f"retries-{kind}",
        group_size=len(names),
        reward={"partial_weight": 0.5},
    )
    found = {name: one.trajectory for name, one in zip(names, played, strict=True)}
    assert found.pop("fixed").reward == 1.0
    assert {name: t.reward for name, t in found.items()} == dict.fromkeys(found, 0.0)
    tampered = {name for name, t in found.items() if t.reward_parts["tampered"]}
    assert bool(tampered) == (kind == "pytest"), "the judge outside is not reached, and sees nothing of it"


def write(files: Mapping[str, str]) -> str:
    """Return a reply that writes files."""
    calls = [ToolCall(name="write", arguments={"path": path, "content": text}) for path, text in files.items()]
    return "\n".join(write_call(call, CallFormat.FENCED) for call in calls)


def test_files_that_cannot_be_taken_over_are_the_agents_doing(renderer: ChatRenderer, tmp_path: Path) -> None:
    deep = run("for i in $(seq 200); do mkdir d; cd d; done 2>/dev/null; cd /task; ls")
    for task, command in (("calls", run("ln -sf notes.txt double.py")), ("script", deep)):
        (played,) = play(renderer, tmp_path, [command, SUBMIT], task=task, reward={"partial_weight": 0.0})
        assert (played.trajectory.status, played.trajectory.reward) == (TrajectoryStatus.COMPLETED, 0.0)


# --- what is recorded -----------------------------------------------------------------------------------------


def test_what_was_tried_and_how_it_came_out_is_in_the_record(renderer: ChatRenderer, tmp_path: Path) -> None:
    script = [run("git log; curl https://example.com"), run("curl -s https://example.com"), WRONG + "\n" + SUBMIT]
    (tried,) = play(renderer, tmp_path, script)
    assert tried.extras["behaviour"] == {"network": 2, "git_history": 1}
    (told,) = tried.extras["evidence"]
    assert (told["solved"], told["failed"], told["changed"]) == (False, ["call 2", "call 3"], ["double.py"])
    (honest,) = play(renderer, tmp_path, [FIX + "\n" + SUBMIT, HALF + "\n" + SUBMIT], task="steps")
    assert honest.extras["behaviour"] == {}
    assert [step["changed"] for step in honest.extras["evidence"]] == [["double.py"], ["half.py"]]


def test_tasks_that_are_left_out_are_never_asked(renderer: ChatRenderer, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("calls\npytest\nsteps\n")

    async def use(backend: SandboxBackend) -> tuple[set[str], set[str]]:
        environment = environment_of(backend, renderer, leave_out=str(path))
        asked = {environment.get_item().task_id for _ in range(30)}
        held_out = {task.task_id for task in environment.held_out()}
        await environment.aclose()
        return asked, held_out

    asked, held_out = with_backend(use, tmp_path)
    assert {"script", "last"} <= asked
    assert not asked & {"calls", "pytest", "steps"}
    assert held_out == set()
