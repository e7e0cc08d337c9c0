"""The agent of agent.toml, as anyone may have written it with OpenAI's client: it knows nothing of asyncrl.

It lets the model think about a sum, asks for the number alone, and leaves that in a file.
"""

from __future__ import annotations

import json
from pathlib import Path

import openai


def main() -> None:
    """Play one task."""
    task = json.loads(Path("task.json").read_text(encoding="utf-8"))
    messages = [{"role": "user", "content": task["question"] + " Think, then answer."}]
    with openai.OpenAI() as client:
        for then in ("Now the number alone.", ""):
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=32)  # type: ignore[arg-type]
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": then}]
    Path("answer.txt").write_text(said, encoding="utf-8")


if __name__ == "__main__":
    main()
