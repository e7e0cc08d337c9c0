"""Train a model: start the engines and the learner, run episodes, learn, until a limit or the end of the tasks.

  asyncrl train configs/demo.toml
  asyncrl train configs/demo.toml --set buffer.max_off_policyness=0 --set run.steps=20
  asyncrl train configs/demo.toml --resume
  asyncrl train my_cluster.toml --on ray

A run that a guard has paused ([guards]) goes on when it gets SIGUSR1: kill -USR1 and the process id that
`asyncrl status` shows. One that a guard has stopped ends with exit code 1.

Ctrl-C once finishes the optimizer step under way, writes a checkpoint and ends; twice ends at once. Either way no
process, sandbox or shared-memory file is left, and --resume goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any

import trio
from prometheus_client import CollectorRegistry, make_asgi_app
from rich.console import Console
from rich.table import Table

from asyncrl import run_directory
from asyncrl.buffers import GroupCommit, Journal
from asyncrl.checkpoint import Checkpoint, CheckpointStore
from asyncrl.commands.arguments import add_config_arguments, add_place_argument, needs_ray
from asyncrl.configs import Config, load_config
from asyncrl.engines import EnginePool
from asyncrl.errors import ConfigError
from asyncrl.gateway import Gateway
from asyncrl.guards import Guards
from asyncrl.hosts import Here, Hosts
from asyncrl.live import LivePage
from asyncrl.metering import MeteredBackend
from asyncrl.metrics import Sampled, Source, collector
from asyncrl.on_ray.bundles import bundles_of, resolved
from asyncrl.preflight import load_demonstrations, preflight
from asyncrl.processes import open_parts
from asyncrl.progress import Progress
from asyncrl.recording import RunRecorder
from asyncrl.resume_plan import Resumption, plan_resumption
from asyncrl.resuming import wait_drawn
from asyncrl.run import Limits, Parts, Run
from asyncrl.run_directory import RunDirectory
from asyncrl.run_history import opened_journal
from asyncrl.run_journal import RunJournal
from asyncrl.serving import listen, serve
from asyncrl.status import RunStatus
from asyncrl.timeline import Timeline
from asyncrl.tokens import ChatRenderer
from asyncrl.warm_start import WarmStart, is_over

HELP = "train a model"

_UNREAD_S = 10.0  # of a page or a scrape; Prometheus itself gives up after as long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser)
    add_place_argument(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint")


def main(arguments: argparse.Namespace) -> int:
    """Train; return the exit code."""
    config = load_config(arguments.config, arguments.set)
    if arguments.on == "ray":
        needs_ray()
        config = resolved(config)
    directory = run_directory.choose(config, resume=arguments.resume)
    checkpoints = CheckpointStore(directory.checkpoints, keep=config.run.keep_checkpoints)
    checkpoint = checkpoints.newest() if arguments.resume else None
    if checkpoint:
        _check_limits(config, checkpoint)
    preflight(config, elsewhere=arguments.on == "ray")
    warm_start = _warm_start(config, checkpoint)
    run_directory.check_space(directory, config)
    console = Console(file=sys.stdout)
    with (
        metrics_port(config) as listener,
        _connected(config, arguments.on),
        run_directory.opened(directory, config),
        opened_journal(
            directory.journal,
            config.journal,
            run_id=directory.run_id,
            state=checkpoint.state if checkpoint else {},
        ) as (journal, history),
    ):
        console.print(f"run directory {directory.path}", highlight=False, soft_wrap=True)
        if listener is not None:
            host, port = listener.getsockname()
            console.print(f"Prometheus metrics at http://{host}:{port}/metrics", highlight=False, soft_wrap=True)
            if config.metrics.page:
                console.print(f"the run as a page at http://{host}:{port}/", highlight=False, soft_wrap=True)
        if warm_start is not None:
            console.print(f"warm start: {warm_start.describe()}", highlight=False, soft_wrap=True)
        if arguments.resume:
            version = f"version {checkpoint.version}" if checkpoint else "the start: it has no checkpoint yet"
            console.print(f"resuming from {version}", highlight=False)
        resumption = plan_resumption(
            checkpoint.state if checkpoint else {},
            checkpoint.version if checkpoint else 0,
            history,
            settings=config.buffer,
            lost_line=config.journal.lost_line,
        )
        return trio.run(
            partial(_train, config, directory, on=arguments.on, console=console),
            *(checkpoints, checkpoint, warm_start, journal, resumption, listener),
        )


def _connected(config: Config, on: str) -> AbstractContextManager[None]:
    """Return what holds the connection to where the run is placed; nothing on this machine. Raises ConfigError."""
    if on == "here":
        return nullcontext()
    from asyncrl.on_ray.cluster import connected  # Ray is an extra, and takes seconds to import

    return connected(config.ray, bundles_of(config))


def _hosts(
    config: Config, directory: RunDirectory, on: str, say: Callable[[str], None]
) -> AbstractAsyncContextManager[Hosts]:
    if on == "here":
        return nullcontext(Here(config))
    from asyncrl.on_ray.parts import placed

    return placed(config, directory.config, say)


def metrics_port(config: Config) -> AbstractContextManager[socket.socket | None]:
    """Return what holds the port of the metrics open; None where nothing is served."""
    if not config.metrics.serve:
        return nullcontext()
    host, port = config.metrics.host, config.metrics.port
    return closing(listen(host, port, setting="[metrics] port", unread_s=_UNREAD_S))


def _warm_start(config: Config, checkpoint: Checkpoint | None) -> WarmStart | None:
    """Return the warm start that is left to do. Raises ConfigError where its file cannot be trained on."""
    state = checkpoint.state.get("warm_start") if checkpoint else None
    if checkpoint and (state is None or is_over(state)):
        return None  # done with, so that its file need not be there any more
    demonstrations = load_demonstrations(config)
    return None if demonstrations is None else WarmStart(demonstrations, config.warm_start, state=state)


def _check_limits(config: Config, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where a resumed run would end before its first step."""
    steps, seconds = checkpoint.state["counters"]["steps"], checkpoint.state["counters"]["seconds_before"]
    warm_start = checkpoint.state.get("warm_start")
    if steps >= config.run.steps and (warm_start is None or is_over(warm_start)):
        raise ConfigError(f"steps = {config.run.steps} are taken already: raise it to go on ([run])")
    if config.run.max_minutes and seconds >= config.run.max_minutes * 60:
        raise ConfigError(
            f"max_minutes = {config.run.max_minutes:g} are used up, the run has trained for {seconds / 60:.1f}: "
            f"raise it to go on ([run])"
        )


