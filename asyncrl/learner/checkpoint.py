"""The learner's part of a checkpoint directory, fsynced file by file.

model/     config.json, model.safetensors, tokenizer and chat template: transformers and vLLM load it as it is;
           where adapters are trained adapter_config.json and adapter_model.safetensors, as peft and vLLM load them
learner/   optimizer.safetensors (float32 masters and moments; of several ranks `optimizer/`, see `sharded_checkpoint`),
           rng.safetensors, state.json (version, counts of updates, what adapts from step to step); teacher.safetensors
           where the teacher is an average of the policy's weights; critic.safetensors where there is a critic (its own
           masters and moments); of several ranks `teacher/` and `critic/`

Safetensors hold arrays and nothing else, so a checkpoint from elsewhere runs no code when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.durable import fsync
from asyncrl.errors import CheckpointError, WeightSyncError
from asyncrl.learner import sharded_checkpoint
from asyncrl.learner.critic import Critic, check_kind
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.sharded_checkpoint import CRITIC, OPTIMIZER, TEACHER, whole_file
from asyncrl.learner.teachers import Teachers
from asyncrl.types import PolicyVersion

MODEL = "model"
LEARNER = "learner"
_RANDOM = "rng.safetensors"
_STATE = "state.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What `load` found."""

    version: PolicyVersion
    updates: int
    warm_updates: int
    optimizer: Mapping[str, torch.Tensor] | None
    """None where several ranks wrote it or are to read it: `sharded_checkpoint.read_state`."""
    random: Mapping[str, torch.Tensor]
    adapted: Mapping[str, float]
    """name -> number that moves from step to step, as `Stepper.adapted` gave it."""
    teacher: Mapping[str, torch.Tensor] | None
    """Empty where the teacher had no state of its own; None as of `optimizer`."""
    critic: Mapping[str, Any] = field(default_factory=dict)
    """What `Critic.state` returned; empty where there was none."""
    critic_tensors: Mapping[str, torch.Tensor] | None = field(default_factory=dict)
    """None as of `optimizer`."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """What `PolicyModel.description` returned; empty where the whole model is trained."""


def save(
    directory: Path,
    *,
    source: Path,
    policy: PolicyModel,
    weights: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    version: PolicyVersion,
    adapted: Mapping[str, float],
    teacher: Mapping[str, torch.Tensor] = MappingProxyType({}),
    critic: Critic | None = None,
    ranks: Ranks = ALONE,
    cast_to: torch.dtype | None = None,
) -> dict[str, int]:
    """Write model and learner below `directory`; return file name -> bytes once all of it is on the disk.

    source: the model directory whose configuration and tokenizer are copied. weights: the `policy`'s, as published to
    the engines, in `cast_to` where that is given. All `ranks` call it at once; the first writes what is not sharded.
    Raises: CheckpointError naming the file that could not be written.
    """
    model, learner = directory / MODEL, directory / LEARNER
    weights_path = model / policy.weights_file
    parts: dict[str, Mapping[str, torch.Tensor]] = {OPTIMIZER: optimizer.state()}
    parts |= {TEACHER: teacher} if teacher else {}
    parts |= {CRITIC: critic.tensors()} if critic is not None else {}
    try:
        if ranks.is_first:
            model.mkdir()
            learner.mkdir()
            policy.write_config(model, source)
        ranks.wait_all()
        if ranks.count > 1:
            sharded_checkpoint.write_model(weights, weights_path, cast_to, is_first=ranks.is_first)
            for name, tensors in parts.items():
                sharded_checkpoint.write_state(tensors, learner, name, ranks)
        if not ranks.is_first:
            return {}
        if ranks.count == 1:
            _save_tensors(weights, weights_path)
            for name, tensors in parts.items():
                _save_tensors(tensors, whole_file(learner, name))
        _save_tensors(_random_state(), learner / _RANDOM)
        state: dict[str, Any] = {"format": _FORMAT, "version": version, "updates": optimizer.updates}
        state |= {"warm_updates": optimizer.warm_updates, "adapted": dict(adapted), "teacher": bool(teacher)}
        state["lora"] = policy.description()
        if critic is not None:
            state["critic"] = critic.state()
        (learner / _STATE).write_text(json.dumps(state), encoding="utf-8")
        written = [path for folder in (model, learner) for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in (*written, *{path.parent for path in written}, directory):
            fsync(path)
    except (OSError, SafetensorError, WeightSyncError) as error:
        raise CheckpointError(f"cannot write the checkpoint {directory}: {error}") from error
    return {str(path.relative_to(directory)): path.stat().st_size for path in written}


def load(directory: Path, *, ranks: Ranks = ALONE) -> LearnerState:
    """Return the learner's state in the checkpoint `directory`. Raises: CheckpointError naming what is missing."""
    learner = directory / LEARNER
    path = learner / _STATE
    if not path.is_file():
        raise CheckpointError(f"checkpoint {directory}: {path.relative_to(directory)} is missing")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint {directory}: {path.relative_to(directory)} is broken: {error}") from None
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {state.get('format')!r}; this version of asyncrl reads {_FORMAT}")
    whole = ranks.count == 1 and not sharded_checkpoint.is_sharded(learner)

    def part(name: str) -> Mapping[str, torch.Tensor] | None:
        return _load_tensors(whole_file(learner, name), directory) if whole else None

    return LearnerState(
        version=int(state["version"]),
        updates=int(state["updates"]),
        warm_updates=int(state.get("warm_updates", 0)),
        optimizer=part(OPTIMIZER),
        random=_load_tensors(learner / _RANDOM, directory),
        adapted=state.get("adapted", {}),
        teacher=part(TEACHER) if state.get("teacher") else {},
        critic=state.get("critic", {}),
        lora=state.get("lora", {}),
        critic_tensors=part(CRITIC) if "critic" in state else {},
    )


def restore_optimizer(optimizer: Optimizer, state: LearnerState, directory: Path, *, ranks: Ranks = ALONE) -> None:
    """Bring `optimizer` to what a checkpoint `directory` holds, whose state `load` returned.

    It may have been written by another number of ranks. Raises: CheckpointError naming what is missing or of another
    shape, as in a checkpoint of another architecture.
    """
    found = state.optimizer
    if found is None:
        blank = optimizer.blank_state(moments=state.updates > 0)
        found = sharded_checkpoint.read_state(blank, directory / LEARNER, OPTIMIZER, ranks)
    optimizer.restore(found, updates=state.updates, warm_updates=state.warm_updates)


def restore_teachers(teachers: Teachers, state: LearnerState, directory: Path, *, ranks: Ranks = ALONE) -> None:
    """As `restore_optimizer`, of a teacher that is an average."""
    found = state.teacher
    if found is None:
        found = sharded_checkpoint.read_state(teachers.blank_state(), directory / LEARNER, TEACHER, ranks)
    teachers.restore(found)


def restore_critic(critic: Critic | None, state: LearnerState, directory: Path, *, ranks: Ranks = ALONE) -> None:
    """As `restore_optimizer`, of the critic. Raises CheckpointError for one of another kind too."""
    check_kind(critic, state.critic)
    if critic is not None:
        found = state.critic_tensors
        if found is None:
            blank = critic.blank_tensors(state.critic)
            found = sharded_checkpoint.read_state(blank, directory / LEARNER, CRITIC, ranks)
        critic.restore(found, state.critic)


def restore_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set torch's generators to what `save` wrote."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def _load_tensors(path: Path, directory: Path) -> dict[str, torch.Tensor]:
    name = path.relative_to(directory)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {directory}: {name} is missing")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {directory}: {name} is broken: {error}") from None
