"""The report: what it shows of whole, running, crashed and broken runs, and what a browser makes of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from browser import find_browser, look, rows_with
from tree import ROOT

from asyncrl import cli, run_directory
from asyncrl.configs import load_config
from asyncrl.errors import ConfigError
from asyncrl.report import read_run, render
from asyncrl.report.intervals import means, rates, wilson
from asyncrl.run_directory import RunDirectory

pytestmark = pytest.mark.slow  # sixteen pictures take a second or two

HOSTILE = "</script></style><img src=x onerror=alert(1)><b>bold</b>{{ 7 * 7 }}"
_CONFIG = '[run]\nname = "demo"\nseed = {seed}\n\n[model]\npath = "models/tiny"\n'
_FIGURES = ("solved", "reward", "lengths", "truncated", "entropy", "ratio", "ess", "mismatch", "staleness0", "clipped")
_FIGURES += ("spikes0", "learner", "engines", "seconds", "sync", "throughput")


def step_line(step: int, seed: int = 0) -> dict[str, Any]:
    """Return a line of metrics.jsonl as a run writes it."""
    wave = math.sin(step / 7 + seed)
    return {
        "phase": "rollouts",
        "step": step,
        "version": step,
        "seconds": 9.0 * step,
        "solve_rate": 0.4 + 0.2 * wave,
        "reward_mean": 0.5 + 0.1 * wave,
        "reward_std": 0.3,
        "num_trajectories": 32.0,
        "completion_tokens_mean": 80.0 + wave,
        "length_p95": 96.0,
        "truncated_share": 0.3,
        "repetition_mean": 0.1,
        "entropy": 1.2,
        "importance_ratio_max": 2.0 + wave,
        **{f"importance_ratio_p{share}": 1.0 + share / 400 for share in (50, 95, 99)},
        "grad_norm": 0.7 + 0.1 * wave,
        "ess_token": 0.98,
        "seq_ess_frac": 0.7,
        "kl_k3": 0.002,
        "mismatch_k3": 0.001,
        "staleness_tokens_0": 100.0,
        "staleness_tokens_1": 900.0,
        "staleness_max": 1,
        "clip_fraction_low": 0.01,
        "clip_fraction_high": 0.02,
        "step_seconds": 6.0,
        "publish_seconds": 0.3,
        "learner_idle_groups_seconds": 2.0,
        "engine_idle_no_slot_seconds": 1.5,
        "sync_seconds": 0.9,
        "sync_stall_seconds": 0.03,
        "generated_tokens_per_second": 130.0,
        "tokens_per_second": 500.0,
    }


def _token(**changed: Any) -> dict[str, Any]:
    return {
        "by": {"ratio": 1, "influence": 1},
        "ratio": 2.5,
        "influence": 0.1,
        "influence_share": 0.02,
        "policy_logprob": -1.0,
        "behaviour_logprob": -1.9,
        "advantage": -0.5,
        "version": 1,
        "staleness": 1,
        "before": "def f():\n  ",
        "text": "return",
        "after": " x",
        "position": 40,
        "position_in_turn": 3,
        "turn": 0,
        "finish_reason": "stop",
        "engine": "engine 0",
        "trajectory_id": "4-2",
        "task_id": "demo/4",
        "environment": "demo",
        "cause": "old_version",
    } | changed


def _shown(step: int, **changed: Any) -> dict[str, Any]:
    sampled = [["re", 1.3, 0.5, step - 1], ["turn\n", None, -2.0, step - 2], [" 1", 0.5, 0.0, step - 1]]
    read = {"turn": None, "text": "user\nfix it\n"}
    return {
        "step": step,
        "version": step,
        "why": "in turn" if step % 2 else "largest ratio",
        "trajectory_id": f"{step}-0",
        "task_id": "demo/4",
        "status": "completed",
        "reward": 1.0,
        "segments": [[read, {"turn": 0, "tokens": sampled}], [read, {"turn": 1, "tokens": sampled}]],
        "left_out": 7,
    } | changed


def _write(path: Path, lines: list[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(path: Path, *, steps: int = 30, seed: int = 0) -> RunDirectory:
    """Write a finished run's directory, as far as a report reads it."""
    directory = RunDirectory(path)
    directory.trajectories.mkdir(parents=True)
    directory.config.write_text(_CONFIG.format(seed=seed))
    numbers = range(1, steps + 1)
    _write(directory.metrics, [step_line(step, seed) for step in numbers])
    _write(directory.spikes, [{"step": n, "version": n, "tokens": [_token(ratio=1.5 + n / 50)]} for n in numbers])
    _write(directory.tokens, [_shown(step) for step in numbers])
    measured = [{"version": v, "solve_rate": 0.1 + 0.3 * v / steps, "num_samples": 96} for v in (0, steps)]
    counters = {"evaluations": measured, "tokens_generated": 94446, "tokens_trained": 75508}
    counters |= {"trajectories": {"completed": 20, "failed_sandbox": 2}, "groups_dropped": {"all_failed": 1}}
    directory.status.write_text(json.dumps({"phase": "finished", "moment": "finished", "counters": counters}))
    directory.summary.write_text(json.dumps({"steps": steps}))
    directory.machine.write_text(json.dumps({"system": "Linux", "cores": 2, "memory_bytes": 2**34, "packages": {}}))
    return directory


