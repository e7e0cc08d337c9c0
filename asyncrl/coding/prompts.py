"""What agents are told of a task, its tools and its limits, and how the calls that solve it would be written."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.coding.tasks import CodingTask, TaskStep
from asyncrl.coding.tools import CallFormat, ToolCall
from asyncrl.tokens import Message

_MAX_NAMES = 40  # of a task's files; whoever wants to know more can look


def asked(task: CodingTask, *, shown_characters: int) -> str:
    """Return the first instruction, the files' names, and those files, by name, that fit into so many characters."""
    names = sorted(task.files)
    listed = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else "")
    shown = [f"{task.steps[0].instruction.strip()}\n\nFiles in {task.work}: {listed or 'none'}"]
    left = shown_characters
    for name in names:
        text = task.files[name].decode(errors="backslashreplace")
        if len(text) <= left:
            left -= len(text)
            shown.append(f"{name}:\n{text.rstrip()}")
    return "\n".join(shown)


def answered(answers: Sequence[str], form: CallFormat, *, by_template: bool, then: str = "") -> list[Message]:
    """Return the messages that answer a reply's calls, and ask what comes `then`.

    The user speaks once: many templates refuse two messages of one side in a row.
    """
    if by_template:
        said = [{"role": "tool", "content": answer} for answer in answers]
        return [*said, {"role": "user", "content": then}] if then else [*said]
    if form is CallFormat.NATIVE:
        answers = [f"<tool_response>\n{answer}\n</tool_response>" for answer in answers]
    return [{"role": "user", "content": "\n".join([*answers, *([then] if then else [])])}]


def mistaken(task: CodingTask, calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Return the calls that write what `calls` solve as the task has it: an attempt that changes nothing.

    None where the task has a file otherwise, or not at all.
    """
    contents = {call.arguments["path"]: task.files.get(call.arguments["path"]) for call in calls}
    try:
        texts = {path: data.decode() for path, data in contents.items() if data is not None}
    except UnicodeDecodeError:
        return []
    if len(texts) < len(contents):
        return []
    return [ToolCall(name="write", arguments={"path": path, "content": text}) for path, text in texts.items()]


def solving(step: TaskStep) -> list[ToolCall]:
    """Return the calls that solve a step; none where its reference is no text files."""
    if step.reference is None or step.reference.script:
        return []
    try:
        contents = {path: data.decode() for path, data in step.reference.files.items()}
    except UnicodeDecodeError:
        return []
    return [ToolCall(name="write", arguments={"path": path, "content": text}) for path, text in contents.items()]
