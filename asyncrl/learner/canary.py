"""What the learner makes of the canary's text: the log-probs that engines with the same weights must come near."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.learner.model import PolicyModel
from asyncrl.packing import lay_out, split, to_device
from asyncrl.types import Logprobs, Segment, TokenIds, TokenSpan


def canary_logprobs(model: PolicyModel, token_ids: Sequence[int], *, device: torch.device) -> tuple[float, ...]:
    """Return the log-probs, in nats, of all tokens but the first, at temperature 1 and from float32 logits."""
    count = len(token_ids)
    segment = Segment(
        token_ids=TokenIds(token_ids),
        loss_mask=bytes([0, *[1] * (count - 1)]),
        behaviour_logprobs=Logprobs([0.0] * count),
        spans=(TokenSpan(start=1, end=count, version=0),),
    )
    batch = lay_out([segment], trajectory_index=[0], group_index=[0], advantages=[0.0], rewards=[0.0])
    (microbatch,) = split(batch, max_tokens=count, share_prefixes=False)
    plain = model.at(temperature=1.0, head_dtype=torch.float32)
    with torch.no_grad():
        logprobs, _ = plain.logprobs(to_device(microbatch, device))
    plain.release()
    return tuple(logprobs[1:].tolist())
