"""The learner as a process: one request at a time over an inherited socket, until the socket closes.

It knows no trio and starts no thread. SIGTERM and the end of the socket both let it remove what it published.

Of several ranks the first has the socket. It passes every request on, all carry it out, and it replies.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from asyncrl import wire
from asyncrl.errors import ConfigError
from asyncrl.learner import checkpoint
from asyncrl.learner.attention_kinds import choose
from asyncrl.learner.canary import canary_logprobs
from asyncrl.learner.compiling import check_compiler
from asyncrl.learner.critic_kinds import open_critic
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.offload import Offload
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import ALONE, Place, Ranks
from asyncrl.learner.settings import LearnerJob, LearnerSettings, check_ranks, parse_job, read_settings
from asyncrl.learner.sharded import load_sharded
from asyncrl.learner.step import Stepper
from asyncrl.learner.supervised import SupervisedStepper
from asyncrl.learner.teachers import open_teachers
from asyncrl.protocols import StepResult, WeightPublisher
from asyncrl.types import PolicyVersion, WeightManifest
from asyncrl.weight_sync import TRANSPORTS
from asyncrl.weight_sync.sharded import take_part


class Learner:
    """Model, optimizer and publisher of one job."""

    def __init__(self, job: LearnerJob, ranks: Ranks = ALONE) -> None:
        settings = job.learner
        torch.manual_seed(job.seed)
        ranks.form_contexts(settings.context_parallel)
        _set_threads(settings.threads, ranks)
        self._job = job
        self._ranks = ranks
        device = _device(settings.device, ranks)
        ranks.check_devices(device)
        if settings.compile:
            check_compiler(device.type == "cuda")
        resumed = Path(job.resume_from) if job.resume_from else None
        state = checkpoint.load(resumed, ranks=ranks) if resumed else None
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        load = _loader(settings, ranks)
        self._model = load(
            job.model,
            dtype=self._dtype,
            device=device,
            temperature=job.temperature,
            head_dtype=torch.float32 if settings.head_dtype == "float32" else None,
            gradient_checkpointing=settings.gradient_checkpointing,
            attention=settings.attention,
            compiled=settings.compiled_by,
        )
        self._optimizer = Optimizer(self._model.tensors(), settings, ranks=ranks)
        if state is not None:
            assert resumed is not None
            self._model.check_resumes(state.lora, resumed)
            checkpoint.restore_optimizer(self._optimizer, state, resumed, ranks=ranks)
            checkpoint.restore_random_state(state.random)
        self._teachers = open_teachers(job, self._model, self._optimizer.masters, device, ranks=ranks)
        self._critic = open_critic(job, self._model, device, ranks=ranks)
        if state is not None:
            assert resumed is not None
            checkpoint.restore_teachers(self._teachers, state, resumed, ranks=ranks)
            checkpoint.restore_critic(self._critic, state, resumed, ranks=ranks)
        self._stepper = Stepper(
            self._model,
            self._optimizer,
            settings,
            max_off_policyness=job.max_off_policyness,
            teachers=self._teachers,
            critic=self._critic,
            version=state.version if state else 0,
            adapted=state.adapted if state else {},
            ranks=ranks,
        )
        self._supervised = SupervisedStepper(self._model, self._optimizer, settings, ranks=ranks)
        self._publisher = _publisher(job, self._cast_to) if ranks.is_first else None
        self._device = device
        self._offload = Offload(self._state_tensors, self._gradient_sums, device) if job.colocated else None

    def hello(self) -> wire.Hello:
        """Return the first message of a learner that is ready, and off the card where it is colocated."""
        hello = wire.Hello(
            version=self._stepper.version,
            num_parameters=self._model.num_parameters,
            vocab_size=self._model.vocab_size,
            attention=choose(self._job.learner.attention, self._device, self._dtype),
            device=str(self._device),
            canary_logprobs=self._canary_logprobs(),
        )
        if self._offload is not None:
            self._offload.leave()
        return hello

    def answer(self, request: Any) -> wire.Message | None:
        """Carry out one request, as all ranks do, and return its reply, or None on a rank that has none to give."""
        if self._offload is not None and not isinstance(request, (wire.SaveRequest, wire.ShutdownRequest)):
            self._offload.come_back()
        match request:
            case wire.StepRequest():
                return wire.StepReply(result=self._stepper.step(request.groups, request.options))
            case wire.SupervisedStepRequest():
                return wire.StepReply(result=self._supervised_step(request))
            case wire.SupervisedLossRequest():
                return wire.SupervisedLossReply(loss=self._supervised.loss(request.segments))
            case wire.PublishRequest():
                manifest = self._publish(request.keep)
                return None if manifest is None else wire.PublishReply(manifest=manifest)
            case wire.SaveRequest():
                return wire.SaveReply(files=self._save(Path(request.directory)))
            case wire.ShutdownRequest():
                self.close()
                return wire.ShutdownReply()
        raise AssertionError(f"not a request: {request!r}")

    @property
    def _cast_to(self) -> torch.dtype | None:
        """What the weights of ranks become where they leave the learner; a single one holds them so."""
        return self._dtype if self._ranks.count > 1 else None

    def _publish(self, keep: Collection[PolicyVersion]) -> WeightManifest | None:
        manifest = None
        if self._publisher is None:
            take_part(self._weights(), self._cast_to)
        else:
            manifest = self._publisher.publish(
                self._weights(), self._stepper.version, keep=keep, adapter_scale=self._model.adapter_scale
            )
        canary_logprobs = self._canary_logprobs()
        if self._offload is not None:
            self._offload.leave()
        return None if manifest is None else replace(manifest, canary_logprobs=canary_logprobs)

    def _supervised_step(self, request: wire.SupervisedStepRequest) -> StepResult:
        result = self._supervised.step(
            request.segments, learning_rate=request.learning_rate, version=self._stepper.version
        )
        self._stepper.version = result.version
        return result

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that lies on the device between two steps but for the sums of gradients."""
        critic = self._critic
        for module in [self._model.model, *(critic.modules() if critic is not None else [])]:
            yield from module.parameters()
            yield from module.buffers()
        yield from self._teachers.tensors()
        for optimizer in self._optimizers():
            yield from optimizer.state_tensors()

    def _gradient_sums(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers():
            yield from optimizer.gradients().values()

    def _optimizers(self) -> list[Optimizer]:
        own = self._critic.optimizer if self._critic is not None else None
        return [self._optimizer] if own is None else [self._optimizer, own]

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
            policy=self._model,
            weights=self._weights(),
            optimizer=self._optimizer,
            version=self._stepper.version,
            adapted=self._stepper.adapted,
            teacher=self._teachers.state(),
            critic=self._critic,
            ranks=self._ranks,
            cast_to=self._cast_to,
        )

    def close(self) -> None:
        """Remove what was published, and leave the servers that were asked. May be called twice."""
        if self._publisher is not None:
            self._publisher.close()
        self._teachers.close()


