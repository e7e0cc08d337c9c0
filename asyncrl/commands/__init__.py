"""The verbs of the command line: one module each, with `HELP`, `add_arguments(parser)` and `main(arguments) -> int`."""

from asyncrl.commands import (
    bench,
    check,
    dashboards,
    engine,
    environment,
    environments,
    evaluate,
    export,
    launch,
    learner,
    orchestrator,
    plot,
    report,
    sandbox,
    serve,
    simulate,
    spikes,
    status,
    trace,
    train,
)

COMMANDS = {
    "train": train,
    "check": check,
    "simulate": simulate,
    "status": status,
    "spikes": spikes,
    "eval": evaluate,
    "environments": environments,
    "sandbox": sandbox,
    "orchestrator": orchestrator,
    "engine": engine,
    "environment": environment,
    "learner": learner,
    "launch": launch,
    "serve": serve,
    "plot": plot,
    "report": report,
    "dashboards": dashboards,
    "trace": trace,
    "export": export,
    "bench": bench,
}
"""Name on the command line -> module."""

__all__ = ["COMMANDS"]
