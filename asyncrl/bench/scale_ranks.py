"""The learner's ranks: a batch handed over to two, their steps against one process, checkpoints against plain files.

    python -m asyncrl.bench.scale_ranks '{"directory": ..., "groups": ..., "parameters": ..., "steps": ...}'

It is asked by the names of its methods (`asked_process`). Each makes its processes by forking, so that torch is
imported once. What forks has computed nothing: a fork has none of the threads that would compute more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl import wire
from asyncrl.bench.asked_process import Report, answer_requests
from asyncrl.bench.buffer import TOKENS, make_group
from asyncrl.learner.process import Learner
from asyncrl.learner.ranks import Place, Ranks
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.types import Group

_RANKS = 2
_VOCABULARY, _LAYERS, _HEAD_WIDTH = 8192, 8, 64
_ROUNDS = 5  # of handing over
_BLOCK_BYTES = 2**22  # of plain writes and reads


class RanksBench:
    """The figures."""

    def __init__(self, directory: Path, groups: int, parameters: int, steps: int) -> None:
        self._directory, self._groups, self._steps = directory, groups, steps
        self._parameters = parameters
        self._lots = 0

    def hand_over(self) -> Report:
        """Return the seconds from a batch in the orchestrator to its records in both ranks, and of the plain bytes."""
        ours, theirs = socket.socketpair()
        plain = [socket.socketpair() for _ in range(_RANKS)]
        batch = wire.StepRequest(groups=[make_group(number) for number in range(self._groups)])

        def rank(ranks: Ranks) -> Report:
            stream = theirs if ranks.is_first else None
            while True:
                data = ranks.pass_on(b"" if stream is None else wire.receive_frame(stream) or b"")
                if not data:
                    break
                request = wire.decode(data, wire.Request)
                ranks.wait_all()
                if isinstance(request, wire.ShutdownRequest):
                    break
                if stream is not None:
                    wire.send(stream, wire.ShutdownReply())
            _answer_plain(plain[ranks.place.rank][1])
            return {}

        def orchestrator() -> Report:
            return trio.run(_orchestrate, ours, batch, [end for end, _ in plain])

        return self._forked(rank, count=_RANKS, beside=orchestrator)[-1]

    def one_process(self) -> Report:
        """Return a step's seconds of one process with a thread for each rank, and of its checkpoint."""
        return self._learner(1)

    def ranks(self) -> Report:
        """Return the same of two ranks with a thread each."""
        return self._learner(_RANKS)

    def _learner(self, count: int) -> Report:
        model, saved = self._directory / "model", self._directory / f"checkpoint-{count}"
        if not model.is_dir():
            self._forked(lambda ranks: _build_model(model, self._parameters), count=1)
        settings = LearnerSettings(
            dtype="float32", device="cpu", threads=_RANKS // count, ranks=count, learning_rate=1e-5
        )
        job = LearnerJob(model=model, run_id=f"bench-{os.getpid()}-{count}", max_off_policyness=100, learner=settings)
        groups = [_with_rewards(make_group(number)) for number in range(2)]

        def train(ranks: Ranks) -> Report:
            with closing(Learner(job, ranks)) as learner:
                seconds = [_step(learner, groups) for _ in range(1 + self._steps)]
                if ranks.is_first:
                    saved.mkdir()
                ranks.wait_all()
                began = time.perf_counter()
                reply = learner.answer(wire.SaveRequest(directory=str(saved)))
                save_s = time.perf_counter() - began
            assert isinstance(reply, wire.SaveReply)
            return {"step_seconds": median(seconds[1:]), "save_seconds": save_s}

        def resume(ranks: Ranks) -> Report:
            began = time.perf_counter()
            with closing(Learner(replace(job, model=saved / "model", resume_from=str(saved)), ranks)):
                ranks.wait_all()
                return {"resume_seconds": time.perf_counter() - began}

        found = self._forked(train, count=count)[0]
        num_bytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        found |= {"plain_write_seconds": _write_plain(self._directory / "plain", num_bytes)}
        found |= self._forked(resume, count=count)[0]
        found |= {"plain_read_seconds": _read_plain(self._directory / "plain"), "num_bytes": num_bytes}
        shutil.rmtree(saved)
        return found | {"tokens": sum(len(group.trajectories) for group in groups) * TOKENS}

    def _forked(
        self, run: Callable[[Ranks], Report], *, count: int, beside: Callable[[], Report] | None = None
    ) -> list[Report]:
        """Return what each rank returns, and then what `beside` does; all of them are gone afterwards."""
        self._lots += 1
        meeting = (self._directory / f"meeting-{self._lots}").absolute().as_uri()

        def meet(rank: int) -> Report:
            with closing(Ranks(Place(rank, count, rank, count, rendezvous=meeting))) as ranks:
                return run(ranks)

        works: list[Callable[[], Report]] = [partial(meet, rank) for rank in range(count)]
        works += [beside] if beside else []
        children: dict[int, Path] = {}
        try:
            for number, work in enumerate(works):
                path = self._directory / f"report-{self._lots}-{number}.json"
                child = os.fork()
                if child == 0:
                    _end(work, path)
                children[child] = path
            for _ in works:
                child, status = os.wait()
                path = children.pop(child)
                if code := os.waitstatus_to_exitcode(status):
                    raise SystemExit(f"a process of the measurement ended with {code}")
            paths = [self._directory / f"report-{self._lots}-{number}.json" for number in range(len(works))]
            return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _end(work: Callable[[], Report], path: Path) -> None:
    """Run `work` in a forked process, leave what it returns in a file, and end."""
    code = 1
    try:
        path.write_text(json.dumps(work()), encoding="utf-8")
        code = 0
    finally:
        sys.stderr.flush()
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


