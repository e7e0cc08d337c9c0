"""vLLM's own arguments that a run may pass to its servers, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError

_OURS = {
    "model": "the model of the run",
    "port": "[engine] port",
    "host": "fixed: the server's developer routes leave this machine behind a token only",
    "middleware": "fixed: it guards the routes of a server that other machines can reach",
    "max_model_len": "[engine] max_model_len",
    "max_num_seqs": "[engine] max_num_seqs",
    "dtype": "[engine] dtype",
    "enforce_eager": "[engine] enforce_eager",
    "enable_sleep_mode": "[engine] colocated",
    "kv_cache_memory_bytes": "[engine] kv_cache_gib",
    "seed": "[run] seed",
    "logprobs_mode": "fixed: ratios need the log-probs of the distribution that was sampled from",
    "weight_transfer_config": "fixed: weights arrive through asyncrl.weight_sync",
    "worker_extension_cls": "fixed: weights are verified through it",
    "enable_scale_out": "fixed: tokens go in and come out as ids",
    "generation_config": "fixed: the model's own file must not change how is sampled",
    "stream_interval": "[engine] stream_interval",
}

_DATA_PARALLEL = (
    "vLLM tells what the first of a server's engines holds and of the others nothing, so that a sync could not be "
    "verified: take count, or urls, whose servers are routed and synced one by one"
)

_GUESSED_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation that guess from text alone."""

_QUANTISED_AS_LOADED = (
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
    "online",
)
"""What vLLM makes of weights of the dtype that the learner sends."""

_UNQUANTISED_CACHE = ("auto", "bfloat16", "float16", "float32")


def check_arguments(extra: Mapping[str, Any]) -> None:
    """Refuse what no run can have. Raises: ConfigError."""
    for name, value in _named(extra).items():
        if name in _OURS:
            _refuse(name, _OURS[name])
        if name.startswith("data_parallel"):
            _refuse(name, _DATA_PARALLEL)
        if name.startswith("spec_"):  # vLLM's other words for parts of it
            _refuse(name, "set speculative_config, whose method is checked")
        if name.endswith("_parallel_size") and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{name} must be a whole number >= 1, got {value!r} ([engine] extra)")
    _check_speculation(_named(extra).get("speculative_config"))
    method = _named(extra).get("quantization")
    if method is not None and method not in _QUANTISED_AS_LOADED:
        raise ConfigError(
            f"quantization must be one of {', '.join(_QUANTISED_AS_LOADED)}, got {method!r} ([engine] extra): the "
            "learner's weights arrive unquantised, and these are what vLLM quantises as it loads"
        )


def _check_speculation(config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config must be a table, got {config!r} ([engine] extra)")
    method = config.get("method")
    if method not in _GUESSED_WITHOUT_MODEL:
        raise ConfigError(
            f"speculative_config.method must be one of {', '.join(_GUESSED_WITHOUT_MODEL)}, got {method!r} ([engine] "
            "extra): a model that guesses is not sent to engines, and stays at the first version while the policy "
            "leaves it"
        )
    rejection = config.get("rejection_sample_method", "standard")
    if rejection != "standard":
        raise ConfigError(
            f"speculative_config.rejection_sample_method must be 'standard', got {rejection!r} ([engine] extra): its "
            "tokens are surely distributed as without speculation, and their log-probs the ratio's"
        )


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(f"extra may not set {name} ([engine]); {reason}")


def num_ranks(extra: Mapping[str, Any]) -> int:
    """Return the processes, or devices, that hold one server's model between them."""
    named = _named(extra)
    return int(named.get("tensor_parallel_size", 1)) * int(named.get("pipeline_parallel_size", 1))


def speculates(extra: Mapping[str, Any]) -> bool:
    """Tell whether a server guesses tokens and judges several in one step."""
    return "speculative_config" in _named(extra)


def guesses_from_suffixes(extra: Mapping[str, Any]) -> bool:
    """Tell whether a server needs the package that does so."""
    return bool(_named(extra).get("speculative_config", {}).get("method") == "suffix")


def quantisation(extra: Mapping[str, Any]) -> str:
    """Return in words what a server quantises, so that it samples from another distribution than is trained; or ""."""
    named = _named(extra)
    cache = named.get("kv_cache_dtype", "auto")
    parts = [f"weights {named['quantization']}"] if named.get("quantization") else []
    parts += [f"keys and values {cache}"] if cache not in _UNQUANTISED_CACHE else []
    return ", ".join(parts)


def _named(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in extra.items()}
