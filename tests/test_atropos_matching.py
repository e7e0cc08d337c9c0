"""What of a posted sequence was sampled here: exactly these ids behind exactly this prompt, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted import completion

from asyncrl.atropos.matching import Matched, SampledTokens
from asyncrl.atropos.messages import BadField
from asyncrl.tokens import build_segments
from asyncrl.types import TokenIds

END = 2
PROMPT = [7, 8, 9]


def sampled(*replies: tuple[Sequence[int], Sequence[int], int, float], max_tokens: int = 1000) -> SampledTokens:
    """Return what was sampled: prompt, reply, version and log-prob of each token."""
    found = SampledTokens(max_tokens=max_tokens, end_token_ids={END})
    for prompt, reply, version, logprob in replies:
        found.add(TokenIds(prompt), completion(reply, version=version, logprob=logprob))
    return found


def trained(matched: Matched) -> list[tuple[int, int]]:
    """Return (token, version) of what would be trained on."""
    (segment,) = build_segments(matched.turns, end_token_ids={END})
    assert [segment.token_ids[i] for i, one in enumerate(segment.loss_mask) if one] == [
        segment.token_ids[i] for span in segment.spans for i in range(span.start, span.end)
    ]
    return [(segment.token_ids[i], span.version) for span in segment.spans for i in range(span.start, span.end)]


def masked(tokens: Sequence[int], start: int) -> list[int]:
    return [-100] * start + list(tokens[start:])


def test_turns_are_found_one_after_the_other_with_their_versions() -> None:
    known = sampled((PROMPT, [5, END], 3, -0.5), ([*PROMPT, 5, END, 11, 12], [6, END], 4, -0.5))
    tokens = [*PROMPT, 5, END, 11, 12, 6, END]
    mask = [-100, -100, -100, 5, END, -100, -100, 6, END]
    matched = known.match(0, tokens, mask)
    assert trained(matched) == [(5, 3), (END, 3), (6, 4), (END, 4)]
    assert [list(turn.context_token_ids) for turn in matched.turns] == [PROMPT, [11, 12]]
    assert (matched.num_unsampled, known.newest_version) == (0, 4)


def test_what_a_template_put_there_is_not_trained_on() -> None:
    known = sampled((PROMPT, [5, END], 3, -0.5))
    tokens = [*PROMPT, 5, END, 10]  # the end of a line behind the end of a turn
    matched = known.match(0, tokens, masked(tokens, 1))  # and the role's name before the reply
    assert trained(matched) == [(5, 3), (END, 3)]
    assert matched.num_unsampled == 3


@pytest.mark.parametrize(("reply", "found"), [([5, 6], 2), ([5, 6, END], 3), ([5], 1), ([5, 4], 0)])
def test_a_reply_may_be_cut_but_not_changed(reply: list[int], found: int) -> None:
    known = sampled((PROMPT, [5, 6, END], 3, -0.5))
    tokens = [*PROMPT, *reply]
    if not found:
        with pytest.raises(BadField, match=r"none of the 1 completions"):
            known.match(0, tokens, masked(tokens, 3))
    else:
        assert len(trained(known.match(0, tokens, masked(tokens, 3)))) == found


def test_a_reply_behind_another_prompt_is_another_reply() -> None:
    known = sampled((PROMPT, [5, END], 3, -0.5))
    tokens = [7, 8, 1, 5, END]
    with pytest.raises(BadField, match=r"tokens.4: nothing was sampled here behind its first 3 tokens"):
        known.match(4, tokens, masked(tokens, 3))
    with pytest.raises(BadField, match="no token of it is to be trained on"):
        known.match(0, tokens, [-100] * 5)


def test_of_equal_replies_it_is_the_one_with_these_log_probs_then_an_unused_one() -> None:
    known = sampled((PROMPT, [5, END], 3, -0.5), (PROMPT, [5, END], 4, -0.75), (PROMPT, [5, END], 5, -0.5))
    tokens = [*PROMPT, 5, END]
    logprobs = [1.0, 1.0, 1.0, -0.75, -0.75]
    assert trained(known.match(0, tokens, masked(tokens, 3), logprobs)) == [(5, 4), (END, 4)]
    versions = [trained(known.match(0, tokens, masked(tokens, 3)))[0][1] for _ in range(3)]
    assert versions == [3, 5, 3]  # the oldest unused one; and where all are used, the oldest


def test_the_longest_of_several_replies_is_meant() -> None:
    known = sampled((PROMPT, [5], 3, -0.5), (PROMPT, [5, 6, END], 4, -0.5))
    tokens = [*PROMPT, 5, 6, END]
    assert len(trained(known.match(0, tokens, masked(tokens, 3)))) == 3


def test_what_is_old_makes_room_and_is_counted() -> None:
    known = sampled(*[(PROMPT, [token, 6, 6, 6], 3, -0.5) for token in (10, 11, 12)], max_tokens=10)
    assert known.num_forgotten == 1
    tokens = [*PROMPT, 10, 6, 6, 6]
    with pytest.raises(BadField, match=r"none of the 2 completions"):
        known.match(0, tokens, masked(tokens, 3))
