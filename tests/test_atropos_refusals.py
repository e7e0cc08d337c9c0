"""What is posted to a trainer of Atropos and cannot be used: refused at the door, with its reason, or survived."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import trio
from atropos_rig import REGISTRATION, Server, firsts, group, run, zipped

from asyncrl.atropos.messages import BadField, read_group


def refusal(**more: Any) -> BadField:
    """Return what is said of a group with other fields."""
    with pytest.raises(BadField) as refused:
        read_group(json.dumps(group(1, **more)).encode(), vocab_size=50, max_token_len=8)
    return refused.value


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"tokens": [[1, 12]] + [[1, 12, 13]] * 3}, "masks.0", "3 entries for 2 tokens"),
        ({"masks": [[-100, 12, 13]] * 3}, "masks", "3 entries for 4 sequences"),
        ({"scores": [0.0, 1.0]}, "scores", "2 entries for 4 sequences"),
        ({"scores": [0.0, float("nan"), 1.0, 1.0]}, "group", "NaN"),
        ({"scores": [0.0, None, 1.0, 1.0]}, "scores", "Expected `float`, got `null`"),
        ({"tokens": []}, "tokens", "missing"),
        ({"tokens": [[]] * 4}, "tokens.0", "at least one token"),
        ({"tokens": [[1, 12, 50]] * 4}, "tokens.0", "ids are from 0 to 49, got 50"),
        ({"tokens": [[1, 12, -1]] * 4}, "tokens.0", "got -1"),
        ({"tokens": [[1, 12, 1.5]] * 4}, "tokens", "Expected `int`"),
        ({"tokens": [[1] * 9] * 4}, "tokens.0", "9 tokens, and the trainer takes 8"),
        ({"inference_logprobs": [[1.0, -0.5, 1.0]] * 4}, "inference_logprobs.0.2", "must be <= 0, got 1"),
        ({"inference_logprobs": [[1.0, -0.5]] * 4}, "inference_logprobs.0", "2 entries for 3 tokens"),
        ({"inference_logprobs": [[1.0, -0.5, float("-inf")]] * 4}, "group", "Infinity"),
        ({"advantages": [[0.0, 1.0]] * 4}, "advantages.0", "2 entries for 3 tokens"),
        ({"advantages": [1.0] * 4}, "advantages", "Expected `array`"),
        ({"ref_logprobs": [[0.0] * 3] * 5}, "ref_logprobs", "5 entries for 4 sequences"),
        ({"messages": [[{"role": "user"}]] * 4}, "messages.0.0", "role and content"),
        ({"env_id": -3}, "env_id", "must be >= 0"),
        ({"distill_token_ids": [[[1]]] * 4, "distill_logprobs": [[[-1.0, -2.0]]] * 4}, "distill_logprobs.0", "shape"),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(fields: dict[str, Any], where: str, words: str) -> None:
    refused = refusal(**fields)
    assert refused.status == 422
    assert (refused.where, words in str(refused)) == (where, True), str(refused)


def test_a_log_prob_above_0_is_fine_where_nothing_is_trained() -> None:
    found = read_group(json.dumps(group(1, inference_logprobs=[[1.0, -0.5, 1e-6]] * 4)).encode())
    assert found.inference_logprobs == [[1.0, -0.5, 1e-6]] * 4


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"tokens": ' + b"[" * 100_000, b"\xff\xfe", b'"text"'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadField):
        read_group(body)


def test_what_is_refused_is_counted_and_poisons_nothing(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        headers = {"content-type": "application/json"}
        nan = json.dumps(group(1, scores=[float("nan")] * 4))
        refused = await server.client.post("/scored_data", content=nan, headers=headers)
        assert refused.status_code == 422
        await server.post("/scored_data", group(2, 5), status=422)  # larger than any batch
        await server.post("/register", {**REGISTRATION, "batch_size": 0}, status=422)
        await server.post("/register-env", {"group_size": 1}, status=422)
        await server.post("/scored_data", group(3))
        assert await server.batch() == [3]
        refusals = (await server.get("/statistics"))["refused"]
        assert refusals == {"group": 1, "tokens": 1, "batch_size": 1, "EnvironmentRegistration": 1}

    run(tmp_path, body)


def test_a_bomb_of_gzip_ends_at_the_limit(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        headers = {"content-encoding": "gzip"}
        bomb = gzip.compress(b" " * 2**23)
        answer = await server.client.post("/scored_data", content=bomb, headers=headers)
        assert answer.status_code == 413
        assert (await server.get("/status"))["queue_size"] == 0

    run(tmp_path, body)


def test_a_body_of_200_megabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", int(server.url.rpartition(":")[2]))
        async with stream:
            await stream.send_all(b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 200000000\r\n\r\n")
            assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 413")

    run(tmp_path, body)


def test_an_environment_that_dies_in_the_middle_of_a_post_leaves_nothing(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        whole = zipped(group(1))
        head = b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(
            whole
        )
        for part in (head, head + whole[:20]):
            stream = await trio.open_tcp_stream("127.0.0.1", int(server.url.rpartition(":")[2]))
            await stream.send_all(part)
            await stream.aclose()
        # one that dies before it hears the answer, and posts again when it is back, is counted once
        stream = await trio.open_tcp_stream("127.0.0.1", int(server.url.rpartition(":")[2]))
        await stream.send_all(head + whole)
        await stream.aclose()
        await server.post("/scored_data", group(1))
        assert firsts((await server.get("/batch"))["batch"]) == [1]
        assert await server.batch() is None

    run(tmp_path, body)


def test_a_queue_that_is_full_asks_to_come_again(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        await server.post("/scored_data", group(1))
        await server.post("/scored_data", group(2), status=503)  # which environments of Atropos try again
        assert [await server.batch(), await server.batch()] == [[1], None]
        await server.post("/scored_data", group(2))  # not taken for one that came before
        assert await server.batch() == [2]

    run(tmp_path, body, max_bytes=100)
