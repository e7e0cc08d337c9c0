"""One vLLM server, as the orchestrator sees it: tokens in, tokens out, and weights pulled in the middle of requests.

What vLLM 0.32 does, and what follows from it here (read in its source, and held by tests/test_engine_vllm.py):

- `pause(mode=keep)` stops the scheduler between two steps. Running requests keep their place, their cached keys and
  values and what they have sampled; new ones are queued. `resume` goes on with the next token.
- The label of the weights changes in `finish_weight_update`, the weights in `update_weights`. Both happen while paused,
  so no token is sampled between them and every label is exact.
- `reset_prefix_cache` does nothing while any request holds a block, and with `reset_running_requests` it throws the
  running requests' keys and values away. So it cannot keep versions apart without stopping requests. Instead every
  request is salted with the version it is sent under, and blocks of different salts never match; old ones are evicted
  when room is needed. A request that was sent before a swap and has not begun when the swap comes is withdrawn and
  sent again with the new salt: the stream's first event tells that it has begun.
- Streams are asked for with `stream_interval` beyond `max_tokens`: two events a request, one for the first token and
  one for the rest, whatever its length.
- A seed in a request kills the CPU build's sampler; none is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import trio

from asyncrl.engines.answers import completion_of, first_line, named
from asyncrl.engines.settings import EngineSettings, KVOnSync, SamplingSettings
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.protocols import SyncReport
from asyncrl.types import Completion, PolicyVersion, TokenIds, WeightManifest
from asyncrl.weight_sync import manifest_to_json

_HEALTH_INTERVAL_S = 0.25  # a server that is starting offers nothing to wait for but its port
_RECOVERY_S = 10.0  # bounds what is done for an engine after a failed or cancelled sync
_ONCE = {"Connection": "close"}  # after an error in a control route the server drops the connection unannounced


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What one engine is doing and has done."""

    running: int
    """Requests in the engine."""
    begun: int
    """Those of them whose first token has been sampled."""
    waiting: int
    """Requests that wait for a place or for a sync to end."""
    completed: int
    failed: int
    withdrawn: int
    """Requests sent again because new weights came before they had begun."""
    tokens_sampled: int
    syncs: int
    version: PolicyVersion


