"""How an environment's messages become tokens: its own template, what that reads, and where replies end.

[environment.chat]
template = "raw"
end_tokens = ["\\n"]

Without it an environment talks as the model's own template says. In a mixture each part has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.tokens import ChatRenderer

_WHERE = "[environment.chat]"

TEMPLATES: Mapping[str, str] = {
    "raw": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "plain": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "### {{ message.role | capitalize }}\n{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}### Assistant\n{% endif %}"
    ),
}
"""Name -> template. "raw" says the messages one behind the other, as a base model continues text; "plain" gives them
titles, and the model's own end token after a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How an environment talks to the model.

    Example:
        >>> renderer = ChatSettings(template="raw").rendering(ChatRenderer.load(model_directory))
        >>> renderer.decode(renderer.start([{"role": "user", "content": "def add(a, b):"}]))
        'def add(a, b):'
    """

    template: str = ""
    """Of chats: "raw" or "plain" (see TEMPLATES), a file, or the text of a template; empty for the model's own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template reads besides the messages, `enable_thinking = false` say, or another `bos_token`;
    `add_generation_prompt = false` leaves the beginning of the reply to the model."""
    end_tokens: tuple[str, ...] = ()
    """Tokens with which a reply ends, besides the model's own; each the text of a single token."""

    def rendering(self, renderer: ChatRenderer) -> ChatRenderer:
        """Return the renderer of episodes. Raises: ConfigError for a template or a token that cannot be had."""
        found = renderer.with_variables(self.variables) if self.variables else renderer
        if self.template:
            found = found.with_template(read_template(self.template, where=_WHERE))
        return found.with_end_tokens(self._end_token_ids(found)) if self.end_tokens else found

    def _end_token_ids(self, renderer: ChatRenderer) -> list[int]:
        found = []
        for text in self.end_tokens:
            ids = renderer.encode(text)
            if len(ids) != 1:
                raise ConfigError(
                    f"end_tokens must be single tokens of the model, and {text!r} is {len(ids)} ({_WHERE})"
                )
            found.append(ids[0])
        return found


def read_template(name: str, *, where: str) -> str:
    """Return the text of a template. Raises: ConfigError naming the section where there is no such file."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{%" in name or "{{" in name:
        return name
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"template = {name!r} is neither {', '.join(TEMPLATES)}, the text of a template, nor a file that can be "
            f"read: {error} ({where})"
        ) from None
