"""The real parts of a run: vLLM servers, learner process, sandboxes and environment, started and ended together.

Every child runs under a keeper (`asyncrl.children`), so that none outlives the run. A child that dies is named with its
last lines. The learner's death ends the run; an engine is started again as often as its settings say.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import trio

from asyncrl import wire
from asyncrl.checkpoint import Checkpoint
from asyncrl.children import Watched
from asyncrl.colocation import SharedCard
from asyncrl.configs import Config, to_table
from asyncrl.curriculum import with_curriculum
from asyncrl.engine_processes import NoEngines, engine_clients, engine_starts, make_pool, model_to_serve
from asyncrl.engines import Canary, EnginePool
from asyncrl.environments import load_environment
from asyncrl.environments.latency import with_latency
from asyncrl.errors import BoundaryError, ConfigError, LearnerError, SandboxError
from asyncrl.hosts import Here, Hosts
from asyncrl.learner_processes import SHUTDOWN_S
from asyncrl.metering import MeteredBackend
from asyncrl.protocols import PLAIN_STEP, Environment, RunsAlongside, Sampler, SandboxBackend, StepOptions, StepResult
from asyncrl.roles import Rendezvous
from asyncrl.run import Parts
from asyncrl.run_directory import RunDirectory
from asyncrl.run_gateway import serve_gateway, wants_gateway
from asyncrl.run_roles import guests_environment, guests_sandboxes, open_roles, take_later_engines
from asyncrl.sandbox import abuse_names, open_backend, self_test
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Group, PolicyVersion, Segment, WeightManifest
from asyncrl.waiting import Queue
from asyncrl.weight_sync.stale import SHARED_MEMORY_DIRECTORY, remove_stale

_DEATH_SEEN_S = 3.0  # from a child's death to its keeper's end: the keeper ends the child's family first


class LearnerProcess:
    """The orchestrator's side of the learner's socket. A `Learner`; one request at a time."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        child: Watched | None,
        *,
        publish_timeout_s: float = math.inf,
        place: str = "which was started by hand",
    ) -> None:
        """`child` is the process at the other end; where somebody else started it, None, and `place` says who."""
        self._stream = stream
        self._reader = wire.Reader(stream)
        self._child = child
        self._place = place
        self._publish_timeout_s = publish_timeout_s
        self.canary_logprobs: Sequence[float] = ()
        """What it makes of the canary's text under the weights that it began with."""
        self.computes_on = ""
        """Its device and attention, in words."""
        self._turn = trio.Lock()

    async def wait_ready(self, version: PolicyVersion) -> None:
        """Return once the learner has loaded the model. Raises: LearnerError when it is at another version."""
        hello: wire.Hello = await self._receive(wire.Hello)
        if hello.version != version:
            raise LearnerError(f"the learner began at version {hello.version} and the checkpoint is at {version}")
        self.canary_logprobs = hello.canary_logprobs
        self.computes_on = f"{hello.device}, attention by {hello.attention}"

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """See `protocols.Learner`."""
        request = wire.StepRequest(groups=list(groups), options=options)
        reply: wire.StepReply = await self._ask(request, wire.StepReply)
        return reply.result

    async def supervised_step(self, segments: Sequence[Segment], *, learning_rate: float) -> StepResult:
        """See `protocols.Learner`."""
        request = wire.SupervisedStepRequest(segments=list(segments), learning_rate=learning_rate)
        reply: wire.StepReply = await self._ask(request, wire.StepReply)
        return reply.result

    async def supervised_loss(self, segments: Sequence[Segment]) -> float:
        """See `protocols.Learner`."""
        request = wire.SupervisedLossRequest(segments=list(segments))
        reply: wire.SupervisedLossReply = await self._ask(request, wire.SupervisedLossReply)
        return reply.loss

    async def publish(self, *, keep: Collection[PolicyVersion] = ()) -> WeightManifest:
        """See `protocols.Learner`."""
        with trio.move_on_after(self._publish_timeout_s):
            reply: wire.PublishReply = await self._ask(wire.PublishRequest(keep=[*keep]), wire.PublishReply)
            return reply.manifest
        raise LearnerError(
            f"the learner has not published its weights in {self._publish_timeout_s:g} s "
            "([weight_sync] publish_timeout_s)"
        )

    async def save(self, directory: str) -> Mapping[str, int]:
        """See `protocols.Learner`."""
        request = wire.SaveRequest(directory=str(Path(directory).absolute()))
        reply: wire.SaveReply = await self._ask(request, wire.SaveReply)
        return reply.files

    async def shut_down(self) -> None:
        """Let the learner remove what it published and end, within a bounded time."""
        with trio.move_on_after(SHUTDOWN_S, shield=True):
            try:
                await self._ask(wire.ShutdownRequest(), wire.ShutdownReply)
            except LearnerError:
                return  # it is gone already; its keeper removes what it published

    async def _ask(self, request: wire.Message, kind: type[wire.Message]) -> Any:
        async with self._turn:
            try:
                await wire.send_async(self._stream, request)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self._fail()
            return await self._receive(kind)

    async def _fail(self) -> NoReturn:
        """Say how the learner ended: its connection closes a moment before its keeper has seen the end."""
        if self._child is None:
            raise LearnerError(f"the learner, {self._place}, closed its connection: see its own output")
        with trio.move_on_after(SHUTDOWN_S):
            raise LearnerError((await self._child.wait_exit()).describe())
        raise LearnerError(f"the learner closed its connection and did not end within {SHUTDOWN_S:.0f} s")

    async def _receive(self, kind: type[wire.Message]) -> Any:
        try:
            reply = await self._reader.receive(wire.Reply)
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            reply = None
        if reply is None:
            await self._fail()
        if isinstance(reply, wire.Failure):
            raise LearnerError(f"the learner failed: {reply.kind}: {reply.message}")
        assert isinstance(reply, kind), f"expected {kind.__name__}, got {reply!r}"
        return reply


