"""The engines, as their clients and as they themselves see them; the sandboxes; and the machine under all."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.engines import EngineStatistics, Health
from asyncrl.metering import SandboxFigures
from asyncrl.metrics.family import Family, Source, Value, Values, counter, gauge, histogram
from asyncrl.metrics.sampling import Sampled
from asyncrl.protocols import BackendStatistics


def _engine(read: Callable[[EngineStatistics], Value]) -> Callable[[Source], Values]:
    return lambda source: {e.name: read(e) for e in source.engines().engines} if source.engines else None


def _own(name: str) -> Callable[[Source], Values]:
    """Return a reader of what every engine says of itself."""
    return lambda source: (
        {engine: said.get(name) for engine, said in source.sampled.engines.items()} if source.sampled else None
    )


ENGINES: tuple[Family, ...] = (
    gauge("asyncrl_engine_up", "0 or 1", "1 where the engine is in service.", "0",
          _engine(lambda e: e.health is Health.SERVING), "engine"),
    gauge("asyncrl_engine_health_seconds", "seconds", "Since it came into service, or went out of it.", "",
          _engine(lambda e: e.health_seconds), "engine"),
    gauge("asyncrl_engine_policy_version", "steps", "Of the weights that it holds.",
          "further behind asyncrl_policy_version than the bound", _engine(lambda e: e.version), "engine"),
    gauge("asyncrl_engine_requests_running", "requests", "Requests in the engine.", "0 while groups run",
          _engine(lambda e: e.running), "engine"),
    gauge("asyncrl_requests_waiting", "requests", "Requests that wait for a place, an engine, or a sync's end.",
          "always many: more engines, or fewer slots",
          lambda source: source.engines().waiting if source.engines else None),
    gauge("asyncrl_engine_tokens_per_second", "tokens/second", "Sampled recently.", "falls",
          _engine(lambda e: e.tokens_per_second), "engine"),
    counter("asyncrl_engine_tokens_sampled", "tokens", "Tokens that have arrived from it.", "does not grow",
            _engine(lambda e: e.tokens_sampled), "engine"),
    counter("asyncrl_engine_tokens_unverified", "tokens",
            "Tokens not kept: sampled under weights that were found to be wrong.", "not 0",
            _engine(lambda e: e.tokens_unverified), "engine"),
    counter("asyncrl_engine_requests_failed", "requests", "Requests that it failed; they go on elsewhere.", "grows",
            _engine(lambda e: e.failed), "engine"),
    counter("asyncrl_engine_syncs", "versions", "Versions that it has pulled.", "does not grow",
            _engine(lambda e: e.syncs), "engine"),
    counter("asyncrl_engine_quarantines", "times", "Times that it took other weights than were sent.", "not 0",
            _engine(lambda e: e.quarantines), "engine"),
    counter("asyncrl_engine_restarts", "times", "Times that its server was started again.", "grows",
            _engine(lambda e: e.restarts), "engine"),
    gauge("asyncrl_engine_canary_distance_nats", "nats",
          "Between the engine's and the learner's log-probs of a text, a token, after the last sync.",
          "jumps: weights that no digest shows to be wrong", _engine(lambda e: e.canary_distance), "engine"),
    counter("asyncrl_requests_moved", "requests", "Requests that another engine went on with.", "grows",
            lambda source: source.run.status.requests_moved),
    counter("asyncrl_tokens_carried", "tokens", "Tokens that moved requests had already.", "",
            lambda source: source.run.status.tokens_carried),
    gauge("asyncrl_engine_batch_requests", "requests", "Requests in the engine's batch, by its own account.", "",
          _own("requests_running"), "engine"),
    gauge("asyncrl_engine_queue_requests", "requests", "Requests that wait inside the engine, by its own account.",
          "not 0 for long: its key-value memory is full", _own("requests_waiting"), "engine"),
    gauge("asyncrl_engine_kv_cache_ratio", "share, 0 to 1", "Used part of the engine's key-value memory.",
          "1, with preemptions", _own("kv_cache_usage"), "engine"),
    counter("asyncrl_engine_preemptions", "times", "Requests that the engine put off and computed again.", "grows",
            _own("preemptions"), "engine"),
    counter("asyncrl_engine_prompt_tokens", "tokens", "Prompt tokens that the engine read.", "",
            _own("prompt_tokens"), "engine"),
    counter("asyncrl_engine_generation_tokens", "tokens", "Tokens that the engine sampled, by its own account.", "",
            _own("generation_tokens"), "engine"),
    counter("asyncrl_engine_prefix_cache_query_tokens", "tokens", "Tokens looked up in its prefix cache.", "",
            _own("prefix_cache_queries"), "engine"),
    counter("asyncrl_engine_prefix_cache_hit_tokens", "tokens", "Tokens found there.",
            "a small share of the looked up", _own("prefix_cache_hits"), "engine"),
)  # fmt: skip


def _backend(read: Callable[[BackendStatistics], Values]) -> Callable[[Source], Values]:
    return lambda source: read(source.sandboxes.statistics()) if source.sandboxes else None


def _figures(read: Callable[[SandboxFigures], Values]) -> Callable[[Source], Values]:
    return lambda source: read(source.sandboxes.figures) if source.sandboxes else None


def _sampled(read: Callable[[Sampled], Values]) -> Callable[[Source], Values]:
    return lambda source: read(source.sampled) if source.sampled else None


SANDBOXES: tuple[Family, ...] = (
    gauge("asyncrl_sandboxes_open", "sandboxes", "Open sandboxes.", "at the limit while others wait",
          _backend(lambda b: b.open)),
    gauge("asyncrl_sandboxes_waiting", "sandboxes", "Openings that wait for a sandbox to be closed.",
          "not 0 for long", _backend(lambda b: b.waiting)),
    counter("asyncrl_sandbox_starts", "sandboxes", "Openings and forks, by whether one came about.",
            "`failed` grows", _figures(lambda f: f.starts), "result"),
    histogram("asyncrl_sandbox_start_seconds", "seconds", "From asking for a sandbox to having it.", "seconds",
              _figures(lambda f: f.start_seconds)),
    counter("asyncrl_sandbox_commands", "commands", "Commands by how they ended.",
            "`infrastructure` grows; a limit ends most", _figures(lambda f: f.commands), "outcome"),
    histogram("asyncrl_sandbox_command_seconds", "seconds", "How long commands took.", "at the limit",
              _figures(lambda f: f.command_seconds), "kind"),
    gauge("asyncrl_sandbox_leases", "leases", "Entries in the ledger of what must be removed, of this machine.",
          "many more than open sandboxes for long: something is left behind", _sampled(lambda s: s.leases)),
)  # fmt: skip

MACHINE: tuple[Family, ...] = (
    gauge("asyncrl_memory_bytes", "bytes", "Resident memory by role; what processes share is counted in each.",
          "grows with the steps", _sampled(lambda s: s.memory), "role"),
    histogram("asyncrl_event_loop_lag_seconds", "seconds", "How late the orchestrator's loop was.",
              "over 0.1 s often: something in it blocks", _sampled(lambda s: s.lag)),
    gauge("asyncrl_disk_free_bytes", "bytes", "Free on the disk of the run directory.",
          "less than two checkpoints", _sampled(lambda s: s.disk_free)),
    gauge("asyncrl_disk_bytes", "bytes", "Size of that disk.", "", _sampled(lambda s: s.disk_total)),
)  # fmt: skip
