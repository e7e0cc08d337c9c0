"""`asyncrl serve tinker`: a base model that several people's training loops share, each by a LoRA adapter."""

from __future__ import annotations

import argparse
import importlib.util
import socket
import tempfile
from contextlib import AsyncExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import trio

from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.preflight import check_model
from asyncrl.sandbox.access import make_token, read_token
from asyncrl.serving import listen, until_signalled
from asyncrl.tinker.running import open_service
from asyncrl.tinker.settings import TinkerSettings


def add_service(services: Any) -> None:
    """Declare the service's command line to `serve`'s subparsers."""
    tinker = services.add_parser(
        "tinker",
        help="a base model that several people's training loops share, each by a LoRA adapter",
        description="Trains and samples adapters on [model], computed as [learner] says: dtype, device, attention, "
        "threads, microbatch_tokens. See asyncrl/tinker/TINKER.md.",
    )
    add_config_arguments(tinker)
    tinker.add_argument("--directory", type=Path, required=True, metavar="DIR", help="where saved models lie")
    tinker.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="holds the token; made if missing"
    )
    tinker.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    tinker.add_argument("--port", type=int, default=8797, help="0 takes a free one and prints it (default: 8797)")
    tinker.add_argument("--name", default="", help="what clients call the base (default: its directory's name)")
    for field in fields(TinkerSettings):
        option = "--" + field.name.replace("_", "-")
        kind = float if isinstance(field.default, float) else int
        tinker.add_argument(option, type=kind, default=field.default, metavar="N", help=f"default: {field.default:g}")
    tinker.set_defaults(command=_serve_tinker)


def _serve_tinker(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set)
    check_model(config.model.path)
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("serve tinker needs peft, which is not there: pip install 'asyncrl[lora]'")
    settings = TinkerSettings(**{field.name: getattr(arguments, field.name) for field in fields(TinkerSettings)})
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {arguments.port}")
    make_token(arguments.token_file)
    token = read_token(str(arguments.token_file), where="--token-file")
    with (
        closing(listen(arguments.host, arguments.port, setting="--port")) as listener,
        tempfile.TemporaryDirectory(prefix="asyncrl-tinker-") as scratch,
    ):
        trio.run(_serve, config, settings, token, arguments, listener, Path(scratch))
    return 0


async def _serve(
    config: Config,
    settings: TinkerSettings,
    token: str,
    arguments: argparse.Namespace,
    listener: socket.socket,
    scratch: Path,
) -> None:
    host, port = listener.getsockname()
    async with until_signalled(), AsyncExitStack() as stack:
        print("loading the base", flush=True)
        service = await stack.enter_async_context(
            open_service(
                config,
                settings,
                directory=arguments.directory,
                name=arguments.name or config.model.path.resolve().name,
                token=token,
                listener=listener,
                scratch=scratch,
                say=lambda words: print(words, flush=True),
            )
        )
        print(f"serving {service.base_names[0]} on {service.ready.computes_on}", flush=True)
        print(f"training loops connect to http://{host}:{port}", flush=True)
        await trio.sleep_forever()
