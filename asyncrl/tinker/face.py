"""The service over HTTP, by the routes of Tinker's SDK: JSON, and protobuf where the SDK has nothing else.

Every request carries the token, as `X-API-Key` or as a bearer; the SDK wants keys that begin with "tml-", so the token
may stand behind that. A request whose number can be read becomes a future even if the rest of it is at fault: its
result says so, and those after it do not wait for it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import trio

from asyncrl.gateway.http import Answer, Refused, Request, Route, Routes, json_answer
from asyncrl.gateway.server import HTTPServer
from asyncrl.tinker import bodies, passages
from asyncrl.tinker.orders import AdapterShape, PassReply, Refusal, SampleReply
from asyncrl.tinker.protobuf import CONTENT_TYPE, Protobuf
from asyncrl.tinker.service import SamplerWeights, TinkerService
from asyncrl.tinker.shelf import SAMPLER, TRAINING

_PREFIX = "tml-"
_T = TypeVar("_T")
_REMEMBERED = 65_536  # futures whose path or sampler is known by their id


class Face:
    """Answers requests with a service."""

    def __init__(self, service: TinkerService, token: str) -> None:
        self._service = service
        self._token = token.removeprefix(_PREFIX).encode()
        self._protobuf = Protobuf()
        self._said: dict[str, dict[str, Any]] = {}
        """By request id: what belongs to a result beside what the process of the models finds."""

    async def serve(
        self, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer requests until cancelled; takes the socket over."""
        await HTTPServer(Routes(self.routes()).answer).serve(listener, task_status=task_status)

    def routes(self) -> list[Route]:
        """Return all routes."""
        v1 = "/api/v1"
        posts: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "forward": self._pass,
            "forward_backward": self._pass,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        gets: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "training_runs/{model}/checkpoints": self._checkpoints,
            "checkpoints": self._checkpoints,
            "samplers/{sampler}": self._get_sampler,
            "statistics": self._statistics,
        }
        open_to_all = {"healthz"}
        return [
            Route(
                method=method,
                path=f"{v1}/{path}",
                handler=handler if path in open_to_all else self._for_those_with_the_token(handler),
                error_body=_error,
            )
            for method, table in (("POST", posts), ("GET", gets))
            for path, handler in table.items()
        ]

    def _for_those_with_the_token(
        self, handler: Callable[[Request], Awaitable[Answer]]
    ) -> Callable[[Request], Awaitable[Answer]]:
        async def answer(request: Request) -> Answer:
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.removeprefix(_PREFIX).encode(), self._token):
                raise Refused(401, "the token in X-API-Key is not the service's")
            return await handler(request)

        return answer

    async def _body(self, request: Request, kind: type[_T]) -> _T:
        data = await self._bytes(request)
        try:
            return msgspec.json.decode(data or b"{}", type=kind)
        except msgspec.MsgspecError as error:
            raise Refused(400, f"the body of {request.path} is not what it should be: {error}") from None

    async def _bytes(self, request: Request) -> bytes:
        settings = self._service.settings
        return await request.body(max_bytes=int(settings.max_body_mib * 2**20), timeout_s=settings.body_timeout_s)

    # --- the service as a whole -------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Answer:
        return json_answer({"status": "ok"})

    async def _client_config(self, request: Request) -> Answer:
        await self._bytes(request)
        # One chunk of a pass stays well below the limits on a body.
        most = int(self._service.settings.max_body_mib * 2**20 / 4)
        return json_answer({"pjwt_auth_enabled": False, "fwdbwd_max_chunk_bytes_count": most})

    async def _dynamic_config(self, request: Request) -> Answer:
        await self._bytes(request)
        return json_answer({})

    async def _telemetry(self, request: Request) -> Answer:
        await self._bytes(request)  # is kept nowhere
        return json_answer({"status": "accepted"})

    async def _capabilities(self, request: Request) -> Answer:
        model = {
            "model_name": self._service.base_names[0],
            "max_context_length": self._service.ready.max_positions,
            "trainable": True,
            "sampleable": True,
        }
        return json_answer({"supported_models": [model]})

    async def _statistics(self, request: Request) -> Answer:
        return json_answer(asdict(self._service.statistics()))

    async def _create_session(self, request: Request) -> Answer:
        await self._bytes(request)
        return json_answer({"type": "create_session", "session_id": self._service.open_session()})

    async def _heartbeat(self, request: Request) -> Answer:
        body = await self._body(request, bodies.SessionBody)
        self._service.hear(body.session_id)
        return json_answer({"type": "session_heartbeat"})

    # --- models -----------------------------------------------------------------------------------------------

    async def _create_model(self, request: Request) -> Answer:
        body = await self._body(request, bodies.CreateBody)
        self._check_base(body.base_model)
        passages.check_optimizer(body.optimizer_config)
        if body.lora_config is None:
            raise Refused(400, "lora_config is missing: every model here is a LoRA adapter on the base")
        lora = body.lora_config
        shape = AdapterShape(rank=lora.rank, attention=lora.train_attn, mlp=lora.train_mlp, unembed=lora.train_unembed)
        request_id = self._service.create(body.session_id, body.model_seq_id, shape=shape, seed=lora.seed)
        return self._future(request_id, {"type": "create_model", "model_id": request_id.rpartition(":")[0]})

    def _check_base(self, name: str) -> None:
        names = self._service.base_names
        if name not in names:
            raise Refused(404, f"base_model must be {' or '.join(names)}, got {name[:200]!r}")

    async def _get_info(self, request: Request) -> Answer:
        body = await self._body(request, bodies.ModelBody)
        model, base = self._service.model(body.model_id), self._service.base_names
        rank = None if model.shape is None else model.shape.rank
        data = {"model_name": base[0], "tokenizer_id": base[-1], "arch": None}
        return json_answer(
            {"type": "get_info", "model_data": data, "model_id": body.model_id, "is_lora": True, "lora_rank": rank,
             "model_name": base[0]}
        )  # fmt: skip

    async def _unload_model(self, request: Request) -> Answer:
        body = await self._body(request, bodies.ModelBody)
        self._service.unload(body.model_id)
        return json_answer({"type": "unload_model", "model_id": body.model_id})

    async def _pass(self, request: Request) -> Answer:
        if request.headers.get("content-type", "").startswith(CONTENT_TYPE):
            order, number, fault = self._protobuf.read_pass(await self._bytes(request))
        else:
            body = await self._body(request, bodies.PassBody)
            order, number, fault = passages.pass_of(body, backward=request.path.endswith("forward_backward"))
        return self._future(self._service.run_pass(order, number, fault), {})

    async def _optim_step(self, request: Request) -> Answer:
        body = await self._body(request, bodies.StepBody)
        order, fault = passages.step_of(body)
        return self._future(self._service.step(order, body.seq_id, fault), {})

    async def _save_weights(self, request: Request) -> Answer:
        body = await self._body(request, bodies.SaveBody)
        fault = passages.lifetime_fault(body.ttl_seconds)
        name = body.path or f"state-{body.seq_id}"
        request_id, saved = self._service.save(
            body.model_id, body.seq_id, TRAINING, name, overwrite=body.overwrite, fault=fault
        )
        return self._future(request_id, {"type": "save_weights", "path": None if saved is None else saved.path})

    async def _save_for_sampler(self, request: Request) -> Answer:
        body = await self._body(request, bodies.SaveForSamplerBody)
        kind = {"type": "save_weights_for_sampler"}
        fault = passages.lifetime_fault(body.ttl_seconds)
        if body.kind != "snapshot":
            fault = 'kind must be "snapshot": weights that change under a sampler are not offered here'
        if body.path is None and body.sampling_session_seq_id is not None and not fault:
            request_id, sampler_id = self._service.snapshot(body.model_id, body.seq_id, body.sampling_session_seq_id)
            return self._future(request_id, {**kind, "sampling_session_id": sampler_id})
        name = body.path or f"sampler-{body.seq_id}"
        request_id, saved = self._service.save(body.model_id, body.seq_id, SAMPLER, name, overwrite=False, fault=fault)
        return self._future(request_id, {**kind, "path": None if saved is None else saved.path})

    async def _load_weights(self, request: Request) -> Answer:
        body = await self._body(request, bodies.LoadBody)
        passages.check_optimizer(body.optimizer_config)
        if body.session_id is not None and body.model_seq_id is not None:
            request_id = self._service.create(
                body.session_id, body.model_seq_id, shape=None, seed=None, saved_as=body.path, optimizer=body.optimizer
            )
        elif body.model_id is not None and body.seq_id is not None:
            request_id = self._service.load(body.model_id, body.seq_id, body.path, optimizer=body.optimizer)
        else:
            raise Refused(400, "load_weights needs model_id and seq_id, or session_id and model_seq_id")
        return self._future(
            request_id, {"type": "load_weights", "path": body.path, "model_id": request_id.rpartition(":")[0]}
        )

    async def _checkpoints(self, request: Request) -> Answer:
        model_id = request.parameters.get("model")
        found = await trio.to_thread.run_sync(passages.checkpoints, self._service.shelf, model_id)
        return json_answer({"checkpoints": found, "cursor": None})

    # --- samplers ---------------------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request) -> Answer:
        body = await self._body(request, bodies.SamplerBody)
        if body.model_path is None:
            self._check_base(body.base_model or "")
        sampler_id = self._service.open_sampler(body.session_id, body.sampling_session_seq_id, body.model_path)
        return json_answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _get_sampler(self, request: Request) -> Answer:
        sampler_id = request.parameters["sampler"]
        saved = self._service.sampler(sampler_id).saved
        return json_answer(
            {
                "sampler_id": sampler_id,
                "base_model": self._service.base_names[0],
                "model_path": None if saved is None else saved.path,
            }
        )

    async def _sample(self, request: Request) -> Answer:
        body = await self._body(request, bodies.SampleBody)
        if body.sampling_session_id is not None:
            weights = self._service.sampler(body.sampling_session_id)
            number = secrets.token_hex(8) if body.seq_id is None else str(body.seq_id)
            request_id = f"{body.sampling_session_id}:{number}"
        else:
            if body.model_path is None:
                self._check_base(body.base_model or "")
            weights = SamplerWeights(saved=self._service.saved(body.model_path) if body.model_path else None)
            request_id = f"sample-{secrets.token_hex(16)}"
        self._service.sample(weights, passages.sample_of(body, weights, self._service), request_id)
        ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return json_answer({"request_id": request_id, "sample_sequence_ids": ids})

    # --- futures ----------------------------------------------------------------------------------------------

    def _future(self, request_id: str, said: dict[str, Any]) -> Answer:
        if said:
            self._said.pop(request_id, None)
            self._said[request_id] = said
            while len(self._said) > _REMEMBERED:
                del self._said[next(iter(self._said))]
        return json_answer({"request_id": request_id, "model_id": request_id.rpartition(":")[0]})

    async def _retrieve(self, request: Request) -> Answer:
        body = await self._body(request, bodies.FutureBody)
        future = self._service.futures.get(body.request_id)
        if future is None:
            raise Refused(
                410,
                f"there is no result {body.request_id[:160]}: nothing was asked under this id, or its result is no "
                "longer kept (max_results_mib), or the service was started again",
                code="result_gone",
            )
        if not await future.wait(self._service.settings.poll_s):
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return json_answer(waiting, status=408)
        result = future.result
        if result is None:
            raise Refused(
                410, f"result {body.request_id[:160]} is no longer kept (max_results_mib)", code="result_gone"
            )
        self._service.futures.note_read(future)
        if isinstance(result, Refusal):
            return json_answer({"error": result.message, "category": "user" if result.by_user else "server"})
        if CONTENT_TYPE in request.headers.get("accept", ""):
            if isinstance(result, PassReply):
                return Answer(body=self._protobuf.pass_reply(result), content_type=CONTENT_TYPE)
            if isinstance(result, SampleReply):
                return Answer(body=self._protobuf.sample_reply(result), content_type=CONTENT_TYPE)
        return json_answer({**bodies.result_json(result), **self._said.get(body.request_id, {})})


def _error(refused: Refused) -> Any:
    """Return an error as the SDK shows it."""
    return {"detail": str(refused), "code": refused.code or str(refused.status)}
