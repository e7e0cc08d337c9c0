"""What a file of demonstrations may hold, and that it is rendered as rollouts render their conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted import END, TEMPLATE, write_chat_files

from asyncrl.demonstrations import read_demonstrations, write_demonstrations
from asyncrl.errors import ConfigError
from asyncrl.packing import lay_out
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Segment

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo!"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("chat")))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def trained(segment: Segment) -> list[int]:
    return [t for t, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]


def test_the_assistants_turns_and_their_end_tokens_are_trained_on_and_nothing_else(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    more = [USER, REPLY, {"role": "user", "content": "More"}, {"role": "assistant", "content": "No."}]
    file = write(tmp_path / "d.jsonl", {"messages": [{"role": "system", "content": "Be short."}, *more], "source": "x"})
    (segment,) = read_demonstrations(file, renderer, max_tokens=200).segments
    assert trained(segment) == [*renderer.encode("Yo!"), END, *renderer.encode("No."), END]
    assert renderer.decode(segment.token_ids, keep_special=True) == (
        "<|system|>Be short.</s>\n<|user|>Hi</s>\n<|assistant|>Yo!</s>\n<|user|>More</s>\n<|assistant|>No.</s>"
    )


def test_a_turn_without_weight_is_read_and_not_trained_on(renderer: ChatRenderer, tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "Ho?", "weight": 0}, USER, {**REPLY, "weight": 1}]
    file = write(tmp_path / "d.jsonl", {"messages": messages})
    (segment,) = read_demonstrations(file, renderer, max_tokens=200).segments
    assert trained(segment) == [*renderer.encode("Yo!"), END]
    assert "<|assistant|>Ho?</s>" in renderer.decode(segment.token_ids, keep_special=True)


def test_a_conversation_has_the_tokens_of_a_rollout_that_said_the_same(renderer: ChatRenderer, tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", {"messages": [USER, REPLY, USER, REPLY]})
    (segment,) = read_demonstrations(file, renderer, max_tokens=200).segments
    sampled = [*renderer.encode("Yo!"), END]
    rollout = [*renderer.start([USER]), *sampled, *renderer.extend([USER], ended=True), *sampled]
    assert list(segment.token_ids) == rollout
    batch = lay_out([segment], trajectory_index=[0], group_index=[0], advantages=[0.0], rewards=[0.0])
    assert batch.num_loss_tokens == 2 * len(sampled)


def test_token_ids_are_taken_as_they_are(renderer: ChatRenderer, tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", {"token_ids": [5, 7, 9, 4], "loss_mask": [0, 1, False, True]})
    (segment,) = read_demonstrations(file, renderer, max_tokens=4).segments
    assert (list(segment.token_ids), segment.loss_mask) == ([5, 7, 9, 4], bytes([0, 1, 0, 1]))
    assert [(span.start, span.end) for span in segment.spans] == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "line 2: is empty"),
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: must be a JSON object, found list"),
        ({"text": "x"}, 'must hold either "messages", or "token_ids" and "loss_mask"'),
        ({"messages": [USER, REPLY], "token_ids": [1]}, 'must hold either "messages", or'),
        ({"token_ids": [1, 2]}, "loss_mask is missing"),
        ({"loss_mask": [0, 1]}, "token_ids is missing"),
        ({"messages": []}, "messages must be a list with something in it"),
        ({"messages": [USER, "Yo"]}, "messages[1] must hold role, content and perhaps weight, found str"),
        ({"messages": [{**USER, "tool_calls": []}, REPLY]}, "perhaps weight, found ['content', 'role', 'tool_calls']"),
        ({"messages": [USER, {"role": "bot", "content": "Yo"}]}, "messages[1]: role must be one of system, user"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1]: content must be text, found ''"),
        ({"messages": [{"role": "user", "content": 3}, REPLY]}, "messages[0]: content must be text, found 3"),
        ({"messages": [USER, {**REPLY, "weight": 2}]}, "messages[1]: weight must be 0 or 1, of the assistant's alone"),
        ({"messages": [USER, {**REPLY, "weight": True}]}, "messages[1]: weight must be 0 or 1"),
        ({"messages": [{**USER, "weight": 0}, REPLY]}, "messages[0]: weight must be 0 or 1, of the assistant's"),
        ({"messages": [USER, {**REPLY, "weight": 0}]}, "no token is trained on"),
        ({"messages": [USER]}, "the last message must be the assistant's, found role 'user'"),
        ({"messages": [REPLY]}, "messages[0]: the assistant speaks where nobody has spoken to it"),
        ({"messages": [USER, REPLY, REPLY]}, "messages[2]: the assistant speaks where nobody"),
        ({"messages": [USER, {"role": "assistant", "content": "a</s>b"}]}, "its content holds an end token"),
        ({"token_ids": [], "loss_mask": []}, "token_ids must be a list of integers with something in it"),
        ({"token_ids": [1, 2.5], "loss_mask": [0, 1]}, "token_ids must be a list of integers"),
        ({"token_ids": [1, True], "loss_mask": [0, 1]}, "token_ids must be a list of integers"),
        ({"token_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask must be a list of 0 and 1"),
        ({"token_ids": [1, 2], "loss_mask": [0, 1, 1]}, "loss_mask has 3 entries for 2 token_ids"),
        ({"token_ids": [1, 262], "loss_mask": [0, 1]}, "token 1 has id 262, allowed are 0 to 261"),
        ({"token_ids": [1, -1], "loss_mask": [0, 1]}, "token 1 has id -1, allowed are 0 to 261"),
        ({"token_ids": [1, 2**40], "loss_mask": [0, 1]}, "allowed are 0 to 261"),
        ({"token_ids": [1, 2], "loss_mask": [0, 0]}, "no token is trained on"),
        ({"token_ids": [1, 2], "loss_mask": [1, 1]}, "the first token is trained on, but nothing predicts it"),
        ({"token_ids": [1] * 41, "loss_mask": [0] + [1] * 40}, "line 2: 41 tokens, at most 40 are allowed"),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_by_its_number(line: Any, words: str, renderer: ChatRenderer, tmp_path: Path) -> None:
    good = {"token_ids": [1, 2], "loss_mask": [0, 1]}
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_demonstrations(write(tmp_path / "d.jsonl", good, line, good), renderer, max_tokens=40)
    assert f"{tmp_path / 'd.jsonl'}, line 2: " in str(caught.value)


def test_bytes_that_are_no_text_are_refused(renderer: ChatRenderer, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 1: is not JSON"):
        read_demonstrations(tmp_path / "d.jsonl", renderer, max_tokens=9)


def test_long_ones_are_dropped_and_counted_where_asked(renderer: ChatRenderer, tmp_path: Path) -> None:
    long, short = {"token_ids": [1] * 9, "loss_mask": [0] + [1] * 8}, {"token_ids": [1, 2], "loss_mask": [0, 1]}
    found = read_demonstrations(write(tmp_path / "d", long, short, long), renderer, max_tokens=8, too_long="drop")
    assert (len(found.segments), found.num_dropped) == (1, 2)
    bad = {"token_ids": [1] * 9, "loss_mask": [1] * 9}
    with pytest.raises(ConfigError, match="first token"):  # only the length is forgiven
        read_demonstrations(write(tmp_path / "d", bad), renderer, max_tokens=8, too_long="drop")
    with pytest.raises(ConfigError, match="all 1 are longer than 8 tokens"):
        read_demonstrations(write(tmp_path / "d", long), renderer, max_tokens=8, too_long="drop")


def test_no_file_an_empty_one_and_a_folder_are_refused(renderer: ChatRenderer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file of demonstrations .*none.jsonl \(\[warm_start\]\)"):
        read_demonstrations(tmp_path / "none.jsonl", renderer, max_tokens=9)
    with pytest.raises(ConfigError, match="holds no demonstrations"):
        read_demonstrations(write(tmp_path / "d"), renderer, max_tokens=9)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_demonstrations(tmp_path, renderer, max_tokens=9)


def test_a_template_that_closes_replies_with_no_end_token_is_refused(tmp_path: Path) -> None:
    model = write_chat_files(tmp_path / "chat", template=TEMPLATE.replace("</s>", ""))
    file = write(tmp_path / "d.jsonl", {"messages": [USER, REPLY]})
    with pytest.raises(ConfigError, match="closes a reply with none of the model's end tokens"):
        read_demonstrations(file, ChatRenderer.load(model), max_tokens=99)


def test_what_is_written_is_read_back(renderer: ChatRenderer, tmp_path: Path) -> None:
    path = tmp_path / "new" / "d.jsonl"
    assert write_demonstrations(path, [[USER, REPLY]] * 3) == 3
    assert len(read_demonstrations(path, renderer, max_tokens=99).segments) == 3
    assert [p.name for p in path.parent.iterdir()] == ["d.jsonl"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_demonstrations(path / "below", [])
