"""A model behind a vLLM server that is asked for the log-probs of given tokens, from a process without an event loop.

Its `/v1/completions` takes prompts as token ids, and with `prompt_logprobs` = k it answers with the log-prob of each
token given those before it, and of the k likeliest in its place. They are at temperature 1, whatever the request says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from asyncrl.dealing import deal
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.vocabulary import tokenizer_of
from asyncrl.packing import Batch

_REQUEST_ENTRIES = 1 << 17  # log-probs in one answer: about 10 MB of JSON
_ROUNDING = 1e-4  # a log-softmax in bfloat16 can end this far above 0; anything more is no log-prob
_KEEPALIVE_S = 2.0  # below the server's own 5 s: never reuse a connection that it is closing
_PROBE = "def add(a, b):\n    return a + b  # 42, caf\u00e9 \u4f60\u597d"
_MARKS = 8  # of the tokenizer's special tokens in the probe


class ServedModel:
    """One server, and what it finds of a batch's tokens. `W` tokens of the rows that are asked about."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        section: str,
        ranks: Ranks = ALONE,
        entries_per_request: int = _REQUEST_ENTRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`section` is named where a setting is to blame; `transport` replaces the network.

        An answer holds at most `entries_per_request` log-probs, but at least those of one row. Each of `ranks` asks for
        its share of the rows, and all of them are told what the others found.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._section = section
        self._ranks = ranks
        self._entries_per_request = entries_per_request
        self._model = ""
        self._client = httpx.Client(
            base_url=self.url,
            timeout=timeout_s,
            trust_env=False,  # no proxies: the server is on this host or on the cluster's own network
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_S),
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections; the server goes on. May be called twice."""
        self._client.close()

    def check(self, model_directory: Path, *, top_k: int) -> None:
        """Raise unless the server answers, reads text as the model's own tokenizer does, and gives `top_k` log-probs.

        The first rank alone reads `model_directory`; the others see whether an answer comes to their host.

        Raises: ConfigError naming the setting; LearnerError where the server does not answer.
        """
        models = self._answer("GET", "/v1/models").get("data") or [{}]
        self._model = str(models[0].get("id", ""))
        if not self._ranks.is_first:
            return
        tokenizer = tokenizer_of(model_directory)
        marks = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
        text = "".join(marks[:_MARKS]) + _PROBE
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        theirs = self._answer("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).get("tokens")
        if theirs != ours:
            raise ConfigError(
                f"url: the server at {self.url} serves {self._model!r}, which has another vocabulary than "
                f"{model_directory}: it reads a probe as {theirs} and not as {ours} ({self._section})"
            )
        try:
            self._ask([ours], top_k)
        except LearnerError as error:
            raise ConfigError(f"top_k = {top_k}: {error} ({self._section})") from error

    def logprobs(self, rows: Batch) -> torch.Tensor:
        """Return [W] float32, nats, of the tokens that `rows.loss_mask` marks; 0.0 for all others.

        Raises: LearnerError.
        """
        found = torch.zeros(rows.num_tokens)
        with self._ranks.failing_together():
            for start, tokens, entries in self._rows(rows, 0):
                values = [_value(entry, token) for token, entry in zip(tokens[1:], entries[1:], strict=True)]
                found[start + 1 : start + len(tokens)] = torch.tensor(values)
        self._ranks.add_up(found)
        return torch.where(rows.loss_mask, found, 0.0)

    def top_k(self, rows: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [W, k] int64 and log-probs [W, k] float32 of the k likeliest in place of each marked token.

        0 where `rows.loss_mask` does not mark one. Raises: LearnerError.
        """
        ids = torch.zeros(rows.num_tokens, k, dtype=torch.int64)
        logprobs = torch.zeros(rows.num_tokens, k)
        with self._ranks.failing_together():
            for start, tokens, entries in self._rows(rows, k):
                likeliest = [_likeliest(entry, k) for entry in entries[1:]]
                part = slice(start + 1, start + len(tokens))
                ids[part] = torch.tensor([[token for token, _ in row] for row in likeliest])
                logprobs[part] = torch.tensor([[value for _, value in row] for row in likeliest])
        self._ranks.add_up(ids, logprobs)
        marked = rows.loss_mask.unsqueeze(1)
        return torch.where(marked, ids, 0), torch.where(marked, logprobs, 0.0)

    def _rows(self, rows: Batch, k: int) -> Iterator[tuple[int, list[int], list[Any]]]:
        """Yield (place of the first token, tokens, the server's entry for each) of this rank's rows.

        One without a marked token is left out.
        """
        asked: list[tuple[int, list[int]]] = []
        bounds = list(pairwise(rows.cu_seqlens.tolist()))
        for row in deal(rows, self._ranks.count, max_tokens=rows.num_tokens)[self._ranks.place.rank]:
            start, end = bounds[row]
            marked = rows.loss_mask[start:end].nonzero()
            if len(marked):
                asked.append((start, rows.token_ids[start : start + int(marked[-1]) + 1].tolist()))
        while asked:
            entries, count = 0, 0
            for _, tokens in asked:
                entries += len(tokens) * (k + 1)
                if count and entries > self._entries_per_request:
                    break
                count += 1
            part, asked = asked[:count], asked[count:]
            answers = self._ask([tokens for _, tokens in part], k)
            for (start, tokens), answer in zip(part, answers, strict=True):
                yield start, tokens, answer

    def _ask(self, prompts: Sequence[list[int]], k: int) -> list[list[Any]]:
        """Return, for each prompt, the entry (token id as text -> logprob, rank) of each token; None for the first."""
        body = {"prompt": list(prompts), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        if self._model:
            body["model"] = self._model
        choices = sorted(self._answer("POST", "/v1/completions", body).get("choices", []), key=lambda c: c["index"])
        found = [choice.get("prompt_logprobs") or [] for choice in choices]
        if [len(row) for row in found] != [len(prompt) for prompt in prompts]:
            raise LearnerError(
                f"the server at {self.url} gave {[len(row) for row in found][:4]} prompt_logprobs for prompts of "
                f"{[len(prompt) for prompt in prompts][:4]} tokens"
            )
        return found

    def _answer(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        where = f"the server at {self.url}{path}"
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TimeoutException:
            raise LearnerError(
                f"{where} did not answer within {self._timeout_s:g} s (timeout_s, {self._section})"
            ) from None
        except httpx.HTTPError as error:
            raise LearnerError(f"{where} does not answer: {type(error).__name__}: {error} ({self._section})") from error
        if response.status_code != 200:
            raise LearnerError(f"{where} answers {response.status_code}: {response.text.strip()[:500]}")
        try:
            answer = response.json()
        except ValueError as error:
            raise LearnerError(f"{where} answers what is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise LearnerError(f"{where} answers a {type(answer).__name__}, not an object")
        return answer


def _value(entry: Any, token: int) -> float:
    try:
        value = float(entry[str(token)]["logprob"])
    except (KeyError, TypeError, ValueError) as error:
        raise LearnerError(f"the server gave no log-prob for token {token}: {entry!r:.200}") from error
    return _checked(value, token)


def _likeliest(entry: Any, k: int) -> list[tuple[int, float]]:
    """Return the k likeliest (token, log-prob); the prompt's own token is among the entries too, whatever its rank."""
    try:
        ranked = sorted((int(found["rank"]), int(token), float(found["logprob"])) for token, found in entry.items())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LearnerError(f"the server gave what are no log-probs: {entry!r:.200}") from error
    if len(ranked) < k:
        raise LearnerError(f"the server gave {len(ranked)} log-probs for a token and {k} were asked for (top_k)")
    return [(token, _checked(value, token)) for _, token, value in ranked[:k]]


def _checked(value: float, token: int) -> float:
    if not (math.isfinite(value) and value <= _ROUNDING):
        raise LearnerError(f"the server gave {value} as the log-prob of token {token}")
    return min(value, 0.0)
