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
- A stream's events hold one token first and then `stream_interval` each, with log-probs and, by
  `weight_sync.vllm_labels`, versions. What has arrived when a server dies is therefore as good as a whole completion.
- A request for the log-probs of its own prompt reads no cached blocks. It is how the canary is asked (`canary`): after
  `resume`, beside the requests that go on. Until the answer is there, completions that hold a token of the new version
  are held back, and if it is wrong those tokens are cut off.
- A seed in a request kills the CPU build's sampler; none is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import httpx
import msgspec
import trio

from asyncrl.engines.answers import Answer, first_line, named
from asyncrl.engines.canary import Canary
from asyncrl.engines.connections import ConnectionFault, Connections
from asyncrl.engines.control import ControlRoutes, held_versions
from asyncrl.engines.draft import Draft, Part
from asyncrl.engines.engine import EngineStatistics, RequestNotSent, RequestRefused
from asyncrl.engines.nap import Napping
from asyncrl.engines.pace import Pace
from asyncrl.engines.requests import Probation, Request, sampling_params
from asyncrl.engines.settings import EngineSettings, SamplingSettings
from asyncrl.engines.sync import Sync
from asyncrl.errors import EngineError, WeightMismatch, WeightSyncError
from asyncrl.protocols import SyncReport
from asyncrl.types import PolicyVersion, TokenIds, WeightManifest
from asyncrl.weight_sync.vllm_labels import SWITCH

_GENERATE = "/inference/v1/generate"
_EVENT = b"data: {"
_HEALTH_INTERVAL_S = 0.25  # a server that is starting offers nothing to wait for but its port
_RECOVERY_S = 10.0  # bounds what is done for an engine after a failed or cancelled sync
_REFUSED = (400, 413, 422)  # what vLLM answers to a request that it will never run; all else may be the server's fault


