"""What a Prometheus answers to a dashboard's queries, over a window of time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx

from asyncrl.dashboards.chart import of_run
from asyncrl.errors import BoundaryError, ConfigError

_TIMEOUT_S = 60.0
_POINTS = 300  # of a curve: a panel is about as many pixels wide
_LEAST_RATE_S = 60  # four scrapes of the usual interval, as Grafana has it; with fewer a rate is unknown


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, in seconds since 1970."""

    start: float
    end: float

    @property
    def step(self) -> float:
        """Seconds between two points of a curve."""
        return max(1.0, (self.end - self.start) / _POINTS)


@dataclass(frozen=True, slots=True)
class Series:
    """A curve."""

    labels: dict[str, str]
    times: list[float]
    """Seconds since 1970; those without a value are missing."""
    values: list[float]

    def legend(self, template: str) -> str:
        """Return its name, of a template as Grafana has them.

        Example:
            >>> Series({"side": "low"}, [], []).legend("clipped, {{side}}{{more}}")
            'clipped, low'
        """
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: self.labels.get(found[1], ""), template)


class Readings:
    """A Prometheus server, asked about the runs whose `instance` matches a regular expression."""

    def __init__(self, url: str, *, run: str = ".+") -> None:
        """Raises: ConfigError where the URL is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--prometheus must begin with http:// or https://, got {url!r}")
        self._url = url
        self._run = run
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def window(self, hours: float) -> Window:
        """Return the part of the last `hours` in which there is anything about the runs.

        Raises: ConfigError where there is nothing.
        """
        now = float(self._ask("query", query="time()")["result"][1])
        window = Window(now - 3600 * hours, now)
        for _ in range(2):  # the first time between points that may be minutes apart
            times = [time for series in self.series("asyncrl_policy_version", window) for time in series.times]
            if not times:
                raise ConfigError(
                    f"{self._url} holds nothing about a run {self._run!r} in the last {hours:g} hours: name another "
                    "one by --run (its host:port), or raise --hours"
                )
            window = Window(min(times) - window.step, min(now, max(times) + window.step))
        return window

    def series(self, expression: str, window: Window) -> list[Series]:
        """Return the curves of a panel's expression. Raises: BoundaryError where it cannot be had."""
        rate_s = max(_LEAST_RATE_S, round(4 * window.step))
        query = of_run(expression).replace("$__rate_interval", f"{rate_s}s")
        query = query.replace("$run", self._run.replace("\\", "\\\\"))
        answer = self._ask("query_range", query=query, start=window.start, end=window.end, step=window.step)
        return [
            Series(row["metric"], [time for time, _ in row["values"]], [float(value) for _, value in row["values"]])
            for row in answer["result"]
        ]

    def _ask(self, route: str, **parameters: Any) -> Any:
        try:
            answer = self._client.get(f"/api/v1/{route}", params=parameters).json()
        except (httpx.TransportError, ValueError) as error:
            raise BoundaryError(f"no Prometheus answers at {self._url}: {str(error) or type(error).__name__}") from None
        if answer.get("status") != "success":
            raise BoundaryError(f"{self._url} refuses {parameters['query']}: {answer.get('error')}")
        return answer["data"]
