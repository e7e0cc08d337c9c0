"""The environment variables of a learner process. Imports no torch, since OpenMP reads them when torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

# A thread that spins at a barrier takes the core from the engine and the sandboxes that share this machine, so here it
# sleeps at once.
_SHARED = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"})

# Looks of GNU's OpenMP at a barrier before the thread sleeps, some microseconds: most of a small model's barriers open
# within them. On two cores (SmolLM2-135M) steps took 0.83 of the time on cores of their own and 1.2 times as long
# beside other work; ten times as many looks gained nothing more on the former, and cost 2.8 times on the latter.
_OWN = MappingProxyType({**_SHARED, "GOMP_SPINCOUNT": "2000"})


def thread_environment(*, own_cores: bool) -> Mapping[str, str]:
    """Return the variables, by whether anything else computes on the cores of the learner's threads."""
    return _OWN if own_cores else _SHARED


def set_environment(*, own_cores: bool) -> None:
    """Set what the user has not set."""
    for name, value in thread_environment(own_cores=own_cores).items():
        os.environ.setdefault(name, value)
