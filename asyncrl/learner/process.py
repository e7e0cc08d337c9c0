"""The learner as a process: one request at a time over an inherited socket, until the socket closes.

It knows no trio and starts no thread. SIGTERM and the end of the socket both let it remove what it published.
"""

from __future__ import annotations

import importlib
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from asyncrl import wire
from asyncrl.errors import ConfigError
from asyncrl.learner import checkpoint
from asyncrl.learner.canary import canary_logprobs
from asyncrl.learner.critic_kinds import open_critic, resume_critic
from asyncrl.learner.model import load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.settings import LearnerJob, read_job
from asyncrl.learner.step import Stepper
from asyncrl.learner.supervised import SupervisedStepper
from asyncrl.learner.teachers import open_teachers
from asyncrl.protocols import StepResult, WeightPublisher
from asyncrl.weight_sync import TRANSPORTS


class Learner:
    """Model, optimizer and publisher of one job."""

    def __init__(self, job: LearnerJob) -> None:
        settings = job.learner
        torch.manual_seed(job.seed)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._job = job
        device = _device(settings.device)
        resumed = Path(job.resume_from) if job.resume_from else None
        state = checkpoint.load(resumed) if resumed else None
        self._model = load_model(
            job.model,
            dtype=getattr(torch, settings.dtype),
            device=device,
            temperature=job.temperature,
            head_dtype=torch.float32 if settings.head_dtype == "float32" else None,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
        self._optimizer = Optimizer(self._model.tensors(), settings)
        if state is not None:
            self._optimizer.restore(state.optimizer, updates=state.updates, warm_updates=state.warm_updates)
            checkpoint.restore_random_state(state.random)
        self._teachers = open_teachers(job, self._model, self._optimizer.masters, device)
        if state is not None:
            self._teachers.restore(state.teacher)
        self._critic = open_critic(job, self._model, device)
        if state is not None:
            resume_critic(self._critic, state.critic_tensors, state.critic)
        self._stepper = Stepper(
            self._model,
            self._optimizer,
            settings,
            max_off_policyness=job.max_off_policyness,
            teachers=self._teachers,
            critic=self._critic,
            version=state.version if state else 0,
            adapted=state.adapted if state else {},
        )
        self._supervised = SupervisedStepper(self._model, self._optimizer, settings)
        self._publisher = _publisher(job)
        self._device = device

    def hello(self) -> wire.Hello:
        """Return the first message of a learner that is ready."""
        return wire.Hello(
            version=self._stepper.version,
            num_parameters=self._model.num_parameters,
            vocab_size=self._model.vocab_size,
            canary_logprobs=self._canary_logprobs(),
        )

    def answer(self, request: Any) -> wire.Message:
        """Carry out one request and return its reply."""
        match request:
            case wire.StepRequest():
                return wire.StepReply(result=self._stepper.step(request.groups, request.options))
            case wire.SupervisedStepRequest():
                return wire.StepReply(result=self._supervised_step(request))
            case wire.SupervisedLossRequest():
                return wire.SupervisedLossReply(loss=self._supervised.loss(request.segments))
            case wire.PublishRequest():
                version = self._stepper.version
                manifest = self._publisher.publish(self._weights(), version, keep=request.keep)
                return wire.PublishReply(manifest=replace(manifest, canary_logprobs=self._canary_logprobs()))
            case wire.SaveRequest():
                return wire.SaveReply(files=self._save(Path(request.directory)))
            case wire.ShutdownRequest():
                self.close()
                return wire.ShutdownReply()
        raise AssertionError(f"not a request: {request!r}")

    def _supervised_step(self, request: wire.SupervisedStepRequest) -> StepResult:
        result = self._supervised.step(
            request.segments, learning_rate=request.learning_rate, version=self._stepper.version
        )
        self._stepper.version = result.version
        return result

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that engines load, in the dtype that the model computes with."""
        return {name: parameter.detach() for name, parameter in self._model.tensors().items()}

    def _canary_logprobs(self) -> tuple[float, ...]:
        token_ids = self._job.canary
        return canary_logprobs(self._model, token_ids, device=self._device) if token_ids else ()

    def _save(self, directory: Path) -> dict[str, int]:
        return checkpoint.save(
            directory,
            source=self._job.model,
            weights=self._weights(),
            optimizer=self._optimizer,
            version=self._stepper.version,
            adapted=self._stepper.adapted,
            teacher=self._teachers.state(),
            critic=self._critic,
        )

    def close(self) -> None:
        """Remove what was published, and leave the servers that were asked. May be called twice."""
        self._publisher.close()
        self._teachers.close()


def serve(stream: socket.socket, settings_path: Path) -> int:
    """Answer requests until the socket closes or one fails; return the exit code.

    What fails is sent as a Failure and printed with its traceback. Nothing published is left behind in any case.
    """
    with _Failures(stream) as failures, closing(Learner(read_job(settings_path))) as learner:
        wire.send(stream, learner.hello())
        while (request := wire.receive(stream, wire.Request)) is not None:
            reply = learner.answer(request)
            wire.send(stream, reply)
            if isinstance(reply, wire.ShutdownReply):
                break
    return failures.exit_code


class _Failures:
    """Turns an exception into a Failure message and exit code 1; a closed socket is an ordinary end."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self.exit_code = 0

    def __enter__(self) -> _Failures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
            return True
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        sys.stderr.flush()
        self.exit_code = 1
        try:
            wire.send(self._stream, wire.Failure(kind=type(error).__name__, message=str(error)))
        except OSError:
            print("the orchestrator is gone: nobody was told of this failure", file=sys.stderr)
        return True


def exit_on_terminate() -> None:
    """Make SIGTERM leave by the same way as an error does, so that what was published is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device ([learner])")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _publisher(job: LearnerJob) -> WeightPublisher:
    module, _, name = TRANSPORTS[job.weight_sync.transport].partition(":")
    make: Callable[..., WeightPublisher] = getattr(importlib.import_module(module), name)
    settings = job.weight_sync
    options = {"directory": settings.directory} if settings.directory != Path("") else {}
    return make(run_id=job.run_id, delta=settings.delta, verification=settings.verify, **options)