class VLLMEngine(Napping):
    """A client of one server. Many tasks may sample at once; one at a time may pull.

    Example:
        >>> async with VLLMEngine("engine 0", url, settings, sampling, end_token_ids=(2,)) as engine:  # doctest: +SKIP
        ...     await engine.wait_healthy(settings.start_timeout_s)
        ...     draft = Draft(prompt, max_tokens=64, trajectory_id="7-0")
        ...     await engine.generate(draft)
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
        canary: Canary | None = None,
        token: str = "",
    ) -> None:
        """`token` is what the server asks for on every route; empty where it asks for none."""
        self.name = name
        self.version = version
        """What the server's weights are called; `version` is what it was started with."""
        self._settings = settings
        self._sampling = sampling
        self._end_token_ids = tuple(end_token_ids)
        self._run_id = run_id
        self._token = token
        self._canary = canary
        self._canary_distance: float | None = None
        self._probation: Probation | None = None
        self._loads = 0  # of weights, whatever they are called
        self._open = trio.Event()
        self._pulling = trio.Lock()
        self._sent: set[Request] = set()
        self._held_back = 0
        self._broken = ""
        self._pace = Pace()
        self._completed = self._failed = self._withdrawn = self._tokens = self._unverified = self._syncs = 0
        self._speak_to(url)
        self._open.set()

    def _speak_to(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connections = Connections(self.url, max_idle=self._settings.max_num_seqs, token=self._token)
        # each asked by itself, and seldom; no proxies: the server is on this host or on the cluster's own network
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        shown = {"Authorization": f"Bearer {self._token}"} if self._token else None
        self._client = httpx.AsyncClient(base_url=self.url, headers=shown, timeout=None, limits=limits, trust_env=False)
        self.control = ControlRoutes(self.name, self.url, self._client)

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
        self._connections.close()

    async def connect(self, url: str, version: PolicyVersion) -> None:
        """Speak to a new server from now on, which was started with `version`; the one before is gone."""
        await self.aclose()
        self.version, self._broken = version, ""
        self._speak_to(url)

    @property
    def capacity(self) -> int:
        """Requests that the server runs at once."""
        return self._settings.max_num_seqs

    @property
    def broken(self) -> str:
        """Why the engine must not be sampled from, or "". A pull that succeeds mends it."""
        return self._broken

    @property
    def seconds_per_token(self) -> float | None:
        """What one request waits for one token; grows while requests run and nothing comes."""
        known = self._pace.seconds_per_token
        if known is None or not any(request.answer.begun for request in self._sent):
            return known
        return max(known, self._pace.quiet_seconds(trio.current_time()) / self._settings.stream_interval)

    def statistics(self) -> EngineStatistics:
        """Return counts since the start."""
        return EngineStatistics(
            name=self.name,
            running=len(self._sent),
            begun=sum(request.answer.begun for request in self._sent),
            waiting=self._held_back,
            completed=self._completed,
            failed=self._failed,
            withdrawn=self._withdrawn,
            tokens_sampled=self._tokens,
            tokens_per_second=self._pace.tokens_per_second(trio.current_time()),
            tokens_unverified=self._unverified,
            canary_distance=self._canary_distance,
            syncs=self._syncs,
            version=self.version,
        )

    # --- start ------------------------------------------------------------------------------------------------

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return when the server answers and has what a run needs; new to the run, its weights are labelled `version`.

        Raises: EngineError when it does not answer in time, asks for another token, or naming the flag that it lacks.
        """
        last = "nothing listens there"
        with trio.move_on_after(timeout_s):
            while True:
                try:
                    response = await self._client.get("/health")
                    if response.status_code == 200:
                        if not self._is_ours(await self.control.reports()):
                            await self._attach()
                        return
                    if response.status_code == 401:
                        raise EngineError(f"{self.name} at {self.url} asks for another token (token_file, [engine])")
                    last = f"/health answers {response.status_code}"
                except httpx.TransportError as error:
                    last = str(error) or type(error).__name__
                await trio.sleep(_HEALTH_INTERVAL_S)
        raise EngineError(f"{self.name} at {self.url} did not become healthy in {timeout_s:g} s: {last}")

    def _is_ours(self, reports: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether the server has been in this run before, whatever it holds: then only a pull can mend it."""
        return {report.get("run_id") for report in reports} == {self._run_id}

    async def _attach(self) -> None:
        need, needs = self.control.need, "VLLM_SERVER_DEV_MODE=1 in its environment"
        await need("/resume", {}, needs)  # a run that was killed in a sync leaves it paused
        await self.control.abandon_update()  # or in the middle of an update
        await need("/update_weight_version", {"new_version": str(self.version)}, needs)
        needs = '--weight-transfer-config \'{"backend": "asyncrl"}\' and asyncrl installed beside vLLM'
        init = {"init_info": {"run_id": self._run_id, "version": self.version, "staged": self._settings.staged_sync}}
        await need("/init_weight_transfer_engine", init, needs)
        await self.control.need_every_rank()
        probe = self._body(TokenIds([0]), 2, stop_token_ids=(), stream_interval=1)
        response = await need("/inference/v1/generate", probe, "--enable-scale-out")
        first = Answer(self.name)
        first.add(next((line for line in response.content.splitlines() if line.startswith(_EVENT)), b"data: nothing"))
        try:
            if not first.part().token_ids:
                raise EngineError(first.complaint)
        except EngineError as error:
            raise EngineError(
                f"{self.name} at {self.url} cannot serve a run: {error}. It needs {SWITCH}=1 in its environment and "
                "asyncrl installed beside vLLM"
            ) from None

    async def check(self) -> bool:
        """Tell whether the server answers and holds, whole, the version that it is believed to hold.

        Waits for a pull under way. What is asked takes no longer than a failed sync's recovery may.
        """
        async with self._pulling:
            with trio.move_on_after(min(_RECOVERY_S, self._settings.sync_timeout_s)):
                reports = await self.control.reports()
                return not self._broken and held_versions(reports) == {self.version} and self._is_ours(reports)
        return False

    async def metrics(self) -> str:
        """See `Engine`."""
        return await self.control.metrics()

    # --- sampling ---------------------------------------------------------------------------------------------

    async def generate(self, draft: Draft) -> None:
        """Go on with `draft` until it is whole; see `Engine`. Ends where the context ends.

        Raises: EngineError when the server fails, is too slow, or answers what cannot be right; RequestRefused.
        """
        room = self._settings.max_model_len - len(draft.prompt)
        if room < 1:
            raise RequestRefused(
                f"a prompt of {len(draft.prompt)} tokens leaves no room in max_model_len = "
                f"{self._settings.max_model_len} ([engine]; trajectory {draft.trajectory_id})"
            )
        while not draft.is_whole:
            await self._wait_open()
            if self._broken:
                raise RequestNotSent(f"{self.name} is out of service: {self._broken}")
            await self._ask(draft, min(draft.max_tokens, room) - len(draft.token_ids))

    async def _wait_open(self) -> None:
        self._held_back += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self._held_back -= 1

    def _body(
        self, context: TokenIds, max_tokens: int, *, stop_token_ids: Sequence[int], stream_interval: int
    ) -> dict[str, Any]:
        return {
            "token_ids": list(context),
            "stream": True,
            "cache_salt": f"version {self.version}, load {self._loads}",
            "sampling_params": sampling_params(
                self._sampling.temperature, max_tokens, stop_token_ids=stop_token_ids, stream_interval=stream_interval
            ),
        }

    async def _ask(self, draft: Draft, max_tokens: int) -> None:
        """Add what the server samples to the draft: up to its end, unless the request is withdrawn before it begins."""
        body = self._body(
            draft.context(),
            max_tokens,
            stop_token_ids=(*self._end_token_ids, *draft.stop_token_ids),
            stream_interval=self._settings.stream_interval,
        )
        request = Request(self.name)
        request.scope.deadline = trio.current_time() + self._settings.request_timeout_s
        self._sent.add(request)
        try:
            with request.scope:
                await self._stream(request, body, draft)
                await self._wait_verified(request)
        finally:
            self._sent.discard(request)
        try:
            try:
                draft.take(self._kept(request), self.name)
            except EngineError:
                if request.shown is not None:  # it was right when it came, and has been acted upon
                    draft.take(request.shown, self.name)
                raise
            if not (draft.is_whole or request.withdrawn):
                raise self._failure(request, draft, max_tokens)
        except EngineError:
            self._failed += 1
            raise
        self._completed += draft.is_whole
        self._withdrawn += not draft.is_whole

    async def _wait_verified(self, request: Request) -> None:
        """Return when it is known whether the weights that sampled the request's tokens were right."""
        while (probation := self._probation) is not None and request.answer.sampled_under(probation.version):
            await probation.over.wait()

    def _kept(self, request: Request) -> Part:
        """Return what a request has sampled, less what was sampled under weights that were found to be wrong."""
        if request.ended and request.shown is not None:
            return request.shown.ended()
        part = request.answer.part()
        if request.cut_at is None:
            return part
        kept = part.before(request.cut_at)
        self._unverified += len(part.token_ids) - len(kept.token_ids)
        return kept

    def _failure(self, request: Request, draft: Draft, max_tokens: int) -> EngineError:
        if request.failure:
            return request.kind(request.failure)
        if request.scope.cancelled_caught:
            return EngineError(
                f"{self.name} took more than {self._settings.request_timeout_s:g} s for {max_tokens} tokens after "
                f"{len(draft.prompt)} ([engine] request_timeout_s; trajectory {draft.trajectory_id})"
            )
        return EngineError(request.answer.complaint)

    async def _stream(self, request: Request, body: Mapping[str, Any], draft: Draft) -> None:
        answered = False
        try:
            async with self._connections.post(_GENERATE, msgspec.json.encode(body)) as answer:
                answered = True
                if answer.status != 200:
                    text = (await answer.read_all()).decode(errors="replace")
                    request.failure = f"{self.name} answers {answer.status}: {first_line(text)}"
                    request.kind = RequestRefused if answer.status in _REFUSED else EngineError
                    return
                while lines := await answer.read_lines():
                    for line in lines:
                        if line.startswith(_EVENT):
                            self._note(request, request.answer.add(line))
                    if draft.watch is not None:
                        self._show(request, draft)
        except ConnectionFault as error:
            request.failure = f"{self.name} at {self.url} does not answer: {error}"
            request.kind = EngineError if answered else RequestNotSent

    def _show(self, request: Request, draft: Draft) -> None:
        """Tell of what a request has sampled, less what the canary may still disown."""
        try:
            part = request.answer.part()
        except EngineError:
            return  # raised when the request is over
        if self._probation is not None:
            part = part.before(self._probation.version)
        if request.scope.cancel_called or len(part.token_ids) <= (len(request.shown.token_ids) if request.shown else 0):
            return
        request.shown = replace(part, finish_reason=None)
        if draft.show(part) and part.finish_reason is None:
            request.ended = True
            request.scope.cancel()

    def _note(self, request: Request, num_tokens: int) -> None:
        now = trio.current_time()
        before, request.last_event = request.last_event, now
        self._tokens += num_tokens
        self._pace.note(num_tokens, None if before is None else now - before, now=now)

    # --- weights ----------------------------------------------------------------------------------------------

    async def pull(self, manifest: WeightManifest) -> SyncReport:
        """Bring the server to the manifest's version, in the middle of its requests, and return what that took.

        The server loads the version beside the weights that run, if everything about it is right. Then it is paused,
        exchanges the two, labels the version, says what it holds, and goes on. After a failure it goes on with what it
        held before; if it cannot be known to hold that, it stays paused, its requests fail, and it is out of service
        (`broken`) until a later pull succeeds.
        Raises: WeightSyncError naming engine, phase and, where one is to blame, the tensor.
        """
        async with self._pulling:
            sync = Sync(self, manifest)
            probation = Probation(manifest.version)
            try:
                if self._canary is not None and manifest.canary_logprobs:
                    self._probation = probation
                async with self._restoring(sync):
                    await sync.run()
                self.version = manifest.version
                self._loads += 1
                self._open.set()
                report = await self._hear_canary(manifest, sync.report())
                self._broken = ""
                self._syncs += 1
                return report
            finally:
                self._probation = None
                probation.over.set()
                self._open.set()

    async def _hear_canary(self, manifest: WeightManifest, report: SyncReport) -> SyncReport:
        """Compare the canary under a version that is in place, while requests go on; return the report with that.

        Raises: WeightMismatch; WeightSyncError where the server does not answer. Either way the engine is out of
        service, and no token of that version is kept.
        """
        if self._probation is None or self._canary is None:
            return report
        began, timeout_s = trio.current_time(), self._settings.sync_timeout_s
        where, why = f"canary of version {manifest.version}", "the sync was given up before its answer"
        try:
            with trio.fail_after(timeout_s):
                found = await self.canary_logprobs()
            self._canary_distance = self._canary.distance(found, manifest.canary_logprobs)
            self._canary.check(self.name, manifest.version, self._canary_distance)
            why = ""
        except trio.TooSlowError:
            why = f"no answer in {timeout_s:g} s ([engine] sync_timeout_s)"
            raise WeightSyncError(f"{self.name}, {where}: {why}") from None
        except EngineError as error:
            why = str(error)
            raise WeightSyncError(f"{self.name}, {where}: {why}") from error
        except WeightMismatch as error:
            why = str(error)
            raise
        finally:
            if why:
                self._disown(manifest.version, f"the {where}: {why}")
        seconds = {**report.seconds, "canary": trio.current_time() - began}
        return replace(report, canary_distance=self._canary_distance, seconds=seconds)

    def _disown(self, version: PolicyVersion, reason: str) -> None:
        """Be out of service, and keep no token that running requests have sampled under a version."""
        self._broken = reason
        for request in self._sent:
            request.cut_at = version
        self.withdraw(reason)

    async def canary_logprobs(self) -> Sequence[float]:
        """Return what the server makes of the canary's text. Raises: EngineError."""
        assert self._canary is not None
        body = self._canary.body(f"canary of load {self._loads}")
        try:
            response = await self._client.post("/inference/v1/generate", json=body)
            answer = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"{self.name} at {self.url} does not answer: {named(error)}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{self.name} answers {response.status_code}: {first_line(response.text)}")
        return self._canary.logprobs(answer, self.name)

    @asynccontextmanager
    async def _restoring(self, sync: Sync) -> AsyncIterator[None]:
        """Whatever ends the sync, leave the server running what it surely holds, or out of service."""
        try:
            yield
        except BaseException as error:  # a cancelled sync too leaves a paused server; raised again on every path
            grace_s = min(_RECOVERY_S, self._settings.sync_timeout_s)
            held: set[PolicyVersion | None] = set()
            with trio.move_on_after(grace_s, shield=True):
                await self.control.abandon_update()
                held = held_versions(await self.control.reports())
                go_on = "/resume" if self.nap is None else "/wake_up"
                if held == {self.version} and await self.control.answers(go_on):
                    self.end_nap()
                    raise
            held_now = ", ".join(map(str, held)) or "no one knows what"
            self._broken = f"after a failed sync to version {sync.manifest.version} ({error}) it holds {held_now}"
            self.withdraw(self._broken)
            raise

    def withdraw(self, reason: str) -> None:
        """End every running request as a failure; what each has sampled is in its draft."""
        for request in self._sent:
            request.failure = f"{self.name} is out of service: {reason}"
            request.scope.cancel()

    def hold_requests(self) -> None:
        """Send no new request until the sync is over."""
        self._open = trio.Event()

    def withdraw_unbegun(self) -> None:
        """Take back the requests that have not begun: they would begin under other weights than their salt names."""
        for request in self._sent:
            if not request.answer.begun:
                request.withdrawn = True
                request.scope.cancel()

    @property
    def settings(self) -> EngineSettings:
        """Those that it was made with."""
        return self._settings

    @property
    def is_sampling(self) -> bool:
        """Whether requests run."""
        return bool(self._sent) and self.nap is None