# --- handing over -------------------------------------------------------------------------------------------------


async def _orchestrate(ours: socket.socket, batch: wire.StepRequest, plain: Sequence[socket.socket]) -> Report:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    reader, seconds = wire.Reader(stream), []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        await wire.send_async(stream, batch)
        await reader.receive(wire.Reply)
        seconds.append(time.perf_counter() - began)
    await wire.send_async(stream, wire.ShutdownRequest())
    data = wire.encode(batch)
    plain_seconds = [_send_plain(plain, data) for _ in range(1 + _ROUNDS)]
    tokens = sum(len(group.trajectories) for group in batch.groups) * TOKENS
    return {
        "seconds": median(seconds[1:]),
        "plain_seconds": median(plain_seconds[1:]),
        "num_bytes": len(data),
        "tokens": tokens,
    }


def _send_plain(ends: Sequence[socket.socket], data: bytes) -> float:
    began = time.perf_counter()
    for end in ends:
        end.sendall(len(data).to_bytes(8, "big"))
        end.sendall(data)
    for end in ends:
        end.recv(1)
    return time.perf_counter() - began


def _answer_plain(end: socket.socket) -> None:
    for _ in range(1 + _ROUNDS):
        left = int.from_bytes(end.recv(8, socket.MSG_WAITALL), "big")
        buffer = memoryview(bytearray(left))
        while left:
            left -= end.recv_into(buffer[:left])
        end.sendall(b"\0")


# --- the learner --------------------------------------------------------------------------------------------------


def _build_model(directory: Path, millions: int) -> Report:
    """Write a Llama with random weights of about so many million parameters."""
    hidden = _HEAD_WIDTH
    while 12 * _LAYERS * hidden**2 + 2 * _VOCABULARY * hidden < millions * 1e6:
        hidden += _HEAD_WIDTH
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=_LAYERS,
        num_attention_heads=hidden // _HEAD_WIDTH,
        num_key_value_heads=hidden // _HEAD_WIDTH,
        max_position_embeddings=2 * TOKENS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return {}


def _with_rewards(group: Group) -> Group:
    """Return the group with rewards that differ, so that there is something to learn."""
    trajectories = [replace(each, reward=float(index % 2)) for index, each in enumerate(group.trajectories)]
    return replace(group, trajectories=tuple(trajectories))


def _step(learner: Learner, groups: list[Group]) -> float:
    began = time.perf_counter()
    learner.answer(wire.StepRequest(groups=groups))
    return time.perf_counter() - began


def _write_plain(path: Path, num_bytes: int) -> float:
    block, left = os.urandom(_BLOCK_BYTES), num_bytes
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(block[:left])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _read_plain(path: Path) -> float:
    block = bytearray(_BLOCK_BYTES)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
    return time.perf_counter() - began


def main(job: dict[str, Any]) -> None:
    """Answer until the input ends."""
    bench = RanksBench(Path(job["directory"]), job["groups"], job["parameters"], job["steps"])
    answer_requests(bench, {"torch": torch.__version__})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
