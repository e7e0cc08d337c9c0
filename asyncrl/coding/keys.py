"""Secrets in text that an agent can read: by the formats of common keys, and by the values of this machine's own."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

_FORMATS: Mapping[str, re.Pattern[bytes]] = {
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s*[A-Za-z0-9+/=\s]{64}"),
    "an AWS access key": re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{60,})"),
    "a GitLab token": re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a model provider's key": re.compile(rb"\bsk-(?:[a-z0-9]+-){0,2}(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,}"),
    "a Hugging Face token": re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b"),
    "a Slack token": re.compile(rb"\bxox[abprs]-[0-9][A-Za-z0-9-]{20,}"),
    "a Google key": re.compile(rb"\bAIza[0-9A-Za-z_-]{35}"),
    "an npm token": re.compile(rb"\bnpm_[A-Za-z0-9]{36}\b"),
    "a PyPI token": re.compile(rb"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{50,}"),
    "a Stripe key": re.compile(rb"\b[rs]k_live_[0-9A-Za-z]{20,}"),
    "a signed web token": re.compile(rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}"),
}
_PLACEHOLDER = re.compile(rb"EXAMPLE|X{8}|x{8}|0{12}|(?i:your[_-]|placeholder|redacted)")

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)
_MIN_NAMED = 8  # characters; shorter values of such names are words like "true", which stand in any text
_MIN_RANDOM = 20
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+=_.-]+")
_RANDOM_BITS = 3.5  # of entropy a character; words and version numbers have fewer, base64 and hexadecimal keys more


def known_secrets(variables: Mapping[str, str]) -> Mapping[bytes, str]:
    """Return value -> variable's name, of those environment variables that hold secrets by their name or their look.

    Example:
        >>> dict(known_secrets({"SERVICE_TOKEN": "correct-horse", "LANG": "en_US.UTF-8"}))
        {b'correct-horse': 'SERVICE_TOKEN'}
    """
    return {
        value.encode(errors="surrogateescape"): name
        for name, value in variables.items()
        if (_SECRET_NAME.search(name) and len(value) >= _MIN_NAMED and not value.startswith("/"))
        or _looks_random(value)
    }


def _looks_random(value: str) -> bool:
    if len(value) < _MIN_RANDOM or not _RANDOM.fullmatch(value):
        return False
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values()) >= _RANDOM_BITS


def secrets_in(text: bytes, known: Mapping[bytes, str]) -> list[str]:
    """Return what secrets a text holds, in words that do not repeat them; `known` as `known_secrets` returns it."""
    found = [f"the value of this machine's {name}" for value, name in known.items() if value in text]
    for what, pattern in _FORMATS.items():
        if any(not _PLACEHOLDER.search(match.group()) for match in pattern.finditer(text)):
            found.append(what)
    return found
