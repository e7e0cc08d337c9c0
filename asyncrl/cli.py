"""`asyncrl VERB ...`: parses, calls the verb's module, and turns errors into one clear message and an exit code.

Exit codes: 0 done; 1 something outside failed (engine, learner, sandbox, ...); 2 what was typed cannot be used;
130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import asyncrl
from asyncrl.commands import COMMANDS
from asyncrl.errors import AsyncRLError, ConfigError, leaves

_DESCRIPTION = """\
Asynchronous off-policy reinforcement learning for LLM agents.

  asyncrl check configs/demo.toml       what would run, and whether it can
  asyncrl train configs/demo.toml       train
  asyncrl status runs/demo-1            what a run does now, or did
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.command(parsed))
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except AsyncRLError as error:
        return _report([error])
    except BaseExceptionGroup as group:
        ours, others = group.split(AsyncRLError)
        if others is not None:
            others = others.split(KeyboardInterrupt)[1]
        if others is not None:
            raise
        return _report(list(leaves(ours))) if ours is not None else 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {asyncrl.__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        verb = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
        if verb.get_default("command") is None:
            verb.set_defaults(command=module.main)
    return parser


def _report(errors: Sequence[BaseException]) -> int:
    for message in dict.fromkeys(str(error) for error in errors):
        print(f"asyncrl: {message}", file=sys.stderr)
    return 2 if all(isinstance(error, ConfigError) for error in errors) else 1


if __name__ == "__main__":
    sys.exit(main())
