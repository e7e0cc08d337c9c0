"""The environment variables of a learner process. Imports no torch, since OpenMP reads them when torch is loaded."""

from __future__ import annotations

import os
from types import MappingProxyType

ENVIRONMENT = MappingProxyType(
    {
        # A thread that spins at a barrier would take the core from the engine and the sandboxes that share this
        # machine; what it costs on an idle one has not been measured.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
)


def set_environment() -> None:
    """Set what the user has not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
