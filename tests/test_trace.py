"""When things happened: what a run writes down of it, how much, and the traces that are made of it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from loop_simulation import Simulation
from rich.console import Console

from asyncrl import cli
from asyncrl.metering import MeteredBackend
from asyncrl.progress import Progress
from asyncrl.protocols import ExecResult, Outcome, StepResult, SyncReport
from asyncrl.recording import RunRecorder
from asyncrl.run import Limits
from asyncrl.run_directory import RunDirectory
from asyncrl.testing import Rates
from asyncrl.timeline import EventKind, Timeline, older, read_events
from asyncrl.trace import Slice, chrome, otlp, slices
from asyncrl.types import Completion, FinishReason, Logprobs, TokenIds, TokenSpan

_RATES = Rates(token_s=0.01, mean_tokens=20.0, environment_s=0.05, step_s=1.0, sync_s=0.3)
_DATE = 1.7e9


def simulated(path: Path, *, max_bytes: int = 1 << 24, steps: int = 4) -> RunDirectory:
    """Return the directory of a simulated run that wrote its events down."""
    directory = RunDirectory(path)
    directory.trajectories.mkdir(parents=True)
    directory.config.touch()

    async def main() -> None:
        with Timeline(directory.events, max_bytes=max_bytes, wall_clock=lambda: _DATE) as timeline:
            progress = Progress(Console(file=io.StringIO()), title="run", max_steps=steps)
            recorder = RunRecorder(directory, progress, lambda _: "", version=0, timeline=timeline)
            limits = Limits(steps=steps)
            simulation = Simulation(
                directory.checkpoints, rates=_RATES, limits=limits, recorder=recorder, watch=timeline.watch
            )
            recorder.watch(simulation.run)
            await simulation.run.train()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return directory


def of(found: list[Slice], process: str) -> list[Slice]:
    """Return the slices of one kind."""
    return [one for one in found if one.process == process]


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_a_run_writes_down_phases_steps_requests_groups_and_syncs(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "run")
    found = slices(read_events(directory.events))
    assert all(_DATE <= one.began <= one.ended <= _DATE + 100 for one in found)
    learner = of(found, "learner")
    steps = [one for one in learner if one.name.startswith("step ")]
    assert [one.name for one in steps] == [f"step {n}" for n in (1, 2, 3, 4)]
    assert [one.seconds for one in steps] == pytest.approx([_RATES.step_s] * 4)
    assert [one.facts["version"] for one in steps] == [1, 2, 3, 4]
    assert {"waiting for groups", "publishing", "saving"} <= {one.name for one in learner}
    edges = [(one.began, one.ended) for one in learner]
    assert all(left[1] == pytest.approx(right[0]) for left, right in pairwise(edges)), "no gaps"
    syncs = of(found, "weight syncs")
    versions = [one.facts["version"] for one in syncs]
    assert versions == sorted(set(versions))
    assert versions[-1] == 4
    assert [one.inside[0].name for one in syncs] == ["update"] * len(syncs)
    assert all(one.inside[0].seconds == pytest.approx(_RATES.sync_s, abs=1e-5) for one in syncs)
    groups = of(found, "groups")
    assert len(groups) >= 16
    episodes = of(found, "episodes")
    finished = [one for one in episodes if one.facts]
    assert len(finished) == 4 * len(groups)
    for one in finished:
        (turn,) = one.inside
        assert (turn.name, turn.facts["engine"], one.facts["status"]) == ("turn 1", "fake", "completed")
        assert turn.seconds == pytest.approx(0.01 * turn.facts["tokens"], abs=1e-5)
        group = next(group for group in groups if group.name == f"group {one.name.split('-')[0]}")
        assert group.began <= turn.began <= turn.ended <= group.ended + 1e-5


def test_lanes_are_as_many_as_were_under_way_at_a_time(tmp_path: Path) -> None:
    for process in ("groups", "episodes"):
        found = of(slices(read_events(simulated(tmp_path / process).events)), process)
        lanes: dict[str, list[Slice]] = {}
        for one in found:
            lanes.setdefault(one.lane, []).append(one)
        for lane in lanes.values():
            assert all(a.ended <= b.began for a, b in pairwise(lane))
        under_way = max(sum(other.began <= one.began < other.ended for other in found) for one in found)
        assert len(lanes) == under_way


def test_the_newest_events_are_kept_within_the_limit(tmp_path: Path) -> None:
    def write(path: Path, *, max_bytes: int) -> list[str]:
        async def main() -> None:
            with Timeline(path, max_bytes=max_bytes, wall_clock=lambda: _DATE) as timeline:
                for number in range(20_000):
                    timeline.note(EventKind.PHASE, str(number), float(number), 1.0)

        trio.run(main, clock=trio.testing.MockClock())
        return [event[1] for event in read_events(path)]

    path = tmp_path / "events.jsonl"
    kept = write(path, max_bytes=300_000)
    assert kept == [str(number) for number in range(20_000)][-len(kept) :]
    assert 0 < len(kept) < 20_000
    assert path.stat().st_size + older(path).stat().st_size <= 300_000
    again = write(path, max_bytes=300_000)
    assert again[-1] == "19999"
    assert path.stat().st_size + older(path).stat().st_size <= 300_000, "the next start knows how full it is"
    assert write(tmp_path / "none", max_bytes=0) == []
    assert not (tmp_path / "none").exists()


def test_a_pull_that_two_calls_waited_for_is_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def reports(*versions: int) -> list[SyncReport]:
        return [
            SyncReport(engine=f"engine {n}", version=v, verified=True, num_bytes=1, seconds={}, stall_seconds=0.0)
            for n, v in enumerate(versions)
        ]

    async def main() -> None:
        with Timeline(path, max_bytes=1 << 20) as timeline:
            timeline.sync(reports(1, 2), trio.current_time())
            timeline.sync(reports(2, 2), trio.current_time())

    trio.run(main, clock=trio.testing.MockClock())
    assert [(e[1], e[4]["version"]) for e in read_events(path)[1:]] == [
        ("engine 0", 1),
        ("engine 1", 2),
        ("engine 0", 2),
    ]


def test_nothing_is_watched_where_nothing_is_written(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "run", max_bytes=0)
    assert not directory.events.exists()
    simulation = Simulation(tmp_path / "checkpoints")
    parts = simulation.run._parts
    assert Timeline(tmp_path / "events.jsonl", max_bytes=0).watch(parts) is parts


def test_a_killed_run_loses_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    async def main() -> None:
        timeline = Timeline(path, max_bytes=1 << 20, wall_clock=lambda: _DATE).__enter__()  # and is never left
        for _ in range(30):
            await trio.sleep(0.1)
            timeline.note(EventKind.PHASE, "x", trio.current_time() - 0.1, 0.1)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    with path.open("ab") as file:
        file.write(b'["phase","torn')
    events = read_events(path)
    assert events[-1][2] + events[-1][3] >= 1.9


def test_commands_in_sandboxes_are_noted_with_how_they_ended() -> None:
    noted: list[tuple[str, str, float, str]] = []

    async def main() -> None:
        backend = MeteredBackend(_Backend(), lambda *what: noted.append(what))  # type: ignore[arg-type]
        box = await backend.open({}, limits=None)  # type: ignore[arg-type]
        await box.exec(["true"])
        await box.shell("true")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert [(box, what, outcome) for box, what, _, outcome in noted] == [
        ("box", "start", "ok"),
        ("box", "exec", "wall"),
        ("box", "shell", "wall"),
    ]
    starts = [began for _, _, began, _ in noted]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([2.0, 3.0])


class _Backend:
    wall, python = "none", ()

    async def open(self, files: Any, **how: Any) -> _Box:
        await trio.sleep(2.0)
        return _Box()


class _Box:
    wall, sandbox_id = "none", "box"

    async def exec(self, argv: Any, **how: Any) -> ExecResult:
        await trio.sleep(3.0)
        return ExecResult(outcome=Outcome.WALL, exit_code=None, stdout=b"", stderr=b"", seconds=3.0)

    shell = exec


# --- what is made of it -----------------------------------------------------------------------------------------------


def _event(kind: EventKind, track: str, began: float, seconds: float, **facts: Any) -> list[Any]:
    return [kind.value, track, began, seconds, facts]


def _some_events() -> list[list[Any]]:
    step = {"step": 3, "version": 3, "stepped": True, "grad_norm": 0.5}
    step |= {"seconds_packing": 0.5, "seconds_forward_backward": 4.0, "seconds_optimizer": 1.0}
    return [
        _event(EventKind.BEGIN, "", 100.0, 0.0, time=1000.0),
        _event(EventKind.SANDBOX, "box", 101.0, 1.0, what="start", outcome="ok"),
        _event(EventKind.REQUEST, "7-0", 100.0, 2.0, engine="engine 0", tokens=3, versions=[2], finish="stop"),
        _event(EventKind.SANDBOX, "box", 102.0, 3.0, what="exec", outcome="wall"),
        _event(EventKind.REQUEST, "7-0", 106.0, 1.0, engine="engine 0", tokens=3, versions=[2], finish="stop"),
        _event(
            EventKind.GROUP, "7", 99.0, 9.0, task="t", environment="e", episodes={"7-0": ["completed", 1.0, 7.5, 2]}
        ),
        _event(EventKind.PHASE, "stepping", 110.0, 6.0),
        _event(EventKind.STEP, "", 117.0, 0.0, **step),
        _event(EventKind.BEGIN, "", 5.0, 0.0, time=2000.0),
        _event(EventKind.PHASE, "waiting for groups", 6.0, 1.0, waiting_for="group 8"),
    ]


def test_times_are_dates_also_after_a_restart() -> None:
    found = slices(_some_events())
    assert {one.name: (one.began, one.ended) for one in of(found, "learner")} == {
        "step 3": (1010.0, 1016.0),
        "waiting for groups": (2001.0, 2002.0),
    }
    (step,) = (one for one in found if one.name == "step 3")
    assert [(one.name, one.began, one.ended) for one in step.inside] == [
        ("packing", 1010.5, 1011.0),
        ("forward and backward", 1011.0, 1015.0),
        ("optimizer", 1015.0, 1016.0),
    ]
    (episode,) = of(found, "episodes")
    assert (episode.name, episode.began, episode.ended) == ("7-0", 1000.0, 1007.5)
    assert [turn.name for turn in episode.inside] == ["turn 1", "turn 2"]
    (box,) = of(found, "sandboxes")
    assert (box.name, box.began, box.ended) == ("sandbox box", 1001.0, 1005.0)
    assert [(call.name, call.facts["outcome"]) for call in box.inside] == [("start", "ok"), ("exec", "wall")]


def test_a_pulls_phases_lie_in_it_and_their_parts_in_them() -> None:
    phases = {"start": 1.0, "update": 2.0, "update.read": 0.5, "update.load": 1.0}
    facts = {"version": 4, "bytes": 1, "encoding": "full", "verified": True, "stall_seconds": 0.1, "phases": phases}
    (pull,) = slices([_event(EventKind.SYNC, "engine 0", 100.0, 5.0, **facts)])
    assert [(one.name, one.began, one.ended) for one in pull.inside] == [
        ("start", 102.0, 103.0),
        ("update", 103.0, 105.0),
    ]
    assert [(one.name, one.began, one.ended) for one in pull.inside[1].inside] == [
        ("update.read", 103.0, 103.5),
        ("update.load", 103.5, 104.5),
    ]


def test_events_whose_beginning_was_dropped_are_dated_by_the_next_one_kept() -> None:
    events = [_event(EventKind.PHASE, "stepping", 4.0, 1.0), _event(EventKind.BEGIN, "", 5.0, 0.0, time=2000.0)]
    assert [one.began for one in slices(events)] == [1999.0]
    assert [one.began for one in slices(events[:1])] == [4.0]


def test_a_chrome_trace_nests_its_events_and_names_its_tracks(tmp_path: Path) -> None:
    for events in (_some_events(), read_events(simulated(tmp_path / "run").events)):
        trace = json.loads(json.dumps(chrome(slices(events)), allow_nan=False))
        by_phase: dict[str, list[Mapping[str, Any]]] = {}
        for event in trace["traceEvents"]:
            by_phase.setdefault(event["ph"], []).append(event)
        names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in by_phase["M"] if "name" in e["args"]}
        assert {"learner", "weight syncs", "groups", "episodes", "sandboxes"} <= set(names.values())
        tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for event in by_phase["X"]:
            assert event["ts"] >= 0
            assert event["dur"] >= 1
            assert (event["pid"], event["tid"]) in names
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        for spans in tracks.values():
            _check_nested(sorted(spans, key=lambda span: (span[0], -span[1])))
    assert any(e["name"] == "importance_ratio_max" and e["args"]["value"] == 1.0 for e in by_phase["C"])


def _check_nested(spans: list[tuple[int, int]]) -> None:
    open_ends: list[int] = []
    for began, ended in spans:
        while open_ends and open_ends[-1] <= began + 2:  # microseconds of rounding
            open_ends.pop()
        assert not open_ends or ended <= open_ends[-1] + 2, f"{began} to {ended} outlasts what it lies in"
        open_ends.append(ended)


def test_an_opentelemetry_trace_has_every_slice_under_its_parent() -> None:
    trace = otlp(slices(_some_events()), run="demo-1")
    (resource,) = trace["resourceSpans"]
    spans = resource["scopeSpans"][0]["spans"]
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans) == 12
    assert all(len(span["traceId"]) == 32 and len(span["spanId"]) == 16 for span in spans)
    (turn,) = (span for span in spans if span["name"] == "turn 2")
    assert by_id[turn["parentSpanId"]]["name"] == "7-0"
    assert (turn["startTimeUnixNano"], turn["endTimeUnixNano"]) == ("1006000000000", "1007000000000")
    assert {"key": "tokens", "value": {"intValue": "3"}} in turn["attributes"]


def test_the_command_writes_a_trace_or_says_why_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    directory = simulated(tmp_path / "run")
    assert cli.main(["trace", str(directory.path)]) == 0
    whole = json.loads((directory.path / "trace.json").read_text())
    out = tmp_path / "last.json"
    assert cli.main(["trace", str(directory.path), "--last", "2", "--out", str(out)]) == 0
    assert 0 < len(json.loads(out.read_text())["traceEvents"]) < len(whole["traceEvents"])
    assert cli.main(["trace", str(directory.path), "--format", "otlp", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["resourceSpans"]
    capsys.readouterr()
    assert cli.main(["trace", str(directory.path), "--last", "0"]) == 2
    assert "--last must be > 0" in capsys.readouterr().err
    assert cli.main(["trace", str(directory.path), "--out", str(tmp_path / "no" / "t.json")]) == 2
    directory.events.unlink()
    assert cli.main(["trace", str(directory.path)]) == 2
    assert "holds no events" in capsys.readouterr().err


def test_a_completion_is_noted_with_how_long_it_waited_for_its_place(tmp_path: Path) -> None:
    completion = Completion(
        token_ids=TokenIds([1, 2]),
        behaviour_logprobs=Logprobs([-1.0, -1.0]),
        spans=(TokenSpan(start=0, end=1, version=4), TokenSpan(start=1, end=2, version=5)),
        finish_reason=FinishReason.LENGTH,
        seconds=2.0,
        engine="engine 1",
    )

    async def main() -> None:
        with Timeline(tmp_path / "events.jsonl", max_bytes=1 << 20) as timeline:
            await trio.sleep(5.0)
            timeline.request("7-0", trio.current_time() - 5.0, completion)
            timeline.step({"step": 1, "loss": 0.5}, StepResult(version=1, metrics={}))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    _, request, step = read_events(tmp_path / "events.jsonl")
    assert request[4] == {"engine": "engine 1", "tokens": 2, "versions": [4, 5], "finish": "length", "waited": 3.0}
    assert step[4] == {"loss": 0.5, "step": 1, "version": 1, "stepped": True}
