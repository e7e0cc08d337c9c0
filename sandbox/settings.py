"""What a user may set about sandboxes."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxLimits

_MIN_MEMORY_BYTES = 16 * 2**20  # an interpreter alone needs about 10 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Where and within which limits the agents' code runs.

    Example:
        >>> SandboxSettings(max_open=8).backend
        'bubblewrap'
    """

    backend: str = "bubblewrap"
    """A name of the SANDBOXES table, or "package.module:opener" for one that is not ours."""
    allow_weaker: bool = False
    """Whether a wall without control groups may do where none can be made; its name is on every trajectory."""
    max_open: int = 64
    """Sandboxes open at a time; who asks for more waits."""
    max_starting: int = 3
    """Commands that are being started at a time; starting burns CPU, so more at a time are not faster."""
    python: str = ""
    """The interpreter inside: empty for /usr/bin/python3, or the running one where there is none; else a path."""
    image: str = ""
    """What the backend `container` runs, by digest or name; it must have been pulled. "host" is an empty image over
    this machine's /usr."""
    engine: str = ""
    """The container engine: empty for podman, or docker where there is no podman; else a program's name or path."""
    runtime: str = ""
    """The engine's runtime: empty for runsc (gVisor) where it is installed, else the engine's own."""
    urls: tuple[str, ...] = ()
    """Of the servers (`asyncrl sandbox serve`) that the backend `remote` opens sandboxes at."""
    token_file: str = ""
    """A file that holds the token which these servers ask for."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Of one sandbox."""

    def __post_init__(self) -> None:
        limits = self.limits
        least = {
            "max_open": (self.max_open, 1),
            "max_starting": (self.max_starting, 1),
            "limits.memory_bytes": (limits.memory_bytes, _MIN_MEMORY_BYTES),
            "limits.max_pids": (limits.max_pids, 1),
            "limits.disk_bytes": (limits.disk_bytes, 2**16),
            "limits.max_files": (limits.max_files, 1),
            "limits.output_bytes": (limits.output_bytes, 1),
            "limits.kept_output_bytes": (limits.kept_output_bytes, 2),
        }
        for name, (value, lowest) in least.items():
            if value < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {value} ([sandbox])")
        if (self.backend == "remote") != bool(self.urls):
            raise ConfigError(
                f"urls must name servers where backend is 'remote', and only there; got {list(self.urls)} with backend "
                f"{self.backend!r} ([sandbox])"
            )
        if (self.backend == "container") != bool(self.image):
            raise ConfigError(
                f"image must name what to run where backend is 'container', and only there; got {self.image!r} with "
                f"backend {self.backend!r} ([sandbox])"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"urls must begin with http:// or https://, got {url!r} ([sandbox])")
        for name, seconds in (
            ("limits.wall_s", limits.wall_s),
            ("limits.cpu_s", limits.cpu_s),
            ("limits.lifetime_s", limits.lifetime_s),
        ):
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name} must be > 0 and finite seconds, got {seconds} ([sandbox])")
