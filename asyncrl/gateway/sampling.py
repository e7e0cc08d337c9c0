"""What a request asks of the sampler, and what it may not ask: another distribution than the one that is trained on.

A run samples from one distribution: its model at its own temperature, nothing cut off, nothing biased. A completion
that came from another one would carry log-probs that no importance ratio can use. So the parameters of a request are of
four kinds:

- honoured: `n`, the limit on tokens, `stop` and `stop_token_ids`, what the answer shows;
- without effect on what is sampled (`user`, `metadata`, ...): accepted, unread;
- of the distribution (`temperature`, `top_p`, ...): accepted where they say what the run does anyway;
- all others, unknown names included: foreign. `[gateway] foreign_sampling` says whether they are refused or ignored.

A `stop` string ends a completion behind the token that completes it, which is a function of what was sampled before and
so keeps the distribution. The engine does not know it: its request is ended when the string is seen to have come, and
what it has sampled behind it is not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.gateway.fields import Fields
from asyncrl.gateway.http import Refused
from asyncrl.gateway.settings import ForeignSampling, GatewaySettings
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, FinishReason, Logprobs, TokenIds, TokenSpan

UNREAD = frozenset(
    {
        "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "seed", "request_id", "parallel_tool_calls", "priority", "cache_salt",
        "skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "detokenize", "output_kind",
        "verbosity",
    }
)  # fmt: skip
"""What has no effect on what is sampled. A seed has none either: an engine's own decides."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,),
    "use_beam_search": (False,), "best_of": (1,), "logit_bias": ({},), "bad_words": ([],), "echo": (False,),
    "suffix": ("",), "response_format": ({"type": "text"},), "include_reasoning": (True,),
    "early_stopping": (False,), "functions": ([],), "truncate_prompt_tokens": (-1,), "modalities": (["text"],),
    "thinking": ({"type": "disabled"},), "add_special_tokens": (False,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "documents": ([],), "chat_template_kwargs": ({},),
}  # fmt: skip
"""What the parameters of a distribution, or of a prompt, say where they change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request asks of the sampler."""

    n: int = 1
    max_tokens: int | None = None
    """None where the request names no limit."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    """Whether the text that is shown ends with the stop string."""
    ignored: tuple[str, ...] = ()
    """Foreign parameters that are not honoured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion as it is shown and recorded."""

    completion: Completion
    """Ends with the token that completes the stop string, where there is one."""
    text: str
    """Special tokens and the stop string left out."""
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def finish_reason(self) -> str:
        """As OpenAI names it."""
        return str(self.completion.finish_reason)


def wanted_of(
    fields: Fields,
    settings: GatewaySettings,
    *,
    temperature: float,
    vocab_size: int,
    limits: Sequence[str] = ("max_tokens",),
) -> Wanted:
    """Return what is asked, having taken it and all that is left from `fields`. `limits` name the limit on tokens.

    Raises: Refused.
    """
    found = [fields.integer(name, 0, low=1) for name in limits if name in fields]
    wanted = Wanted(
        n=fields.integer("n", 1, low=1, high=settings.max_choices),
        max_tokens=min(found, default=None),
        stop=fields.texts("stop"),
        stop_token_ids=tuple(fields.token_ids("stop_token_ids", vocab_size=vocab_size)),
        keeps_stop=fields.flag("include_stop_str_in_output"),
    )
    foreign = _foreign(fields.rest(), temperature)
    if foreign and settings.foreign_sampling is ForeignSampling.REFUSE:
        raise Refused(
            400,
            f"{foreign[0]} is not what this run samples with, and could not be trained on: leave it out, or let the "
            'run set foreign_sampling = "ignore" ([gateway])',
            code="foreign_sampling",
        )
    return replace(wanted, ignored=tuple(words.partition(" ")[0] for words in foreign))


def _foreign(rest: Mapping[str, Any], temperature: float) -> list[str]:
    """Return "name = value" for each parameter of another distribution."""
    off = {**_OFF, "temperature": (temperature,)}
    return [
        f"{name} = {value!r}"[:200]
        for name, value in rest.items()
        if name not in UNREAD and not any(_same(value, allowed) for allowed in off.get(name, ()))
    ]


def _same(value: Any, allowed: Any) -> bool:
    if isinstance(value, float) and isinstance(allowed, float):
        return math.isclose(value, allowed, rel_tol=1e-6)
    return bool(value == allowed)


def choice_of(completion: Completion, wanted: Wanted, renderer: ChatRenderer) -> Choice:
    """Return a completion cut where a stop string ends it."""
    text = renderer.decode(completion.token_ids)
    met = {stop: text.find(stop) for stop in wanted.stop if stop in text}
    if not met:
        return Choice(completion=completion, text=text)
    # the string that is complete first, as it would have been seen while sampling
    stop = min(met, key=lambda one: met[one] + len(one))
    low, high = 1, len(completion.token_ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stop in renderer.decode(completion.token_ids[:middle]) else (middle + 1, high)
    end = met[stop] + (len(stop) if wanted.keeps_stop else 0)
    return Choice(completion=cut(completion, high), text=text[:end], stop=stop)


def cut(completion: Completion, num_tokens: int) -> Completion:
    """Return the first tokens of a completion, which then ends by itself."""
    spans = [span for span in completion.spans if span.start < num_tokens]
    return replace(
        completion,
        token_ids=TokenIds(completion.token_ids[:num_tokens]),
        behaviour_logprobs=Logprobs(completion.behaviour_logprobs[:num_tokens]),
        spans=tuple(replace(span, end=min(span.end, num_tokens)) for span in spans),
        finish_reason=FinishReason.STOP,
        moved_at=tuple(place for place in completion.moved_at if place <= num_tokens),
    )


def version_names(spans: Sequence[TokenSpan]) -> str:
    """Return the versions of spans, oldest first: "3,4"."""
    return ",".join(map(str, sorted({span.version for span in spans})))
