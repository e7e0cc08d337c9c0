"""What every backend asks and answers in the same way."""

from __future__ import annotations

import math
from typing import Any

from asyncrl.protocols import ExecResult, Outcome, SandboxLimits
from asyncrl.sandbox.commands import NOT_EXECUTABLE


def cannot_run(reason: str) -> ExecResult:
    """Return the result of a command that no system could start: the agent's doing."""
    message = f"{reason}\n".encode()
    return ExecResult(
        outcome=Outcome.OK, exit_code=NOT_EXECUTABLE, stdout=b"", stderr=message, output_bytes=len(message)
    )


def infrastructure(reason: str) -> ExecResult:
    """Return the result of a command whose sandbox failed: not the agent's doing."""
    return ExecResult(outcome=Outcome.INFRASTRUCTURE, exit_code=None, stdout=b"", stderr=b"", detail=reason)


def check_caps(
    limits: SandboxLimits, wall_s: float | None, output_bytes: int | None, kept_output_bytes: int | None
) -> dict[str, Any]:
    """Return the limits of one command, with the sandbox's where none are given. Raises ValueError."""
    caps = {
        "wall_s": limits.wall_s if wall_s is None else wall_s,
        "output_bytes": limits.output_bytes if output_bytes is None else output_bytes,
        "kept_output_bytes": limits.kept_output_bytes if kept_output_bytes is None else kept_output_bytes,
    }
    if not 0 < caps["wall_s"] < math.inf:
        raise ValueError(f"wall_s must be > 0 and finite seconds, got {wall_s}")
    for name, least in (("output_bytes", 1), ("kept_output_bytes", 2)):
        if caps[name] < least:
            raise ValueError(f"{name} must be >= {least}, got {caps[name]}")
    return caps
