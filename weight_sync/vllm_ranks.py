"""An answer of every rank to every call that asks all. Runs inside vLLM's engine process, put there by `plugin`.

The ranks of a tensor-parallel engine answer each in a queue of its own. When one answers with an error, vLLM 0.32
raises it and leaves the answers of the ranks after it where they are (`MultiprocExecutor.collective_rpc`): from then on
each call takes those ranks' answers to the call before. An update that is refused, as one with a wrong digest must be,
would leave an engine whose reports are a call old. No setting changes that, so calls that ask all ranks are made such
that none fails in a rank: an error comes back as what the rank returns, and is raised once all have answered.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank returns of a call that failed there."""

    words: str


def hear_every_rank() -> None:
    """Make engines of several ranks hear every rank's answer. May be called several times in one process.

    Raises: RuntimeError where this vLLM's source is not as it was read: training on stale reports is worse.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    whole = getattr(MultiprocExecutor, "collective_rpc", None)
    if whole is None:
        raise RuntimeError("this vLLM's MultiprocExecutor has no collective_rpc, whose answers must not be left behind")
    if getattr(whole, "hears_every_rank", False):
        return

    @functools.wraps(whole)
    def heard(
        executor: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, **ways: Any
    ) -> Any:
        if not isinstance(method, str) or any(ways.values()) or ways.get("unique_reply_rank") is not None:
            return whole(executor, method, timeout, args, kwargs, **ways)  # a step of the model: one that fails ends it
        answers = whole(executor, functools.partial(_answer, name=method), timeout, args, kwargs, **ways)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise RuntimeError(f"rank {rank}: {answer.words}")
        return answers

    heard.hears_every_rank = True  # type: ignore[attr-defined]
    MultiprocExecutor.collective_rpc = heard


def _answer(worker: Any, *arguments: Any, name: str, **named: Any) -> Any:
    """Return what a worker's method returns, or how it failed."""
    try:
        return getattr(worker, name)(*arguments, **named)
    except Exception as error:  # raised in the engine's process, where vLLM itself raises the first rank's
        logging.getLogger("vllm").exception("%s failed in this rank", name)
        return Failure(str(error) or type(error).__name__)
