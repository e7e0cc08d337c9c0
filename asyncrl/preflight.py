"""What is looked at before anything is started: the model, the disk, shared memory, sandboxes, vLLM."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import tempfile
from pathlib import Path

import trio

from asyncrl.card_memory import check_card
from asyncrl.configs import Config
from asyncrl.demonstrations import Demonstrations, read_demonstrations
from asyncrl.engines.arguments import guesses_from_suffixes
from asyncrl.environments import load_environment, resolve_options
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.learner.critic_settings import check_critic
from asyncrl.learner.lora_settings import check_lora, version_bytes
from asyncrl.learner.settings import DTYPE_BYTES
from asyncrl.learner.vocabulary import check_same_vocabulary
from asyncrl.roles import RoleSettings
from asyncrl.roles.settings import split_address, tls_context
from asyncrl.sandbox import open_backend
from asyncrl.sandbox.access import read_token
from asyncrl.tokens import ChatRenderer

_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
_SHARED_MEMORY = Path("/dev/shm")
_PUBLISHED_VERSIONS = 2  # on disk at once while engines change over


def preflight(config: Config, *, elsewhere: bool = False) -> None:
    """Raise ConfigError for the first thing that would stop a run of `config`. Starts nothing that stays.

    Where engines run `elsewhere`, and sandboxes or environments do by [ray], what they need is not looked for here.
    """
    check_model(config.model.path)
    check_critic(config.learner.critic, config.model.path)
    check_lora(config.learner.lora, config.model.path)
    for section, settings in (
        ("learner.teacher", config.learner.teacher),
        ("learner.reference", config.learner.reference),
    ):
        if settings.source == "model":
            check_model(settings.path, f"[{section}]")
            check_same_vocabulary(config.model.path, settings.path, f"[{section}]")
    if not elsewhere:
        check_engine(config)
        check_card(config)
    _check_port(config.gateway.host, config.gateway.port, "[gateway]")
    _check_shared_memory(config)
    _check_roles(config.roles)
    by_ray = elsewhere and (config.ray.sandboxes or config.ray.environments)
    if not (config.roles.environments or config.roles.sandboxes or by_ray):
        trio.run(_check_environment, config)


def _check_roles(settings: RoleSettings) -> None:
    if settings.listen:
        host, port = split_address(settings.listen, "listen ([roles])")
        _check_port(host, port, "[roles]")
    if settings.token_file:
        read_token(settings.token_file, where="[roles]")
    tls_context(settings)


def load_demonstrations(config: Config) -> Demonstrations | None:
    """Return what the warm start trains on, None without one. Raises ConfigError naming the file and line."""
    settings = config.warm_start
    if not settings.enabled:
        return None
    renderer = config.environment.chat.rendering(ChatRenderer.load(config.model.path))
    options = resolve_options(config.environment)
    if hasattr(options, "rendering"):  # the environment brings a template, or tools: its episodes are rendered so too
        renderer = options.rendering(renderer)
    longest = settings.max_tokens or config.engine.max_model_len
    return read_demonstrations(settings.path, renderer, max_tokens=longest, too_long=settings.too_long)


async def _check_environment(config: Config) -> None:
    """Load the tasks and make one sandbox backend."""
    renderer = ChatRenderer.load(config.model.path)
    with tempfile.TemporaryDirectory(prefix="asyncrl-preflight-") as scratch:
        try:
            async with open_backend(config.sandbox, directory=scratch) as sandboxes:
                environment = load_environment(
                    config.environment, renderer=renderer, sandboxes=sandboxes, seed=config.run.seed
                )
                await environment.aclose()
        except SandboxError as error:
            raise ConfigError(f"{error} ([sandbox])") from None


def check_model(path: Path, section: str = "[model]") -> None:
    """Raise ConfigError, naming `section`, unless `path` holds a model in Hugging Face form."""
    if not path.is_dir():
        raise ConfigError(f"path: there is no model directory {path} ({section}); the demo's is made by `make demo`")
    for name in _MODEL_FILES:
        if not (path / name).is_file():
            raise ConfigError(f"path: {path} holds no {name}, so it is no model in Hugging Face form ({section})")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"path: {path} holds no weights: no *.safetensors file ({section})")


def check_engine(config: Config) -> None:
    if config.engines_elsewhere or not config.samples:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed: pip install asyncrl[cpu] or asyncrl[gpu], or name servers by urls ([engine])"
        )
    if guesses_from_suffixes(config.engine.extra) and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "speculative_config.method = 'suffix' needs the package arctic-inference, which is not installed; 'ngram' "
            "needs nothing ([engine] extra)"
        )
    for port in config.engine.ports:
        _check_port("127.0.0.1", port, "[engine]")


def _check_port(host: str, port: int, section: str) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used: {error.strerror}; take another, or 0 for a free one ({section})"
            ) from None


def _check_shared_memory(config: Config) -> None:
    if config.weight_sync.transport != "shared_memory":
        return
    number_bytes = DTYPE_BYTES[config.learner.dtype]
    weights = version_bytes(config.learner.lora, config.model.path, number_bytes=number_bytes)
    free = shutil.disk_usage(_SHARED_MEMORY).free
    needed = _PUBLISHED_VERSIONS * weights * (2 if config.weight_sync.delta else 1)  # a delta is smaller than the whole
    if free < needed:
        raise ConfigError(
            f"transport = 'shared_memory' needs {needed / 1e9:.2f} GB in {_SHARED_MEMORY} and "
            f"{free / 1e9:.2f} GB are free: make it larger, or take transport = 'filesystem' ([weight_sync])"
        )
