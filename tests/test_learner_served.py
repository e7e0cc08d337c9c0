"""A teacher or reference behind a server: what it is asked, what it answers, and what it may do wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from synthetic_groups import random_groups
from test_learner_teachers import (
    _CPU,
    by_definition,
    directory,
    found_by_the_learner,
    load,
    next_tokens,
    plain,
    settings_for,
    told,
    written_out,
)
from tiny_model import build_tiny_model

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.credit import select
from asyncrl.learner.replicas import Replica
from asyncrl.learner.served import ServedModel
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.learner.teacher_settings import ReferenceSettings, TeacherSettings
from asyncrl.learner.teachers import Teachers
from asyncrl.learner.vocabulary import check_same_vocabulary, tokenizer_of
from asyncrl.packing import Batch

URL = "http://teacher:8000"
SECTION = "[learner.teacher]"
Answer = Callable[[httpx.Request], httpx.Response]


class FakeServer:
    """Answers as vLLM does, with the log-probs of the teacher's model at the tests' own temperature."""

    def __init__(self, *, max_logprobs: int = 20) -> None:
        self.model = plain("teacher")
        self.tokenizer = tokenizer_of(directory("teacher"))
        self.max_logprobs = max_logprobs
        self.prompts: list[list[list[int]]] = []
        self.change: Callable[[str, dict[str, Any]], Any] = lambda path, answer: answer

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        answer: dict[str, Any]
        if request.url.path == "/v1/models":
            answer = {"data": [{"id": "teacher"}]}
        elif request.url.path == "/tokenize":
            assert body["add_special_tokens"] is False
            answer = {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids}
        else:
            assert request.url.path == "/v1/completions"
            assert (body["model"], body["max_tokens"]) == ("teacher", 1)
            if body["prompt_logprobs"] > self.max_logprobs:
                text = f"Requested prompt logprobs of {body['prompt_logprobs']}, greater than {self.max_logprobs}"
                return httpx.Response(400, json={"error": {"message": text}})
            self.prompts.append(body["prompt"])
            choices = [
                {"index": place, "prompt_logprobs": self.entries(prompt, body["prompt_logprobs"])}
                for place, prompt in enumerate(body["prompt"])
            ]
            answer = {"choices": choices[::-1]}
        changed = self.change(request.url.path, answer)
        return changed if isinstance(changed, httpx.Response) else httpx.Response(200, json=changed)

    def entries(self, prompt: list[int], k: int) -> list[dict[str, Any] | None]:
        with torch.no_grad():
            every = next_tokens(self.model, torch.tensor(prompt)) if len(prompt) > 1 else torch.zeros(0, 1)
        found: list[dict[str, Any] | None] = [None]
        for token, row in zip(prompt[1:], every, strict=True):
            rank = int((row > row[token]).sum()) + 1
            entry = {str(token): {"logprob": row[token].item(), "rank": rank, "decoded_token": "?"}}
            for place, other in enumerate(row.topk(k).indices.tolist() if k else []):
                entry[str(other)] = {"logprob": row[other].item(), "rank": place + 1, "decoded_token": "?"}
            found.append(entry)
        return found


def served_by(server: Answer, **options: int) -> ServedModel:
    return ServedModel(URL, timeout_s=5.0, section=SECTION, transport=httpx.MockTransport(server), **options)


def checked(server: FakeServer, *, top_k: int = 0, **options: int) -> ServedModel:
    model = served_by(server, **options)
    model.check(directory("student"), top_k=top_k)
    server.prompts.clear()
    return model


def batch_of(seed: int = 0) -> Batch:
    return select(random_groups(seed), LearnerSettings()).batch


@pytest.mark.slow
def test_log_probs_stand_at_the_tokens_that_they_are_of() -> None:
    rows, server = batch_of(), FakeServer()
    found = checked(server).logprobs(rows)
    ids, values = checked(server, top_k=4).top_k(rows, 4)
    bounds = rows.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007
        tokens, mask = rows.token_ids[start:end], rows.loss_mask[start:end]
        with torch.no_grad():
            every = next_tokens(server.model, tokens)
        wanted = every.gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(found[start + 1 : end][mask[1:]].double(), wanted[mask[1:]], rtol=1e-6, atol=1e-6)
        best = every.topk(4)
        assert torch.equal(ids[start + 1 : end][mask[1:]], best.indices[mask[1:]])
        torch.testing.assert_close(
            values[start + 1 : end][mask[1:]].double(), best.values[mask[1:]], rtol=1e-6, atol=1e-6
        )
    assert bool((found[~rows.loss_mask] == 0).all())


@pytest.mark.slow
def test_what_follows_the_last_trained_token_is_not_asked() -> None:
    rows, server = batch_of(), FakeServer()
    checked(server).logprobs(rows)
    asked = [prompt for request in server.prompts for prompt in request]
    bounds = rows.cu_seqlens.tolist()
    for prompt, start, end in zip(asked, bounds, bounds[1:], strict=False):
        assert len(prompt) == int(rows.loss_mask[start:end].nonzero()[-1]) + 1
        assert prompt == rows.token_ids[start : start + len(prompt)].tolist()


@pytest.mark.slow
def test_a_large_batch_is_asked_in_several_requests() -> None:
    rows, server = batch_of(), FakeServer()
    whole = checked(server).logprobs(rows)
    assert len(server.prompts) == 1
    assert torch.equal(checked(server, entries_per_request=50).logprobs(rows), whole)
    assert len(server.prompts) > 2
    assert all(sum(map(len, prompts)) <= 50 for prompts in server.prompts)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_distillation_from_a_server_is_that_over_its_likeliest_tokens(divergence: str) -> None:
    groups = told(random_groups(1))
    settings = settings_for("distillation", TeacherSettings(source="engine", url=URL, divergence=divergence, top_k=8))
    student = load("student")
    teacher = checked(FakeServer(), top_k=8)
    teachers = Teachers(settings.resolved_loss, student, _CPU, settings=settings.teacher, teacher=teacher)
    loss, gradients = found_by_the_learner(groups, settings, teachers)
    wanted = written_out(groups, by_definition(settings.teacher), source="engine")
    assert loss == pytest.approx(wanted[0], rel=1e-5)  # the server's numbers travel as float32
    largest = max(float(g.abs().max()) for g in wanted[1].values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.slow
def test_a_kl_to_a_served_reference_is_the_kl_to_a_replica_of_it() -> None:
    groups = random_groups(2)
    settings = LearnerSettings(
        loss="kl_k3", dtype="float64", reference=ReferenceSettings(source="engine", url=URL), microbatch_tokens=10_000
    )
    student = load("student")
    replica = Replica(load("teacher"), _CPU, max_tokens=100, share_prefixes=True)
    found, wanted = (
        found_by_the_learner(groups, settings, Teachers(settings.resolved_loss, student, _CPU, reference=reference))
        for reference in (checked(FakeServer()), replica)
    )
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    largest = max(float(g.abs().max()) for g in wanted[1].values())
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-4, atol=1e-5 * largest)


# --- what may go wrong ------------------------------------------------------------------------------------------


def test_a_server_with_another_vocabulary_is_refused() -> None:
    server = FakeServer()
    server.change = lambda path, answer: {"tokens": answer["tokens"][1:]} if path == "/tokenize" else answer
    with pytest.raises(
        ConfigError, match=r"url: the server at http://teacher:8000 serves 'teacher', which has another"
    ):
        checked(server)


def test_more_log_probs_than_the_server_gives_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k = 30: .*answers 400: .*Requested prompt logprobs of 30"):
        checked(FakeServer(), top_k=30)


def without(answer: dict[str, Any], change: Callable[[list[Any]], None]) -> dict[str, Any]:
    for choice in answer["choices"]:
        change(choice["prompt_logprobs"])
    return answer


def drop_last(entries: list[Any]) -> None:
    entries.pop()


def drop_own(entries: list[Any]) -> None:
    entries[-1] = {"0": {"logprob": -1.0, "rank": 1}}


def make_positive(entries: list[Any]) -> None:
    for entry in entries[1:]:
        for found in entry.values():
            found["logprob"] = 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda answer: httpx.Response(500, text="out of memory"), "answers 500: out of memory"),
        (lambda answer: httpx.Response(200, text="<html>"), "answers what is not JSON"),
        (lambda answer: httpx.Response(200, json=[1]), "answers a list"),
        (lambda answer: {"choices": answer["choices"][1:]}, "prompt_logprobs for prompts of"),
        (lambda answer: without(answer, drop_last), "prompt_logprobs for prompts of"),
        (lambda answer: without(answer, drop_own), "gave no log-prob for token"),
        (lambda answer: without(answer, make_positive), "gave 0.5 as the log-prob of token"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_with_its_reason(
    change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    server = FakeServer()
    model = checked(server)
    server.change = lambda path, answer: change(answer)
    with pytest.raises(LearnerError, match=words):
        model.logprobs(batch_of())


def test_fewer_likeliest_tokens_than_asked_for_are_an_error() -> None:
    server = FakeServer()
    model = checked(server, top_k=4)

    def drop(entries: list[Any]) -> None:
        entries[-1] = dict(list(entries[-1].items())[:2])

    server.change = lambda path, answer: without(answer, drop)
    with pytest.raises(LearnerError, match=r"the server gave 2 log-probs for a token and 4 were asked for \(top_k\)"):
        model.top_k(batch_of(), 4)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ReadTimeout("late"), r"did not answer within 5 s \(timeout_s, \[learner.teacher\]\)"),
        (httpx.ConnectError("refused"), "does not answer: ConnectError: refused"),
    ],
)
def test_a_server_that_does_not_answer_is_named_with_the_setting(error: Exception, words: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(LearnerError, match=rf"the server at http://teacher:8000/v1/completions {words}"):
        served_by(fail).logprobs(batch_of())


def test_a_model_with_another_vocabulary_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", num_layers=1)
    check_same_vocabulary(directory("student"), other, SECTION)
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('"a": 97', '"a": 98', 1).replace('"b": 98', '"b": 97', 1)
    (other / "tokenizer.json").write_text(swapped)
    with pytest.raises(ConfigError, match=r"another vocabulary .* 'a' is id 98 against 97 \(\[learner.teacher\]\)"):
        check_same_vocabulary(directory("student"), other, SECTION)


def test_a_server_is_asked_at_temperature_1_only() -> None:
    teacher = TeacherSettings(source="engine", url=URL)
    with pytest.raises(ConfigError, match=r"temperature must be 1 with source = 'engine' \(\[learner.teacher\]\)"):
        LearnerJob(model=Path("m"), run_id="r", temperature=0.7, learner=LearnerSettings(loss="opd", teacher=teacher))