def page_of(*directories: RunDirectory) -> str:
    """Return the report about runs."""
    return render([read_run(directory.path) for directory in directories])


def figures_of(page: str) -> list[str]:
    """Return the names of a page's pictures."""
    return re.findall(r'<figure id="figure-([^"]+)">', page)


# --- what is shown ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(write_run(tmp_path_factory.mktemp("runs") / "demo-1"))


def test_a_finished_run_has_every_picture_its_spikes_trajectories_and_configuration(page: str) -> None:
    assert tuple(figures_of(page)) == _FIGURES
    assert page.count("<svg") == len(_FIGURES)
    for words in (
        "finished, 30 steps",
        "0.100 at version 0, 0.400 at version 30",
        "2 failed_sandbox",
        "ratio 2.1</span> at step 30",
        "<mark>return</mark>",
        "turn 2: 3 tokens under versions 28 to 29",
        "7 more sampled tokens were not written down",
        "the context was rewritten here",
        "path = &#34;models/tiny&#34;",
        "16.0 GiB",
    ):
        assert words in page, words
    assert 'class="r5 a5" title="ratio 1.3, advantage 0.5, 0 steps old">re</span>' in page
    assert 'class="rx a0" title="ratio not finite, advantage -2, 1 step old">turn\n</span>' in page
    assert 'class="r0 a3"' in page
    assert 'problems"' not in page


def test_the_page_needs_nothing_besides_itself(page: str) -> None:
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page) == []
    assert "url(http" not in page
    assert "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "ids of two pictures would clash"
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_what_a_model_a_task_or_a_user_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "<img src=x>$x_1$")
    directory.config.write_text(f"# {HOSTILE}\n")
    _write(directory.spikes, [{"step": 1, "tokens": [_token(text=HOSTILE, task_id=HOSTILE, before="\u202e\x1b[2J")]}])
    run = {"turn": 0, "tokens": [[HOSTILE, 1.0, 1.0, 0]]}
    shown = _shown(1, task_id=HOSTILE, segments=[[{"turn": None, "text": HOSTILE}, run]])
    _write(directory.tokens, [shown])
    page = page_of(directory)
    assert "<img" not in page
    assert "<b>" not in page
    assert "<script" not in page
    assert page.count("</style>") == 1
    assert page.count("&lt;/script&gt;") >= 5
    assert "{{ 7 * 7 }}" in page
    assert "\\u202e\\x1b[2J" in page
    assert "\u202e" not in page


def test_several_runs_share_their_pictures_and_show_what_they_differ_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name / "demo-1", seed=seed) for seed, name in enumerate(("a", "b"))]
    out = tmp_path / "two.html"
    assert cli.main(["report", *(str(run.path) for run in runs), "--out", str(out)]) == 0
    assert f"report in {out}" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    assert len(figures_of(page)) == len(_FIGURES) + 2, "staleness and spikes are by run"
    for seed, run in enumerate(runs):
        assert page.count(f">{run.path}<") >= 3, "two runs of one name are told apart"
        assert f"<td>{seed}</td>" in page
    assert "<code>run.seed</code>" in page
    assert "<code>model.path</code>" not in page


# --- runs that are not whole ----------------------------------------------------------------------------------------


def test_a_run_that_has_just_begun_says_that_there_is_nothing_yet(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "new")
    directory.trajectories.mkdir(parents=True)
    directory.config.write_text(_CONFIG.format(seed=0))
    with directory.locked():
        page = page_of(directory)
    assert "running, 0 steps so far" in page
    assert figures_of(page) == []
    for words in ("nothing to draw", "No tokens were written down", "No trajectories were written down"):
        assert words in page
    assert "What machine it ran on was not written down" in page


def test_one_step_is_drawn(tmp_path: Path) -> None:
    assert set(figures_of(page_of(write_run(tmp_path / "one", steps=1)))) == set(_FIGURES)


