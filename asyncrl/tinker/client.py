"""A client of the service, for training loops in trio.

A verb sends and returns a future at once; requests of one model are carried out in the order in which the verbs were
called, whatever the network does to them. What is lost on the way is sent again under the same number, and is carried
out once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import trio

from asyncrl.errors import LearnerError
from asyncrl.tinker.orders import Row
from asyncrl.types import Logprobs, TokenIds

_HEARTBEAT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_REQUEST_TIMEOUT_S = 60.0  # longer than the service waits for a result before it says that there is none yet
_AGAIN = (408, 429)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a forward or forward_backward found."""

    logprobs: list[Logprobs]
    """By row, nats: of each target."""
    metrics: Mapping[str, float]
    """By "name:reduction"; "loss:sum" is the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion."""

    token_ids: TokenIds
    logprobs: Logprobs
    """Nats, under the distribution that each token was sampled from."""
    stopped: bool


class Future(Generic[_T]):
    """What becomes of a request."""

    def __init__(self) -> None:
        self._settled = trio.Event()
        self._value: Any = None
        self._error: LearnerError | None = None

    async def result(self) -> _T:
        """Return it once it is there; as often as one likes. Raises: LearnerError where the request failed."""
        await self._settled.wait()
        if self._error is not None:
            raise LearnerError(str(self._error))
        value: _T = self._value
        return value


def next_token_row(tokens: Sequence[int], *, weights: Sequence[float] | None = None) -> Row:
    """Return a row that predicts each token from those before it; `weights` are by predicted token.

    Example:
        >>> next_token_row([5, 6, 7], weights=[0.0, 1.0]).target_ids.tolist()
        [6, 7]
    """
    values = {} if weights is None else {"weights": Logprobs(weights)}
    return Row(token_ids=TokenIds(tokens[:-1]), target_ids=TokenIds(tokens[1:]), values=values)


def sampled_row(prompt: Sequence[int], sampled: Sampled, advantage: float) -> Row:
    """Return a row that reinforces a completion of a prompt by its advantage."""
    tokens, before = [*prompt, *sampled.token_ids], [0.0] * (len(prompt) - 1)
    values = {
        "logprobs": Logprobs([*before, *sampled.logprobs]),
        "advantages": Logprobs([*before, *[advantage] * len(sampled.token_ids)]),
    }
    return Row(token_ids=TokenIds(tokens[:-1]), target_ids=TokenIds(tokens[1:]), values=values)


