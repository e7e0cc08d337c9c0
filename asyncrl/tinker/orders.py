"""What the service asks of the process that holds the models, and what that answers. Imports no torch.

Frames of `asyncrl.wire`, one order at a time. `N` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncrl import wire
from asyncrl.types import Logprobs, TokenIds


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, and what a loss needs at each of its tokens."""

    token_ids: TokenIds
    """[N] what the model reads."""
    target_ids: TokenIds
    """[N] the token whose log-prob is taken at each place, given the tokens up to and including that place."""
    values: Mapping[str, Logprobs] = msgspec.field(default_factory=dict)
    """name -> [N] float32: "weights", or "logprobs" (nats, of the sampler) and "advantages"."""


class AdapterShape(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights of the base an adapter changes, and by how much rank."""

    rank: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


class Order(wire.Message, frozen=True, kw_only=True):
    """Something to do for one model, by its id."""

    model: str


class CreateOrder(Order, frozen=True, kw_only=True):
    """Make a new adapter, which changes nothing yet."""

    shape: AdapterShape
    seed: int | None = None


class PassOrder(Order, frozen=True, kw_only=True):
    """Take the log-probs and the summed loss of some rows; with `backward` add its gradients to those there are."""

    rows: list[Row]
    loss: str
    options: Mapping[str, float] = msgspec.field(default_factory=dict)
    backward: bool = True


class StepOrder(Order, frozen=True, kw_only=True):
    """Take a step of AdamW with the gradients there are, and forget them."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """0 clips nothing."""


class SaveOrder(Order, frozen=True, kw_only=True):
    """Write the adapter, and the optimizer's state where asked, into a new directory."""

    directory: str
    optimizer: bool
    overwrite: bool = False


class LoadOrder(Order, frozen=True, kw_only=True):
    """Go on from what a directory holds; a model that is not there is made with the adapter's shape."""

    directory: str
    optimizer: bool


class UnloadOrder(Order, frozen=True, kw_only=True):
    """Forget the model."""


class SampleOrder(wire.Message, frozen=True, kw_only=True):
    """Sample completions of one prompt."""

    directory: str
    """Of a saved adapter; "" samples from the base."""
    prompt: TokenIds
    num_samples: int
    max_tokens: int
    temperature: float
    top_k: int
    """-1: no limit."""
    top_p: float
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    """None: the model's own end tokens."""
    stop_texts: list[str] = msgspec.field(default_factory=list)
    prompt_logprobs: bool = False


class CloseOrder(wire.Message, frozen=True, kw_only=True):
    """End after replying."""


class Ready(wire.Message, frozen=True, kw_only=True):
    """The first message: the base is loaded."""

    vocab_size: int
    max_positions: int
    num_parameters: int
    computes_on: str
    end_token_ids: list[int]


class PassReply(wire.Message, frozen=True, kw_only=True):
    """Of a pass."""

    logprobs: list[Logprobs]
    """By row, [N] nats: of each target."""
    metrics: Mapping[str, float]


class StepReply(wire.Message, frozen=True, kw_only=True):
    """Of a step."""

    metrics: Mapping[str, float]


class StateReply(wire.Message, frozen=True, kw_only=True):
    """Of everything that is about a model as a whole."""

    shape: AdapterShape | None = None
    num_bytes: int = 0


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    token_ids: TokenIds
    logprobs: Logprobs
    """Nats, under the distribution that each token was sampled from (for temperature 0: at temperature 1)."""
    stopped: bool
    """False where the limit on tokens ended it."""


class SampleReply(wire.Message, frozen=True, kw_only=True):
    """Of a sampling order."""

    sequences: list[Sequence]
    prompt_logprobs: Logprobs | None = None
    """[len(prompt)] nats at temperature 1; NaN for the first token."""


class Refusal(wire.Message, frozen=True, kw_only=True):
    """The order could not be carried out, and everything else goes on."""

    message: str
    by_user: bool
    """Whether the order was at fault, and not the machine."""


Orders = CreateOrder | PassOrder | StepOrder | SaveOrder | LoadOrder | UnloadOrder | SampleOrder | CloseOrder
Replies = Ready | PassReply | StepReply | StateReply | SampleReply | Refusal | wire.Failure
Result = PassReply | StepReply | StateReply | SampleReply | Refusal