@asynccontextmanager
async def open_parts(
    config: Config,
    directory: RunDirectory,
    renderer: ChatRenderer,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
    note_sandbox: Callable[[str, str, float, str], None] | None = None,
    hosts: Hosts | None = None,
) -> AsyncIterator[Parts]:
    """Start everything, yield it when it answers, and end everything on leaving.

    `say` hears what is being started, `note_sandbox` what happens in sandboxes (`MeteredBackend`). `hosts` starts the
    processes, which are on this machine without it.
    Raises (in an exception group) EngineError, LearnerError, SandboxError.
    """
    version = checkpoint.version if checkpoint else 0
    model, served = model_to_serve(config, checkpoint)
    for path in remove_stale():
        say(f"removed {path}, left by a run that was killed")
    run_id = f"{re.sub('[^A-Za-z0-9_.]', '_', directory.path.name)[:60]}-{secrets.token_hex(4)}"
    canary = Canary.of(renderer) if config.samples and config.weight_sync.canary else None
    job = _learner_job(config, checkpoint, run_id, canary)
    hosts = hosts or Here(config)
    async with AsyncExitStack() as stack:
        children: dict[Watched, type[BoundaryError]] = {}
        roles = await stack.enter_async_context(open_roles(config, directory, job, say))
        played, sandboxes = await _open_environment(config, hosts, directory, renderer, stack, say, note_sandbox, roles)
        environment = with_curriculum(
            played, config.curriculum, seed=config.run.seed, group_size=config.buffer.group_size
        )
        environment = with_latency(environment, config.environment.latency, seed=config.run.seed)
        say("starting the engine and the learner" if config.samples else "starting the learner")
        token = hosts.engine_token
        make_engine = engine_clients(config, renderer, run_id, version, canary, token)
        engines = {guest.name: guest.url for guest in roles.guests("engine")} if roles else {}
        pool = make_pool(config, make_engine, engines) if config.samples else NoEngines()
        stack.push_async_callback(pool.aclose)
        learner = await _start_learner(config, hosts, directory, job, stack, children, say, roles)
        async with _watched(children), trio.open_nursery() as services:
            if config.engine.colocated:  # it must be off the card before an engine measures what is free
                await learner.wait_ready(version)
                _check_card(learner.computes_on)
            async with trio.open_nursery() as starting:
                starts = hosts.engine_starts(directory, model, served)
                starting.start_soon(services.start, partial(pool.serve, starts, say=say))
                if not config.engine.colocated:
                    starting.start_soon(learner.wait_ready, version)
            card = SharedCard(learner, pool) if config.engine.colocated else None
            say(f"the learner computes on {learner.computes_on}")
            if config.samples and (config.engines_elsewhere or served != version):  # they hold something else
                await (card or pool).pull_all(await (card or learner).publish())
            if canary is not None and isinstance(pool, EnginePool):
                await pool.learn_canary(canary, learner.canary_logprobs)
            if engines and roles and isinstance(pool, EnginePool):
                later = partial(take_later_engines, known=list(engines), say=say)
                services.start_soon(later, roles, pool, make_engine)
            queues: dict[str, Queue] = {"sandboxes": sandboxes} if sandboxes else {}
            if isinstance(pool, EnginePool):
                queues = {"engines": pool, **queues}
            if isinstance(pool, EnginePool) and wants_gateway(config, played):
                added = engine_clients(config, renderer, run_id, 0, canary, token)
                queues["gateway"] = await services.start(
                    partial(serve_gateway, config, directory.path, renderer, played, pool, added, say=say)
                )
            yield Parts(
                environment=environment,
                sampler=pool,
                learner=card or learner,
                engines=card or pool,
                queues=queues,
                quarantines=pool.count_quarantines,
            )
            services.cancel_scope.cancel()
        await learner.shut_down()


