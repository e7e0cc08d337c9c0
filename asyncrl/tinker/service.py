"""The service: sessions of clients, their models and samplers, and what is asked of these. Knows no HTTP.

A model is named by its session and its number in it, so that making it twice makes it once. What is asked of a model
goes through its `Line`; what is asked of a sampler, whose weights never change, is carried out as it comes.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import trio

from asyncrl.errors import ConfigError, EngineError
from asyncrl.gateway.http import Refused
from asyncrl.tinker.futures import Future, Futures, FutureStatistics
from asyncrl.tinker.holder import Holder
from asyncrl.tinker.line import Line, digest_of
from asyncrl.tinker.orders import (
    AdapterShape,
    CreateOrder,
    LoadOrder,
    Order,
    PassOrder,
    Refusal,
    Result,
    SampleOrder,
    SaveOrder,
    StateReply,
    StepOrder,
    UnloadOrder,
)
from asyncrl.tinker.settings import TinkerSettings
from asyncrl.tinker.shelf import SAMPLER, TRAINING, Saved, Shelf

_MIB = 2**20


class Sampler(Protocol):
    """Carries out sampling orders. The process of the models does, or an engine."""

    async def sample(self, order: SampleOrder) -> Result:
        """Return the completions, or why there are none."""
        ...


@dataclass(slots=True, kw_only=True)
class Model:
    """A model that clients train."""

    line: Line
    shape: AdapterShape | None = None
    """None until it is there."""
    snapshots: deque[Saved] = field(default_factory=deque)


@dataclass(slots=True, kw_only=True)
class SamplerWeights:
    """What a sampler samples from, for good."""

    saved: Saved | None
    """None samples from the base."""
    ended: str = ""


@dataclass(slots=True, kw_only=True)
class Session:
    """One client's."""

    deadline: float
    models: dict[str, Model] = field(default_factory=dict)
    samplers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerStatistics:
    """What the service does and has done."""

    sessions: int
    models: int
    samplers: int
    sampling: int
    sessions_ended: int
    requests: dict[str, int]
    """By verb; a repetition counts once."""
    futures: FutureStatistics