class TinkerClient:
    """A session with a service; made by `connect`."""

    def __init__(self, http: httpx.AsyncClient, nursery: trio.Nursery, session_id: str, patience_s: float) -> None:
        self._http = http
        self._nursery = nursery
        self._patience_s = patience_s
        self.session_id = session_id
        self._models = self._samplers = 0

    async def capabilities(self) -> dict[str, Any]:
        """Return the base's name and what it can read."""
        found: dict[str, Any] = (await self.call("GET", "get_server_capabilities"))["supported_models"][0]
        return found

    async def create_model(
        self,
        *,
        rank: int,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        base_model: str = "",
    ) -> TrainedModel:
        """Return a new model, which computes what the base does."""
        number, self._models = self._models, self._models + 1
        lora = {"rank": rank, "seed": seed, "train_attn": train_attn, "train_mlp": train_mlp}
        body = {
            "session_id": self.session_id,
            "model_seq_id": number,
            "base_model": base_model or (await self.capabilities())["model_name"],
            "lora_config": {**lora, "train_unembed": train_unembed},
        }
        return await self._made("create_model", body)

    async def load_model(self, path: str, *, optimizer: bool = True) -> TrainedModel:
        """Return a new model that goes on from a saved one."""
        number, self._models = self._models, self._models + 1
        body = {"session_id": self.session_id, "model_seq_id": number, "path": path, "optimizer": optimizer}
        return await self._made("load_weights", body)

    async def _made(self, verb: str, body: Mapping[str, Any]) -> TrainedModel:
        made = await self.send(verb, body, lambda found: found).result()
        return TrainedModel(self, made["model_id"])

    async def sampler(self, path: str | None = None) -> ModelSampler:
        """Return a sampler of saved weights, or of the base."""
        number = self.next_sampler()
        body = {"session_id": self.session_id, "sampling_session_seq_id": number, "model_path": path}
        if path is None:
            body["base_model"] = (await self.capabilities())["model_name"]
        made = await self.call("POST", "create_sampling_session", body)
        return ModelSampler(self, made["sampling_session_id"])

    def next_sampler(self) -> int:
        """Return a number for a new sampler of this session."""
        self._samplers += 1
        return self._samplers - 1

    async def saved(self, model_id: str | None = None) -> list[dict[str, Any]]:
        """Return what is saved, of one model or of all."""
        where = "checkpoints" if model_id is None else f"training_runs/{model_id}/checkpoints"
        found: list[dict[str, Any]] = (await self.call("GET", where))["checkpoints"]
        return found

    async def statistics(self) -> dict[str, Any]:
        """Return the service's counts."""
        found: dict[str, Any] = await self.call("GET", "statistics")
        return found

    def send(self, verb: str, body: Mapping[str, Any], read: Any) -> Future[Any]:
        """Return the future of a request; `read` makes its value of the answer."""
        future: Future[Any] = Future()
        self._nursery.start_soon(self._fetch, verb, body, read, future)
        return future

    async def _fetch(self, verb: str, body: Mapping[str, Any], read: Any, future: Future[Any]) -> None:
        try:
            promised = await self.call("POST", verb, body)
            found = await self.call("POST", "retrieve_future", {"request_id": promised["request_id"]}, waits=True)
            if "error" in found:
                future._error = LearnerError(f"{verb} failed: {found['error']}")
            else:
                future._value = read(found)
        except LearnerError as error:
            future._error = error
        future._settled.set()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, waits: bool = False
    ) -> dict[str, Any]:
        """Return an answer; asks again while the service cannot be reached or has no room, at most for the patience.

        `waits` asks as long as the service says that a result is still to come. Raises: LearnerError.
        """
        deadline, pause, why = trio.current_time() + self._patience_s, _FIRST_PAUSE_S, ""
        while trio.current_time() < deadline:
            try:
                response = await self._http.request(method, f"/api/v1/{path}", json=body)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    answer: dict[str, Any] = response.json()
                    return answer
                if waits and response.status_code == 408:
                    deadline = trio.current_time() + self._patience_s
                    continue
                why = f"{response.status_code}: {response.text[:500]}"
                if response.status_code not in _AGAIN and response.status_code < 500:
                    break
            await trio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise LearnerError(f"{path}: {self._http.base_url} answers {why or 'nothing'}")

    async def keep_alive(self) -> None:
        """Tell the service of this session until cancelled, or until the service has ended it."""
        while True:
            await trio.sleep(_HEARTBEAT_S)
            try:
                await self.call("POST", "session_heartbeat", {"session_id": self.session_id})
            except LearnerError:
                return  # whatever is asked next says so


@dataclass(slots=True, kw_only=True)
class _Numbers:
    next: int = 1
    """0 made the model."""

    def take(self) -> int:
        number, self.next = self.next, self.next + 1
        return number