class _Request:
    """One request on its way. Mutable, owned by the task that sent it."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self.scope = scope
        self.begun = False
        self.withdrawn = False
        self.failure = ""


class VLLMEngine:
    """A client of one server. Many tasks may sample at once; one at a time may pull.

    Example:
        >>> async with VLLMEngine("engine-0", url, settings, sampling, end_token_ids=(2,)) as engine:  # doctest: +SKIP
        ...     await engine.wait_healthy(settings.start_timeout_s)
        ...     completion = await engine.sample(prompt, max_tokens=64, trajectory_id="7-0")
        ...     report = await engine.pull(manifest)
    """

    def __init__(
        self,
        name: str,
        url: str,
        settings: EngineSettings,
        sampling: SamplingSettings,
        *,
        end_token_ids: Sequence[int],
        run_id: str = "run",
        version: PolicyVersion = 0,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.version = version
        """What the server's weights are called; `version` is what it was started with."""
        self._settings = settings
        self._sampling = sampling
        self._end_token_ids = tuple(end_token_ids)
        self._run_id = run_id
        self._places = trio.CapacityLimiter(settings.max_num_seqs)
        self._open = trio.Event()
        self._pulling = trio.Lock()
        self._sent: set[_Request] = set()
        self._broken = ""
        self._completed = self._failed = self._withdrawn = self._tokens = self._syncs = 0
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=settings.max_num_seqs,
            keepalive_expiry=2.0,  # the server closes idle connections after 5 s: never reuse one that it is closing
        )
        # no proxies: the server is on this host or on the cluster's own network
        self._client = httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits, trust_env=False)
        self._open.set()

    async def __aenter__(self) -> VLLMEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        with trio.move_on_after(_RECOVERY_S, shield=True):
            await self._client.aclose()

    @property
    def broken(self) -> str:
        """Why the engine must not be sampled from, or "". A pull that succeeds mends it."""
        return self._broken

    def statistics(self) -> EngineStatistics:
        """Return counts since the start."""
        places = self._places.statistics()
        return EngineStatistics(
            running=len(self._sent),
            begun=sum(request.begun for request in self._sent),
            waiting=places.tasks_waiting + places.borrowed_tokens - len(self._sent),
            completed=self._completed,
            failed=self._failed,
            withdrawn=self._withdrawn,
            tokens_sampled=self._tokens,
            syncs=self._syncs,
            version=self.version,
        )

    # --- start ------------------------------------------------------------------------------------------------

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return when the server answers and has what a run needs; its weights are then labelled `version`.

        Raises: EngineError when it does not answer in time, or naming the flag that it was started without.
        """
        last = "nothing listens there"
        with trio.move_on_after(timeout_s):
            while True:
                try:
                    response = await self._client.get("/health")
                    if response.status_code == 200:
                        await self._attach()
                        return
                    last = f"/health answers {response.status_code}"
                except httpx.TransportError as error:
                    last = str(error) or type(error).__name__
                await trio.sleep(_HEALTH_INTERVAL_S)
        raise EngineError(f"{self.name} at {self.url} did not become healthy in {timeout_s:g} s: {last}")

    async def _attach(self) -> None:
        needs = "VLLM_SERVER_DEV_MODE=1 in its environment"
        await self._need("/update_weight_version", {"new_version": str(self.version)}, needs)
        needs = '--weight-transfer-config \'{"backend": "asyncrl"}\' and asyncrl installed beside vLLM'
        init = {"init_info": {"run_id": self._run_id, "version": self.version}}
        await self._need("/init_weight_transfer_engine", init, needs)
        needs = "--worker-extension-cls asyncrl.weight_sync.vllm_engine.WorkerReport"
        await self._need("/collective_rpc", {"method": "asyncrl_weight_report"}, needs)
        probe = self._body(TokenIds([0]), 1, ())
        await self._need("/inference/v1/generate", probe, "--enable-scale-out")

    async def _need(self, path: str, body: Mapping[str, Any], flag: str) -> None:
        response = await self._client.post(path, json=body, headers=_ONCE)
        if response.status_code != 200:
            raise EngineError(
                f"{self.name} at {self.url} cannot serve a run: {path} answers {response.status_code} "
                f"({first_line(response.text)}). It needs {flag}"
            )

    # --- sampling ---------------------------------------------------------------------------------------------

    async def sample(
        self, token_ids: TokenIds, *, max_tokens: int, trajectory_id: str, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Return one completion; see `protocols.Sampler`. At most `max_tokens`, less where the context ends before.

        Raises: EngineError when the server fails, is too slow, or answers what cannot be right.
        """
        room = self._settings.max_model_len - len(token_ids)
        if room < 1:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens leaves no room in max_model_len = "
                f"{self._settings.max_model_len} ([engine]; trajectory {trajectory_id})"
            )
        async with self._places:
            while True:
                while not self._open.is_set():
                    await self._open.wait()
                if self._broken:
                    raise EngineError(f"{self.name} is out of service: {self._broken}")
                completion = await self._ask(token_ids, min(max_tokens, room), trajectory_id, stop_token_ids)
                if completion is not None:
                    return completion

    def _body(self, token_ids: TokenIds, max_tokens: int, stop_token_ids: Sequence[int]) -> dict[str, Any]:
        return {
            "token_ids": list(token_ids),
            "stream": True,
            "cache_salt": f"version {self.version}",
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": self._sampling.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "logprobs": 0,
                "ignore_eos": True,  # the end tokens are those given here, whatever the model's files say
                "stop_token_ids": [*self._end_token_ids, *stop_token_ids],
                "detokenize": False,
                "stream_interval": max_tokens + 1,
            },
        }

    async def _ask(
        self, token_ids: TokenIds, max_tokens: int, trajectory_id: str, stop_token_ids: Sequence[int]
    ) -> Completion | None:
        """Return the completion, or None if the request was withdrawn before it had begun."""
        started = trio.current_time()
        with trio.CancelScope(deadline=started + self._settings.request_timeout_s) as scope:
            request = _Request(scope)
            self._sent.add(request)
            try:
                lines = await self._stream(request, self._body(token_ids, max_tokens, stop_token_ids))
                completion = completion_of(lines, self.name, trio.current_time() - started)
                self._completed += 1
                self._tokens += len(completion.token_ids)
                return completion
            except EngineError:
                self._failed += 1
                raise
            finally:
                self._sent.discard(request)
        if request.withdrawn:
            self._withdrawn += 1
            return None
        self._failed += 1
        if request.failure:
            raise EngineError(f"{self.name} is out of service: {request.failure}")
        raise EngineError(
            f"{self.name} took more than {self._settings.request_timeout_s:g} s for {max_tokens} tokens after "
            f"{len(token_ids)} ([engine] request_timeout_s; trajectory {trajectory_id})"
        )

    async def _stream(self, request: _Request, body: Mapping[str, Any]) -> list[str]:
        lines: list[str] = []
        try:
            async with self._client.stream("POST", "/inference/v1/generate", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise EngineError(f"{self.name} answers {response.status_code}: {first_line(text)}")
                # nothing may be raised in this loop: httpx's generators would be left half read
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        lines.append(line)
                        request.begun = True
        except httpx.HTTPError as error:
            raise EngineError(f"{self.name} at {self.url} does not answer: {named(error)}") from error
        return lines

    # --- weights ----------------------------------------------------------------------------------------------

    async def pull(self, manifest: WeightManifest) -> SyncReport:
        """Bring the server to the manifest's version, in the middle of its requests, and return what that took.

        The server is paused, loads the version if everything about it is right, labels it, says what it holds, and
        goes on. After a failure it goes on with what it held before; if it cannot be known to hold that, it stays
        paused, its requests fail, and it is out of service (`broken`) until a later pull succeeds.
        Raises: WeightSyncError naming engine, phase and, where one is to blame, the tensor.
        """
        async with self._pulling:
            self._open = trio.Event()
            sync = _Sync(self, manifest)
            try:
                async with self._restoring(sync):
                    await sync.run()
                self.version, self._broken = manifest.version, ""
                self._syncs += 1
            finally:
                self._open.set()
            return sync.report()

    @asynccontextmanager
    async def _restoring(self, sync: _Sync) -> AsyncIterator[None]:
        """Whatever ends the sync, leave the server running what it surely holds, or out of service."""
        try:
            yield
        except BaseException as error:
            grace_s = min(_RECOVERY_S, self._settings.sync_timeout_s)
            held: set[PolicyVersion | None] = set()
            with trio.move_on_after(grace_s, shield=True):
                held = await self._held()
                if held == {self.version} and await self._answers("/resume"):
                    raise
            held_now = ", ".join(map(str, held)) or "no one knows what"
            self._break(f"after a failed sync to version {sync.manifest.version} ({error}) it holds {held_now}")
            raise

    async def _held(self) -> set[PolicyVersion | None]:
        """Return the versions that the server's ranks hold whole; empty if that cannot be learnt."""
        try:
            body = {"method": "asyncrl_weight_report"}
            response = await self._client.post("/collective_rpc", json=body, headers=_ONCE)
            reports = response.json()["results"] if response.status_code == 200 else []
        except (httpx.HTTPError, ValueError, KeyError):
            return set()
        return {None if report["broken"] else report["version"] for report in reports}

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._client.post(path, headers=_ONCE)).status_code == 200
        except httpx.HTTPError:
            return False

    def _break(self, reason: str) -> None:
        self._broken = reason
        for request in self._sent:
            request.failure = reason
            request.scope.cancel()

    def withdraw_unbegun(self) -> None:
        """Take back the requests that have not begun: they would begin under other weights than their salt names."""
        for request in self._sent:
            if not request.begun:
                request.withdrawn = True
                request.scope.cancel()

    async def post(self, path: str, body: Mapping[str, Any] | None, params: Mapping[str, str]) -> Any:
        """Return the JSON that a control route answers. Raises: WeightSyncError."""
        try:
            response = await self._client.post(path, json=body, params=dict(params), headers=_ONCE)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"the server does not answer: {named(error)}") from error
        if response.status_code != 200:
            raise WeightSyncError(first_line(response.text))
        return response.json()

    @property
    def kv_on_sync(self) -> KVOnSync:
        """What becomes of running requests' keys and values."""
        return self._settings.kv_on_sync

    @property
    def sync_timeout_s(self) -> float:
        """Seconds that one phase of a sync may take."""
        return self._settings.sync_timeout_s


