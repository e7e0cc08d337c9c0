"""Which tokens stand out, where they come from, why, and what of it lies on disk."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from synthetic_groups import make_group, make_segment, random_groups
from tiny_model import build_tiny_model

from asyncrl import cli
from asyncrl.learner.process import Learner
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.progress import Progress
from asyncrl.protocols import StepResult
from asyncrl.recording import RunRecorder, read_spikes, read_tokens
from asyncrl.run_directory import RunDirectory
from asyncrl.spikes import MAX_LINE_BYTES, WORDS, Cause, likely_cause, pieces, shown_line, spike_line
from asyncrl.types import FinishReason, Group, Segment, TokenSpan, TurnSpan
from asyncrl.weight_sync.settings import WeightSyncSettings
from asyncrl.wire import StepRequest

_ROW: Mapping[str, Any] = {
    "by": {"ratio": 1, "influence": 2},
    "ratio": 3.0,
    "influence": 0.5,
    "influence_share": 0.25,
    "policy_logprob": -0.5,
    "behaviour_logprob": -1.6,
    "advantage": -2.0,
    "version": 4,
    "staleness": 1,
    "begun_under": 4,
    "token_id": 65,
    "before": [72, 105],
    "after": [33],
    "position": 12,
    "position_in_turn": 3,
    "segment": 0,
    "turn": 1,
    "finish_reason": "length",
    "engine": "engine 0",
    "trajectory_id": "7-2",
    "task_id": "demo/7",
    "environment": "demo",
    "status": "completed",
    "reward": 1.0,
}


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


def step(model: Path, published: Path, groups: Sequence[Group], *, version: int = 0, **settings: Any) -> StepResult:
    learner = Learner(
        LearnerJob(
            model=model,
            run_id="test",
            max_off_policyness=3,
            weight_sync=WeightSyncSettings(transport="filesystem", directory=published),
            learner=LearnerSettings(dtype="float32", threads=1, **settings),
        )
    )
    learner._stepper.version = version
    reply = learner.answer(StepRequest(groups=list(groups)))
    learner.close()
    return reply.result  # type: ignore[attr-defined, no-any-return]


# --- the learner's half -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ppo", "importance_sampling"])
def test_influence_is_ratio_times_advantage_over_the_tokens_where_the_clip_lets_it_pass(
    model_path: Path, tmp_path: Path, loss: str
) -> None:
    result = step(model_path, tmp_path, random_groups(3, num_groups=6), loss=loss, microbatch_tokens=64)
    assert result.metrics["num_microbatches"] > 1, "the denominator is the whole batch's"
    num_tokens = result.metrics["num_loss_tokens"]
    clipped = 0
    for row in result.spikes:
        ratio, advantage = row["ratio"], row["advantage"]
        clipped_here = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        passes = loss == "importance_sampling" or not clipped_here
        assert row["influence"] == pytest.approx(passes * abs(ratio * advantage) / num_tokens, rel=1e-4)
        clipped += not passes
    if loss == "ppo":
        assert clipped, "a clipped token is among the largest ratios"
    else:
        signs = {row["advantage"] > 0 for row in result.spikes if row["influence"]}
        assert signs == {True, False}, "what is pushed up and what is pushed down"
    by_influence = sorted((r["by"]["influence"], r["influence"]) for r in result.spikes if "influence" in r["by"])
    assert [value for _, value in by_influence] == sorted((value for _, value in by_influence), reverse=True)
    by_ratio = {r["by"]["ratio"]: r["ratio"] for r in result.spikes if "ratio" in r["by"]}
    assert by_ratio == {n: pytest.approx(row["ratio"]) for n, row in enumerate(result.top_ratios[:6], start=1)}
    assert sum(row["influence_share"] for row in result.spikes) <= 1.0


def test_influence_has_no_part_of_a_loss_that_is_spread_over_a_sequence_left_out(
    model_path: Path, tmp_path: Path
) -> None:
    """Of gspo every token of a sequence has the same: A s / (n tokens x sequences)."""
    groups = random_groups(1, num_groups=2)
    wide = {"clip_low": 0.99, "clip_high": 1e6}
    result = step(model_path, tmp_path, groups, loss="gspo", loss_settings=wide)
    by_trajectory: dict[str, set[float]] = {}
    for row in result.spikes:
        by_trajectory.setdefault(row["trajectory_id"], set()).add(round(row["influence"], 9))
    assert all(len(found) == 1 for found in by_trajectory.values())
    assert max(found.pop() for found in by_trajectory.values()) > 0


def _two_turns() -> Group:
    """Version 1, then 2 from the second token of the second reply on; its last token has the largest ratio."""
    segment = make_segment([1, 2, 3], [([65, 66], [7, 8, 9]), ([67, 68, 69], [])], logprob=-1.0)
    likely = segment.behaviour_logprobs
    likely[-1] = -300.0
    segment = replace(
        segment,
        behaviour_logprobs=likely,
        spans=tuple(TokenSpan(start=a, end=b, version=v) for a, b, v in ((3, 5, 1), (8, 9, 1), (9, 11, 2))),
        turns=(
            TurnSpan(start=3, end=5, finish_reason=FinishReason.STOP, engine="engine 0"),
            TurnSpan(start=8, end=11, finish_reason=FinishReason.LENGTH, engine="engine 1"),
        ),
    )
    first = make_segment([1, 2], [([5], [])])
    group = make_group(0, [segment, first], [1.0, 0.0], environment="two turns")
    two = replace(group.trajectories[0], segments=(replace(first, spans=_at(first, 2)), segment))
    one = replace(group.trajectories[1], segments=(replace(first, spans=_at(first, 2)),))
    return replace(group, trajectories=(two, one))


def _at(segment: Segment, version: int) -> tuple[TokenSpan, ...]:
    return tuple(replace(span, version=version) for span in segment.spans)


def test_a_token_has_its_whole_origin(model_path: Path, tmp_path: Path) -> None:
    result = step(model_path, tmp_path, [_two_turns()], version=3)
    row = min(result.spikes, key=lambda row: row["by"].get("ratio", 99))
    assert row["ratio"] == pytest.approx(torch.tensor(20.0).double().exp().item()), "clamped to 20 nats"
    found = {name: row[name] for name in ("version", "staleness", "begun_under", "segment", "turn", "engine")}
    assert found == {"version": 2, "staleness": 1, "begun_under": 1, "segment": 1, "turn": 1, "engine": "engine 1"}
    assert (row["token_id"], row["before"][-3:], row["after"]) == (69, [9, 67, 68], [])
    assert (row["position"], row["position_in_turn"], row["finish_reason"]) == (10, 2, "length")
    assert (row["environment"], row["task_id"], row["trajectory_id"]) == ("two turns", "task-0", "task-0/0")
    assert likely_cause(row, {}) is Cause.STALE_PREFIX


def test_a_trajectory_is_shown_token_by_token(model_path: Path, tmp_path: Path) -> None:
    result = step(model_path, tmp_path, [_two_turns()], version=3)
    shown = result.shown
    assert (shown["why"], shown["trajectory_id"], shown["left_out"]) == ("largest ratio", "task-0/0", 0)
    first, second = shown["segments"]
    assert [run["token_ids"] for run in first] == [[1, 2], [5]]
    assert [run["token_ids"] for run in second] == [[1, 2, 3], [65, 66], [7, 8, 9], [67, 68, 69]]
    assert [run["turn"] for run in second] == [None, 0, None, 1]
    assert second[3]["version"] == [1, 2, 2]
    assert len(second[3]["ratio"]) == len(second[3]["advantage"]) == 3
    line = json.loads(shown_line(result, step=4, decode=decode))
    assert line["segments"][1][3]["tokens"][0][::3] == ["C", 1]
    long = make_group(0, [make_segment([1], [([5] * 300, [6]), ([7] * 300, [])])] * 2, [1.0, 0.0])
    shown = step(model_path, tmp_path / "long", [long]).shown
    assert shown["why"] == "in turn"
    assert sum(len(run["token_ids"]) for run in shown["segments"][0] if "ratio" in run) == 400
    assert shown["left_out"] == 200


def test_a_number_that_is_not_finite_is_none_and_comes_first(model_path: Path, tmp_path: Path) -> None:
    groups = random_groups(2, num_groups=1)
    for trajectory in groups[0].trajectories:
        for segment in trajectory.segments:
            segment.behaviour_logprobs[len(segment.token_ids) - 1] = float("nan")
    result = step(model_path, tmp_path, groups)
    json.dumps([dict(row) for row in result.spikes], allow_nan=False)
    assert result.spikes


# --- causes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "metrics", "cause"),
    [
        ({"ratio": None}, {}, Cause.NOT_FINITE),
        ({"ratio": 1.05}, {}, Cause.ADVANTAGE),
        ({"ratio": 1.05, "by": {"ratio": 1}}, {}, Cause.NOISE),
        ({}, {"mismatch_abs_mean": 0.3}, Cause.LOG_PROB_MODE),
        ({"begun_under": 3, "behaviour_logprob": -9.0}, {"mismatch_abs_mean": 0.03}, Cause.STALE_PREFIX),
        ({"behaviour_logprob": -9.0, "staleness": 0}, {}, Cause.RARE_TOKEN),
        ({"staleness": 0}, {}, Cause.ENGINE_MISMATCH),
        ({}, {}, Cause.OLD_VERSION),
        ({"ratio": 0.0}, {}, Cause.OLD_VERSION),
    ],
)
def test_a_cause_follows_its_rule(changed: Mapping[str, Any], metrics: Mapping[str, float], cause: Cause) -> None:
    assert likely_cause({**_ROW, **changed}, metrics) is cause
    assert cause in WORDS


# --- what lies on disk ---------------------------------------------------------------------------------------------


def test_a_hundred_lines_stay_below_a_megabyte_whatever_is_in_them() -> None:
    rows = [{**_ROW, "by": {"ratio": n}, "before": [0xC3, 0xBC] * 300, "task_id": "t" * 900} for n in range(1, 13)]
    line = spike_line(StepResult(version=5, metrics={}, spikes=rows), step=5, decode=decode, sampling={})
    assert len(line) <= MAX_LINE_BYTES == 10_000
    found = json.loads(line)
    assert found["left_out"] == 12 - len(found["tokens"]) > 0
    assert [token["by"]["ratio"] for token in found["tokens"]] == [*range(1, 13 - found["left_out"])]
    small = spike_line(StepResult(version=5, metrics={}, spikes=[_ROW]), step=5, decode=decode, sampling={})
    (token,) = json.loads(small)["tokens"]
    assert (token["before"], token["text"], token["after"], token["cause"]) == ("Hi", "A", "!", "old_version")


def test_the_text_of_tokens_is_the_text_of_all_of_them() -> None:
    text = "a \u00fc \u20ac \U0001f600."
    ids = [*text.encode(), 0xFF, 0xFE, 65]
    found = pieces(ids, decode)
    assert len(found) == len(ids)
    assert "".join(found) == decode(ids)
    assert pieces([], decode) == []


def _recorder(directory: RunDirectory, version: int) -> RunRecorder:
    progress = Progress(Console(file=io.StringIO()), title="run", max_steps=9)
    sampling = {"temperature": 0.5}
    return RunRecorder(directory, progress, lambda _: "", version=version, sampling=sampling, decode_all=decode)


def _take(recorder: RunRecorder, *versions: int) -> None:
    shown = {"trajectory_id": "7-2", "segments": [[{"turn": None, "token_ids": [72]}]]}
    for version in versions:
        record = {"step": version, "version": version, "seconds": 1.0, "tokens_generated": 1.0}
        result = StepResult(version=version, metrics={}, spikes=[{**_ROW, "ratio": 2.0 * version}], shown=shown)
        recorder.step(record, result)


def test_steps_that_are_taken_again_are_there_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    _take(_recorder(directory, 0), 1, 2, 3)
    for path in (directory.spikes, directory.tokens):
        with path.open("ab") as file:
            file.write(b'{"step": 4, "versi')  # killed in the middle of it
    assert [line["step"] for line in read_spikes(directory)] == [1, 2, 3]
    _take(_recorder(directory, 1), 2, 3)
    assert [line["step"] for line in read_spikes(directory)] == [1, 2, 3]
    assert [line["step"] for line in read_tokens(directory)] == [1, 2, 3]


def test_the_command_shows_a_runs_largest_and_all_of_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    assert cli.main(["spikes", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    directory.config.touch()
    assert cli.main(["spikes", str(tmp_path)]) == 0
    assert "no tokens were trained on yet" in capsys.readouterr().out
    _take(_recorder(directory, 0), 1, 2, 3)
    assert cli.main(["spikes", str(tmp_path), "--number", "2", "--json"]) == 0
    assert [token["ratio"] for token in json.loads(capsys.readouterr().out)["tokens"]] == [6.0, 4.0]
    assert cli.main(["spikes", str(tmp_path), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    for words in ("step 1: ratio 2, influence 25 % of the step's: the weights have moved", "Hi >>>A<<< !"):
        assert words in shown
    for words in ("temperature 0.5", "turn 2", "ended by length, engine 0", "task demo/7, trajectory 7-2"):
        assert words in shown
    assert cli.main(["spikes", str(tmp_path), "--step", "9"]) == 2
    assert "--step 9 is not in" in capsys.readouterr().err


def test_the_command_prints_no_control_character_that_a_model_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.config.touch()
    row = {**_ROW, "before": [*b"\x1b[2J\r\n"]}
    recorder = _recorder(directory, 0)
    record = {"step": 1, "version": 1, "seconds": 1.0, "tokens_generated": 1.0}
    recorder.step(record, StepResult(version=1, metrics={}, spikes=[row]))
    assert cli.main(["spikes", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2J\\r\\n" in shown
