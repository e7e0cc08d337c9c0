"""What may be set about engines and sampling, and the server's command line that follows from it."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from asyncrl import engines
from asyncrl.configs.loader import build
from asyncrl.engines import EngineSettings, SamplingSettings, command, free_port
from asyncrl.engines.arguments import _GUESSED_WITHOUT_MODEL, _QUANTISED_AS_LOADED
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0.9}, r"top_p must be 1: got 0\.9.*importance ratio is biased"),
        ({"top_k": 20}, r"top_k must be 0 \(off\): got 20.*importance ratio is biased"),
        ({"temperature": 0.0}, r"temperature must be > 0"),
        ({"temperature": -1.0}, r"temperature must be > 0"),
        ({"temperature": float("nan")}, r"temperature must be > 0"),
    ],
)
def test_sampling_that_would_bias_the_ratio_is_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplingSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": ("localhost:8000",)}, r"urls must begin with http:// or https://, got 'localhost:8000'"),
        ({"token_file": "t"}, r"token_file is of servers that urls name, and none are named; got 't'"),
        ({"port": 70000}, "port must be from 0 to 65535, got 70000"),
        ({"port": 65535, "count": 2}, "port must be from 0 to 65534, got 65535"),
        ({"count": 0}, "count must be from 1 to 1024, got 0"),
        ({"count": 2, "urls": ("http://a",)}, "count must be 1 where urls name the servers, got 2"),
        (
            {"count": 2, "devices": ("0",)},
            r"devices must have one entry for each of the count = 2 servers, got \['0'\]",
        ),
        ({"restarts": -1}, "restarts must be from 0"),
        ({"stream_interval": 0}, "stream_interval must be from 1"),
        ({"outage_timeout_s": 0.0}, r"outage_timeout_s must be > 0 seconds, got 0\.0"),
        ({"max_model_len": 0}, "max_model_len must be from 16"),
        ({"max_num_seqs": 0}, "max_num_seqs must be from 1"),
        ({"kv_cache_gib": -1.0}, "kv_cache_gib must be from 0"),
        ({"threads": -1}, "threads must be from 0"),
        ({"niceness": 20}, "niceness must be from 0 to 19"),
        ({"request_timeout_s": 0.0}, r"request_timeout_s must be > 0 seconds, got 0\.0"),
        ({"dtype": "int4"}, "dtype must be one of bfloat16, float16, float32, auto, got 'int4'"),
        ({"extra": {"seed": 1}}, r"extra may not set seed \(\[engine\]\); \[run\] seed"),
        ({"extra": {"middleware": "a.b"}}, "extra may not set middleware.*it guards the routes"),
        ({"extra": {"logprobs-mode": "raw_logprobs"}}, "extra may not set logprobs_mode.*ratios need"),
        ({"extra": {"data-parallel-size": 2}}, "extra may not set data_parallel_size.*take count, or urls"),
        ({"extra": {"data_parallel_backend": "ray"}}, "extra may not set data_parallel_backend.*take count, or urls"),
        ({"extra": {"tensor_parallel_size": 0}}, "tensor_parallel_size must be a whole number >= 1, got 0"),
        ({"extra": {"tensor_parallel_size": "2"}}, "tensor_parallel_size must be a whole number >= 1, got '2'"),
        (
            {"extra": {"tensor_parallel_size": 2}, "devices": ("0",)},
            r"devices must name 2 for each server.*got '0'.*\"0,1\", \"2,3\"",
        ),
        ({"extra": {"spec-method": "eagle3"}}, "extra may not set spec_method.*speculative_config"),
        ({"extra": {"speculative_config": "ngram"}}, "speculative_config must be a table, got 'ngram'"),
        (
            {"extra": {"speculative_config": {"method": "eagle3", "model": "m"}}},
            "method must be one of ngram, ngram_gpu, suffix, got 'eagle3'.*stays at the first version",
        ),
        ({"extra": {"speculative_config": {"model": "m"}}}, "method must be one of ngram.*got None"),
        (
            {"extra": {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}}},
            "rejection_sample_method must be 'standard', got 'synthetic'",
        ),
        ({"extra": {"quantization": "awq"}}, "quantization must be one of fp8, .*got 'awq'.*arrive unquantised"),
    ],
)
def test_an_engine_setting_that_cannot_be_used_is_refused_with_its_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineSettings(**settings)


def test_the_command_line_turns_on_what_training_needs() -> None:
    argv, environment = command(EngineSettings(kv_cache_gib=0.5, threads=2), "/models/m", 8123)
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in {
        "--model": "/models/m",
        "--port": "8123",
        "--host": "127.0.0.1",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--kv-cache-memory-bytes": str(2**29),
    }.items():
        assert argv[argv.index(flag) + 1] == value
    assert "--enable-scale-out" in argv
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "asyncrl"}
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert int(command(EngineSettings(), "m", 1)[1]["OMP_NUM_THREADS"]) >= 1


def test_servers_that_are_started_together_share_the_cores_and_have_their_own_devices() -> None:
    cores = len(os.sched_getaffinity(0))
    settings = EngineSettings(count=2, devices=("0,1", "2,3"))
    environments = [command(settings, "m", 1, index=index)[1] for index in range(2)]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0,1", "2,3"]
    assert environments[0]["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert "CUDA_VISIBLE_DEVICES" not in command(EngineSettings(), "m", 1)[1]


def test_further_arguments_are_passed_as_vllm_names_them() -> None:
    extra = {"tensor_parallel_size": 2, "trust_remote_code": True, "enable_chunked_prefill": False, "x": {"a": 1}}
    argv, _ = command(EngineSettings(extra=extra), "m", 1)
    assert argv[-6:] == [
        "--tensor-parallel-size",
        "2",
        "--trust-remote-code",
        "--no-enable-chunked-prefill",
        "--x",
        '{"a": 1}',
    ]


def test_the_page_about_engines_shows_settings_that_are_taken() -> None:
    page = (Path(engines.__file__).parent / "ENGINES.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    settings = build(EngineSettings, tomllib.loads(shown)["engine"], section="engine")
    assert settings.num_ranks == 2
    assert settings.quantisation == "weights fp8"
    for method in (*_QUANTISED_AS_LOADED, *_GUESSED_WITHOUT_MODEL):
        assert f"`{method}`" in page


def test_servers_that_guess_tokens_are_told_so_and_judge_them_rightly() -> None:
    guessing = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    argv, environment = command(EngineSettings(extra=guessing), "m", 1)
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == guessing["speculative_config"]
    assert environment["ASYNCRL_SPECULATES"] == "1"
    assert "ASYNCRL_SPECULATES" not in command(EngineSettings(), "m", 1)[1]


def test_the_ranks_of_a_server_share_its_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    settings = EngineSettings(count=2, extra={"tensor-parallel-size": 2}, devices=("0,1", "2,3"))
    assert command(settings, "m", 1)[1]["OMP_NUM_THREADS"] == str(max(1, cores // 4))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ""),
        ({"kv_cache_dtype": "auto"}, ""),
        ({"quantization": "fp8"}, "weights fp8"),
        ({"quantization": "fp8_per_channel", "kv-cache-dtype": "fp8"}, "weights fp8_per_channel, keys and values fp8"),
    ],
)
def test_what_a_server_quantises_is_known(extra: dict[str, Any], words: str) -> None:
    assert EngineSettings(extra=extra).quantisation == words


def test_a_free_port_can_be_listened_on() -> None:
    assert 0 < free_port() < 65536
