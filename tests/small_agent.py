"""A small agent as anyone may have written it, with OpenAI's client: it knows nothing of asyncrl.

It asks for the even digits below ten until it has seen one, and leaves what it found in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai


def main() -> None:
    """Play one task."""
    task = json.loads(Path("task.json").read_text())
    with openai.OpenAI() as client:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(task.get("tries", 2)):
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
            message = answer.choices[0].message
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
            print("it said", repr(message.content))
        Path("answer.txt").write_text(message.content or "", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
