"""The process that holds one base and all models on it: an order at a time over an inherited socket, until it closes.

It knows no trio and starts no thread. What an order is at fault for is refused and changes nothing, whichever model it
was for; anything else that is raised is a bug, and ends the process.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from asyncrl import wire
from asyncrl.errors import CheckpointError, ConfigError, EngineError, ShapeError
from asyncrl.learner.attention_kinds import choose
from asyncrl.learner.model import load_model
from asyncrl.learner.vocabulary import tokenizer_of
from asyncrl.tinker import states
from asyncrl.tinker.adapters import Adapted, Adapters
from asyncrl.tinker.job import ModelsJob
from asyncrl.tinker.loss_names import check_rows, loss_of
from asyncrl.tinker.orders import (
    CloseOrder,
    CreateOrder,
    LoadOrder,
    Orders,
    PassOrder,
    PassReply,
    Ready,
    Refusal,
    SampleOrder,
    SampleReply,
    SaveOrder,
    StateReply,
    StepOrder,
    StepReply,
    UnloadOrder,
)
from asyncrl.tinker.passes import run_pass, target_logprobs
from asyncrl.tinker.sampling import sample
from asyncrl.tinker.steps import take_step
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Logprobs

_BY_USER = (ConfigError, ShapeError, EngineError, CheckpointError)
_BY_MACHINE = (torch.OutOfMemoryError,)


class Models:
    """One base, and the models on it by their ids."""

    def __init__(self, job: ModelsJob) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self._job = job
        self._base = Path(job.model)
        self._device = torch.device("cuda" if _takes_cuda(job.device) else "cpu")
        dtype: torch.dtype = getattr(torch, job.dtype)
        self._policy = load_model(
            self._base,
            dtype=dtype,
            device=self._device,
            head_dtype=torch.float32 if job.head_dtype == "float32" else None,
            gradient_checkpointing=job.gradient_checkpointing,
            attention=job.attention,
        )
        num_parameters = self._policy.num_parameters
        self._adapters = Adapters(self._policy)
        self.models: dict[str, Adapted] = {}
        self._samplers: OrderedDict[str, Adapted] = OrderedDict()
        self._tokenizer = tokenizer_of(self._base)
        self._ready = Ready(
            vocab_size=self._policy.vocab_size,
            max_positions=_max_positions(self._policy.model),
            num_parameters=num_parameters,
            computes_on=f"{self._device}, attention by {choose(job.attention, self._device, dtype)}",
            end_token_ids=sorted(ChatRenderer.load(self._base).end_token_ids),
        )

    def ready(self) -> Ready:
        """Return the first message."""
        return self._ready

    def answer(self, order: Any) -> wire.Message:
        """Carry out an order, or say why not."""
        try:
            return self._carry_out(order)
        except _BY_USER as error:
            return Refusal(message=str(error), by_user=True)
        except _BY_MACHINE as error:
            found = self.models.get(getattr(order, "model", ""))
            if found is not None and isinstance(order, PassOrder):
                found.discard()  # some of this order's gradients may be among them
            return Refusal(message=f"{error}; gradients since the last optim_step are dropped", by_user=False)

    def _carry_out(self, order: Any) -> wire.Message:
        match order:
            case CreateOrder():
                self.models[order.model] = self._adapters.create(order.shape, order.seed)
                return StateReply(shape=order.shape)
            case PassOrder():
                return self._pass(order)
            case StepOrder():
                return StepReply(metrics=take_step(self._model(order.model), order))
            case SaveOrder():
                model = self._model(order.model)
                num_bytes = states.save(
                    Path(order.directory),
                    self._adapters,
                    model,
                    optimizer=order.optimizer,
                    overwrite=order.overwrite,
                    base=self._base,
                )
                self._forget_sampler(order.directory)
                return StateReply(shape=model.shape, num_bytes=num_bytes)
            case LoadOrder():
                return self._load(order)
            case UnloadOrder():
                self._adapters.remove(self._model(order.model))
                del self.models[order.model]
                return StateReply()
            case SampleOrder():
                return self._sample(order)
            case CloseOrder():
                return StateReply()
        raise AssertionError(f"not an order: {order!r}")

    def _model(self, name: str) -> Adapted:
        if name not in self.models:
            raise ConfigError(f"there is no model {name}: it was not created, or it was unloaded")
        return self.models[name]

    def _pass(self, order: PassOrder) -> PassReply:
        model = self._model(order.model)
        loss_of(order.loss, order.options)
        check_rows(order.loss, order.rows, vocab_size=self._ready.vocab_size, max_positions=self._ready.max_positions)
        found, metrics = run_pass(
            self._adapters,
            model,
            order.rows,
            order.loss,
            order.options,
            backward=order.backward,
            max_tokens=self._job.microbatch_tokens,
            device=self._device,
        )
        return PassReply(logprobs=[Logprobs(row.tolist()) for row in found], metrics=metrics)

    def _load(self, order: LoadOrder) -> StateReply:
        directory = Path(order.directory)
        shape = states.read_state(directory).shape
        model = self.models.get(order.model)
        if model is not None:
            states.load(directory, model, optimizer=order.optimizer)
        else:
            self.models[order.model] = self._loaded(directory, optimizer=order.optimizer)
        return StateReply(shape=shape)

    def _loaded(self, directory: Path, *, optimizer: bool) -> Adapted:
        model = self._adapters.create(states.read_state(directory).shape, 0)
        try:
            states.load(directory, model, optimizer=optimizer)
        except CheckpointError:
            self._adapters.remove(model)
            raise
        return model

    def _sample(self, order: SampleOrder) -> SampleReply:
        model = self._sampler(order.directory) if order.directory else None
        most, device = self._job.microbatch_tokens, self._device
        sequences = sample(
            self._adapters,
            model,
            order,
            end_token_ids=self._ready.end_token_ids,
            tokenizer=self._tokenizer,
            max_tokens=most,
            device=device,
        )
        prompt_logprobs = None
        if order.prompt_logprobs:
            prompt_logprobs = target_logprobs(self._adapters, model, order.prompt, max_tokens=most, device=device)
        return SampleReply(sequences=sequences, prompt_logprobs=prompt_logprobs)

    def _sampler(self, directory: str) -> Adapted:
        if directory not in self._samplers:
            self._samplers[directory] = self._loaded(Path(directory), optimizer=False)
            if len(self._samplers) > self._job.max_samplers:
                _, oldest = self._samplers.popitem(last=False)
                self._adapters.remove(oldest)
        self._samplers.move_to_end(directory)
        return self._samplers[directory]

    def _forget_sampler(self, directory: str) -> None:
        found = self._samplers.pop(directory, None)
        if found is not None:
            self._adapters.remove(found)


def _max_positions(model: Any) -> int:
    return int(model.config.max_position_embeddings)


def serve(stream: socket.socket, job: ModelsJob) -> int:
    """Answer orders until the socket closes; return the exit code."""
    try:
        models = Models(job)
        wire.send(stream, models.ready())
        while (order := wire.receive(stream, Orders)) is not None:
            wire.send(stream, models.answer(order))
            if isinstance(order, CloseOrder):
                break
    except ConfigError as error:  # of the base itself
        wire.send(stream, wire.Failure(kind="ConfigError", message=str(error)))
        return 1
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    return 0


def _takes_cuda(name: str) -> bool:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device ([learner])")
    return name != "cpu" and torch.cuda.is_available()
