"""What can be seen of a run while it goes: the status, lines in a log, and a page."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from browser import find_browser, look, rows_with
from loop_simulation import Simulation
from prometheus_client import CollectorRegistry, make_asgi_app
from rich.console import Console

from asyncrl import cli
from asyncrl.live import LivePage
from asyncrl.progress import Progress
from asyncrl.protocols import StepResult
from asyncrl.recording import RunRecorder, read_metrics
from asyncrl.run import Limits
from asyncrl.run_directory import RunDirectory
from asyncrl.serving import listen, serve
from asyncrl.status import EvaluationResult

_HOSTILE = "</pre><script>alert(1)</script>"


def _step(step: int, **changed: Any) -> dict[str, Any]:
    line = {"step": step, "version": step, "seconds": 60.0 * step, "solve_rate": 0.1 * step, "reward_mean": 0.5}
    return line | {"importance_ratio_max": 1.0 + step, "tokens_generated": 100.0 * step, **changed}


# --- status ----------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.write_text("[run]\nsteps = 100\nmax_minutes = 90.0\n")
    return directory


def _write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_status_is_json_also_where_a_number_is_none(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(directory.metrics, _step(1, grad_norm=math.nan, entropy=math.inf))
    assert cli.main(["status", str(directory.path), "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    last = json.loads(capsys.readouterr().out, parse_constant=refuse)["last_step"]
    assert (last["grad_norm"], last["entropy"], last["solve_rate"]) == (None, None, 0.1)


def test_status_says_how_long_a_run_goes_on(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    def eta() -> float | None:
        assert cli.main(["status", str(directory.path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["max_steps"] == 100
        return found["eta_seconds"]  # type: ignore[no-any-return]

    with directory.locked():
        assert eta() is None, "no pace yet"
        _write(directory.metrics, *(_step(step, seconds=20.0 * step) for step in range(1, 31)))
        assert eta() == pytest.approx(70 * 20.0)
        _write(directory.metrics, *(_step(step, seconds=120.0 * step) for step in range(1, 31)))
        assert eta() == pytest.approx(90 * 60 - 3600), "max_minutes comes first"
        assert cli.main(["status", str(directory.path)]) == 0
        shown = capsys.readouterr().out
    assert "step 30 of 100: solved 3.00, reward 0.50, largest ratio 31.00" in shown
    assert "about 30 minutes more" in shown
    assert eta() is None, "it does not run any more"


def test_status_names_the_cause_of_the_largest_ratio_and_what_was_measured(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(directory.metrics, _step(1))
    token = {"cause": "stale_prefix", "task_id": "demo/1", "trajectory_id": "4-2"}
    _write(directory.spikes, {"step": 1, "version": 1, "tokens": [token]})
    result = {"version": 0, "solve_rate": 0.25}
    directory.status.write_text(json.dumps({"time": 0.0, "counters": {"evaluations": [result]}}))
    assert cli.main(["status", str(directory.path)]) == 0
    shown = capsys.readouterr().out
    assert "its largest ratio: a reply that was begun under older weights (demo/1, 4-2)" in shown
    assert "held-out tasks solved: 0.250 at version 0" in shown


def test_lines_that_a_power_failure_left_are_passed_over(directory: RunDirectory) -> None:
    directory.metrics.write_bytes(
        json.dumps(_step(1)).encode() + b"\n\0\0\0\0\n" + json.dumps(_step(2)).encode() + b"\n{"
    )
    assert [line["step"] for line in read_metrics(directory)] == [1, 2]
    progress = Progress(Console(file=io.StringIO()), title="run", max_steps=9)
    recorder = RunRecorder(directory, progress, lambda _: "", version=1)
    assert [line["step"] for line in recorder.last_steps()] == [1]


# --- lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", ["file", "dumb"])
def test_a_log_file_and_a_dumb_terminal_get_plain_lines_at_once(terminal: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal == "dumb", _environ={"TERM": "dumb"}, width=80)
    progress = Progress(console, title="run", max_steps=9)

    async def main() -> None:
        async with progress.shown():
            progress.say("starting")
            progress.step(_step(1))
            said = out.getvalue()
            assert said.splitlines()[0] == "starting"
            assert said.splitlines()[1].startswith("step 1  solved 0.10  reward 0.50")
            assert len(said.splitlines()) == 2, "a line is not broken"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert "\x1b" not in out.getvalue()


def _spike(step: int) -> dict[str, Any]:
    return {
        "by": {"ratio": 1},
        "ratio": 1.5 * step,
        "influence": 0.1,
        "influence_share": 0.01,
        "policy_logprob": -1.0,
        "behaviour_logprob": -1.5,
        "advantage": 1.0,
        "version": step,
        "staleness": 1,
        "begun_under": step,
        "token_id": 65,
        "before": [72],
        "after": [33],
        "position": 3,
        "position_in_turn": 1,
        "segment": 0,
        "turn": 0,
        "finish_reason": "stop",
        "engine": "engine 0",
        "trajectory_id": f"{step}-0",
        "task_id": _HOSTILE,
        "environment": "demo",
        "status": "completed",
        "reward": 1.0,
    }


# --- page ----------------------------------------------------------------------------------------------------


def _with_page(tmp_path: Path, look_at: Callable[[RunRecorder, str], Any]) -> None:
    """Serve the page of a run that has taken three steps, and call `look_at` in a thread with its address."""
    directory = RunDirectory(tmp_path / "run")
    directory.trajectories.mkdir(parents=True)
    progress = Progress(Console(file=io.StringIO()), title="run", max_steps=3)
    recorder = RunRecorder(directory, progress, lambda _: "", version=0)
    simulation = Simulation(directory.checkpoints, limits=Limits(steps=3), recorder=recorder)
    simulation.status.waiting_for = _HOSTILE

    async def main() -> None:
        recorder.watch(simulation.run)
        for step in (1, 2, 3):
            spikes = [_spike(step)]
            recorder.step(_step(step, grad_norm=math.nan), StepResult(version=step, metrics={}, spikes=spikes))
        simulation.status.trajectories["completed"] = 96
        simulation.status.evaluations.append(
            EvaluationResult(
                version=0,
                solve_rate=0.25,
                mean_reward=0.3,
                num_tasks=2,
                num_samples=8,
                num_failed=0,
                by_task={},
                seconds=1.0,
            )
        )
        metrics = make_asgi_app(CollectorRegistry())
        page = LivePage(
            metrics, title="<b>run</b>", status=recorder.status, steps=recorder.last_steps, spikes=recorder.last_spikes
        )
        listener = listen("127.0.0.1", 0, setting="port")
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, page, listener)
            await trio.to_thread.run_sync(partial(look_at, recorder, address))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_the_page_shows_the_run_and_nothing_that_it_wrote_is_markup(tmp_path: Path) -> None:
    def ask(recorder: RunRecorder, address: str) -> None:
        answer = httpx.get(f"{address}/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        page = answer.text
        for words in ("<td>4</td>", "0.250 solved, 8 episodes", "completed", "not finite", "&lt;b&gt;run&lt;/b&gt;"):
            assert words in page, words
        assert page.index("<td>3</td>") < page.index("<td>1</td>"), "the newest step is on top"
        assert page.index("ratio 4.5 at step 3") < page.index("ratio 3 at step 2")
        assert "the weights have moved since it was sampled" in page
        assert page.count("<polyline") == 3, "solved, reward and ratio: a chart of no number is left out"
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert httpx.get(f"{address}/metrics").status_code == 200
        found = json.loads(httpx.get(f"{address}/status.json").text)
        assert [step["step"] for step in found["last_steps"]] == [1, 2, 3]
        assert found["last_steps"][0]["grad_norm"] is None
        assert found["phase"] == "starting"
        assert httpx.get(f"{address}/nothing").status_code == 404
        assert httpx.post(f"{address}/", content=b"x").status_code == 405

    _with_page(tmp_path, ask)


@pytest.mark.slow
def test_a_browser_shows_the_page_without_a_complaint(tmp_path: Path) -> None:
    browser = find_browser()

    def visit(recorder: RunRecorder, address: str) -> None:
        picture = tmp_path / "page.png"
        assert look(browser, f"{address}/", picture, height=1400) == ""
        assert rows_with(picture, "#3b82f6") > 20

    _with_page(tmp_path, visit)
