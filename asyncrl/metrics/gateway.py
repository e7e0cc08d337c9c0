"""The gateway: what agents ask it, and what becomes of their sessions."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.gateway import Gateway
from asyncrl.metrics.family import Family, Source, Values, counter, gauge, histogram


def _gateway(read: Callable[[Gateway], Values]) -> Callable[[Source], Values]:
    return lambda source: read(source.gateway) if source.gateway else None


GATEWAY: tuple[Family, ...] = (
    gauge("asyncrl_gateway_sessions_open", "sessions", "Sessions that are open: one an episode.",
          "grows without end: nobody closes them", _gateway(lambda g: g.statistics().sessions)),
    gauge("asyncrl_gateway_sessions_waiting", "sessions",
          "Open sessions that were turned away while every engine's cache was full, and have not begun.",
          "not 0 for long: fewer slots, or more engines", _gateway(lambda g: g.statistics().waiting)),
    gauge("asyncrl_gateway_requests_running", "requests", "Requests that are being answered.", "",
          _gateway(lambda g: g.statistics().running)),
    counter("asyncrl_gateway_requests", "requests",
            "Requests by face and HTTP status; `left`: nobody waited for the answer.",
            "400 (agents ask what cannot be trained on), 429, 503 or 504 grow",
            _gateway(lambda g: g.figures.requests), "face", "status"),
    histogram("asyncrl_gateway_request_seconds", "seconds", "From a request to the end of its answer.",
              "near `request_timeout_s`", _gateway(lambda g: g.figures.seconds), "face"),
    counter("asyncrl_gateway_sessions_ended", "sessions",
            "Sessions by what became of them; `left`: whoever opened one said nothing of it.",
            "`failed_*` grow", _gateway(lambda g: g.statistics().sessions_ended), "outcome"),
    counter("asyncrl_gateway_admissions_refused", "requests",
            "Requests of new sessions that were turned away, as every engine's cache was full.", "grows all the time",
            _gateway(lambda g: g.figures.turned_away)),
    histogram("asyncrl_gateway_admission_wait_seconds", "seconds",
              "From the first request of a session that was turned away to the one that was taken.", "minutes",
              _gateway(lambda g: g.figures.admission_seconds)),
    counter("asyncrl_gateway_streams_left", "requests", "Streams that their client left before the end.", "",
            _gateway(lambda g: g.figures.streams_left)),
)  # fmt: skip
