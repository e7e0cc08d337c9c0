"""Text to ids and back, and turns into segments: what a model is trained on is what it really saw."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import END, FENCE, TEMPLATE, completion, write_chat_files

from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.tokens import ChatRenderer, build_segments, turn_from_prompt
from asyncrl.types import FinishReason, Logprobs, TokenIds, TokenSpan, Turn, TurnSpan

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


def test_a_prompt_ends_where_the_reply_begins(renderer: ChatRenderer) -> None:
    text = renderer.decode(renderer.start(USER), keep_special=True)
    assert text == "<|user|>hi</s>\n<|assistant|>"
    prefixed = renderer.start(USER, reply_prefix="```python\n")
    assert renderer.decode(prefixed, keep_special=True) == text + "```python\n"


def test_a_note_is_a_paragraph_of_the_users_last_message_and_changes_nothing_else(renderer: ChatRenderer) -> None:
    messages = [*USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    noted = renderer.decode(renderer.start(messages, reply_prefix="So ", note="It is 4."), keep_special=True)
    plain = renderer.decode(renderer.start(messages, reply_prefix="So "), keep_special=True)
    assert noted == plain.replace("and?", "and?\n\nIt is 4.")
    assert messages[-1]["content"] == "and?"
    with pytest.raises(EnvironmentFault, match="a note belongs to a message of the user"):
        renderer.start([{"role": "system", "content": "hi"}], note="It is 4.")


def test_special_tokens_are_left_out_of_text_unless_asked_for(renderer: ChatRenderer) -> None:
    ids = [*b"ok", END]
    assert renderer.decode(ids) == "ok"
    assert renderer.decode(ids, keep_special=True) == "ok</s>"


def test_an_ended_reply_is_followed_by_what_comes_after_its_end_token(renderer: ChatRenderer) -> None:
    assert renderer.decode(renderer.extend(USER, ended=True), keep_special=True) == "\n<|user|>hi</s>\n<|assistant|>"


def test_a_reply_that_did_not_end_is_closed_first(renderer: ChatRenderer) -> None:
    after = renderer.extend(USER, ended=False)
    assert after[0] == END
    assert TokenIds(after[1:]) == renderer.extend(USER, ended=True)


@pytest.mark.parametrize("reply", ["", "yes", "def f(x):\n    return x\n", "\u00e9 \u4e2d"])
def test_a_conversation_by_extension_equals_the_template_of_the_whole(renderer: ChatRenderer, reply: str) -> None:
    before = renderer.start(USER) + renderer.encode(reply) + TokenIds([END])
    by_extension = TokenIds(before + renderer.extend(USER, ended=True))
    assert by_extension == renderer.start([*USER, {"role": "assistant", "content": reply}, *USER])


def test_a_token_that_is_a_text_is_found_by_the_text(renderer: ChatRenderer) -> None:
    assert renderer.token_ids_of("```") == (FENCE,)
    assert renderer.token_ids_of("two words") == ()


def test_the_template_is_read_from_either_file(tmp_path: Path) -> None:
    inside = ChatRenderer.load(write_chat_files(tmp_path / "inside"))
    beside = write_chat_files(tmp_path / "beside", template=None)
    (beside / "chat_template.jinja").write_text(TEMPLATE)
    assert ChatRenderer.load(beside).start(USER) == inside.start(USER)


def test_what_a_model_directory_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        ChatRenderer.load(tmp_path)
    write_chat_files(tmp_path, template=None)
    without = ChatRenderer.load(tmp_path)
    assert without.decode(without.encode("text")) == "text"
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))} has no chat template"):
        without.start(USER)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatRenderer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        ChatRenderer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        ChatRenderer.load(tmp_path)


def test_a_template_that_drops_the_assistants_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drops or repeats"):
        ChatRenderer.load(write_chat_files(tmp_path, template="{{ messages[0].content }}"))


def test_a_model_without_a_template_is_rendered_with_one_that_is_given(tmp_path: Path, renderer: ChatRenderer) -> None:
    given = ChatRenderer.load(write_chat_files(tmp_path, template=None)).with_template(TEMPLATE)
    assert given.start(USER) == renderer.start(USER)
    assert given.extend(USER, ended=True) == renderer.extend(USER, ended=True)
    assert given.reply_end == END
    with pytest.raises(ConfigError, match="cannot be read"):
        given.with_template("{% for %}")


def test_tools_reach_a_template_that_takes_them(renderer: ChatRenderer) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert not renderer.takes_tools
    assert renderer.with_tools(tools).start(USER) == renderer.start(USER)
    taking = renderer.with_template("{% for tool in tools %}{{ tool.function.name }};{% endfor %}" + TEMPLATE)
    assert taking.takes_tools
    assert taking.with_tools(tools).decode(taking.with_tools(tools).start(USER)).startswith("look;")
    assert taking.start(USER) == renderer.start(USER), "the one without tools is as it was"
    picky = renderer.with_template("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + TEMPLATE)
    with pytest.raises(ConfigError, match="refuses the messages: no tools here"):
        picky.with_tools(tools)


def test_ids_may_be_as_large_as_the_models_table(tmp_path: Path) -> None:
    directory = write_chat_files(tmp_path)
    assert ChatRenderer.load(directory).vocab_size == 262
    (directory / "config.json").write_text('{"vocab_size": 320, "eos_token_id": [257, 259]}')
    renderer = ChatRenderer.load(directory)
    assert renderer.vocab_size == 320
    assert renderer.end_token_ids == {257, 259}


@pytest.mark.slow
def test_the_renderer_imports_no_torch_and_no_transformers() -> None:
    program = "import sys, asyncrl.tokens, asyncrl.rollout; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- segments -------------------------------------------------------------------------------------------------


def test_turns_join_into_one_segment_with_only_sampled_tokens_trained() -> None:
    turns = [
        Turn(context_token_ids=TokenIds([1, 2]), completion=completion([3, END], version=4)),
        Turn(context_token_ids=TokenIds([5]), completion=completion([6, 7, END], version=5)),
    ]
    (segment,) = build_segments(turns, end_token_ids={END})
    assert list(segment.token_ids) == [1, 2, 3, END, 5, 6, 7, END]
    assert list(segment.loss_mask) == [0, 0, 1, 1, 0, 1, 1, 1]
    assert list(segment.behaviour_logprobs) == [0, 0, -0.5, -0.5, 0, -0.5, -0.5, -0.5]
    assert segment.spans == (TokenSpan(start=2, end=4, version=4), TokenSpan(start=5, end=8, version=5))


def test_a_rewritten_history_is_a_new_segment() -> None:
    first = completion([3, END])
    history = [1, 2, 3, END]
    assert turn_from_prompt(history, [*history, 9], first) == Turn(context_token_ids=TokenIds([9]), completion=first)
    turns = [
        turn_from_prompt([], [1, 2], first),
        turn_from_prompt(history, [1, 2, 3, 4, 9], completion([8])),
    ]
    segments = build_segments(turns, end_token_ids={END})
    assert [list(segment.token_ids) for segment in segments] == [[1, 2, 3, END], [1, 2, 3, 4, 9, 8]]
    assert [list(segment.loss_mask) for segment in segments] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]


def test_a_teachers_prompt_is_that_of_the_first_segment() -> None:
    turns = [
        Turn(context_token_ids=TokenIds([1]), completion=completion([2])),
        Turn(context_token_ids=TokenIds([3]), completion=completion([4]), starts_segment=True),
    ]
    told = build_segments(turns, end_token_ids={END}, teacher_prompt_token_ids=TokenIds([7, 8]))
    assert [s.teacher_prompt_token_ids for s in told] == [TokenIds([7, 8]), None]
    assert [s.token_ids for s in told] == [s.token_ids for s in build_segments(turns, end_token_ids={END})]


def test_a_turns_reward_lies_on_its_sampled_tokens() -> None:
    turns = [
        Turn(context_token_ids=TokenIds([1, 2]), completion=completion([3, END]), reward=0.5),
        Turn(context_token_ids=TokenIds([5]), completion=completion([6, END], cut=True)),
        Turn(context_token_ids=TokenIds([1]), completion=completion([8]), starts_segment=True, reward=-1.0),
    ]
    first, second = build_segments(turns, end_token_ids={END})
    stop, cut = FinishReason.STOP, FinishReason.LENGTH
    assert first.turns == (
        TurnSpan(start=2, end=4, reward=0.5, finish_reason=stop),
        TurnSpan(start=5, end=6, finish_reason=cut),
    )
    assert second.turns == (TurnSpan(start=1, end=2, reward=-1.0, finish_reason=stop),)


def test_a_forced_end_token_stays_in_the_sequence_and_is_not_trained_on() -> None:
    turns = [
        Turn(context_token_ids=TokenIds([1]), completion=completion([2, 3, END], cut=True)),
        Turn(context_token_ids=TokenIds([4]), completion=completion([5, 6], cut=True)),
    ]
    (segment,) = build_segments(turns, end_token_ids={END})
    assert list(segment.token_ids) == [1, 2, 3, END, 4, 5, 6]
    assert list(segment.loss_mask) == [0, 1, 1, 0, 0, 1, 1]
    assert list(segment.behaviour_logprobs) == [0, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert segment.spans == (TokenSpan(start=1, end=3, version=0), TokenSpan(start=5, end=7, version=0))


def test_a_forced_end_token_alone_leaves_no_empty_span() -> None:
    (segment,) = build_segments(
        [Turn(context_token_ids=TokenIds([1]), completion=completion([END], cut=True))], end_token_ids={END}
    )
    assert segment.spans == ()
    assert not any(segment.loss_mask)


def test_spans_of_one_completion_are_shifted_and_cut_at_the_forced_end() -> None:
    three = (
        TokenSpan(start=0, end=1, version=1),
        TokenSpan(start=1, end=3, version=2),
        TokenSpan(start=3, end=4, version=3),
    )
    sampled = replace(completion([5, 6, 7, END], cut=True), spans=three)
    (segment,) = build_segments([Turn(context_token_ids=TokenIds([1, 2]), completion=sampled)], end_token_ids={END})
    assert segment.spans == (TokenSpan(start=2, end=3, version=1), TokenSpan(start=3, end=5, version=2))


def test_rounding_above_zero_is_taken_as_zero() -> None:
    (segment,) = build_segments(
        [Turn(context_token_ids=TokenIds([1]), completion=completion([2], logprob=9e-6))], end_token_ids={END}
    )
    assert segment.behaviour_logprobs[1] == 0.0


@pytest.mark.parametrize("value", [1.1e-5, 0.5, math.nan, math.inf, -math.inf])
def test_what_is_no_logprob_is_refused_by_its_token(value: float) -> None:
    bad = replace(completion([7, 8]), behaviour_logprobs=Logprobs([-1.0, value]))
    with pytest.raises(EnvironmentFault, match=r"turn 0: token 1 \(id 8\)"):
        build_segments([Turn(context_token_ids=TokenIds([1]), completion=bad)], end_token_ids={END})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behaviour_logprobs": Logprobs([-1.0])}, "2 tokens but 1 behaviour"),
        ({"spans": (TokenSpan(start=0, end=1, version=0),)}, "cover 1 of 2"),
        ({"spans": (TokenSpan(start=1, end=2, version=0),)}, "does not follow token 0"),
        ({"spans": (TokenSpan(start=0, end=0, version=0), TokenSpan(start=0, end=2, version=0))}, "does not follow"),
        ({"spans": (TokenSpan(start=0, end=3, version=0),)}, "cover 3 of 2"),
        ({"token_ids": TokenIds([7, 300])}, "id 300, allowed are 0 to 261"),
        ({"token_ids": TokenIds([7, -1])}, "id -1, allowed"),
    ],
)
def test_a_completion_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    bad = replace(completion([7, 8]), **change)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFault, match=message):
        build_segments([Turn(context_token_ids=TokenIds([1]), completion=bad)], end_token_ids={END}, vocab_size=262)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_spans_always_cover_exactly_the_trained_tokens(shape: list[tuple[int, int, bool, bool]]) -> None:
    turns = [
        Turn(
            context_token_ids=TokenIds([1] * context),
            completion=completion([2] * sampled + [END] * ended, cut=cut, version=number),
        )
        for number, (context, sampled, ended, cut) in enumerate(shape)
    ]
    (segment,) = build_segments(turns, end_token_ids={END})
    covered = [position for span in segment.spans for position in range(span.start, span.end)]
    trained = [position for position, trained in enumerate(segment.loss_mask) if trained]
    assert covered == trained
    assert len(segment.turns) == len(turns)
    assert [position for turn in segment.turns for position in range(turn.start, turn.end)] == trained
    assert len(segment.token_ids) == len(segment.loss_mask) == len(segment.behaviour_logprobs)
