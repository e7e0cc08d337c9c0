"""What a user may set about the engines and about sampling, and the vLLM command line that follows from it."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.engine_door import TOKEN_VARIABLE, TokenDoor
from asyncrl.engines.arguments import check_arguments, num_ranks, quantisation, speculates
from asyncrl.errors import ConfigError
from asyncrl.weight_sync import vllm_speculation
from asyncrl.weight_sync.plugin import BACKEND
from asyncrl.weight_sync.vllm_labels import SWITCH


class KVOnSync(StrEnum):
    """What becomes of the keys and values that running requests have cached when the weights change under them."""

    KEEP = "keep"
    """They stay: later tokens attend to what older weights wrote. Nothing is recomputed, nothing waits."""
    RECOMPUTE = "recompute"
    """They are computed again under the new weights before the next token; costs a prefill of every running request."""
    FINISH = "finish"
    """Running requests end under the old weights before the swap; the engine drains at every sync."""


LOOPBACK = "127.0.0.1"

_DTYPES = ("bfloat16", "float16", "float32", "auto")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How completions are sampled. One distribution, nothing cut off: the log-probs must be those of the sampler.

    Example:
        >>> SamplingSettings(top_p=0.9)
        Traceback (most recent call last):
        asyncrl.errors.ConfigError: top_p must be 1: ...
    """

    temperature: float = 1.0
    """Divides the logits; > 0. The behaviour log-probs are taken after it, the learner applies the same one."""
    top_p: float = 1.0
    """Only 1."""
    top_k: int = 0
    """Only 0, which is off."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 < self.temperature <= 10.0):
            raise ConfigError(
                f"temperature must be > 0 and <= 10, got {self.temperature} ([sampling]); at 0 every log-prob is 0 "
                "and no ratio is defined"
            )
        if self.top_p != 1.0:
            raise ConfigError(
                f"top_p must be 1: got {self.top_p} ([sampling]). It cuts tokens off that the policy being trained "
                "would still sample, so the importance ratio is biased"
            )
        if self.top_k not in (0, -1):
            raise ConfigError(
                f"top_k must be 0 (off): got {self.top_k} ([sampling]). It cuts tokens off that the policy being "
                "trained would still sample, so the importance ratio is biased"
            )


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One kind of engine: vLLM servers that the run starts, or that run elsewhere (`urls`)."""

    urls: tuple[str, ...] = ()
    """Servers that run already; empty to have `count` started here. They need the flags and variables of `command`."""
    token_file: str = ""
    """A file that holds the token which the servers of `urls` ask for (`asyncrl.engine_door`); empty where they ask for
    none."""
    count: int = 1
    """Servers that are started here."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server that is started here, as in ("0", "1"), or ("0,1", "2,3") where each has two
    ranks; empty leaves it as it is."""
    port: int = 0
    """Of the first server that is started, the others have those after it; 0 takes free ones."""
    restarts: int = 3
    """How often each server that is started here may be started again when it dies; then the run ends. 0 ends it at the
    first death."""
    outage_timeout_s: float = 600.0
    """How long requests and weights wait for an engine when none is in service; then the run ends."""
    max_model_len: int = 2048
    """Tokens of prompt and completion together."""
    max_num_seqs: int = 64
    """Requests that run at once in one engine; more wait in the orchestrator."""
    kv_cache_gib: float = 1.0
    """Memory for keys and values. 0 lets vLLM decide, which on a GPU is what `gpu_memory_utilization` leaves."""
    dtype: str = "bfloat16"
    enforce_eager: bool = True
    """False compiles the model first: minutes at the start, faster after it. Worth it on a GPU."""
    threads: int = 0
    """OpenMP threads of each process of a CPU engine; 0 shares out every core that this process may run on."""
    niceness: int = 0
    """Added to the server's niceness by whoever starts it: > 0 lets the learner go first on shared cores."""
    stream_interval: int = 16
    """Tokens of one event of a stream. A server that dies takes up to so many of every running request with it: those
    are sampled again elsewhere. Each event costs the server and the orchestrator time."""
    kv_on_sync: KVOnSync = KVOnSync.KEEP
    staged_sync: bool = True
    """Load new weights beside those that run, and exchange the two at once: generation stands still for milliseconds,
    and the engine holds its weights twice. On a CPU with `enforce_eager` only; others load in place, while paused."""
    colocated: bool = False
    """Learner and servers take turns on one GPU: the servers sleep while the learner computes, and its state lies in
    host memory while they generate. Needs kv_on_sync = "recompute" or "finish", and room in host memory for both. A
    server that dies then ends the run, whatever `restarts` says: a new one would start in the learner's memory."""
    card_gib: float = 0.0
    """Memory of the GPU that the servers share with the learner, for the check that both fit on it; 0 asks nvidia-smi,
    and where there is none nothing is checked."""
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    """From a request's start in the engine to its last token, the engine's sleep left out."""
    sync_timeout_s: float = 60.0
    """Of each phase of a weight sync, and of going to sleep."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own arguments, named as vLLM names them with underscores: {"tensor_parallel_size": 2}. See ENGINES.md."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"urls must begin with http:// or https://, got {url!r} ([engine])")
        _in_range("count", self.count, 1, 1024)
        _in_range("port", self.port, 0, 65536 - self.count)
        _in_range("restarts", self.restarts, 0, 2**16)
        _in_range("stream_interval", self.stream_interval, 1, 2**16)
        if self.token_file and not self.urls:
            raise ConfigError(
                f"token_file is of servers that urls name, and none are named; got {self.token_file!r} ([engine])"
            )
        if self.urls and self.count > 1:
            raise ConfigError(f"count must be 1 where urls name the servers, got {self.count} ([engine])")
        if self.devices and len(self.devices) != self.count:
            raise ConfigError(
                f"devices must have one entry for each of the count = {self.count} servers, got {list(self.devices)} "
                "([engine])"
            )
        _in_range("max_model_len", self.max_model_len, 16, 2**24)
        _in_range("max_num_seqs", self.max_num_seqs, 1, 2**16)
        _in_range("kv_cache_gib", self.kv_cache_gib, 0, 2**16)
        _in_range("card_gib", self.card_gib, 0, 2**16)
        _in_range("threads", self.threads, 0, 1024)
        _in_range("niceness", self.niceness, 0, 19)
        for name in ("start_timeout_s", "request_timeout_s", "sync_timeout_s", "outage_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0 seconds, got {getattr(self, name)} ([engine])")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r} ([engine])")
        if self.colocated and self.urls:
            raise ConfigError("colocated = true is for servers that the run starts: leave urls empty ([engine])")
        if self.colocated and self.kv_on_sync is KVOnSync.KEEP:
            raise ConfigError(
                'kv_on_sync must be "recompute" or "finish" with colocated = true, got "keep": a server that sleeps '
                "throws its keys and values away ([engine])"
            )
        check_arguments(self.extra)
        for entry in self.devices:
            if len(entry.split(",")) < self.num_ranks:
                raise ConfigError(
                    f"devices must name {self.num_ranks} for each server, as its parallel sizes in extra do, got "
                    f'{entry!r} ([engine]); as in devices = ["0,1", "2,3"]'
                )

    @property
    def num_ranks(self) -> int:
        """Processes, or devices, that hold one server's model between them."""
        return num_ranks(self.extra)

    @property
    def quantisation(self) -> str:
        """In words what the servers quantise, and "" for nothing."""
        return quantisation(self.extra)

    @property
    def allowed_restarts(self) -> int:
        """How often a server may be started again."""
        return 0 if self.colocated else self.restarts

    @property
    def ports(self) -> Sequence[int]:
        """Of the servers that are started here, where they are not taken as they come."""
        return range(self.port, self.port + self.count) if self.port else ()


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low} to {high}, got {value} ([engine])")


