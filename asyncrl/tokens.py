"""Text to token ids and back, and turns joined into segments. Imports no torch and no transformers.

Token ids are carried, never re-derived from text: a turn's ids are the ids that were sampled, and what an environment
answers is appended after them.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers

from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.types import Completion, FinishReason, Logprobs, Segment, TokenIds, TokenSpan, Turn, TurnSpan

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and whatever else the model's template reads."""

_PROBE = "zqxprobe"  # stands for a sampled reply when the template is rendered; only its position is used
_MAX_LOGPROB = 1e-5  # rounding of log-softmax may exceed 0 by this much; more means that it is not a log-probability


class ChatRenderer:
    """Renders chat messages with a model's tokenizer and its own template, or with another one.

    Example:
        >>> renderer = ChatRenderer.load(model_directory)
        >>> prompt = renderer.start([{"role": "user", "content": "Hi"}])
        >>> renderer.decode(prompt).endswith("assistant\\n")
        True
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: str | None,
        *,
        end_token_ids: Collection[int],
        stop_token_ids: Collection[int] = (),
        vocab_size: int | None = None,
        variables: Mapping[str, Any] | None = None,
        name: str = "the model",
    ) -> None:
        """`variables` are what the template may read besides the messages (`bos_token`, `tools`, ...).

        A `template` of None encodes and decodes, and renders nothing; `name` is whom the errors are about.
        Raises: ConfigError if the template cannot be read, or rewrites the assistant's turns.
        """
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._name = name
        self.template_text = template or ""
        """The chat template, for who must know what it says."""
        self.end_token_ids = frozenset(end_token_ids)
        """Ids with which a reply ends."""
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        """Those of them that are not the model's own, and that the engine must be told."""
        self.vocab_size = vocab_size if vocab_size is not None else tokenizer.get_vocab_size(with_added_tokens=True)
        """Ids are below this: the model's number of rows where its configuration tells it."""
        self.takes_tools = False
        """Whether the template shows the model its `tools`, and so knows how it calls them."""
        self._template: jinja2.Template | None = None
        self._reply_end: int | None = None
        if template is None:
            return
        environment = _jinja_environment()
        try:
            self._template = environment.from_string(template)
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(template))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {name} cannot be read: {error}") from error
        closing = self._encode(self._after_reply([{"role": "user", "content": "probe"}]))
        self._reply_end = next((token_id for token_id in closing if token_id in self.end_token_ids), None)

    def with_template(self, template: str) -> ChatRenderer:
        """Return a renderer of the same model with another template. Raises: ConfigError as the constructor does."""
        return self._changed(template=template)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer whose template is given other or more variables. Raises: ConfigError as the constructor."""
        return self._changed(variables={**self._variables, **variables})

    def with_end_tokens(self, token_ids: Collection[int]) -> ChatRenderer:
        """Return a renderer with which replies end with `token_ids` too. Raises: ConfigError as the constructor."""
        more = {*token_ids} - self.end_token_ids
        return self._changed(end_token_ids=[*self.end_token_ids, *more], stop_token_ids=[*self.stop_token_ids, *more])

    def _changed(self, **changes: Any) -> ChatRenderer:
        return ChatRenderer(self._tokenizer, **{**self._parts(), **changes})

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """Return a renderer whose template is given `tools`, in the form of OpenAI's function calling.

        Raises: ConfigError where the template refuses them.
        """
        other = copy.copy(self)
        other._variables = {**self._variables, "tools": list(tools)}
        other._render([{"role": "user", "content": "probe"}])
        return other

    def record(self) -> dict[str, Any]:
        """Return what `of_record` makes the same renderer of, in another process say (JSON-like)."""
        return {"tokenizer": self._tokenizer.to_str(), **self._parts()}

    def _parts(self) -> dict[str, Any]:
        return {
            "template": self.template_text or None,
            "end_token_ids": sorted(self.end_token_ids),
            "stop_token_ids": list(self.stop_token_ids),
            "vocab_size": self.vocab_size,
            "variables": self._variables,
            "name": self._name,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ChatRenderer:
        """Return the renderer of a `record`."""
        tokenizer = tokenizers.Tokenizer.from_str(record["tokenizer"])
        return cls(tokenizer, **{name: value for name, value in record.items() if name != "tokenizer"})

    def require_template(self) -> None:
        """Raise ConfigError where there is no template to render with."""
        if self._template is None:
            raise ConfigError(
                f"{self._name} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json; "
                "take a model that has one, or an environment that brings its own"
            )

    @property
    def reply_end(self) -> int:
        """The end token with which the template closes a reply. Raises: ConfigError where it closes with none."""
        if self._reply_end is None:
            raise ConfigError(
                f"the chat template of {self._name} closes a reply with none of the model's end tokens "
                f"{sorted(self.end_token_ids)}, so that text cannot show where to end"
            )
        return self._reply_end

    @classmethod
    def load(cls, model_directory: str | Path) -> ChatRenderer:
        """Return the renderer of a model in Hugging Face form.

        Reads tokenizer.json, tokenizer_config.json, chat_template.jinja (or the template inside
        tokenizer_config.json), generation_config.json and config.json. A model without a template is read too; it is
        rendered `with_template`. Raises: ConfigError, naming the file.
        """
        directory = Path(model_directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: the model directory must hold tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        model = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json")
        special = {name: _content(config[name]) for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
        vocab_size = max(model.get("vocab_size") or 0, tokenizer.get_vocab_size(with_added_tokens=True))
        return cls(
            tokenizer,
            _find_template(directory, config),
            end_token_ids=_end_token_ids(tokenizer, special.get("eos_token"), model, generation),
            vocab_size=vocab_size,
            variables=special,
            name=str(directory),
        )

    def start(self, messages: Sequence[Message], *, reply_prefix: str = "", note: str = "") -> TokenIds:
        """Return the prompt's ids, up to where the assistant's reply begins.

        `reply_prefix` is the beginning of the reply, put into the model's mouth: context, never trained on. A `note` is
        added to the last message of the user, as a paragraph of its own.
        Raises: EnvironmentFault where a note finds no message of the user whose content is text.
        """
        noted = _with_note(messages, note) if note else messages
        return TokenIds(self._encode(self._render(noted)) + self._encode(reply_prefix))

    def extend(self, messages_after: Sequence[Message], *, ended: bool, reply_prefix: str = "") -> TokenIds:
        """Return the ids to append after a sampled reply so that the reply to `messages_after` follows.

        `ended` tells whether the sampled ids end with an end token; where not, the closing tokens are added.
        """
        ids = self._encode(self._after_reply(messages_after))
        if ended:
            end = next((i for i, token_id in enumerate(ids) if token_id in self.end_token_ids), None)
            if end is not None:
                ids = TokenIds(ids[end + 1 :])
        return TokenIds(ids + self._encode(reply_prefix))

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of `ids`, special tokens left out unless `keep_special`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of plain text; nothing is added."""
        return self._encode(text)

    def token_ids_of(self, text: str) -> tuple[int, ...]:
        """Return the single tokens that are `text`, alone or with white space around it; none where there are none."""
        forms = [before + text + after for before in ("", " ", "\n") for after in ("", "\n", "\n\n")]
        found = {tuple(self._encode(form)) for form in forms}
        return tuple(sorted(ids[0] for ids in found if len(ids) == 1))

    def _encode(self, text: str) -> TokenIds:
        return TokenIds(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: Sequence[Message]) -> str:
        self.require_template()
        assert self._template is not None
        try:
            return self._template.render(messages=messages, **{"add_generation_prompt": True, **self._variables})
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {self._name} refuses the messages: {error}") from error

    def _after_reply(self, messages: Sequence[Message]) -> str:
        before = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": _PROBE}]
        text = self._render([*before, *messages])
        if text.count(_PROBE) != 1:
            raise ConfigError(
                f"the chat template of {self._name} drops or repeats the assistant's turns: it cannot be used"
            )
        return text[text.index(_PROBE) + len(_PROBE) :]