def test_a_run_that_is_being_written_is_no_broken_one(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with directory.metrics.open("a") as file:
        file.write('{"step": 31, "vers')
    with directory.locked():
        data = read_run(directory.path)
    assert (data.state, data.problems) == ("running, 30 steps so far", [])


def test_a_crashed_run_is_shown_as_one_and_its_torn_line_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    directory.summary.unlink()
    with directory.metrics.open("a") as file:
        file.write('{"step": 31, "vers')
    data = read_run(directory.path)
    assert data.state == "ended without a summary after 30 steps: it crashed or was killed"
    assert data.problems == ["metrics.jsonl: the last line was torn off in the middle, and is left out"]
    assert data.numbers == [*range(1, 31)]


def test_lines_and_files_that_are_broken_are_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    lines = directory.metrics.read_text().splitlines()
    lines[3:5] = ["\0\0\0", '["no", "object"]']
    directory.metrics.write_text("\n".join(lines) + "\n")
    directory.status.write_text("{")
    page = page_of(directory)
    assert "metrics.jsonl: 2 of 30 lines could not be read, and are left out" in page
    assert "status.json could not be read, and is left out" in page
    assert set(figures_of(page)) == set(_FIGURES)


def test_numbers_that_are_not_finite_are_gaps_and_are_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    lines = [step_line(step) for step in range(1, 31)]
    lines[6] |= {"kl_k3": math.nan, "reward_mean": math.inf, "grad_norm_nonfinite": 1.0}
    del lines[6]["grad_norm"]
    for line in lines:
        line["entropy"] = math.nan
    _write(directory.metrics, lines)
    _write(directory.spikes, [{"step": 7, "tokens": [_token(ratio=None, influence_share=None, cause="not_finite")]}])
    page = page_of(directory)
    for words in (
        "grad_norm was not a finite number in 1 step (7)",
        "kl_k3 was not a finite number in 1 step (7)",
        "entropy was not a finite number in 30 steps (1, 2, 3, 4, 5, ...)",
        "ratio not finite</span> at step 7, not a finite share",
    ):
        assert words in page, words
    assert "entropy" not in figures_of(page)
    assert "mismatch" in figures_of(page)


def test_without_tokens_trajectories_are_shown_by_their_text(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    directory.tokens.unlink()
    for version in range(12):
        line = {"trajectory_id": f"{version}-0", "task_id": "demo/1", "reward": None, "status": "failed_sandbox"}
        _write(directory.trajectories / f"version-{version}.jsonl", [{**line, "text": [f"hello {version}\n"]}] * 3)
    page = page_of(directory)
    assert page.count('<details class="trajectory"') == 6
    for words in ("hello 0\n", "hello 11\n", "no reward", "failed_sandbox"):
        assert words in page


def test_what_is_no_run_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        read_run(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 2
    directory = write_run(tmp_path / "run", steps=1)
    assert cli.main(["report", str(directory.path), "--out", str(tmp_path / "none" / "r.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert cli.main(["report", *[str(directory.path)] * 9]) == 2
    assert "at most 8 runs" in capsys.readouterr().err


def test_a_run_writes_down_what_it_runs_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with run_directory.opened(directory, load_config(ROOT / "configs" / "demo.toml")):
        pass
    machine = read_run(directory.path).machine
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    assert {"torch", "transformers", "trio"} <= set(machine["packages"])


# --- intervals --------------------------------------------------------------------------------------------------------


def test_intervals_are_of_all_episodes_of_a_window() -> None:
    """Checked against Wilson's formula by its own definition: the ends solve (p - end)^2 = z^2 end (1 - end) / n."""
    low, high = wilson(9, 40)
    for end in (low, high):
        assert (9 / 40 - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / 40)
    value, below, above = rates([0.5, math.nan, 0.25], [8.0, 8.0, 8.0], 2)
    assert value == [0.5, 0.5, 0.25]
    assert (below[2], above[2]) == wilson(2, 8)
    assert math.isnan(rates([math.nan], [8.0], 5)[0][0])
    value, below, above = means([1.0, 0.0], [0.0, 0.0], [2.0, 2.0], 2)
    assert value[1] == 0.5
    assert above[1] - below[1] == pytest.approx(2 * 1.959963984540054 * 0.5 / 2)


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


def test_a_browser_shows_the_pictures_and_has_nothing_to_complain_of(browser: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>nothing()</script>")
    assert "nothing is not defined" in look(browser, broken.as_uri(), tmp_path / "broken.png", height=200)
    page = tmp_path / "report.html"
    page.write_text(page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=2)), encoding="utf-8")
    for dark in (False, True):
        picture = tmp_path / f"{dark}.png"
        assert look(browser, page.as_uri(), picture, height=6000, dark=dark) == ""
        assert rows_with(picture, "#3b82f6") > 150, "the first run's lines"
        assert rows_with(picture, "#f59e0b") > 150, "the second run's"
        assert (rows_with(picture, "#fbfbfa") > 5000) is not dark
        assert (rows_with(picture, "#131518") > 5000) is dark


def test_the_report_of_a_long_run_is_small(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "long", steps=1000))
    assert len(page.encode()) < 3e6