LEFT_BEHIND = ("/dev/shm/{scratch}-*",)
"""What the ranks of a CPU engine leave when they are killed, as vLLM kills them itself: shared memory named after their
meeting place, which is one of the server's temporary files."""


def command(
    settings: EngineSettings,
    model_directory: str,
    port: int,
    *,
    seed: int = 0,
    index: int = 0,
    host: str = LOOPBACK,
    token: str = "",
) -> tuple[list[str], dict[str, str]]:
    """Return the argv of a stock vLLM server, and what to add to the environment it is started with.

    `index` counts the servers of one run. `seed` must be another one for each, or they sample the same.

    The module form is used because the console script of the CPU build fails; both are the same server. Its developer
    routes (pause, weights) have no protection of their own: it listens where only this machine reaches it, or all of
    its routes ask for `token`.
    """
    assert token or host == LOOPBACK, "a server that others can reach needs a token"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", model_directory, "--host", host, "--port", str(port)]
    argv += ["--dtype", settings.dtype, "--seed", str(seed)]
    argv += ["--max-model-len", str(settings.max_model_len)]
    argv += ["--max-num-seqs", str(settings.max_num_seqs + 1)]  # one for the canary, which must not wait for a place
    if settings.kv_cache_gib > 0:
        argv += ["--kv-cache-memory-bytes", str(int(settings.kv_cache_gib * 2**30))]
    if settings.enforce_eager:
        argv += ["--enforce-eager"]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--enable-prefix-caching"]  # blocks are salted with the version: see VLLMEngine
    argv += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    argv += ["--worker-extension-cls", "asyncrl.weight_sync.vllm_engine.WorkerReport"]
    argv += ["--disable-uvicorn-access-log"]
    if settings.colocated:
        argv += ["--enable-sleep-mode"]
    if token:
        argv += ["--middleware", f"{TokenDoor.__module__}.{TokenDoor.__qualname__}"]
    for name, value in settings.extra.items():
        argv += _argument(name, value)
    num_processes = settings.count * settings.num_ranks
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # turns the routes for pausing and for weights on
        SWITCH: "1",  # what a server has streamed when it dies is then known to the token, and goes on elsewhere
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # "auto" keeps a core free for the scheduler, which on two cores is half the machine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # without it vLLM serves with one thread
        "OMP_NUM_THREADS": str(settings.threads or max(1, len(os.sched_getaffinity(0)) // num_processes)),
        # threads that spin at a barrier starve the learner, and are starved by it: on two cores with other work beside,
        # 135 tokens/s where they sleep and 19 where they spin (SmolLM2-135M, 32 requests)
        "OMP_WAIT_POLICY": "PASSIVE",
        # the worker lives in the scheduler's process: no second process that polls, 0.6 GB less, a faster start, and
        # no shared-memory files that a kill would leave behind. Tensor-parallel engines have workers all the same
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if speculates(settings.extra):
        environment[vllm_speculation.SWITCH] = "1"
    if token:
        environment[TOKEN_VARIABLE] = token
    if settings.devices:
        environment["CUDA_VISIBLE_DEVICES"] = settings.devices[index]
    return argv, environment


def _argument(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, (Mapping, list, tuple)):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago; who gets it must still be ready to lose the race."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
