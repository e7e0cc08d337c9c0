"""A run's events as a trace: Chrome's JSON, which Perfetto and chrome://tracing open, or OpenTelemetry's.

Five rows of tracks: the learner, weight syncs by engine, groups, episodes with their turns inside, sandboxes with their
calls inside. Groups, episodes and sandboxes that do not overlap share a lane, so that there are as many lanes as were
under way at a time.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.timeline import EventKind

_PROCESSES = ("learner", "weight syncs", "groups", "episodes", "sandboxes")
_COUNTERS = ("importance_ratio_max", "staleness_max", "grad_norm", "reward_mean")
_PARTS_OF_A_STEP = ("packing", "forward_backward", "optimizer")


@dataclass(slots=True, kw_only=True)
class Slice:
    """Something that took a while."""

    process: str
    lane: str
    name: str
    began: float
    """Seconds since 1970."""
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    inside: list[Slice] = field(default_factory=list)

    @property
    def ended(self) -> float:
        """Seconds since 1970."""
        return self.began + self.seconds


def slices(events: Sequence[Sequence[Any]]) -> list[Slice]:
    """Return what happened, by its own kind, inner ones inside outer ones; times are dates.

    Events from before the first "begin" that is kept are dated by that one: they are of the same start of the run.
    """
    found: list[Slice] = []
    requests: dict[str, list[Slice]] = defaultdict(list)
    sandboxes: dict[str, list[Slice]] = defaultdict(list)
    stepping: Slice | None = None
    groups: list[tuple[Slice, Mapping[str, Any]]] = []
    for kind, track, began, seconds, facts in _dated(events):
        match kind:
            case EventKind.PHASE:
                found.append(
                    Slice(process="learner", lane="phase", name=track, began=began, seconds=seconds, facts=facts)
                )
                stepping = found[-1] if track == "stepping" else stepping
            case EventKind.STEP if stepping is not None:
                stepping.name, stepping.facts = f"step {facts['step']}", facts
                stepping.inside = _parts_of(stepping)
            case EventKind.SYNC:
                found.append(_pull(track, began, seconds, facts))
            case EventKind.REQUEST:
                turn = f"turn {len(requests[track]) + 1}"
                requests[track].append(
                    Slice(process="episodes", lane="", name=turn, began=began, seconds=seconds, facts=facts)
                )
            case EventKind.GROUP:
                words = {name: value for name, value in facts.items() if name != "episodes"}
                name = f"group {track}"
                group = Slice(process="groups", lane="", name=name, began=began, seconds=seconds, facts=words)
                groups.append((group, facts.get("episodes", {})))
            case EventKind.SANDBOX:
                sandboxes[track].append(
                    Slice(process="sandboxes", lane="", name=facts["what"], began=began, seconds=seconds, facts=facts)
                )
    ends = {trajectory_id: end for _, episodes in groups for trajectory_id, end in episodes.items()}
    found += _in_lanes([group for group, _ in groups])
    found += _in_lanes([_episode(name, turns, ends.get(name)) for name, turns in requests.items()])
    found += _in_lanes([_around("sandboxes", f"sandbox {name}", calls) for name, calls in sandboxes.items()])
    return found


def _dated(events: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, Any, float, float, Mapping[str, Any]]]:
    begins = [event for event in events if event[0] == EventKind.BEGIN]
    shift = begins[0][4]["time"] - begins[0][2] if begins else 0.0
    for kind, track, began, seconds, facts in events:
        if kind == EventKind.BEGIN:
            shift = facts["time"] - began
            continue
        yield kind, track, began + shift, seconds, facts


def _parts_of(step: Slice) -> list[Slice]:
    """Return the learner's parts of a step, which end with it: what comes before them is the groups' way there."""
    parts = {name.replace("_", " and "): float(step.facts.get(f"seconds_{name}", 0.0)) for name in _PARTS_OF_A_STEP}
    return _one_after_another(step, parts, max(step.began, step.ended - sum(parts.values())))


def _pull(engine: str, began: float, seconds: float, facts: Mapping[str, Any]) -> Slice:
    """Return an engine's pull; its phases end with it, since what comes before them is waiting."""
    name = f"version {facts['version']}"
    pull = Slice(process="weight syncs", lane=engine, name=name, began=began, seconds=seconds, facts=facts)
    phases = facts.get("phases", {})
    whole = {phase: took for phase, took in phases.items() if "." not in phase}
    pull.inside = _one_after_another(pull, whole, max(began, pull.ended - sum(whole.values())))
    for one in pull.inside:
        parts = {phase: took for phase, took in phases.items() if phase.startswith(f"{one.name}.")}
        one.inside = _one_after_another(one, parts, one.began)
    return pull


