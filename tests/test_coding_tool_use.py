"""What tools do in a real sandbox, and what the agent is shown of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
from sandboxes import LIMITS, with_backend

from asyncrl.coding.tool_use import ToolResult, ToolUser
from asyncrl.coding.tools import ToolCall
from asyncrl.errors import SandboxError
from asyncrl.protocols import Outcome, SandboxBackend

pytestmark = pytest.mark.slow

T = TypeVar("T")
FILES = {"a.txt": b"one two two\n", "deep/b.txt": b"\xff\xfeb\n"}


def with_user(
    body: Callable[[ToolUser], Awaitable[T]],
    directory: Path,
    *,
    shown: int = 400,
    variables: Mapping[str, str] | None = None,
) -> T:
    async def use(backend: SandboxBackend) -> T:
        async with await backend.open(FILES, limits=LIMITS) as sandbox:
            return await body(ToolUser(sandbox=sandbox, variables=variables or {}, shown_characters=shown))

    return with_backend(use, directory)


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def use_all(user: ToolUser, *calls: ToolCall) -> list[ToolResult]:
    return [await user.use(one, wall_s=10) for one in calls]


def test_files_are_read_written_and_edited_and_the_shell_sees_it(tmp_path: Path) -> None:
    async def body(user: ToolUser) -> list[ToolResult]:
        return await use_all(
            user,
            call("read", path="a.txt"),
            call("edit", path="a.txt", old="one", new="1\n"),
            call("write", path="new/c.txt", content="\u00e9\n"),
            call("run", command="cat a.txt /task/new/c.txt; cd new; export X=3; false"),
            call("run", command="pwd; echo $X >&2"),
            call("read", path="/task/new/c.txt"),
            call("read", path="deep/b.txt"),
            call("write", path="empty", content=""),
            call("read", path="empty"),
        )

    results = with_user(body, tmp_path)
    assert [result.shown for result in results] == [
        "one two two\n",
        "edited a.txt",
        "wrote 3 bytes to new/c.txt",
        "exit code 1\n1\n two two\n\u00e9\n",
        "exit code 0\n/task/new\n3\n",
        "\u00e9\n",
        "\\xff\\xfeb\n",
        "wrote 0 bytes to empty",
        "(the file is empty)",
    ]
    assert all(result.done for result in results)


def test_what_cannot_be_done_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    refused = [
        (call("read", path="nothing"), "error: there is no file 'nothing'"),
        (call("read", path="deep"), "error: 'deep': Is a directory"),
        (call("read", path="../../etc/passwd"), "error: '../../etc/passwd' must be relative and without '..'"),
        (call("read", path="/etc/passwd"), "must be relative, or lie in one of /task"),
        (call("read", path="link"), "is or passes a link"),
        (call("write", path="link", content="x"), "is or passes a link"),
        (call("write", path="away/x", content="x"), "is or passes a link"),
        (call("write", path="/tests/x", content="x"), "must be relative, or lie in one of /task"),
        (call("write", path="deep", content="x"), "error: 'deep'"),
        (call("write", path="x" * 300, content="x"), "File name too long"),
        (call("write", path="large", content="x" * 2**20), "No space left"),
        (call("edit", path="a.txt", old="three", new="3"), "error: the old text is not in 'a.txt'"),
        (call("edit", path="a.txt", old="two", new="2"), "error: the old text is in 'a.txt' more than once"),
        (call("edit", path="overlap", old="aa", new="b"), "error: the old text is in 'overlap' more than once"),
        (call("edit", path="pipe", old="aa", new="b"), "error: 'pipe'"),
    ]

    async def body(user: ToolUser) -> list[str]:
        await user.use(
            call(
                "run",
                command="ln -s /etc/passwd link; ln -s /usr away; printf aaa > overlap; mkfifo pipe; "
                "head -c 7500000 /dev/zero > zeros",
            ),
            wall_s=10,
        )
        found = []
        for one, _ in refused:
            result = await user.use(one, wall_s=10)
            assert not result.done
            found.append(result.shown)
        (after,) = await use_all(user, call("run", command="cat a.txt overlap; ls"))
        return [*found, after.shown]

    *found, after = with_user(body, tmp_path)
    for shown, (one, says) in zip(found, refused, strict=True):
        assert says in shown, one
    assert "\none two two\naaaa.txt\n" in after, "the files are as they were"


def test_long_outputs_are_shown_by_head_and_tail(tmp_path: Path) -> None:
    async def body(user: ToolUser) -> list[ToolResult]:
        return await use_all(
            user,
            call("run", command="echo begin; seq 1 100000; echo end"),
            call("write", path="long", content="b" + "x" * 1000 + "e"),
            call("read", path="long"),
            call("run", command="printf '\\377%.0s' $(seq 3000)"),
        )

    (ran, _, read, odd) = with_user(body, tmp_path, shown=100)
    assert ran.shown.startswith("exit code 0\nbegin\n1\n2\n")
    assert ran.shown.endswith("\n99999\n100000\nend\n")
    assert "[... the middle is left out; 588905 bytes in all ...]" in ran.shown
    assert "[... the middle is left out; 1002 characters in all ...]" in read.shown
    assert (read.shown[0], read.shown[-1]) == ("b", "e")
    assert odd.shown.count("\\xff") == 24
    for result in (ran, read, odd):
        assert len(result.shown) < 100 + 80


def test_a_command_that_a_limit_ends_says_so_and_the_shell_is_a_new_one(tmp_path: Path) -> None:
    async def body(user: ToolUser) -> list[ToolResult]:
        slow = await user.use(call("run", command="Y=1; cat; sleep 60"), wall_s=0.3)
        return [slow, *await use_all(user, call("run", command="echo $Y$Z"), call("run", command="yes"))]

    slow, after, loud = with_user(body, tmp_path, variables={"Z": "it's\nkept"})
    assert slow.shown == "ended after 0.3 s"
    assert slow.command is not None
    assert slow.command.outcome is Outcome.WALL
    assert "a new shell" in after.shown
    assert after.shown.endswith("it's kept\n")
    assert loud.shown.startswith("ended by the limit on output")
    assert len(loud.shown) < 600


def test_variables_are_set_once_and_the_agents_own_stay(tmp_path: Path) -> None:
    async def body(user: ToolUser) -> list[ToolResult]:
        return await use_all(
            user,
            call("run", command='echo "$A"; A=mine; set -u'),
            call("run", command='echo "$A"; env | grep -c ASYNCRL'),
            call("run", command="nothing-of-this-name"),
        )

    first, second, third = with_user(body, tmp_path, variables={"A": "a 'b' $c", "B": "2"})
    assert first.shown == "exit code 0\na 'b' $c\n"
    assert second.shown == "exit code 1\nmine\n0\n"
    assert "nothing-of-this-name: command not found" in third.shown


def test_a_sandbox_that_is_gone_is_no_answer(tmp_path: Path) -> None:
    async def body(user: ToolUser) -> None:
        await user.sandbox.aclose()
        for one in (call("run", command="ls"), call("read", path="a.txt"), call("write", path="a.txt", content="")):
            with pytest.raises(SandboxError, match="closed"):
                await user.use(one, wall_s=10)

    with_user(body, tmp_path)