class TrainedModel:
    """A model of this session."""

    def __init__(self, client: TinkerClient, model_id: str) -> None:
        self._client = client
        self.model_id = model_id
        self._numbers = _Numbers()

    def forward_backward(
        self, rows: Sequence[Row], loss: str, options: Mapping[str, float] | None = None
    ) -> Future[PassResult]:
        """Add the gradients of the loss, summed over tokens, to those there are."""
        return self._pass("forward_backward", "forward_backward_input", rows, loss, options)

    def forward(self, rows: Sequence[Row], loss: str, options: Mapping[str, float] | None = None) -> Future[PassResult]:
        """Take log-probs and loss alone."""
        return self._pass("forward", "forward_input", rows, loss, options)

    def _pass(
        self, verb: str, key: str, rows: Sequence[Row], loss: str, options: Mapping[str, float] | None
    ) -> Future[PassResult]:
        given = {"data": [_datum(row) for row in rows], "loss_fn": loss, "loss_fn_config": dict(options or {})}
        return self._send(verb, {key: given}, _pass_result)

    def optim_step(
        self,
        *,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Future[Mapping[str, float]]:
        """Take a step of AdamW; its result are metrics."""
        adam = {
            "learning_rate": learning_rate,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_clip_norm": grad_clip_norm,
        }
        return self._send("optim_step", {"adam_params": adam}, lambda found: found["metrics"])

    def save(self, name: str, *, overwrite: bool = False) -> Future[str]:
        """Save adapter and optimizer; the result is the path to load it from."""
        return self._send("save_weights", {"path": name, "overwrite": overwrite}, lambda found: found["path"])

    def load(self, path: str, *, optimizer: bool = True) -> Future[str]:
        """Go on from what is saved; gradients are forgotten."""
        return self._send("load_weights", {"path": path, "optimizer": optimizer}, lambda found: found["path"])

    def save_for_sampler(self, name: str) -> Future[str]:
        """Save the adapter under a name; the result is the path for a sampler."""
        return self._send("save_weights_for_sampler", {"path": name}, lambda found: found["path"])

    def sampler(self) -> Future[ModelSampler]:
        """Take the weights as they are once all before is done; the result samples from them."""
        body = {"sampling_session_seq_id": self._client.next_sampler()}
        return self._send(
            "save_weights_for_sampler", body, lambda found: ModelSampler(self._client, found["sampling_session_id"])
        )

    async def unload(self) -> None:
        """End the model."""
        await self._client.call("POST", "unload_model", {"model_id": self.model_id})

    def _send(self, verb: str, body: Mapping[str, Any], read: Any) -> Future[Any]:
        return self._client.send(verb, {**body, "model_id": self.model_id, "seq_id": self._numbers.take()}, read)


class ModelSampler:
    """Samples from weights that do not change."""

    def __init__(self, client: TinkerClient, sampler_id: str) -> None:
        self._client = client
        self._sampler_id = sampler_id
        self._numbers = _Numbers()

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
    ) -> Future[list[Sampled]]:
        """Sample completions; at another temperature than 1 their log-probs are no longer the learner's."""
        params = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "stop": None if stop is None else list(stop),
        }
        body = {
            "sampling_session_id": self._sampler_id,
            "seq_id": self._numbers.take(),
            "num_samples": num_samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": params,
        }
        return self._client.send("asample", body, _samples)


@asynccontextmanager
async def connect(
    url: str, *, token: str, patience_s: float = 300.0, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[TinkerClient]:
    """Yield a session with the service at `url`; on leaving, what was asked and not awaited is given up.

    `patience_s` is how long a service that cannot be reached is asked again; `transport` replaces the network.
    Raises: LearnerError.
    """
    async with (
        httpx.AsyncClient(
            base_url=url,
            headers={"x-api-key": token},
            timeout=_REQUEST_TIMEOUT_S,
            trust_env=False,  # no proxies: the service is on this host or on the cluster's own network
            transport=transport,
        ) as http,
        trio.open_nursery() as nursery,
    ):
        client = TinkerClient(http, nursery, "", patience_s)
        client.session_id = (await client.call("POST", "create_session", {}))["session_id"]
        nursery.start_soon(client.keep_alive)
        yield client
        nursery.cancel_scope.cancel()


def _datum(row: Row) -> dict[str, Any]:
    inputs: dict[str, Any] = {"target_tokens": _tensor(row.target_ids, "int64")}
    inputs |= {name: _tensor(values, "float32") for name, values in row.values.items()}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(row.token_ids)}]},
        "loss_fn_inputs": inputs,
    }


def _tensor(values: Sequence[float], dtype: str) -> dict[str, Any]:
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


def _pass_result(found: Mapping[str, Any]) -> PassResult:
    rows = [Logprobs(output["logprobs"]["data"]) for output in found["loss_fn_outputs"]]
    return PassResult(logprobs=rows, metrics=found["metrics"])


def _samples(found: Mapping[str, Any]) -> list[Sampled]:
    return [
        Sampled(
            token_ids=TokenIds(sequence["tokens"]),
            logprobs=Logprobs(sequence["logprobs"]),
            stopped=sequence["stop_reason"] == "stop",
        )
        for sequence in found["sequences"]
    ]