def _one_after_another(around: Slice, seconds: Mapping[str, float], at: float) -> list[Slice]:
    """Return slices inside another one that follow each other from `at` on, and end with it at the latest."""
    found = []
    for name, took in seconds.items():
        took = max(0.0, min(took, around.ended - at))
        found.append(Slice(process=around.process, lane=around.lane, name=name, began=at, seconds=took))
        at += took
    return found


def _episode(name: str, turns: list[Slice], end: Sequence[Any] | None) -> Slice:
    """Return an episode around its turns; `end` is its (status, reward, seconds, turns), where it has ended."""
    whole = _around("episodes", name, turns)
    if end is not None:
        status, reward, seconds, _ = end
        whole.facts = {"status": status, "reward": reward}
        whole.seconds = max(whole.seconds, seconds)
    return whole


def _around(process: str, name: str, inside: list[Slice]) -> Slice:
    began, ended = min(one.began for one in inside), max(one.ended for one in inside)
    return Slice(process=process, lane="", name=name, began=began, seconds=ended - began, inside=inside)


def _in_lanes(slices: list[Slice]) -> list[Slice]:
    """Give each slice the lowest lane that is free for as long as it lasts."""
    slices.sort(key=lambda one: one.began)
    busy: list[tuple[float, int]] = []  # (when it is free again, lane)
    free: list[int] = []
    for one in slices:
        while busy and busy[0][0] <= one.began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy) + len(free)
        heapq.heappush(busy, (one.ended, lane))
        one.lane = f"lane {lane + 1}"
        for inner in one.inside:
            inner.lane = one.lane
    return slices


# --- formats --------------------------------------------------------------------------------------------------------


def chrome(found: Sequence[Slice]) -> dict[str, Any]:
    """Return the trace in Chrome's JSON object format; times are microseconds since the first thing began."""
    start = min((one.began for one in found), default=0.0)
    events: list[dict[str, Any]] = []
    threads: dict[tuple[str, str], int] = {}
    for name in _PROCESSES:
        pid = _PROCESSES.index(name) + 1
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for one in _all(found):
        pid = _PROCESSES.index(one.process) + 1
        if (one.process, one.lane) not in threads:
            threads[one.process, one.lane] = tid = len(threads) + 1
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": one.lane}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        at = round(1e6 * (one.began - start))
        events.append(
            {
                "ph": "X",
                "name": one.name,
                "cat": one.process,
                "pid": pid,
                "tid": threads[one.process, one.lane],
                "ts": at,
                "dur": max(1, round(1e6 * one.seconds)),
                "args": dict(one.facts),
            }
        )
        if one.process == "learner" and "step" in one.facts:
            end = at + round(1e6 * one.seconds)
            counters = ((key, one.facts[key]) for key in _COUNTERS if key in one.facts)
            events += [{"ph": "C", "name": k, "pid": pid, "ts": end, "args": {"value": v}} for k, v in counters]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": start}}


def otlp(found: Sequence[Slice], *, run: str) -> dict[str, Any]:
    """Return the trace as OpenTelemetry's JSON, which a collector reads from a file (`otlpjsonfile`).

    Every slice is a span; what lies inside another one is its child. One trace for the run.
    """
    trace_id = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
    spans: list[dict[str, Any]] = []

    def add(one: Slice, parent: str) -> None:
        span_id = f"{len(spans) + 1:016x}"
        spans.append(
            {
                "traceId": trace_id,
                "spanId": span_id,
                "parentSpanId": parent,
                "name": one.name,
                "kind": 1,
                "startTimeUnixNano": str(round(1e9 * one.began)),
                "endTimeUnixNano": str(round(1e9 * one.ended)),
                "attributes": [
                    _attribute("asyncrl.part", one.process),
                    *(_attribute(*fact) for fact in one.facts.items()),
                ],
            }
        )
        for inner in one.inside:
            add(inner, span_id)

    for one in found:
        add(one, "")
    resource = {"attributes": [_attribute("service.name", "asyncrl"), _attribute("asyncrl.run", run)]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "asyncrl"}, "spans": spans}]}]}


def _attribute(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    return {"key": key, "value": {"stringValue": str(value)}}


def _all(found: Iterable[Slice]) -> Iterable[Slice]:
    for one in found:
        yield one
        yield from _all(one.inside)
