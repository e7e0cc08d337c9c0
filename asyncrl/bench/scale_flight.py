"""What one orchestrator bears: rollouts under way at one moment, and requests to engines.

    python -m asyncrl.bench.scale_flight '{"rollouts": 100000, "requests": 2000, "engine": "http://...", ...}'

The rollouts are the real ones, in the real loop with gate, buffer, books and journal (on disk, not synced apart): a
conversation of two turns, of which the second is under way in all of them at once. Time is a mock clock's; learner and
engines are simulated, and the journal is written in the loop's own thread. Not in the memory are HTTP connections and
sandboxes. It is asked by the names of its methods (`asked_process`).
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
import trio.testing
from rich.console import Console

from asyncrl.bench.asked_process import answer_requests
from asyncrl.bench.buffer import resident_bytes
from asyncrl.bench.gateway_worker import MAX_MODEL_LEN, REPLY_TOKENS, RUN_ID, make_renderer
from asyncrl.buffers import BufferSettings, Fsync, GroupCommit, Journal
from asyncrl.checkpoint import CheckpointStore
from asyncrl.engines import EnginePool, EngineSettings, SamplingSettings, VLLMEngine
from asyncrl.progress import Progress
from asyncrl.protocols import Watch
from asyncrl.recording import RunRecorder
from asyncrl.rollout import Episode, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.run import Limits, Parts, Run
from asyncrl.run_directory import RunDirectory
from asyncrl.run_journal import RunJournal
from asyncrl.simulation.parts import SimulatedEngines, SimulatedLearner, World
from asyncrl.simulation.rates import SimulationRates
from asyncrl.status import RunStatus
from asyncrl.testing import run_inline
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Completion, FinishReason, Logprobs, Task, TokenIds, TokenSpan

_GROUP_SIZE = 8
_ANSWERED = 64  # requests that end at one moment
_TOGETHER = 64  # requests to the engine at a time
_QUESTION = "What does this function return for an empty list, and why? Answer in a sentence or two."
_MORE = "Are you sure?"


class _Engines(SimulatedEngines):
    """Wait, and hand out tokens of their own each time."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.asked = 0
        self.first, self.second = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        """Where the first and the second requests wait."""
        self._reply = b"A sentence or two that answer the question, more or less, as sampled ones do.".ljust(96, b".")

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        self.asked += 1
        await (self.second if len(token_ids) > len(self._reply) + len(_QUESTION) else self.first).park()
        return Completion(
            token_ids=TokenIds(list(self._reply)),
            behaviour_logprobs=Logprobs([-0.5] * len(self._reply)),
            spans=(TokenSpan(start=0, end=len(self._reply), version=self.version),),
            finish_reason=FinishReason.STOP,
            engine="stand-in",
        )


class _Questions(MultiTurnEnvironment):
    """Asks twice."""

    name = "questions"

    def __init__(self, renderer: ChatRenderer) -> None:
        tasks = TaskSource(lambda epoch: [Task(task_id="q", environment=self.name, data={})], seed=0)
        limits = RolloutSettings(max_turns=2, max_tokens=128, max_episode_tokens=1024, episode_timeout_s=10_000.0)
        super().__init__(renderer=renderer, tasks=tasks, settings=limits)
        self.token_bytes = 0
        """Of one conversation in its second turn: ids and log-probs of what was said, and ids of what is asked."""

    def start(self, episode: Episode) -> Sequence[Message]:
        return [{"role": "user", "content": _QUESTION}]

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        if not self.token_bytes:
            (turn,) = episode.turns
            said, read = len(turn.completion.token_ids), len(turn.context_token_ids)
            # ids are held where they were said, in the request under way, and by the journal, which writes what is new
            self.token_bytes = 4 * (said + read) + 4 * said + 4 * (said + read + len(_MORE)) + 4 * (said + read)
        return StepOutcome(done=len(episode.turns) == 2, reward=1.0, messages=[{"role": "user", "content": _MORE}])