def serve(stream: socket.socket | None, settings_path: Path, place: Place = ALONE.place) -> int:
    """Answer requests until the socket closes or one fails; return the exit code.

    What fails is sent as a Failure and printed with its traceback. Nothing published is left behind in any case. Only
    the first of several ranks has a `stream`, and reads the settings.
    """
    with _Failures(stream) as failures, closing(Ranks(place)) as ranks:
        if ranks.is_first and ranks.count > 1:
            exit_on_terminate()  # until all have met, a signal must end a process that waits for the others
        job = parse_job(ranks.pass_on(read_settings(settings_path) if ranks.is_first else None), settings_path)
        check_ranks(job.learner, ranks.count)
        with closing(Learner(job, ranks)) as learner:
            _converse(stream, learner, ranks)
    return failures.exit_code


def _converse(stream: socket.socket | None, learner: Learner, ranks: Ranks) -> None:
    hello = learner.hello()
    if stream is not None:
        wire.send(stream, hello)
    while True:
        frame = b"" if stream is None else wire.receive_frame(stream) or b""
        if not (frame := ranks.pass_on(frame)):
            return
        request = wire.decode(frame, wire.Request)
        reply = learner.answer(request)
        if stream is not None:
            assert reply is not None
            wire.send(stream, reply)
        if isinstance(request, wire.ShutdownRequest):
            return


class _Failures:
    """Turns an exception into a Failure message and exit code 1; a closed socket is an ordinary end."""

    def __init__(self, stream: socket.socket | None) -> None:
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
        if self._stream is None:
            return True
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


def _device(name: str, ranks: Ranks) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device ([learner])")
    if ranks.place.local_count > torch.cuda.device_count():
        raise ConfigError(
            f"{ranks.place.local_count} ranks of the learner are on this host and torch sees "
            f"{torch.cuda.device_count()} CUDA devices: each rank takes one (ranks, [learner])"
        )
    torch.cuda.set_device(ranks.place.local_rank)
    return torch.device("cuda", ranks.place.local_rank)


def _loader(settings: LearnerSettings, ranks: Ranks) -> Callable[..., PolicyModel]:
    if settings.lora.enabled:
        from asyncrl.learner.lora import load_lora  # peft takes seconds to import

        return partial(load_lora, settings=settings.lora, ranks=ranks)
    return load_model if ranks.count == 1 else partial(load_sharded, ranks=ranks)


def _set_threads(threads: int, ranks: Ranks) -> None:
    """Set the threads of one rank; 0 shares this host's cores among its ranks."""
    if not threads and ranks.count > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks.place.local_count)
    if threads:
        torch.set_num_threads(threads)


def _publisher(job: LearnerJob, cast_to: torch.dtype | None) -> WeightPublisher:
    module, _, name = TRANSPORTS[job.weight_sync.transport].partition(":")
    make: Callable[..., WeightPublisher] = getattr(importlib.import_module(module), name)
    settings = job.weight_sync
    options = {"directory": settings.directory} if settings.directory != Path("") else {}
    return make(run_id=job.run_id, delta=settings.delta, verification=settings.verify, cast_to=cast_to, **options)
