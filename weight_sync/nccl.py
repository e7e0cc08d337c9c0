"""Weights over NCCL: vLLM's own trainer engine sends every tensor to all ranks of all engines at once.

Nothing is kept: a version exists while it is sent, so all engines take it together, and one that joins late or restarts
needs a publisher of its own. The tensors stream into the model as they arrive, so what they are can be compared only
afterwards: the engines stay paused until every rank's digests agree, and one that holds other weights is never resumed.
That is the price of needing neither a file nor host memory; the other transports verify before they touch anything.

Never run on a GPU yet: `python -m asyncrl.weight_sync.check_nccl` does that, and `[weight_sync]` does not offer the
transport to runs until it has. The contract is tested with vLLM's real trainer and worker engines over a fake
communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import httpx
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from asyncrl.errors import WeightSyncError
from asyncrl.types import PolicyVersion, TensorEntry, Verification, WeightManifest
from asyncrl.weight_sync.checksum import DIGESTS
from asyncrl.weight_sync.manifest import combined_digest
from asyncrl.weight_sync.reports import check_reports
from asyncrl.weight_sync.sharded import bytes_of, entries_of, sent_dtype, whole


class EngineControl(Protocol):
    """Every engine that takes part, as one: what vLLM's trainer calls (the first four), and what goes around it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every rank join the group. Returns when all have."""
        ...

    def start_weight_update(self) -> None:
        """Announce an update."""
        ...

    def update_weights(self, update_info: Any) -> None:
        """Have every rank receive. Runs while the tensors are sent."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have every rank make the received weights its model, and label them."""
        ...

    def pause(self) -> None:
        """Stop between two decode steps; requests stay where they are."""
        ...

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Return what every rank says that it holds."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class NcclPublisher:
    """The learner's half: sends each version to all engines and returns when all hold it.

    `num_workers` counts the ranks of all engines together; `address` and `port` are this process's own, where they
    meet. `packed` sends many tensors in one buffer of the device, which is vLLM's default.
    """

    transport = "nccl"

    def __init__(
        self,
        *,
        run_id: str,
        engines: EngineControl,
        num_workers: int,
        address: str = "127.0.0.1",
        port: int,
        packed: bool = True,
        verification: Verification = Verification.DIGEST,
        cast_to: torch.dtype | None = None,
    ) -> None:
        self.run_id = run_id
        self._engines = _Labelled(engines, run_id, verification)
        self._source = _Source(verification, cast_to)
        self._rendezvous = NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=port, world_size=1 + num_workers, packed=packed
        )
        self._trainer: Any = None
        self._closed = False
        self._version: PolicyVersion | None = None

    def publish(
        self,
        tensors: Mapping[str, Any],
        version: PolicyVersion,
        *,
        keep: Collection[PolicyVersion] = (),
        adapter_scale: float | None = None,
    ) -> WeightManifest:
        """Send `tensors` (name -> torch.Tensor) to every engine, compare what each holds, and return the manifest.

        `keep` is for transports that keep something.
        Raises: WeightSyncError if the version does not grow or a dtype cannot be sent, before any engine is paused, or
        if an engine refuses the version: over NCCL that may be seen only when the caller's own deadline ends this
        process, because the others wait for that engine. WeightMismatch naming the tensor if a rank holds other
        weights; the engines stay paused, and that one must be restarted.
        """
        if self._closed:
            raise WeightSyncError(f"the publisher of run {self.run_id} is closed")
        if self._version is not None and version <= self._version:
            raise WeightSyncError(f"version {version} was published after version {self._version}")
        if adapter_scale is not None:
            raise WeightSyncError("the nccl transport sends whole models, and no adapter alone")
        self._source.take(tensors)
        self._engines.version = version
        if self._trainer is None:
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                self._rendezvous, client=self._engines, source=self._source
            )
        self._engines.pause()
        self._send()
        manifest = self._source.manifest(self.run_id, version, self._location)
        check_reports(manifest, self._engines.reports(), "engine")
        self._engines.resume()
        self._version = version
        return manifest

    def _send(self) -> None:
        with ExitStack() as unless_sent:
            unless_sent.callback(self.close)  # ranks may still stand in the broadcast: the group is of no use any more
            self._trainer.send_weights()
            unless_sent.pop_all()

    @property
    def _location(self) -> str:
        return f"nccl://{self._rendezvous.master_address}:{self._rendezvous.master_port}"

    def close(self) -> None:
        """Leave the group. May be called twice."""
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None
        self._closed = True

    def __enter__(self) -> NcclPublisher:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class _Source(WeightSource):  # type: ignore[misc]
    """One version's tensors, made whole one at a time; notes the digest of each as it goes by."""

    def __init__(self, verification: Verification, cast_to: torch.dtype | None) -> None:
        self._verification, self._cast_to = verification, cast_to
        self._tensors: Mapping[str, Any] = {}
        self._entries: tuple[TensorEntry, ...] = ()
        self._digests: dict[str, str] = {}

    def take(self, tensors: Mapping[str, Any]) -> None:
        """Make these what is sent next. Raises: WeightSyncError for a dtype that cannot be sent."""
        self._entries = entries_of(tensors, self._cast_to)
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        """Return what will be sent, in order."""
        return [
            ParamMeta(entry.name, sent_dtype(self._tensors[entry.name], self._cast_to), entry.shape)
            for entry in self._entries
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        digest_of = DIGESTS[self._verification]
        self._digests = {}
        for entry in self._entries:
            tensor = whole(self._tensors[entry.name], self._cast_to)
            self._digests[entry.name] = digest_of(bytes_of(tensor))
            yield entry.name, tensor

    def manifest(self, run_id: str, version: PolicyVersion, location: str) -> WeightManifest:
        """Return the manifest of what has just been sent."""
        entries = tuple(replace(entry, digest=self._digests[entry.name]) for entry in self._entries)
        return WeightManifest(
            run_id=run_id,
            version=version,
            transport=NcclPublisher.transport,
            location=location,
            tensors=entries,
            digest=combined_digest(entries),
            verification=self._verification,
        )


class _Labelled:
    """The engines, told the version with everything that vLLM's trainer says without one."""

    def __init__(self, engines: EngineControl, run_id: str, verification: Verification) -> None:
        self._engines, self._run_id, self._verification = engines, run_id, verification
        self.version: PolicyVersion = 0
        self.init_weight_transfer_engine = engines.init_weight_transfer_engine
        self.start_weight_update = engines.start_weight_update
        self.pause, self.reports, self.resume = engines.pause, engines.reports, engines.resume

    def update_weights(self, update_info: dict[str, Any]) -> None:
        named = {"run_id": self._run_id, "version": self.version, "verification": self._verification.value}
        self._engines.update_weights({**update_info, **named})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engines.finish_weight_update(str(self.version))


class HttpEngines:
    """vLLM servers by their URLs; each call goes to all of them at once and ends when all have answered.

    They are started with `VLLM_SERVER_DEV_MODE=1`, `--weight-transfer-config '{"backend": "asyncrl_nccl"}'` and
    `--worker-extension-cls asyncrl.weight_sync.vllm_engine.WorkerReport`.
    Raises, from every method: WeightSyncError naming the server and the route.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = 300.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._client = httpx.Client(timeout=timeout_s, trust_env=False, transport=transport)
        # a thread for each server, against this project's habit: every rank of every one must be receiving for any to
        # receive, and vLLM's trainer, which calls this from a thread of its own, waits for them all
        self._executor = ThreadPoolExecutor(len(self._urls), thread_name_prefix="asyncrl-nccl")

    def num_workers(self) -> int:
        """Return the ranks of all servers together."""
        return sum(int(answer.json()["world_size"]) for answer in self._all("GET", "/get_world_size"))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every rank join; each server's ranks come after those of the servers before it."""
        offset = init_info["rank_offset"]
        bodies = []
        for url in self._urls:
            bodies.append({"init_info": {**init_info, "rank_offset": offset}})
            offset += int(self._ask("GET", url, "/get_world_size").json()["world_size"])
        self._all("POST", "/init_weight_transfer_engine", lambda place: bodies[place])

    def start_weight_update(self) -> None:
        """Announce an update."""
        self._all("POST", "/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have every rank receive."""
        self._all("POST", "/update_weights", lambda place: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have every rank make the received weights its model, and label them."""
        self._all("POST", "/finish_weight_update", lambda place: {"weight_version": weight_version})

    def pause(self) -> None:
        """Stop every server between two decode steps."""
        self._all("POST", "/pause?mode=keep&clear_cache=false")

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Return what every rank of every server says that it holds."""
        answers = self._all("POST", "/collective_rpc", lambda place: {"method": "asyncrl_weight_report"})
        return [report for answer in answers for report in answer.json()["results"]]

    def resume(self) -> None:
        """Have every server go on."""
        self._all("POST", "/resume")

    def _all(self, method: str, path: str, body: Callable[[int], Any] = lambda place: None) -> list[httpx.Response]:
        asked = [self._executor.submit(self._ask, method, url, path, body(n)) for n, url in enumerate(self._urls)]
        return [answer.result() for answer in asked]

    def _ask(self, method: str, url: str, path: str, body: Any = None) -> httpx.Response:
        try:
            answer = self._client.request(method, url + path, json=body)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{url} does not answer {path}: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise WeightSyncError(f"{url}{path} answers {answer.status_code}: {answer.text[:500]}")
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._executor.shutdown(wait=False)
