"""Train a model with parts on other hosts: start what [roles] does not ask for, and wait for what it does.

  asyncrl orchestrator cluster.toml
  asyncrl orchestrator cluster.toml --resume

  [roles]
  listen = "0.0.0.0:8780"
  token_file = "token"      # the same file for every role: python -c "import secrets; print(secrets.token_urlsafe(32))"
  engines = 2               # asyncrl engine --connect HOST:8780 --token-file token, on two hosts
  environments = 1          # asyncrl environment ...
  sandboxes = 0             # asyncrl sandbox ..., for an environment that plays here
  learner = false           # asyncrl learner ...
  tls_certificate = ""      # and tls_key: then roles take --tls-ca

It is `asyncrl train` otherwise, which takes such a configuration as well. `asyncrl launch` writes the commands of all
hosts.
"""

from __future__ import annotations

import argparse

from asyncrl.commands import train
from asyncrl.configs import load_config
from asyncrl.errors import ConfigError

HELP = "train with engines, environments, sandboxes or the learner on other hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    train.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Train; return the exit code."""
    if not load_config(arguments.config, arguments.set).roles.wanted:
        raise ConfigError(
            "no role is asked for: set listen, and engines, environments, sandboxes or learner ([roles]); with all on "
            "this host it is asyncrl train"
        )
    return train.main(arguments)
