"""The orchestrator's side of the inference engines: settings, the server's command line, its client, and a pool."""

from asyncrl.engines.canary import Canary
from asyncrl.engines.draft import Draft, Part
from asyncrl.engines.engine import Engine, EngineStatistics, Health, RequestNotSent, RequestRefused
from asyncrl.engines.pool import EnginePool, PoolStatistics
from asyncrl.engines.settings import (
    LEFT_BEHIND,
    EngineSettings,
    KVOnSync,
    SamplingSettings,
    command,
    free_port,
)
from asyncrl.engines.supervision import Server, StartServer
from asyncrl.engines.vllm import VLLMEngine

__all__ = [
    "LEFT_BEHIND",
    "Canary",
    "Draft",
    "Engine",
    "EnginePool",
    "EngineSettings",
    "EngineStatistics",
    "Health",
    "KVOnSync",
    "Part",
    "PoolStatistics",
    "RequestNotSent",
    "RequestRefused",
    "SamplingSettings",
    "Server",
    "StartServer",
    "VLLMEngine",
    "command",
    "free_port",
]
