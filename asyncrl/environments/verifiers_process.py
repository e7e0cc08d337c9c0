"""The process that verifiers' environments run in: `PYTHON verifiers_process.py --fd N`, by `verifiers`.

Its Python has verifiers 0.4 and need not have asyncrl: this file imports the standard library and verifiers alone.
verifiers is built on asyncio, so what drives it is, too; no other part of asyncrl is.

One JSON object a line goes over the socket that it inherits. It is told `begin`, and answers `ready` with the tasks, or
`refused`; then any number of `play` and `stop`, each `play` answered with `played`, in any order.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import inspect
import itertools
import json
import math
import os
import socket
import sys
import traceback
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

_LONGEST_LINE = 2**30  # of what the run says: the options of one environment, and addresses
_WANTED = "0.4."


class Refusal(Exception):  # noqa: N818  (never leaves this file)
    """The environment cannot be played; its text says why."""


class Player:
    """One environment of verifiers, and its tasks."""

    def __init__(self, config: dict[str, Any], num_tasks: int, agent_timeout_s: float) -> None:
        """Raises: Refusal; and whatever the environment's own code raises."""
        self._vf = vf = _import_verifiers()
        resolved = vf.resolve_env_config(config)
        self._env = vf.load_environment(self._with_defaults(resolved, agent_timeout_s))
        taskset = self._env.taskset
        if not num_tasks and not taskset.bounded:
            raise Refusal(f"its task set {resolved.taskset.id!r} has no end: say how many to take (num_tasks)")
        self._tasks = list(itertools.islice(taskset, num_tasks or None))
        self._playing: dict[int, asyncio.Task[None]] = {}

    def _with_defaults(self, config: Any, agent_timeout_s: float) -> Any:
        """Return the config where roles that say nothing chat in a process of this machine, and end in time.

        A harness that runs what the model says is not put onto this machine unasked: it keeps verifiers' own default.
        """
        vf, update = self._vf, {}
        for name, role in config:
            if not isinstance(role, vf.AgentConfig):
                continue
            changes: dict[str, Any] = {}
            harness = role.harness or vf.default_agent_harness(config.taskset.id)
            if role.harness is None and harness.id == "bash":  # the task set brings none
                harness = changes["harness"] = vf.harness_config_type("null")(id="null")
            if "runtime" not in role.model_fields_set and not vf.load_harness(harness).EXECUTES_CODE:
                changes["runtime"] = vf.SubprocessConfig()
            if role.timeout.rollout is None:
                changes["timeout"] = role.timeout.model_copy(update={"rollout": agent_timeout_s})
            update[name] = role.model_copy(update=changes)
        return config.model_copy(update=update)

    def listed(self) -> list[dict[str, Any]]:
        """Return each task's id and data; ids are the tasks' own where those differ, and else their places."""
        names = [task.data.id or task.data.name or str(place) for place, task in enumerate(self._tasks)]
        counts = Counter(names)
        return [
            {
                "id": name if counts[name] == 1 else f"{name}-{place}",
                "data": task.data.model_dump(mode="json", exclude_none=True),
            }
            for place, (name, task) in enumerate(zip(names, self._tasks, strict=True))
        ]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Play what is asked until the run closes its side."""
        async with self._env.serving():
            _say(writer, kind="ready", name=self._env.config.env_id, tasks=self.listed())
            async with asyncio.TaskGroup() as group:
                while line := await reader.readline():
                    asked = json.loads(line)
                    if asked["kind"] == "play":
                        self._playing[asked["number"]] = group.create_task(self._play(asked, writer))
                    elif asked["number"] in self._playing:
                        self._playing[asked["number"]].cancel()
                for playing in self._playing.values():
                    playing.cancel()

    async def _play(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = asked["number"]
        try:
            episode = await self._episode(asked)
        except Exception as error:  # noqa: BLE001 - a boundary: one episode's failure is no other's
            episode = {"traces": [], "errors": [{"type": type(error).__name__, "message": str(error)}]}
            traceback.print_exc()
        finally:
            del self._playing[number]
        _say(writer, kind="played", number=number, episode=episode)

    async def _episode(self, asked: dict[str, Any]) -> dict[str, Any]:
        vf, task, variable = self._vf, self._tasks[asked["task"]], f"ASYNCRL_SESSION_{asked['number']}_API_KEY"
        _reach_directly(asked["base_url"])
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
        os.environ[variable] = asked[
            "key"
        ]  # which is where verifiers looks for keys; programs do not inherit *API_KEY*
        try:
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, vf.ModelContext(model=asked["model"], client=client))
        finally:
            del os.environ[variable]
        traces = [await self._told(task, trace, alone=len(episode.traces) == 1) for trace in episode.traces]
        return {
            "traces": traces,
            "errors": [_error(error) for error in episode.errors],
            "timed_out": episode.is_timeout,
        }

    async def _told(self, task: Any, trace: Any, *, alone: bool) -> dict[str, Any]:
        """Return what the run must know of an agent's trace."""
        ok, overflowed = trace.ok, _has_overflowed(trace)
        if overflowed and not ok and alone and _is_graded_without_runtime(task):
            # verifiers grades nothing that ended in an error; a full context is an end like any other limit
            await task.score(trace)
            ok = True
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        errors = [_error(error) for error in trace.errors]
        missing = [name for name in trace.rewards if name not in rewards]
        if ok and (missing or not rewards):  # out of time, or by nobody: verifiers counts either as 0
            ok = False
            graded = f"without {', '.join(missing)}" if missing else "by nothing"
            errors.append({"type": "TaskError", "message": f"it was graded {graded} ({trace.stop_condition})"})
        for name, value in (*rewards.items(), *metrics.items()):
            if not math.isfinite(value):  # which JSON cannot say
                ok = False
                errors.append({"type": "TaskError", "message": f"{name} is {value}, and must be finite"})
        return {
            "agent": trace.agent.name,
            "ok": ok,
            "reward": trace.reward if ok else 0.0,
            "rewards": rewards if ok else {},
            "metrics": metrics if ok else {},
            "errors": errors,
            "stop": trace.stop_condition or "",
            "truncated": trace.is_truncated or overflowed,
            "timed_out": trace.is_timeout,
        }


