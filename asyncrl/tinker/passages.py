"""From what clients send to orders: what is at fault in it is said as a result, or refused where no order is named."""

from __future__ import annotations

import datetime
from typing import Any

from asyncrl.gateway.http import Refused
from asyncrl.tinker import bodies
from asyncrl.tinker.orders import PassOrder, SampleOrder, StepOrder
from asyncrl.tinker.protobuf import row_of
from asyncrl.tinker.service import SamplerWeights, TinkerService
from asyncrl.tinker.shelf import TRAINING, Shelf
from asyncrl.types import TokenIds

_MAX_SAMPLED = 1024  # of a request that names no limit


def check_optimizer(body: bodies.OptimizerBody | None) -> None:
    """Refuse any optimizer but AdamW."""
    if body is not None and body.type != "adamw":
        raise Refused(400, f'optimizer_config must have type "adamw", got {body.type[:80]!r}')


def pass_of(body: bodies.PassBody, *, backward: bool) -> tuple[PassOrder, int, str]:
    """Return the order, its number, and what is wrong with its data or ""."""
    given = body.forward_backward_input if backward else body.forward_input
    if given is None:
        name = "forward_backward_input" if backward else "forward_input"
        return PassOrder(model=body.model_id, rows=[], loss="", backward=backward), body.seq_id, f"{name} is missing"
    rows, options, fault = [], {}, ""
    try:
        for index, datum in enumerate(given.data):
            tokens = datum.model_input.tokens(f"data[{index}]: model_input")
            for key, tensor in datum.loss_fn_inputs.items():
                if tensor.sparse_crow_indices is not None or len(tensor.shape or [0]) != 1:
                    raise ValueError(f"data[{index}]: {key} must be a dense vector")
            rows.append(row_of(index, tokens, {key: tensor.data for key, tensor in datum.loss_fn_inputs.items()}))
        options = {key: float(value) for key, value in (given.loss_fn_config or {}).items()}
    except ValueError as error:
        rows, options, fault = [], {}, str(error)
    order = PassOrder(model=body.model_id, rows=rows, loss=given.loss_fn, options=options, backward=backward)
    return order, body.seq_id, fault


def step_of(body: bodies.StepBody) -> tuple[StepOrder, str]:
    """Return the order, and what is wrong with it or ""."""
    adam = body.adam_params or bodies.AdamBody()
    fault = ""
    if body.optimizer_params is not None:
        fault = f"optim_step takes adam_params, got those of {body.optimizer_params.type[:80]!r}"
    order = StepOrder(
        model=body.model_id,
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.grad_clip_norm,
    )
    return order, fault


def lifetime_fault(ttl_seconds: int | None) -> str:
    """Return what is wrong with a saved model's lifetime or ""."""
    return (
        ""
        if ttl_seconds is None
        else "ttl_seconds must be absent: what is saved here stays until it is removed by hand"
    )


def sample_of(body: bodies.SampleBody, weights: SamplerWeights, service: TinkerService) -> SampleOrder:
    """Return the order. Raises: Refused for what is not offered here."""
    if found := body.unsupported():
        raise Refused(400, f"{', '.join(found)}: not offered here")
    params = body.sampling_params
    try:
        tokens = body.prompt.tokens("prompt")
        prompt = TokenIds(tokens)
    except (ValueError, OverflowError) as error:
        raise Refused(400, f"{error}") from None
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = [entry for entry in stop or [] if isinstance(entry, str)]
    ids = [entry for entry in stop or [] if isinstance(entry, int)]
    room = service.ready.max_positions - len(prompt)
    return SampleOrder(
        directory="" if weights.saved is None else str(weights.saved.directory),
        prompt=prompt,
        num_samples=body.num_samples,
        max_tokens=min(room, _MAX_SAMPLED) if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop_token_ids=ids if stop is not None and not texts else None,
        stop_texts=texts,
        prompt_logprobs=bool(body.prompt_logprobs),
    )


def checkpoints(shelf: Shelf, model_id: str | None) -> list[dict[str, Any]]:
    """Return what is saved, of one model or of all."""
    found = []
    for saved in shelf.saved(model_id):
        files = [path.stat() for path in saved.directory.iterdir()]
        found.append(
            {
                "checkpoint_id": f"{saved.kind}/{saved.name}",
                "checkpoint_type": "training" if saved.kind == TRAINING else "sampler",
                "time": datetime.datetime.fromtimestamp(max(file.st_mtime for file in files), datetime.UTC).isoformat(),
                "tinker_path": saved.path,
                "size_bytes": sum(file.st_size for file in files),
                "public": False,
            }
        )
    return found
