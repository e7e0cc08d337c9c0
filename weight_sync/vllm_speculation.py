"""Speculation on a CPU at the temperature that was asked for. Runs inside vLLM's server process, put there by `plugin`.

A speculating vLLM judges guessed tokens by the probabilities after temperature, so it spreads the requests'
temperatures over their guesses. On a CPU vLLM 0.32 writes them into a converted copy of the tensor that it then goes
on with (`_expand_kernel_impl` in `cpu_triton_utils`): logits are divided by whatever that memory held, guesses are
accepted by chance, and the log-probs of all but a step's last token are of no distribution, minus infinity among them.
No setting changes that, so the one function that spreads is replaced there.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # the orchestrator, which carries none, reads the switch's name here

SWITCH = "ASYNCRL_SPECULATES"
"""Set in the environment of a server that speculates; any other vLLM on the machine stays as it is."""

_ARGUMENTS = ["x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"]


def spread_on_cpu() -> None:
    """Make a speculating vLLM on a CPU spread settings over guessed tokens rightly. May be called several times.

    Raises: RuntimeError where this vLLM's source is not as it was read: training on wrong log-probs is worse.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler

    whole: Any = getattr(rejection_sampler, "expand_batch_to_tokens", None)
    if whole is None or list(inspect.signature(whole).parameters) != _ARGUMENTS:
        raise RuntimeError(f"this vLLM spreads no settings over guessed tokens as {SWITCH} expects")
    rejection_sampler.expand_batch_to_tokens = spread


def spread(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return `x` [requests] repeated for each request's tokens [num_tokens]; `replace_from` becomes `replace_to`.

    `cu_num_tokens` [requests] counts the tokens up to and including each request's.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)
