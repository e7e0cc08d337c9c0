"""Resolve a configuration, refuse what cannot run, and print what would run.

  asyncrl check configs/demo.toml
  asyncrl check configs/demo.toml --set buffer.max_off_policyness=2 --json
  asyncrl check configs/demo.toml --from runs/demo-1
  asyncrl check my_cluster.toml --on ray

What it would come to is predicted by a short simulation (`asyncrl simulate`), with rates from a run that has been
(--from) or given (--rate); without either nothing is predicted. --on ray says what would be taken of a Ray cluster,
which is not asked. Nothing is started.
Exit code 2 and one message when a run of it would be refused.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

from asyncrl import run_directory
from asyncrl.card_memory import card_shares
from asyncrl.commands.arguments import (
    add_config_arguments,
    add_place_argument,
    add_rate_arguments,
    forecast_of,
    rates_of,
)
from asyncrl.configs import Config, dump_config, load_config, to_table
from asyncrl.environments import resolve_options
from asyncrl.errors import ConfigError
from asyncrl.learner.teacher_settings import ReferenceSettings, TeacherSettings
from asyncrl.on_ray.bundles import bundles_of, resolved
from asyncrl.preflight import load_demonstrations, preflight
from asyncrl.serving import listen
from asyncrl.simulation import SimulationRates
from asyncrl.simulation.forecast import as_table
from asyncrl.warm_start import WarmStart

HELP = "resolve a configuration and refuse what cannot run"

_STEPS = 100  # simulated: the cold start's share of them is small, and they take about a second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser)
    add_place_argument(parser)
    add_rate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print configuration and plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Check; return the exit code."""
    config = load_config(arguments.config, arguments.set)
    places = {}
    if arguments.on == "ray":
        config = resolved(config)
        places = {f"on Ray, {bundle.name}": bundle.describe() for bundle in bundles_of(config)}
    directory = run_directory.choose(config, resume=False)
    preflight(config, elsewhere=arguments.on == "ray")
    run_directory.check_space(directory, config)
    listen(config.metrics.host, config.metrics.port, setting="[metrics] port").close()
    demonstrations = load_demonstrations(config)
    plan = process_plan(config) | {"run directory": str(directory.path)} | places
    if places:
        plan |= _on_ray(config)
    forecast = None
    if arguments.run is not None or arguments.rate:
        rates = rates_of(arguments, config)
        check_deadlines(config, rates)
        forecast = forecast_of(config, rates, steps=_STEPS)
    if demonstrations is not None:
        plan["warm start"] = WarmStart(demonstrations, config.warm_start).describe()
    if arguments.json:
        report = {"config": to_table(config), "plan": plan, "forecast": forecast and asdict(forecast)}
        print(json.dumps(report, indent=2))
        return 0
    print(dump_config(config))
    print("# what would run")
    for name, what in plan.items():
        print(f"# {name}: {what}")
    if forecast is not None:
        print(f"# what it would come to, by {_STEPS} simulated steps")
        for name, what in as_table(forecast).items():
            print(f"# {name}: {what}")
    return 0


def _on_ray(config: Config) -> dict[str, Any]:
    """Return what Ray would start, in place of what is started here otherwise."""
    ray = config.ray
    plan: dict[str, Any] = {"placed by": f"Ray at {ray.address}, {ray.strategy.value}"}
    if not config.engine.urls and config.samples:
        plan["engines"] = process_plan(config)["engines"].replace("started here", "on Ray")
    if ray.sandboxes:
        plan["sandboxes"] = f"{config.sandbox.backend}, by {ray.sandboxes} servers on Ray"
    if ray.environments:
        plan["environment"] = f"{config.environment.name}, by {ray.environments} workers on Ray"
    return plan


