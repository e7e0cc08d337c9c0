"""The version of every token in every event of a stream. Runs inside vLLM's server process, put in place by `plugin`.

A request that goes on elsewhere when its server dies needs the versions of the tokens that have arrived. vLLM 0.32
keeps them for each running request, and sends them with the last event alone, which a dying server does not send
(`GenerateStreamChoiceBase.weight_versions`: "set on the final chunk only"). No setting changes that, so the one private
method that leaves them out is wrapped here. A client cannot know them by itself: which tokens of an event were sampled
before a swap and which after it is known to the scheduler alone.
"""

from __future__ import annotations

import functools
from typing import Any

SWITCH = "ASYNCRL_LABEL_EVERY_EVENT"
"""Set in a server's environment to turn this on; any other vLLM on the machine stays as it is."""


def label_every_event() -> None:
    """Make outputs carry the weight versions of the tokens so far. May be called several times in one process.

    Raises: RuntimeError where this vLLM's source is not as it was read: training on guessed versions is worse.
    """
    from vllm.v1.engine.output_processor import RequestState

    whole = getattr(RequestState, "_new_completion_output", None)
    if whole is None or not hasattr(RequestState, "_weight_version_spans"):
        raise RuntimeError(f"this vLLM's RequestState cannot label every event of a stream, which {SWITCH} asks for")
    if getattr(whole, "labels_every_event", False):
        return

    @functools.wraps(whole)
    def labelled(state: Any, *arguments: Any, **options: Any) -> Any:
        output = whole(state, *arguments, **options)
        if output.weight_versions is None:
            output.weight_versions = state._weight_version_spans()
        return output

    labelled.labels_every_event = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = labelled
