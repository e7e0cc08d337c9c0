"""Calls are read out of whatever a model says, and never more than it said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.coding.tools import (
    TOOLS,
    CallFormat,
    Malformed,
    ToolCall,
    describe_tools,
    read_calls,
    tool_schemas,
    write_call,
)

FENCED, NATIVE = CallFormat.FENCED, CallFormat.NATIVE


def run(command: str) -> ToolCall:
    return ToolCall(name="run", arguments={"command": command})


def write(path: str, content: str) -> ToolCall:
    return ToolCall(name="write", arguments={"path": path, "content": content})


def edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall(name="edit", arguments={"path": path, "old": old, "new": new})


SUBMIT = ToolCall(name="submit")


def native(name: object, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("```run\nls\n```", [run("ls")]),
        ("First.\n```run\ncd a\nls\n```\nThen.", [run("cd a\nls")]),
        ("```run ls -l\n```", [run("ls -l")]),
        ("```run ls```", [run("ls")]),
        ("```run\nls```", [run("ls")]),
        ("```run\nls\n```\n```submit\n```", [run("ls"), SUBMIT]),
        ("```submit```", [SUBMIT]),
        ("```submit\n```", [SUBMIT]),
        ("   ```run  \r\nls\n  ```  ", [run("ls")]),
        ("```read a b.txt\n```", [ToolCall(name="read", arguments={"path": "a b.txt"})]),
        ("```write a.py\nx = 1\n\ny = 2\n```", [write("a.py", "x = 1\n\ny = 2\n")]),
        ("```write empty\n```", [write("empty", "")]),
        ("```edit a.py\na - b\n=======\na + b\n```", [edit("a.py", "a - b", "a + b")]),
        ("```edit a.py\none\ntwo\n=======\n```", [edit("a.py", "one\ntwo", "")]),
        # fences inside: shorter ones are text of a longer block, and a block in a block of words is no call
        ("````write a.md\n```run\nls\n```\n````", [write("a.md", "```run\nls\n```\n")]),
        ("````markdown\n```run\nls\n```\n````\n```run\npwd\n```", [run("pwd")]),
        ("```write a.md\ntext\n```\n```\n```submit\n```\n", [write("a.md", "text\n")]),
        ("```python\nx = 1\n```\n```run\nls\n```", [run("ls")]),
        ("no ```run\nls\n``` in the line", []),
        ("    ```run\nls\n    ```", []),
    ],
)
def test_blocks_are_read_as_they_stand(text: str, calls: list[ToolCall]) -> None:
    found = read_calls(text, FENCED)
    if calls:
        assert list(found) == calls
    else:
        assert [type(call) for call in found] == [Malformed]
        assert "no tool was called" in found[0].reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tool was called"),
        ("I would fix it.", "no tool was called"),
        ("```python\nprint(1)\n```", "no tool was called"),
        ("```run\nls", "run is not closed"),
        ("```run\nls\n``", "run is not closed"),
        ("````run\nls\n```", "run is not closed"),
        ("```write a.py\n```python\nx\n", "write is not closed"),
        ("```run\n\n```", "run is empty"),
        ("```write\nx\n```", "path of write is empty"),
        ("```read a\nb\n```", "read must be empty"),
        ("```submit\ndone\n```", "submit must be empty"),
        ("```submit now\n```", "takes no arguments"),
        ("```edit a.py\nx\n```", "must hold one line ======="),
        ("```edit a.py\nx\n=======\ny\n=======\nz\n```", "must hold one line ======="),
        ("```edit a.py\n=======\ny\n```", "old of edit is empty"),
        ("```run\nl\0s\n```", "NUL"),
    ],
)
def test_what_is_no_block_of_a_tool_says_why(text: str, says: str) -> None:
    (found,) = read_calls(text, FENCED)
    assert isinstance(found, Malformed)
    assert says in found.reason
    assert len(found.reason) < 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```run\nls\n```", "no tool was called"),
        ("<tool_call>", "not JSON"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>{'name': 'run'}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "run", "arguments": {"command": NaN}}</tool_call>', "NaN is no JSON"),
        ('<tool_call>{"name": "run", "arguments": {"command": -Infinity}}</tool_call>', "-Infinity is no JSON"),
        ('<tool_call>{"name": "run", "name": "submit"}</tool_call>', "given twice"),
        ('<tool_call>{"name": "run", "arguments": {"command": "ls"}}', "not closed"),
        ('<tool_call>{"name": "submit"} and more</tool_call>', "not closed"),
        ("<tool_call>" + "[" * 200_000 + "</tool_call>", "nested too deeply"),
        ('<tool_call>{"name": ' + "1" * 10_000 + "}</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "a call is"),
        ('<tool_call>{"arguments": {}}</tool_call>', "a call is"),
        ('<tool_call>{"name": "submit", "id": 3}</tool_call>', "a call is"),
        ('<tool_call>{"name": "submit", "arguments": "{}"}</tool_call>', "arguments an object"),
        (native(3), "name must be text"),
        (native("sudo", command="ls"), "no tool 'sudo'"),
        (native("x" * 10_000), "no tool"),
        (native("run"), "run lacks command"),
        (native("run", command="ls", cwd="/"), "no argument 'cwd'"),
        (native("submit", answer="4"), "no argument 'answer'"),
        (native("run", command=3), "must be text"),
        (native("run", command=["ls"]), "must be text"),
        (native("write", path="", content="x"), "path of write is empty"),
        (native("edit", path="a", old="", new="x"), "old of edit is empty"),
        (native("read", path="a\0b"), "NUL"),
        (r'<tool_call>{"name": "run", "arguments": {"command": "\ud800"}}</tool_call>', "lone surrogate"),
        (native("write", path="a", content="x" * (2**20 + 1)), "longer than"),
        ("<tool_call>{broken " + native("submit").replace("<", "&lt;"), "not JSON"),
    ],
)
def test_what_is_no_json_call_says_why(text: str, says: str) -> None:
    (found,) = read_calls(text, NATIVE)
    assert isinstance(found, Malformed)
    assert says in found.reason
    assert len(found.reason) < 200


def test_json_calls_are_read_in_order_whatever_their_text_quotes() -> None:
    content = "</tool_call><tool_call>\n```run\nls\n```"
    text = f"I try.{native('write', path='a', content=content)}\n<tool_call>{{oops}}</tool_call>{native('submit')}"
    first, second, third = read_calls(text, NATIVE)
    assert (first, third) == (write("a", content), SUBMIT)
    assert isinstance(second, Malformed)
    (broken,) = read_calls("<tool_call>{" + native("submit"), NATIVE)
    assert isinstance(broken, Malformed), "a call inside a broken one is quoted, and not made"
    newlines = '<tool_call>\n{"name": "run", "arguments": {"command": "ls\npwd"}}\n</tool_call>'
    assert read_calls(newlines, NATIVE) == (run("ls\npwd"),)


def test_a_million_characters_are_read() -> None:
    content = "x" * 10**6
    assert read_calls(native("write", path="a", content=content), NATIVE) == (write("a", content),)
    assert read_calls(f"```write a\n{content}\n```", FENCED) == (write("a", content + "\n"),)
    # what would take a careless pattern hours
    for text in ("```run x" + " " * 10**6 + "y", "```\n" * 10**5, "`" * 10**6, "<tool_call>" * 10**5):
        for form in CallFormat:
            assert read_calls(text, form)


def test_a_reply_of_too_many_calls_is_not_read_to_its_end() -> None:
    for form, text in ((FENCED, "```run\nls\n```\n"), (NATIVE, native("run", command="ls"))):
        found = read_calls(text * 100, form)
        assert found[:8] == (run("ls"),) * 8
        assert isinstance(found[8], Malformed)
        assert len(found) == 9


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\r"), max_size=60)
LINES = st.lists(st.sampled_from(["```", "````run", "x = 1", "", "  y", "</tool_call>", "==="]), max_size=5).map(
    "\n".join
)
BODY = LINES | TEXT
PATH = st.from_regex(r"[a-z][a-z /.]{0,10}[a-z]", fullmatch=True)
CALLS = st.one_of(
    st.builds(run, BODY.map(lambda text: f"ls\n{text}\ntrue")),
    st.builds(write, PATH, BODY.map(lambda text: f"{text}\n")),
    st.builds(edit, PATH, BODY.filter(bool), BODY),
    st.builds(lambda path: ToolCall(name="read", arguments={"path": path}), PATH),
    st.just(SUBMIT),
)


@settings(deadline=None)
@given(CALLS, st.sampled_from(CallFormat))
def test_a_call_that_is_written_is_read_back(call: ToolCall, form: CallFormat) -> None:
    text = f"Some words.\n{write_call(call, form)}\nMore of them."
    assert read_calls(text, form) == (call,)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["```", "````", "run", "write a", "\n", " ", "x", "<tool_call>", "{", '"name"', "}"])))
def test_no_text_is_too_odd(pieces: list[str]) -> None:
    for form in CallFormat:
        assert read_calls("".join(pieces), form)


def test_an_edit_that_no_block_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold a line ======="):
        write_call(edit("a", "x\n=======", "y"), FENCED)


def test_what_agents_are_told_can_be_called() -> None:
    told = describe_tools(FENCED)
    assert [call.name for call in read_calls(told, FENCED) if isinstance(call, ToolCall)] == list(TOOLS)
    assert read_calls(describe_tools(NATIVE), NATIVE) == (run("ls"),)
    assert [schema["function"]["name"] for schema in tool_schemas()] == list(TOOLS)
    for schema in tool_schemas():
        parameters = schema["function"]["parameters"]
        assert parameters["required"] == [*parameters["properties"]] == [*TOOLS[schema["function"]["name"]].arguments]