def _check_card(computes_on: str) -> None:
    """Raise ConfigError unless the learner computes on a GPU, which engines can have meanwhile."""
    if not computes_on.startswith("cuda"):
        raise ConfigError(
            f"colocated = true ([engine]) shares a GPU, and the learner computes on {computes_on}: set it to false"
        )


@asynccontextmanager
async def open_evaluation(
    config: Config, directory: RunDirectory, renderer: ChatRenderer, model: Path, say: Callable[[str], None]
) -> AsyncIterator[tuple[Environment, Sampler]]:
    """Start the environment and the engines, which serve `model`, and no learner; end them on leaving."""
    async with AsyncExitStack() as stack:
        environment, _ = await _open_environment(config, Here(config), directory, renderer, stack, say)
        say("starting the engine")
        make_engine = engine_clients(config, renderer, "evaluation", 0)
        pool = make_pool(config, make_engine)
        stack.push_async_callback(pool.aclose)
        async with trio.open_nursery() as services:
            await services.start(partial(pool.serve, engine_starts(config, directory, model, 0), say=say))
            if wants_gateway(config, environment):
                await services.start(
                    partial(serve_gateway, config, directory.path, renderer, environment, pool, make_engine, say=say)
                )
            yield environment, pool
            services.cancel_scope.cancel()


@asynccontextmanager
async def open_tasks(config: Config) -> AsyncIterator[tuple[Any, ChatRenderer, SandboxBackend]]:
    """Yield an environment whose tasks can be listed, its renderer and its sandboxes, without any engine."""
    renderer = ChatRenderer.load(config.model.path)
    with tempfile.TemporaryDirectory(prefix="asyncrl-tasks-") as scratch:
        async with open_backend(config.sandbox, directory=Path(scratch)) as sandboxes:
            environment = load_environment(
                config.environment, renderer=renderer, sandboxes=sandboxes, seed=config.run.seed
            )
            try:
                if not hasattr(environment, "all_tasks"):
                    raise ConfigError(
                        f"environment {config.environment.name!r} has no all_tasks() that lists its tasks"
                    )
                yield environment, config.environment.chat.rendering(renderer), sandboxes
            finally:
                await environment.aclose()


@asynccontextmanager
async def _watched(children: Mapping[Watched, type[BoundaryError]]) -> AsyncIterator[None]:
    """End the body with an error that names the child when one of `children` ends before the body does."""
    async with trio.open_nursery() as watchers:
        for child, error in children.items():
            watchers.start_soon(child.fail_on_exit, error)
        try:
            yield
        except (BoundaryError, BaseExceptionGroup):
            with trio.move_on_after(_DEATH_SEEN_S):  # a dead child's closed port is noticed before its end is
                await trio.sleep_forever()
            raise
        watchers.cancel_scope.cancel()