def check_deadlines(config: Config, rates: SimulationRates) -> None:
    """Raise ConfigError where a median episode would not end before its deadline at these rates."""
    median_s = rates.completion_tokens / rates.request_tokens_per_second + rates.environment_s
    episode_s = getattr(resolve_options(config.environment), "episode_timeout_s", math.inf)
    for name, section, deadline in (
        ("group_deadline_s", "buffer", config.buffer.group_deadline_s or math.inf),
        ("episode_timeout_s", "environment.options", episode_s),
    ):
        if deadline < median_s:
            raise ConfigError(
                f"{name} = {deadline:g} ([{section}]) ends most episodes: at these rates the median one takes "
                f"completion_tokens / request_tokens_per_second + environment_s = {median_s:.1f} s (--rate, --from)"
            )


def process_plan(config: Config) -> dict[str, Any]:
    """Return who would run where, and how much would be under way."""
    buffer, learner = config.buffer, config.learner
    order = buffer.order.value
    count = config.engine.count
    engines = ", ".join(config.engine.urls) or f"{count} vLLM server{'s' * (count > 1)}, started here"
    if config.roles.engines:
        engines = "vLLM"
    if config.engine.num_ranks > 1 and not config.engine.urls:
        engines += f", each of {config.engine.num_ranks} ranks"
    if not config.samples:
        engines = "none: nothing is sampled"
    shares = card_shares(config)
    plan: dict[str, Any] = {
        "orchestrator": "this process",
        "learner": f"{_processes(learner.ranks)}, loss {learner.loss}, {learner.dtype}, critic {learner.critic.kind}"
        f"{_asked(config)}",
        "engines": engines,
        **({} if shares is None else {"the GPU that they share": str(shares)}),
        "sandboxes": config.sandbox.backend,
        "environment": config.environment.name,
        "one step": f"{buffer.groups_per_step} groups of {buffer.group_size} trajectories",
        "under way": f"at most {buffer.num_slots} groups, {buffer.num_slots * buffer.group_size} trajectories",
        "staleness": f"at most {buffer.max_off_policyness} optimizer steps",
        "order": order if buffer.effective_window is None else f"{order}, window {buffer.effective_window}",
    }
    for kind, where in (("learner", "learner"), ("engine", "engines"), ("environment", "environment")):
        if number := config.roles.wanted.get(kind, 0):
            plan[where] += f"; on {number} other host{'s' * (number > 1)}"
    if hosts := config.roles.sandboxes or config.roles.environments:
        plan["sandboxes"] += f", of {hosts} other host{'s' * (hosts > 1)}"
    if config.engine.quantisation and config.samples:
        plan["engine mismatch"] = _mismatch(config)
    return plan


def _mismatch(config: Config) -> str:
    """Return in words what engines that quantise do to training, and what the run's loss does about it."""
    loss = config.learner.resolved_loss
    if loss.correction != "none":
        then = f"the correction of loss {loss.name} weighs tokens by it"
    elif loss.objective == "policy" and loss.ratio != "none":
        then = f"it is part of the ratio of loss {loss.name}, and clipped with what training moves"
    else:
        then = f"loss {loss.name} does not correct it"
    return (
        f"engines quantise ({config.engine.quantisation}), so they sample from another distribution than is trained: "
        f"asyncrl_engine_mismatch_nats says how far off at staleness 0; {then} (decoupled_ppo, tis, mis and icepop are "
        "made for it)"
    )


def _processes(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} processes that hold the model between them"


def _asked(config: Config) -> str:
    """Return the models that the learner asks and does not train, in words."""
    learner = config.learner
    asked: list[tuple[str, TeacherSettings | ReferenceSettings]] = []
    if learner.teacher.source != "none":
        asked.append(("teacher", learner.teacher))
    if learner.needs_reference:
        asked.append(("reference", learner.reference))
    words = {"self": "the policy itself", "start": "the starting weights"}
    return "".join(
        f", {name}: {words.get(s.source) or (s.url if s.source == 'engine' else s.path)}" for name, s in asked
    )
