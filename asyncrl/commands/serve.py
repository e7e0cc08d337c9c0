"""Serve what runs elsewhere, or others' programs, need.

  asyncrl serve environment my_package.my_module:Class --token-file token
  asyncrl serve environment bugfix --token-file token --host 0.0.0.0 --port 8795
  asyncrl serve atropos --directory queue
  asyncrl serve atropos-environment configs/demo.toml --to http://127.0.0.1:8000
  asyncrl serve gateway configs/demo.toml --access-file access.json --trajectories done.jsonl
  asyncrl serve tinker configs/demo.toml --directory adapters --token-file token

`environment` plays an environment for runs whose [environment] has name = "served", this machine's address in `urls`
and the same token: its dependencies are needed here alone. Each run brings its options and its tokenizer. The protocol
is not encrypted: on a network that others can listen to, put it into a tunnel.

`atropos` is the server between environments and a trainer of Atropos; it asks nobody for a key: the contract has none.
`atropos-environment` plays a configuration's environment for such a trainer.

`gateway` serves a model to agents that ask over HTTP, without a run; see asyncrl/gateway/GATEWAY.md.

`tinker` trains and samples LoRA adapters of many people's training loops on one base; see asyncrl/tinker/TINKER.md.

All listen on this machine alone unless --host, or host in [gateway], says otherwise.
"""

from __future__ import annotations

import argparse

from asyncrl.commands import serve_atropos, serve_atropos_environment, serve_environment, serve_gateway, serve_tinker

HELP = "serve an environment to runs elsewhere, Atropos environments and trainers, or agents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    services = parser.add_subparsers(title="services", metavar="SERVICE", required=True)
    for service in (serve_environment, serve_atropos, serve_atropos_environment, serve_gateway, serve_tinker):
        service.add_service(services)


def main(arguments: argparse.Namespace) -> int:
    """Never called: each service has its own."""
    raise AssertionError(arguments)