async def _train(
    config: Config,
    directory: RunDirectory,
    checkpoints: CheckpointStore,
    checkpoint: Checkpoint | None,
    warm_start: WarmStart | None,
    journal: Journal,
    resumption: Resumption,
    listener: socket.socket | None,
    *,
    on: str,
    console: Console,
) -> int:
    started = trio.current_time()
    stop = trio.Event()
    progress = Progress(console, title=config.run.name, max_steps=config.run.steps)
    renderer = ChatRenderer.load(config.model.path)
    summary = None
    recorder: RunRecorder | None = None

    def say(note: str) -> None:
        progress.say(note)
        if recorder is not None:
            recorder.phase()  # what an engine's death means for who waits for whom is in the status file

    async with trio.open_nursery() as beside:  # outlives the parts, so that signals are heard while they end
        events_bytes = round(config.metrics.events_mib * 2**20)
        with trio.CancelScope() as scope, Timeline(directory.events, max_bytes=events_bytes) as timeline:
            beside.start_soon(_listen_for_signals, stop, scope, progress)
            opening = partial(open_parts, config, directory, renderer, checkpoint, say, timeline.sandbox)
            placing = _hosts(config, directory, on, say)
            async with progress.shown(), placing as hosts, opening(hosts) as parts:
                version = checkpoint.version if checkpoint else 0
                recorder = RunRecorder(
                    directory,
                    progress,
                    renderer.decode,
                    version=version,
                    sampling=asdict(config.sampling),
                    decode_all=partial(renderer.decode, keep_special=True),
                    timeline=timeline,
                )
                await wait_drawn(resumption, parts.environment, checkpoint.state if checkpoint else {})
                run = Run(
                    timeline.watch(parts),
                    config.buffer,
                    _limits(config),
                    recorder=recorder,
                    checkpoints=checkpoints,
                    status=RunStatus(),
                    stop=stop,
                    guards=Guards(config.guards),
                    warm_start=warm_start,
                    resume_from=checkpoint,
                    journal=RunJournal(GroupCommit(journal)),
                    resumption=resumption,
                    rng=Random(f"{config.run.seed}/{version}"),
                )
                for note in run.notes:
                    console.print(note, highlight=False, soft_wrap=True)
                beside.start_soon(_listen_to_go_on, run)
                progress.watch(run)
                recorder.watch(run)
                if listener is not None:
                    app = _metrics_app(run, parts, directory, beside)
                    if config.metrics.page:
                        app = LivePage(
                            app,
                            title=directory.path.name,
                            status=recorder.status,
                            steps=recorder.last_steps,
                            spikes=recorder.last_spikes,
                        )
                    await beside.start(serve, app, listener)
                gc.freeze()  # what is here stays: full collections, which stall the loop, need not walk over it
                await run.train()
                summary = recorder.finish(run, wall_seconds=trio.current_time() - started)
        beside.cancel_scope.cancel()
    if summary is None:
        return 130
    console.print(_table(summary))
    console.print(f"summary in {directory.summary}", highlight=False, soft_wrap=True)
    return _say_how_it_ended(console, stopped_by=run.status.stopped_by, stopped=stop.is_set())