class TinkerService:
    """Sessions, models and samplers on one base. `serve` must run while it is asked."""

    def __init__(
        self, holder: Holder, shelf: Shelf, settings: TinkerSettings, *, base_names: tuple[str, ...], sampler: Sampler
    ) -> None:
        """`base_names` are what clients may call the base; the first is what it is called in answers."""
        self.settings = settings
        self.base_names = base_names
        self.ready = holder.ready
        self.shelf = shelf
        self.futures = Futures(int(settings.max_results_mib * _MIB))
        self._holder = holder
        self._sampler = sampler
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplerWeights] = {}
        self._sampling = 0
        self._ended = 0
        self._requests: Counter[str] = Counter()
        self._nursery: trio.Nursery

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry out what is asked until cancelled. Raises: LearnerError when the process of the models ends."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    # --- sessions ---------------------------------------------------------------------------------------------

    def open_session(self) -> str:
        """Return the id of a new session; nobody can guess it."""
        session_id = f"session-{secrets.token_hex(16)}"
        self._sessions[session_id] = Session(deadline=self._deadline())
        self._nursery.start_soon(self._end_when_silent, session_id)
        return session_id

    def hear(self, session_id: str) -> Session:
        """Return a session, whose client has just been heard of. Raises: Refused where there is none."""
        session = self._sessions.get(session_id)
        if session is None:
            raise Refused(410, f"there is no session {session_id[:80]}: it ended, or the service was started again")
        session.deadline = self._deadline()
        return session

    def _deadline(self) -> float:
        return trio.current_time() + self.settings.session_timeout_s

    async def _end_when_silent(self, session_id: str) -> None:
        session = self._sessions[session_id]
        while trio.current_time() < session.deadline:  # noqa: ASYNC110  (it moves meanwhile)
            await trio.sleep_until(session.deadline)
        del self._sessions[session_id]
        self._ended += 1
        why = f"its session has not been heard of for {self.settings.session_timeout_s:g} s (session_timeout_s)"
        for model_id in list(session.models):
            self._end_model(model_id, why)
        for sampler_id in session.samplers:
            self._samplers.pop(sampler_id, None)

    def _end_model(self, model_id: str, why: str) -> None:
        model = self._models.get(model_id)
        if model is not None:
            model.line.end(why, partial(self._unload, model_id))

    async def _unload(self, model_id: str) -> None:
        await self._holder.ask(UnloadOrder(model=model_id))  # is refused where it was never made
        model = self._models.pop(model_id)
        for saved in model.snapshots:
            self._drop_snapshot(saved)

    # --- models -----------------------------------------------------------------------------------------------

    def create(
        self, session_id: str, number: int, *, shape: AdapterShape | None, seed: int | None, saved_as: str = "",
        optimizer: bool = False,
    ) -> str:  # fmt: skip
        """Return the future of a session's new model, made anew or of what is saved under a path."""
        session = self.hear(session_id)
        model_id = f"{session_id}:train:{number}"
        order: Order
        fault = ""
        if shape is not None:
            order = CreateOrder(model=model_id, shape=shape, seed=seed)
        else:
            directory, fault = self._directory_of(saved_as)
            order = LoadOrder(model=model_id, directory=directory, optimizer=optimizer)
        model = session.models.get(model_id)
        if model is None:
            if len(self._models) >= self.settings.max_models:
                raise Refused(
                    403,
                    f"the service has {len(self._models)} models (max_models): unload one, or let a session end",
                    code="too_many_models",
                )
            line = Line(
                model_id,
                self.futures,
                max_waiting=self.settings.max_waiting,
                gap_timeout_s=self.settings.gap_timeout_s,
            )
            model = session.models[model_id] = self._models[model_id] = Model(line=line)
            self._nursery.start_soon(line.serve)
        return self._submit(model, 0, "create", order, fault, partial(self._made, model))

    async def _made(self, model: Model, result: Result) -> None:
        if isinstance(result, StateReply):
            model.shape = result.shape

    def model(self, model_id: str) -> Model:
        """Return a model, whose client has just been heard of. Raises: Refused where there is none."""
        session = self._sessions.get(model_id.partition(":")[0])
        if session is not None:
            session.deadline = self._deadline()
        if model_id not in self._models:
            raise Refused(
                404,
                f"there is no model {model_id[:120]}: it was unloaded, its session ended, or the service was started "
                "again; a saved state can be loaded into a new one",
            )
        return self._models[model_id]

    def run_pass(self, order: PassOrder, number: int, fault: str = "") -> str:
        """Return the future of a pass; `fault` is what is wrong with its data already."""
        tokens = sum(len(row.token_ids) for row in order.rows)
        if fault:
            pass
        elif not order.rows:
            fault = "data is empty"
        elif tokens > self.settings.max_tokens:
            fault = f"the request has {tokens} tokens, at most {self.settings.max_tokens} are allowed (max_tokens)"
        return self._submit(
            self.model(order.model), number, "forward_backward" if order.backward else "forward", order, fault
        )

    def step(self, order: StepOrder, number: int, fault: str = "") -> str:
        """Return the future of an optimizer step."""
        return self._submit(self.model(order.model), number, "optim_step", order, fault)

    def save(
        self, model_id: str, number: int, kind: str, name: str, *, overwrite: bool, fault: str = ""
    ) -> tuple[str, Saved | None]:
        """Return the future of a model saved under a name, to train on or to sample from, and where it will be."""
        return self._save(model_id, number, kind, name, overwrite=overwrite, fault=fault)

    def _save(
        self, model_id: str, number: int, kind: str, name: str, *, overwrite: bool, fault: str = "",
        then: Callable[[Result], Awaitable[None]] | None = None,
    ) -> tuple[str, Saved | None]:  # fmt: skip
        model, saved = self.model(model_id), None
        try:
            saved = self.shelf.place(model_id, kind, name)
        except ConfigError as error:
            fault = fault or str(error)
        directory = "" if saved is None else str(saved.directory)
        order = SaveOrder(model=model_id, directory=directory, optimizer=kind == TRAINING, overwrite=overwrite)
        return self._submit(model, number, "save", order, fault, then), saved

    def snapshot(self, model_id: str, number: int, sampler_number: int) -> tuple[str, str]:
        """Return the future of unnamed weights, and the id of the sampler that will sample from them."""
        model = self.model(model_id)
        session_id = model_id.partition(":")[0]
        sampler_id = f"{session_id}:sample:{sampler_number}"

        async def open_sampler(result: Result) -> None:
            if not isinstance(result, Refusal):
                assert saved is not None
                self._samplers[sampler_id] = SamplerWeights(saved=saved)
                if session_id in self._sessions:
                    self._sessions[session_id].samplers.add(sampler_id)
                model.snapshots.append(saved)
                if len(model.snapshots) > self.settings.max_snapshots:
                    self._drop_snapshot(model.snapshots.popleft())

        request_id, saved = self._save(
            model_id, number, SAMPLER, f"snapshot-{sampler_number}", overwrite=True, then=open_sampler
        )
        return request_id, sampler_id

    def _drop_snapshot(self, saved: Saved) -> None:
        for weights in self._samplers.values():
            if weights.saved == saved:
                weights.ended = (
                    f"its weights are no longer kept: {self.settings.max_snapshots} newer ones were saved "
                    "(max_snapshots), or its model ended; save_weights_for_sampler with a name keeps them"
                )
        self.shelf.remove(saved)

    def load(self, model_id: str, number: int, path: str, *, optimizer: bool) -> str:
        """Return the future of a model that goes on from what is saved under a path."""
        directory, fault = self._directory_of(path)
        order = LoadOrder(model=model_id, directory=directory, optimizer=optimizer)
        return self._submit(self.model(model_id), number, "load", order, fault)

    def unload(self, model_id: str) -> None:
        """End a model after what is under way; what waits fails."""
        self.model(model_id)
        self._end_model(model_id, "it was unloaded")

    def _directory_of(self, path: str) -> tuple[str, str]:
        """Return where a path leads, or what is wrong with it; whether something is there is seen in turn."""
        try:
            return str(self.shelf.parse(path).directory), ""
        except ConfigError as error:
            return "", str(error)

    def _submit(
        self,
        model: Model,
        number: int,
        verb: str,
        order: Order,
        fault: str = "",
        then: Callable[[Result], Awaitable[None]] | None = None,
    ) -> str:
        """Put an order into a model's line. One that is at fault is a result too, so that the next ones have no gap."""

        async def carry() -> Result:
            self._requests[verb] += 1
            result = Refusal(message=fault, by_user=True) if fault else await self._holder.ask(order)
            if then is not None:
                await then(result)
            return result

        return model.line.submit(number, digest_of(order), carry)

    # --- samplers ---------------------------------------------------------------------------------------------

    def open_sampler(self, session_id: str, number: int, path: str | None) -> str:
        """Return the id of a sampler of saved weights, or of the base. Raises: Refused."""
        session = self.hear(session_id)
        sampler_id = f"{session_id}:sample:{number}"
        if sampler_id not in self._samplers:
            self._samplers[sampler_id] = SamplerWeights(saved=self.saved(path) if path else None)
            session.samplers.add(sampler_id)
        return sampler_id

    def sampler(self, sampler_id: str) -> SamplerWeights:
        """Return a sampler. Raises: Refused where there is none."""
        session = self._sessions.get(sampler_id.partition(":")[0])
        if session is not None:
            session.deadline = self._deadline()
        if sampler_id not in self._samplers:
            raise Refused(
                404, f"there is no sampler {sampler_id[:120]}: its session ended, or the service was started again"
            )
        return self._samplers[sampler_id]

    def saved(self, path: str) -> Saved:
        """Return what is saved under a path. Raises: Refused."""
        try:
            return self.shelf.find(path)
        except ConfigError as error:
            raise Refused(404, str(error)) from None

    def sample(self, weights: SamplerWeights, order: SampleOrder, request_id: str) -> None:
        """Begin to sample, for a future of this id. Raises: Refused where too much is being sampled."""
        if self.futures.get(request_id) is not None:
            return
        if self._sampling >= self.settings.max_waiting:
            raise Refused(429, f"{self._sampling} sampling requests are under way (max_waiting)", retry_after_s=1)
        self._nursery.start_soon(self._sample, weights, order, self.futures.open(request_id))

    async def _sample(self, weights: SamplerWeights, order: SampleOrder, future: Future) -> None:
        self._requests["sample"] += 1
        self._sampling += 1
        fault = weights.ended or self._sampling_fault(order)
        result: Result
        if fault:
            result = Refusal(message=fault, by_user=True)
        else:
            try:
                result = await self._sampler.sample(order)
            except EngineError as error:  # it may be there again for the next one
                result = Refusal(message=str(error), by_user=False)
        self._sampling -= 1
        self.futures.settle(future, result)

    def _sampling_fault(self, order: SampleOrder) -> str:
        prompt, most, limit = len(order.prompt), order.max_tokens * order.num_samples, self.settings.max_tokens
        if not prompt or order.num_samples < 1 or order.max_tokens < 1:
            return "a prompt of at least one token, num_samples >= 1 and max_tokens >= 1 are needed"
        if prompt + order.max_tokens > self.ready.max_positions:
            return f"{prompt} + {order.max_tokens} tokens are more than the base reads ({self.ready.max_positions})"
        if prompt + most > limit:
            return f"{prompt} + {most} tokens are more than a request may have ({limit}, max_tokens)"
        if min(order.prompt) < 0 or max(order.prompt) >= self.ready.vocab_size:
            return f"a prompt must hold tokens from 0 to {self.ready.vocab_size - 1}"
        if not (0 <= order.temperature < 1e3 and 0 < order.top_p <= 1):
            return f"temperature must be >= 0 and top_p in (0, 1], got {order.temperature:g} and {order.top_p:g}"
        return ""

    def statistics(self) -> TinkerStatistics:
        """Return the present counts."""
        return TinkerStatistics(
            sessions=len(self._sessions),
            models=len(self._models),
            samplers=len(self._samplers),
            sampling=self._sampling,
            sessions_ended=self._ended,
            requests=dict(self._requests),
            futures=self.futures.statistics(),
        )


class HolderSampler:
    """Samples in the process of the models, between what trains there."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    async def sample(self, order: SampleOrder) -> Any:
        """See `Sampler`. Raises: LearnerError when the process ends."""
        return await self._holder.ask(order)
