"""What clients send as JSON, and results as JSON. The names are those of Tinker's SDK.

A field that is not named here is ignored, as long as it asks for nothing that changes numbers: those are named, and
refused where they are set.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from asyncrl.tinker.orders import PassReply, Result, SampleReply, StateReply, StepReply


class SessionBody(msgspec.Struct, kw_only=True):
    """Of a client's words that it is there."""

    session_id: str


class LoraBody(msgspec.Struct, kw_only=True):
    """Which adapter a model is."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(msgspec.Struct, kw_only=True):
    """Which optimizer a model has."""

    type: str = "adamw"


class CreateBody(msgspec.Struct, kw_only=True):
    """Make a model."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = msgspec.field(default_factory=OptimizerBody)


class ModelBody(msgspec.Struct, kw_only=True):
    """Of what is about a model and needs no order."""

    model_id: str


class TensorBody(msgspec.Struct, kw_only=True):
    """An array."""

    data: list[float]
    dtype: str = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None


class ChunkBody(msgspec.Struct, kw_only=True):
    """A part of what a model reads."""

    tokens: list[int] = []
    type: str = "encoded_text"


class InputBody(msgspec.Struct, kw_only=True):
    """What a model reads."""

    chunks: list[ChunkBody]

    def tokens(self, where: str) -> list[int]:
        """Return the tokens of all chunks. Raises: ValueError for anything but text."""
        if any(chunk.type != "encoded_text" for chunk in self.chunks):
            raise ValueError(f"{where} must be text")
        return [token for chunk in self.chunks for token in chunk.tokens]


class DatumBody(msgspec.Struct, kw_only=True):
    """One sequence and what a loss reads of it."""

    model_input: InputBody
    loss_fn_inputs: dict[str, TensorBody]


class PassInputBody(msgspec.Struct, kw_only=True):
    """What a pass is over."""

    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class PassBody(msgspec.Struct, kw_only=True):
    """A pass, as clients that speak no protobuf send it."""

    model_id: str
    seq_id: int
    forward_backward_input: PassInputBody | None = None
    forward_input: PassInputBody | None = None


class AdamBody(msgspec.Struct, kw_only=True):
    """Settings of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepBody(msgspec.Struct, kw_only=True):
    """An optimizer step."""

    model_id: str
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerBody | None = None


class SaveBody(msgspec.Struct, kw_only=True):
    """Save a state to train on."""

    model_id: str
    seq_id: int
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None


class SaveForSamplerBody(msgspec.Struct, kw_only=True):
    """Save weights to sample from, by a name or for one sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None


class LoadBody(msgspec.Struct, kw_only=True):
    """Go on from a saved state, in a model or as a new one of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    optimizer_config: OptimizerBody | None = None


class SamplerBody(msgspec.Struct, kw_only=True):
    """Open a sampler."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """How is sampled."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(msgspec.Struct, kw_only=True):
    """Sample completions."""

    prompt: InputBody
    sampling_params: SamplingBody
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None

    def unsupported(self) -> list[str]:
        """Return what is asked for and not given here."""
        names = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
        return [name for name in (*names, "prompt_logprobs_last_n") if getattr(self, name)]


class FutureBody(msgspec.Struct, kw_only=True):
    """Fetch a result."""

    request_id: str


def result_json(result: Result) -> dict[str, Any]:
    """Return a result that is no refusal as JSON."""
    match result:
        case PassReply():
            rows = [
                {"logprobs": {"data": list(row), "dtype": "float32", "shape": [len(row)]}} for row in result.logprobs
            ]
            return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": rows, "metrics": dict(result.metrics)}
        case StepReply():
            return {"metrics": dict(result.metrics)}
        case SampleReply():
            return _sample_json(result)
        case StateReply():
            return {}
    raise AssertionError(f"not a result: {result!r}")


def _sample_json(reply: SampleReply) -> dict[str, Any]:
    sequences = [
        {
            "stop_reason": "stop" if sequence.stopped else "length",
            "tokens": list(sequence.token_ids),
            "logprobs": list(sequence.logprobs),
        }
        for sequence in reply.sequences
    ]
    prompt = reply.prompt_logprobs
    shown = None if prompt is None else [None if math.isnan(value) else value for value in prompt]
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": shown}
