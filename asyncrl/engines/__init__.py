"""The orchestrator's side of the inference engines: settings, the server's command line, its client, and a pool."""

from asyncrl.engines.pool import EnginePool, PoolStatistics
from asyncrl.engines.settings import EngineSettings, KVOnSync, SamplingSettings, command, free_port
from asyncrl.engines.vllm import EngineStatistics, VLLMEngine

__all__ = [
    "EnginePool",
    "EngineSettings",
    "EngineStatistics",
    "KVOnSync",
    "PoolStatistics",
    "SamplingSettings",
    "VLLMEngine",
    "command",
    "free_port",
]
