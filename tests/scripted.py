"""A byte-level chat model's files without the model, and a sampler that says what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import trio
from tokenizers import decoders, models, pre_tokenizers

from asyncrl.errors import BoundaryError
from asyncrl.protocols import Sandbox, SandboxLimits, Watch
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, FinishReason, Logprobs, TokenIds, TokenSpan

END = 257
FENCE = 261

TEMPLATE = (
    "{% for message in messages %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] }}</s>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "<|assistant|>\n"
    "{%- endif %}"
)


def write_chat_files(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write a tokenizer whose token i is byte i, then <s>, </s>, three roles and the fence; 262 tokens."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    spare = iter(range(0x100, 0x200))
    vocabulary = {chr(byte) if chr(byte) in letters else chr(next(spare)): byte for byte in range(256)}
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary |= {token: 256 + index for index, token in enumerate(special)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(["```"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def completion(token_ids: Sequence[int], *, cut: bool = False, version: int = 0, logprob: float = -0.5) -> Completion:
    """Return a completion of `token_ids` under one version; `cut` says that it ended at the limit on tokens."""
    n = len(token_ids)
    return Completion(
        token_ids=TokenIds(token_ids),
        behaviour_logprobs=Logprobs([logprob] * n),
        spans=(TokenSpan(start=0, end=n, version=version),) if n else (),
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
    )


class NoSandboxes:
    """A backend that is never asked."""

    wall = "none"
    python = ("python3",)

    async def open(self, files: Any, *, limits: SandboxLimits) -> Sandbox:
        raise AssertionError("nothing is run")


Reply = str | BoundaryError | Exception
"""What is said; an exception is raised instead."""


class ScriptedSampler:
    """Says the replies of a script, one a request, ended by the end token; a reply that is too long is cut."""

    def __init__(
        self, renderer: ChatRenderer, script: Callable[[str, int], Reply], *, seconds: float = 0.0, ends: bool = True
    ) -> None:
        """`script` is given the trajectory's id and the number of its requests before this one."""
        self._renderer = renderer
        self._script = script
        self._seconds = seconds
        self._ends = ends
        self.prompts: dict[str, list[TokenIds]] = {}
        """By trajectory, what was sampled from."""
        self.stops: set[tuple[int, ...]] = set()

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Return the script's reply after `seconds`."""
        prompts = self.prompts.setdefault(trajectory_id, [])
        prompts.append(token_ids)
        self.stops.add(tuple(stop_token_ids))
        await trio.sleep(self._seconds)
        reply = self._script(trajectory_id, len(prompts) - 1)
        if isinstance(reply, Exception):
            raise reply
        ids = list(self._renderer.encode(reply))
        stop = next((i for i, token_id in enumerate(ids) if token_id in stop_token_ids), None)
        ids = [*ids, END] if stop is None and self._ends else ids[: None if stop is None else stop + 1]
        return completion(ids[:max_tokens], cut=len(ids) > max_tokens)