def _with_note(messages: Sequence[Message], note: str) -> list[Message]:
    place = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if place is None or not isinstance(messages[place].get("content"), str):
        raise EnvironmentFault("a note belongs to a message of the user whose content is text, and there is none")
    noted = {**messages[place], "content": f"{messages[place]['content']}\n\n{note}"}
    return [*messages[:place], noted, *messages[place + 1 :]]


def turn_from_prompt(history: Sequence[int], prompt: Sequence[int], completion: Completion) -> Turn:
    """Return the turn of a request whose whole `prompt` is known, after `history` (all ids so far, replies included).

    The turn continues the segment where the prompt extends the history exactly, and else starts a new one.
    """
    length = len(history)
    if length and len(prompt) >= length and list(prompt[:length]) == list(history):
        return Turn(context_token_ids=TokenIds(prompt[length:]), completion=completion)
    return Turn(context_token_ids=TokenIds(prompt), completion=completion, starts_segment=True)


def build_segments(
    turns: Iterable[Turn],
    *,
    end_token_ids: Collection[int],
    vocab_size: int | None = None,
    teacher_prompt_token_ids: TokenIds | None = None,
) -> tuple[Segment, ...]:
    """Return the segments of an episode: turns are joined until one says that it starts a new segment.

    An end token that the engine forced at the limit on tokens stays in the sequence, and is not trained on. The
    teacher's prompt is that of the first segment: what later ones begin with was rewritten by whoever started them.
    Raises: EnvironmentFault naming the turn and token where a completion contradicts itself: lengths, spans that do not
    cover the tokens, a log-prob that is not finite or above 0 (rounding up to 1e-5 is taken as 0), an id out of range.
    """
    parts: list[list[tuple[int, Turn]]] = []
    for number, turn in enumerate(turns):
        if turn.starts_segment or not parts:
            parts.append([])
        parts[-1].append((number, turn))
    segments = [_join(part, end_token_ids, vocab_size) for part in parts]
    if segments and teacher_prompt_token_ids is not None:
        segments[0] = replace(segments[0], teacher_prompt_token_ids=teacher_prompt_token_ids)
    return tuple(segments)


