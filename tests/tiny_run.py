"""Small real runs of the tiny model: their configuration, and one server of vLLM for several of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from engine_server import Server, running_server

from asyncrl.engines import EngineSettings

_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "tiny"},
    "environment": {
        "name": "parity_environment:ParityEnvironment",
        "options": {"max_turns": 2, "max_tokens": 12, "max_episode_tokens": 256},
    },
    "buffer": {"max_off_policyness": 1, "groups_per_step": 2, "group_size": 4},
    "engine": {"max_model_len": 256, "max_num_seqs": 16, "dtype": "float32", "kv_cache_gib": 0.1},
    "learner": {"dtype": "float32", "learning_rate": 1e-3},
    "evaluation": {"samples": 2},
}


def write_config(path: Path, model: Path, settings: Mapping[str, Any]) -> Path:
    """Write a configuration, with `settings` ("section.key" -> value) put over the usual ones, and return its path."""
    tables: dict[str, Any] = copy.deepcopy({**_SETTINGS, "model": {"path": str(model)}})
    for name, value in settings.items():
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = value
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    return path


@contextmanager
def tiny_server(directory: Path) -> Iterator[Server]:
    """Yield a server as such runs ask of it; see `running_server`."""
    with running_server(directory, EngineSettings(**_SETTINGS["engine"])) as running:
        yield running
