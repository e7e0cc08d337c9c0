"""The run's state as a web page and as JSON, beside /metrics on the same port.

    GET /             a page that renews itself
    GET /status.json  what `status.json` in the run directory holds, with the last steps
    GET /metrics      for Prometheus

Nothing is read from disk for it, and it changes nothing: there is no other method, and no input.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from asyncrl.spikes import WORDS, Cause, visible

Application = Callable[[Mapping[str, Any], Any, Any], Awaitable[None]]
"""ASGI."""

_CHARTS = (
    ("solved", "solve_rate"),
    ("reward", "reward_mean"),
    ("largest ratio", "importance_ratio_max"),
    ("ESS", "ess_token"),
    ("gradient norm", "grad_norm"),
    ("seconds of a step", "step_seconds"),
)
_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("solved", "solve_rate", "{:.2f}"),
    ("reward", "reward_mean", "{:.3g}"),
    ("staleness", "staleness_max", "{:.0f}"),
    ("largest ratio", "importance_ratio_max", "{:.3g}"),
    ("ESS", "ess_token", "{:.3f}"),
    ("KL", "kl_k3", "{:.2g}"),
    ("gradient norm", "grad_norm", "{:.3g}"),
    ("entropy", "entropy", "{:.3g}"),
    ("engine tok/s", "generated_tokens_per_second", "{:.0f}"),
    ("step s", "step_seconds", "{:.1f}"),
    ("sync s", "sync_seconds", "{:.2f}"),
)
_SHOWN_STEPS = 12
_SHOWN_SPIKES = 5
_WIDTH, _HEIGHT = 240.0, 56.0  # of a chart, in its own units


class LivePage:
    """Answers a browser about one run. An ASGI application around that of the metrics."""

    def __init__(
        self,
        metrics: Application,
        *,
        title: str,
        status: Callable[[], Mapping[str, Any]],
        steps: Callable[[], Sequence[Mapping[str, Any]]],
        spikes: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        """`status` returns what status.json holds, `steps` the lines of the last steps and `spikes` the token with the
        largest ratio of each, oldest first.
        """
        here = Path(__file__).parent / "report"
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(here), autoescape=True, undefined=jinja2.StrictUndefined
        )
        self._metrics = metrics
        self._title = title
        self._status = status
        self._steps = steps
        self._spikes = spikes
        self._template = environment.get_template("live.html.jinja")
        self._style = (here / "style.css").read_text(encoding="utf-8")

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        path = scope["path"]
        if path.startswith("/metrics"):
            await self._metrics(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "text/plain", b"only GET and HEAD\n")
        elif path == "/":
            await _answer(send, 200, "text/html", self.page().encode("utf-8", errors="replace"))
        elif path == "/status.json":
            body = msgspec.json.encode({**self._status(), "last_steps": list(self._steps())})  # NaN becomes null
            await _answer(send, 200, "application/json", body)
        else:
            await _answer(send, 404, "text/plain", b"there are /, /status.json and /metrics\n")

    def page(self) -> str:
        """Return the page."""
        status, steps = self._status(), self._steps()
        rows = [[_figure(step.get(key), form) for _, key, form in _COLUMNS] for step in steps[-_SHOWN_STEPS:]]
        return self._template.render(
            title=self._title,
            style=self._style,
            status=status,
            counters={name: v for name, v in status["counters"].items() if not isinstance(v, list | dict)},
            trajectories=status["counters"].get("trajectories", {}),
            evaluations=status["counters"].get("evaluations", []),
            titles=[title for title, _, _ in _COLUMNS],
            rows=rows[::-1],
            spikes=[_spike(token) for token in sorted(self._spikes(), key=_by_ratio)[:_SHOWN_SPIKES]],
            charts=[chart for title, key in _CHARTS if (chart := _chart(title, [step.get(key) for step in steps]))],
            width=_WIDTH,
            height=_HEIGHT,
        )


def _figure(value: Any, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) if math.isfinite(value) else "not finite"


def _by_ratio(token: Mapping[str, Any]) -> float:
    return -math.inf if token["ratio"] is None else -float(token["ratio"])


def _spike(token: Mapping[str, Any]) -> dict[str, str]:
    age = token["staleness"]
    origin = f"{token['environment']}, task {token['task_id']}, trajectory {token['trajectory_id']}"
    return {
        "title": f"ratio {_figure(token['ratio'], '{:.3g}') or 'not finite'} at step {token['step']}",
        "cause": WORDS[Cause(token["cause"])],
        "origin": f"{age} step{'s' * (age != 1)} old; {origin}",
        **{part: visible(token[part]) for part in ("before", "text", "after")},
    }


def _chart(title: str, values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return a small line chart; a step without a finite value is left out."""
    known = [(at, v) for at, v in enumerate(values) if v is not None and math.isfinite(v)]
    if not known:
        return None
    low, high = min(v for _, v in known), max(v for _, v in known)
    scale = (high - low) or 1.0
    points = " ".join(
        f"{_WIDTH * at / max(1, len(values) - 1):.1f},{_HEIGHT - 3 - (_HEIGHT - 6) * (v - low) / scale:.1f}"
        for at, v in known
    )
    return {"title": title, "points": points, "low": f"{low:.3g}", "high": f"{high:.3g}", "last": f"{known[-1][1]:.3g}"}


async def _live(receive: Any, send: Any) -> None:
    """Tell the server that there is nothing to do at its start and its end."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _answer(send: Any, code: int, kind: str, body: bytes) -> None:
    headers = [
        (b"content-type", f"{kind}; charset=utf-8".encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