def _join(part: list[tuple[int, Turn]], end_token_ids: Collection[int], vocab_size: int | None) -> Segment:
    token_ids, logprobs, spans, turns = TokenIds(), Logprobs(), list[TokenSpan](), list[TurnSpan]()
    mask = bytearray()
    for number, turn in part:
        context, completion = turn.context_token_ids, turn.completion
        _check(completion, number)
        token_ids.extend(context)
        mask += bytes(len(context))
        logprobs.extend([0.0] * len(context))
        start, num_trained = len(token_ids), len(completion.token_ids)
        if num_trained and completion.finish_reason is FinishReason.LENGTH:
            num_trained -= completion.token_ids[-1] in end_token_ids
        num_forced = len(completion.token_ids) - num_trained
        token_ids.extend(completion.token_ids)
        mask += b"\1" * num_trained + bytes(num_forced)
        logprobs.extend(min(value, 0.0) for value in completion.behaviour_logprobs[:num_trained])
        logprobs.extend([0.0] * num_forced)
        _add_spans(spans, completion.spans, start, num_trained)
        turns.append(
            TurnSpan(
                start=start,
                end=start + num_trained,
                reward=turn.reward,
                finish_reason=completion.finish_reason,
                engine=completion.engine,
            )
        )
    if vocab_size is not None:
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise EnvironmentFault(f"token {position} has id {token_id}, allowed are 0 to {vocab_size - 1}")
    return Segment(
        token_ids=token_ids,
        loss_mask=bytes(mask),
        behaviour_logprobs=logprobs,
        spans=tuple(spans),
        turns=tuple(turns),
    )


def _add_spans(spans: list[TokenSpan], new: Sequence[TokenSpan], start: int, num_trained: int) -> None:
    for span in new:
        end = min(span.end, num_trained)
        if end > span.start:
            spans.append(TokenSpan(start=start + span.start, end=start + end, version=span.version))


def _check(completion: Completion, number: int) -> None:
    num_tokens, where = len(completion.token_ids), f"turn {number}"
    if len(completion.behaviour_logprobs) != num_tokens:
        found = len(completion.behaviour_logprobs)
        raise EnvironmentFault(f"{where}: {num_tokens} tokens but {found} behaviour log-probs")
    position = 0
    for span in completion.spans:
        if span.start != position or span.end <= span.start:
            raise EnvironmentFault(f"{where}: span {span.start} to {span.end} does not follow token {position}")
        position = span.end
    if position != num_tokens:
        raise EnvironmentFault(f"{where}: the version spans cover {position} of {num_tokens} tokens")
    for index, value in enumerate(completion.behaviour_logprobs):
        if not math.isfinite(value) or value > _MAX_LOGPROB:
            token_id = completion.token_ids[index]
            raise EnvironmentFault(
                f"{where}: token {index} (id {token_id}) has behaviour log-prob {value}, which must be finite and <= 0"
            )


# --- reading a model's files ----------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _end_token_ids(
    tokenizer: tokenizers.Tokenizer,
    eos_token: str | None,
    model: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> frozenset[int]:
    found: set[int] = set()
    for ids in (generation.get("eos_token_id"), model.get("eos_token_id")):
        if ids is not None:
            found.update(ids if isinstance(ids, list) else [ids])
    if eos_token is not None and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        found.add(token_id)
    if not found:
        raise ConfigError("the model names no end token: eos_token_id is missing in generation_config.json")
    return frozenset(found)


def _jinja_environment() -> jinja2.Environment:
    # What the templates of published models expect: trimmed blocks, loop controls, and these three names.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