def _say_how_it_ended(console: Console, *, stopped_by: str, stopped: bool) -> int:
    """Return the exit code of a run that has left its loop; `stopped_by` is what a guard said, if one has ended it."""
    if stopped_by:
        console.print(f"stopped by a guard: {stopped_by}; go on with --resume", highlight=False, soft_wrap=True)
        return 1
    if stopped:
        console.print("stopped before its end; go on with --resume", highlight=False)
        return 130
    return 0


def _metrics_app(run: Run, parts: Parts, directory: RunDirectory, beside: trio.Nursery) -> Any:
    """Return the ASGI app that Prometheus asks; what must be looked at between scrapes is, in `beside`."""
    pool = parts.engines if isinstance(parts.engines, EnginePool) else None
    sandboxes, gateway = parts.queues.get("sandboxes"), parts.queues.get("gateway")
    sampled = Sampled(directory.path)
    beside.start_soon(sampled.watch, pool.read_metrics if pool else None)
    source = Source(
        run=run,
        engines=pool.statistics if pool else None,
        sandboxes=sandboxes if isinstance(sandboxes, MeteredBackend) else None,
        gateway=gateway if isinstance(gateway, Gateway) else None,
        sampled=sampled,
    )
    registry = CollectorRegistry()
    registry.register(collector(source))
    return make_asgi_app(registry)


def _limits(config: Config) -> Limits:
    return Limits(
        steps=config.run.steps,
        max_seconds=config.run.max_minutes * 60 or float("inf"),
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        evaluation_samples=config.evaluation.samples,
        evaluate_before=config.evaluation.before,
        evaluate_every_steps=config.evaluation.every_steps,
        stall_seconds=config.run.stall_minutes * 60 or float("inf"),
    )


async def _listen_for_signals(stop: trio.Event, scope: trio.CancelScope, progress: Progress) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if stop.is_set():
                scope.cancel()
                continue
            progress.say("stopping after the step under way; once more to stop at once")
            stop.set()


async def _listen_to_go_on(run: Run) -> None:
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        async for _ in signals:
            run.go_on()


def _table(summary: dict[str, Any]) -> Table:
    """Return the end of the run, for a person."""
    table = Table(title="what the run did", show_header=False)
    evaluation = summary["eval"]
    if evaluation["before"] is not None:
        table.add_row("held-out solve rate before", f"{evaluation['before']:.3f}")
    if evaluation["after"] is not None:
        gain = f" ({evaluation['after'] - evaluation['before']:+.3f})" if evaluation["before"] is not None else ""
        table.add_row("held-out solve rate after", f"{evaluation['after']:.3f}{gain}")
    if summary["warm_start"]:
        table.add_row("warm start", _warm_start_words(summary))
    table.add_row("optimizer steps", str(summary["steps"]))
    table.add_row("time, training / in all", f"{summary['training_seconds']:.0f} / {summary['wall_seconds']:.0f} s")
    table.add_row("tokens generated / trained on", f"{summary['tokens_generated']} / {summary['tokens_trained']}")
    table.add_row("largest staleness trained on", f"{summary['max_staleness_trained']} optimizer steps")
    table.add_row("largest importance ratio", f"{summary['max_importance_ratio']:.2f}")
    table.add_row("weight syncs, verified", f"{summary['weight_syncs']}, {summary['weight_syncs_verified']}")
    table.add_row("generation stalled by syncs", f"{summary['generation_stall_seconds']:.1f} s")
    ended = ", ".join(f"{status} {count}" for status, count in sorted(summary["trajectories"].items()))
    table.add_row("episodes", ended)
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(summary["groups_dropped"].items()))
    table.add_row("groups trained on / dropped", f"{summary['groups_trained']} / {dropped or 'none'}")
    return table


def _warm_start_words(summary: dict[str, Any]) -> str:
    done = summary["warm_start"]
    words = f"{done['steps']:.0f} steps, {done['tokens']:.0f} tokens"
    if "held_out_perplexity_before" in done and "held_out_perplexity_after" in done:
        words += f", perplexity {done['held_out_perplexity_before']:.3f} to {done['held_out_perplexity_after']:.3f}"
    if summary["eval"]["after_warm_start"] is not None:
        words += f", then {summary['eval']['after_warm_start']:.3f} solved"
    return words