async def _open_environment(
    config: Config,
    hosts: Hosts,
    directory: RunDirectory,
    renderer: ChatRenderer,
    stack: AsyncExitStack,
    say: Callable[[str], None],
    note_sandbox: Callable[[str, str, float, str], None] | None = None,
    roles: Rendezvous | None = None,
) -> tuple[Environment, MeteredBackend | None]:
    """Return the environment and its sandboxes, whose walls have been tested; what they do from now on is counted.

    One that guests play has its sandboxes where they are.
    """
    if roles is not None and config.roles.environments:
        return await _run_alongside(guests_environment(config, roles, renderer), directory, stack, say), None
    say("starting the sandboxes and testing their walls")
    opening = hosts.open_sandboxes(directory.path / "sandboxes")
    if roles is not None and config.roles.sandboxes:
        opening = guests_sandboxes(config, roles)
    sandboxes = await stack.enter_async_context(opening)
    reached = [abuse for abuse in await self_test(sandboxes, only=abuse_names(main_only=True)) if not abuse.stopped]
    if reached:
        raise SandboxError(
            "the sandbox does not stop what it must, so nothing is trained in it: "
            + "; ".join(f"{abuse.name} ({abuse.detail})" for abuse in reached)
        )
    metered = MeteredBackend(sandboxes, note_sandbox)
    environment = hosts.load_environment(renderer, metered)
    return await _run_alongside(environment, directory, stack, say), metered


async def _run_alongside(
    environment: Environment, directory: RunDirectory, stack: AsyncExitStack, say: Callable[[str], None]
) -> Environment:
    """Return the environment, which `stack` closes, once it has been reached where it must be."""
    stack.push_async_callback(environment.aclose)
    if isinstance(environment, RunsAlongside):
        say("reaching the environment")
        alongside = await stack.enter_async_context(trio.open_nursery())
        stack.callback(alongside.cancel_scope.cancel)
        await alongside.start(environment.serve, directory.logs)
    return environment


def _learner_job(config: Config, checkpoint: Checkpoint | None, run_id: str, canary: Canary | None) -> dict[str, Any]:
    """Return what the learner is told, with paths that hold in any working directory."""
    weight_sync = to_table(config.weight_sync)
    if config.weight_sync.directory != Path(""):
        weight_sync["directory"] = str(config.weight_sync.directory.absolute())
    return {
        "model": str(config.model.path.absolute()),
        "run_id": run_id,
        "resume_from": str(checkpoint.directory.absolute()) if checkpoint else "",
        "seed": config.run.seed,
        "temperature": config.sampling.temperature,
        "max_off_policyness": config.buffer.max_off_policyness,
        "colocated": config.engine.colocated,
        "canary": list(canary.token_ids) if canary else [],
        "weight_sync": weight_sync,
        "learner": to_table(config.learner),
    }


async def _start_learner(
    config: Config,
    hosts: Hosts,
    directory: RunDirectory,
    job: Mapping[str, Any],
    stack: AsyncExitStack,
    children: dict[Watched, type[BoundaryError]],
    say: Callable[[str], None],
    roles: Rendezvous | None,
) -> LearnerProcess:
    """Start the learner's processes, or wait for them. They do not answer yet."""
    if roles is not None and config.roles.learner:
        (guest,) = roles.guests("learner")
        channel = await stack.enter_async_context(guest.channel())
        return LearnerProcess(
            channel,
            None,
            publish_timeout_s=config.weight_sync.publish_timeout_s,
            place=f"{guest.name} at {guest.hello.host}",
        )
    run_id = job["run_id"]
    settings_path = directory.logs / "learner.json"
    settings_path.write_text(json.dumps(job, indent=2), encoding="utf-8")
    place = config.weight_sync.directory if config.weight_sync.transport == "filesystem" else SHARED_MEMORY_DIRECTORY
    processes, ours = await hosts.start_learner(
        settings_path,
        run_id=run_id,
        published=[f"{place}/asyncrl-{run_id}-*", f"{place}/asyncrl-{run_id}.lock"],
        stack=stack,
        say=say,
    )
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    stack.push_async_callback(stream.aclose)
    children |= dict.fromkeys(processes, LearnerError)
    first = processes[0] if processes else None
    return LearnerProcess(stream, first, publish_timeout_s=config.weight_sync.publish_timeout_s)