class Flight:
    """The figures."""

    def __init__(self, rollouts: int, requests: int, engine: str, directory: Path) -> None:
        self._groups, self._requests = math.ceil(rollouts / _GROUP_SIZE), requests
        self._engine, self._directory = engine, directory
        self._renderer = make_renderer()
        self._renderer.start([{"role": "user", "content": "x"}])  # what is compiled late is not a rollout's memory

    def tasks(self) -> dict[str, float]:
        """Return the memory of as many bare trio tasks that sleep."""
        count = self._groups * _GROUP_SIZE

        async def main() -> float:
            gc.collect()
            before = resident_bytes()
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(trio.sleep_forever)
                await trio.sleep(1)
                gc.collect()
                grown = resident_bytes() - before
                nursery.cancel_scope.cancel()
            return grown

        return {"kib_per_task": trio.run(main, clock=_clock()) / count / 1024}

    def rollouts(self) -> dict[str, float]:
        """Return what rollouts under way at one moment cost."""
        with Journal(self._directory / "journal", run_id="bench", fsync=Fsync.NEVER) as journal:
            return trio.run(self._fly, journal, clock=_clock())

    async def _fly(self, journal: Journal) -> dict[str, float]:
        world = World(SimulationRates(), engines=1, engine_slots=1, seed=0, faults=())
        engines, environment, status = _Engines(world), _Questions(self._renderer), RunStatus()
        files = RunDirectory(self._directory / "run")
        files.trajectories.mkdir(parents=True)
        nowhere = Progress(Console(file=(self._directory / "shown").open("w")), title="bench", max_steps=1)
        per_step = math.ceil(self._groups / 2)
        run = Run(
            Parts(environment=environment, sampler=engines, learner=SimulatedLearner(world), engines=engines),
            BufferSettings(max_off_policyness=1, groups_per_step=per_step, group_size=_GROUP_SIZE, slots=self._groups),
            Limits(steps=1),
            recorder=RunRecorder(files, nowhere, lambda token_ids: "", version=0),
            checkpoints=CheckpointStore(files.checkpoints, keep=1),
            status=status,
            stop=trio.Event(),
            rng=random.Random(0),
            journal=RunJournal(GroupCommit(journal, run_blocking=run_inline)),
        )
        gc.collect()
        before, began = resident_bytes(), time.process_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.train)
            await trio.sleep(1.0)
            await _answer(engines.first)
            count = run.ledger.statement().in_flight.trajectories
            assert engines.asked == 2 * count, f"{engines.asked} requests of {count} rollouts"
            cpu = time.process_time() - began
            gc.collect()
            grown = resident_bytes() - before
            nursery.cancel_scope.cancel()
        kib, tokens = grown / count / 1024, environment.token_bytes / 1024
        return {
            "in_flight": float(count),
            "kib_per_rollout_with_tokens": kib,
            "kib_of_tokens": tokens,
            "kib_per_rollout": kib - tokens,
            "cpu_ms_per_turn": 1000.0 * cpu / count,
        }

    def requests(self) -> dict[str, float]:
        """Return what requests to an engine's server cost this process, HTTP and all."""
        return trio.run(self._ask)

    async def _ask(self) -> dict[str, float]:
        settings = EngineSettings(max_num_seqs=8192, max_model_len=MAX_MODEL_LEN)
        engine = VLLMEngine("engine 0", self._engine, settings, SamplingSettings(), end_token_ids=(257,), run_id=RUN_ID)
        pool = EnginePool([engine], settings)
        prompt = TokenIds([1] * 512)

        async def ask(share: int) -> None:
            for _ in range(share):
                await pool.sample(prompt, max_tokens=REPLY_TOKENS, trajectory_id="0-0")

        async with engine, trio.open_nursery() as nursery:
            await nursery.start(pool.serve)
            await ask(_TOGETHER)
            share = math.ceil(self._requests / _TOGETHER)
            cpu, began = time.process_time(), time.perf_counter()
            async with trio.open_nursery() as asking:
                for _ in range(_TOGETHER):
                    asking.start_soon(ask, share)
            cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
            nursery.cancel_scope.cancel()
        count = share * _TOGETHER
        return {
            "requests": count,
            "requests_per_second": count / seconds,
            "cpu_ms_per_request": 1000.0 * cpu / count,
            "requests_per_cpu_second": count / cpu,
        }


async def _answer(waiting: trio.lowlevel.ParkingLot) -> None:
    """Answer all requests, few at a time: in a run they do not end at one moment."""
    while waiting:
        waiting.unpark(count=_ANSWERED)
        await trio.sleep(0.01)


def _clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


def main(job: dict[str, Any]) -> None:
    """Answer until the input ends."""
    flight = Flight(job["rollouts"], job["requests"], job["engine"], Path(job["directory"]))
    answer_requests(flight, {})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