def _import_verifiers() -> Any:
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise Refusal(
            f"{sys.executable} has no verifiers: `{sys.executable} -m pip install 'verifiers=={_WANTED}*' uv`, or name "
            "another Python that has it (python)"
        ) from None
    if not found.startswith(_WANTED):
        raise Refusal(f"{sys.executable} has verifiers {found}, and {_WANTED}* is needed")
    return importlib.import_module("verifiers.v1")


def _has_overflowed(trace: Any) -> bool:
    error = trace.calls[-1].error if trace.calls else None
    return error is not None and "maximum context length" in error.message


def _is_graded_without_runtime(task: Any) -> bool:
    functions = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    return not any("runtime" in inspect.signature(function).parameters for function in functions)


def _error(error: Any) -> dict[str, Any]:
    return {"type": error.type, "message": error.message}


def _reach_directly(url: str) -> None:
    """Ask the gateway without a proxy, whatever this machine's settings for others are."""
    host = urlsplit(url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        known = [one for one in os.environ.get(name, "").split(",") if one]
        if host not in known:
            os.environ[name] = ",".join([*known, host])


def _say(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_LINE)
    if not (line := await reader.readline()):
        return  # the run is gone already
    try:
        begin = json.loads(line)
        player = Player(begin["config"], begin["num_tasks"], begin["agent_timeout_s"])
    except Refusal as refusal:
        _say(writer, kind="refused", reason=str(refusal))
    except Exception as error:  # noqa: BLE001 - a boundary: the run must be told what the environment's code raised
        traceback.print_exc()
        _say(writer, kind="refused", reason=f"it raised {type(error).__name__}: {error}")
    else:
        await player.serve(reader, writer)
    await writer.drain()
    writer.close()


def main() -> int:
    """Play until the run has closed its side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket")
    # `uv` may be installed beside this Python; the built-in harnesses look for it on the path
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    # the user's modules, as in the run, for tool servers too; the files beside this one are not on the path (-P)
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    asyncio.run(_serve(socket.socket(fileno=parser.parse_args().fd)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