class _Sync:
    """One pull by one engine: its phases, each with a deadline."""

    def __init__(self, engine: VLLMEngine, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._engine = engine
        self._seconds: dict[str, float] = {}
        self._stall_s = 0.0

    async def run(self) -> None:
        engine, version = self._engine, str(self.manifest.version)
        mode = "wait" if engine.kv_on_sync is KVOnSync.FINISH else "keep"
        await self._phase("pause", "/pause", params={"mode": mode, "clear_cache": "false"})
        paused = trio.current_time()
        await self._phase("start", "/start_weight_update")
        await self._phase("update", "/update_weights", {"update_info": {"manifest": manifest_to_json(self.manifest)}})
        await self._phase("finish", "/finish_weight_update", {"weight_version": version})
        self._check(await self._phase("report", "/collective_rpc", {"method": "asyncrl_weight_report"}))
        if engine.kv_on_sync is KVOnSync.RECOMPUTE:
            await self._phase("recompute", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        engine.withdraw_unbegun()
        await self._phase("resume", "/resume")
        self._stall_s = trio.current_time() - paused

    async def _phase(
        self, phase: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> Any:
        started = trio.current_time()
        where = f"{self._engine.name}, {phase} of version {self.manifest.version}"
        try:
            with trio.fail_after(self._engine.sync_timeout_s):
                answer = await self._engine.post(path, body, params or {})
        except trio.TooSlowError:
            raise WeightSyncError(
                f"{where}: no answer in {self._engine.sync_timeout_s:g} s, {self.manifest.num_bytes} bytes under way "
                "([engine] sync_timeout_s)"
            ) from None
        except WeightSyncError as error:
            raise WeightSyncError(f"{where}: {error}") from error
        self._seconds[phase] = trio.current_time() - started
        return answer

    def _check(self, answer: Any) -> None:
        """Compare what every rank of the engine computed itself with the manifest."""
        wanted = (self.manifest.run_id, self.manifest.version, self.manifest.digest)
        for rank, report in enumerate(answer["results"]):
            found = (report["run_id"], report["version"], report["digest"])
            if report["broken"] or found != wanted:
                raise WeightSyncError(
                    f"{self._engine.name} rank {rank} says that it holds (run, version, digest) {found}, "
                    f"sent was {wanted}{'; ' + report['broken'] if report['broken'] else ''}"
                )
            for part, seconds in report["seconds"].items():
                self._seconds[f"update.{part}"] = max(seconds, self._seconds.get(f"update.{part}", 0.0))

    def report(self) -> SyncReport:
        return SyncReport(
            engine=self._engine.name,
            version=self.manifest.version,
            verified=True,  # `_check` has raised otherwise
            num_bytes=self.manifest.num_bytes,
            seconds=self._seconds,
            stall_seconds=self._stall_s,
        )
