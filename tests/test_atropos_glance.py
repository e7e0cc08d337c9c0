"""What is taken for whole at a glance is whole: whoever looks closely finds the same, and nothing else gets by."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from asyncrl.atropos.glance import Seen, glance
from asyncrl.atropos.messages import DIGEST_BYTES, BadField, ScoredGroup, _check, _read_closely, read_group
from tests.atropos_rig import group

_LAST_ID = 49
_MAX_LEN = 8


def seen(body: bytes) -> Seen | None:
    """Return what is seen of a group at a glance."""
    return glance(body, last_id=_LAST_ID, max_token_len=_MAX_LEN, max_logprob=1e-5)


def is_whole(body: bytes) -> bool:
    """Tell whether a group is whole when it is looked at closely."""
    try:
        values, _ = _read_closely(body)
        if not {"tokens", "masks", "scores"} <= values.keys():
            return False
        _check(values, last_id=_LAST_ID, max_token_len=_MAX_LEN)
    except BadField:
        return False
    return True


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"env_id": None},
        {"inference_logprobs": None, "ref_logprobs": [], "advantages": [], "overrides": [], "group_overrides": {}},
        {"advantages": [[0, 0.5, -1]] * 4, "ref_logprobs": [[-1.0, -2.0, 0.0]] * 4},
        {"generation_params": {"temperature": 1.0, "stop": ["[", "]"]}, "overrides": [{}, {"a": [1]}, {}, {}]},
        {"mine": {"rows": [[1], [2.5, None]], "words": "[x]"}, "[odd]": [1], "images": None, "messages": []},
        {"scores": [1, 0, 1, 0.5]},
    ],
)
def test_what_environments_send_is_seen_at_a_glance(more: dict[str, Any]) -> None:
    """Kills: a glance that sees nothing, after which every group is looked at closely."""
    body = json.dumps(group(1, **more)).encode()
    assert seen(body) == Seen(size=4, env_id=more.get("env_id", 0))
    assert is_whole(body)


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": [[1, 12, [13]]] * 4},  # a number in a list of its own looks as one that is not
        {"tokens": [[1, [], [12, 13]]] * 4},
        {"masks": [[-100, 12, [13]]] * 4},
        {"scores": [[1.0], 0.0, 1.0, 0.0]},
        {"inference_logprobs": [[1.0, [-0.25], -0.5]] * 4},
        {"tokens": {"a": [1, 2, 3]}},
        {"tokens": ["abc"] * 4},
        {"tokens": [[1, 12, 50]] * 4},
        {"tokens": [[-1, 12, 13]] * 4},
        {"tokens": [[1, 12, 13.5]] * 4},
        {"tokens": [[1, 12]] * 4},
        {"tokens": [[1] * 9] * 4},
        {"tokens": [[1, 12, 13]] * 3 + [[]]},
        {"tokens": []},
        {"masks": [[-100, 12]] * 4},
        {"masks": [[-100, 12]] * 4, "inference_logprobs": None},
        {"tokens": [[1]] * 3 + [[]], "masks": [[1]] * 3 + [[]], "inference_logprobs": None},
        {"masks": [[-100, 12, 13]] * 3},
        {"scores": [1.0, 0.0, 1.0]},
        {"scores": None},
        {"inference_logprobs": [[1.0, -0.25, 0.5]] * 4},
        {"inference_logprobs": [[1.0, -0.25]] * 4},
        {"inference_logprobs": 3},
        {"advantages": [[1.0]] * 4},
        {"env_id": -1},
        {"env_id": "x"},
        {"overrides": [{}]},
        {"overrides": [1, 2, 3, 4]},
        {"generation_params": [1]},
        {"group_overrides": "x"},
        {"messages": [[{"role": "user"}]] * 4},
        {"distill_token_ids": [[[1]]]},
    ],
)
def test_what_is_not_whole_is_not_taken_for_whole(more: dict[str, Any]) -> None:
    body = json.dumps(group(1, **more)).encode()
    assert seen(body) is None
    assert not is_whole(body)
    with pytest.raises(BadField):
        read_group(body, vocab_size=_LAST_ID + 1, max_token_len=_MAX_LEN)


def test_a_list_that_is_hidden_by_an_escaped_bracket_is_seen() -> None:
    """Kills: counting the brackets of a field as it is written anew."""
    body = json.dumps(group(1, tokens=[[1, 12, [13]]] + [[1, 12, 13]] * 3, mine="?")).encode()
    assert seen(body.replace(b'"?"', b'"\\u005b"')) is None


def test_a_name_that_is_there_twice_is_looked_at_closely() -> None:
    body = json.dumps(group(1)).encode().replace(b'"env_id"', b'"env_id": 1, "env_id"')
    assert seen(body) is None
    assert read_group(body).env_id == 0


def test_what_nests_deeper_than_readers_go_is_not_taken_unread() -> None:
    """It would be stored, and break the batch that it is part of."""
    body = json.dumps(group(1)).encode()[:-1] + b', "mine": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert seen(body) is None


def test_whatever_is_changed_in_a_group_a_glance_takes_no_more_than_a_close_look() -> None:
    """Kills: a check that only one of the two makes."""
    rng = random.Random(0)
    whole = json.dumps(group(1, advantages=[[0.5, 1, -2]] * 4, overrides=[{"a": [1]}] * 4, mine=["["])).encode()
    pieces = [b"[", b"]", b",", b"1", b"-", b"0", b".5", b"null", b'"', b"{}", b"[]", b" ", b"true", b"e9", b"99"]
    taken = 0
    for _ in range(3000):
        place, length = rng.randrange(len(whole)), rng.choice((0, 0, 1, 2))
        body = whole[:place] + rng.choice(pieces) + whole[place + length :]
        if (found := seen(body)) is not None:
            taken += 1
            assert is_whole(body), body
            group_read = read_group(body, vocab_size=_LAST_ID + 1, max_token_len=_MAX_LEN)
            assert (group_read.size, group_read.env_id) == (found.size, found.env_id)
    assert taken > 100, "the changes are to be such that many groups stay whole"


def test_groups_that_differ_anywhere_are_known_from_each_other() -> None:
    """Kills: a digest of the beginning, or one that quarters can cancel out in."""
    body = json.dumps(group(1)).encode()
    others = [body[:place] + b"7" + body[place + 1 :] for place, byte in enumerate(body) if byte in b"1234"]
    others.append(body[len(body) // 2 :] + body[: len(body) // 2])
    digests = {ScoredGroup(size=4, body=each).digest for each in [body, *others]}
    assert len(digests) == len(others) + 1
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}
    assert ScoredGroup(size=4, body=bytes(body)).digest in digests
