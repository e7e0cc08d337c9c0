"""Whether two models mean the same by a token id. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from asyncrl.errors import ConfigError


def check_same_vocabulary(model: Path, other: Path, section: str) -> None:
    """Raise ConfigError, naming `section`, unless the tokenizers of both directories give every id the same token."""
    ours, theirs = vocabulary(model), vocabulary(other)
    if ours == theirs:
        return
    token = min((t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t)), key=lambda t: (len(t), t))
    raise ConfigError(
        f"path: {other} has another vocabulary than {model}, so its log-probs would be of other tokens: "
        f"{len(theirs)} tokens against {len(ours)}, and {token!r} is id {theirs.get(token)} against {ours.get(token)} "
        f"({section})"
    )


def vocabulary(model: Path) -> dict[str, int]:
    """Return token -> id of the tokenizer in a model directory. Raises: ConfigError."""
    return tokenizer_of(model).get_vocab(with_added_tokens=True)


def tokenizer_of(model: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in a model directory. Raises: ConfigError naming the file."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: the model directory must hold tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
