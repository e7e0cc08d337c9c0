"""What a user may set about roles that run on other hosts."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.errors import ConfigError

KINDS = ("learner", "engine", "environment", "sandbox")
"""What a role may be; `asyncrl KIND --connect` starts it."""

_LONGEST_HEARTBEAT_S = 10.0  # who comes under a taken name waits for two of them, and gives up after thirty seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Which parts of a run come from other hosts, and where they find it. What is not asked for is started here.

    Example:
        >>> RoleSettings(listen="0.0.0.0:8780", token_file="token", engines=2).wanted
        {'engine': 2}
    """

    listen: str = ""
    """"HOST:PORT" that roles dial (`--connect`). Port 0 takes a free one and prints it."""
    token_file: str = ""
    """A file that holds the token which roles must have; may be left out where `listen` is on the loopback."""
    tls_certificate: str = ""
    """PEM file of the certificate that roles are shown, with its chain; empty speaks without TLS."""
    tls_key: str = ""
    """PEM file of its key; empty where the certificate's file holds it too."""
    learner: bool = False
    """Whether the learner runs elsewhere, on a host that shares the run directory."""
    engines: int = 0
    """Engines that are waited for at the start; more may come later."""
    environments: int = 0
    """Hosts that play the environment, in sandboxes of their own."""
    sandboxes: int = 0
    """Hosts that open the sandboxes of an environment that plays here."""
    wait_s: float = 600.0
    """How long they are waited for at the start; then the run ends, naming who is missing."""
    heartbeat_s: float = 2.0
    """Between two signs of life, both ways."""
    lost_s: float = 30.0
    """Of silence, after which a role is lost: what it had under way goes on elsewhere, or when it is back. A shorter
    silence interrupts nothing."""

    def __post_init__(self) -> None:
        for name in ("engines", "environments", "sandboxes"):
            if not 0 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{name} must be from 0 to 1024, got {getattr(self, name)} ([roles])")
        for name in ("wait_s", "heartbeat_s", "lost_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be > 0 and finite seconds, got {getattr(self, name)} ([roles])")
        if self.heartbeat_s > _LONGEST_HEARTBEAT_S:
            raise ConfigError(
                f"heartbeat_s must be at most {_LONGEST_HEARTBEAT_S:g} seconds, got {self.heartbeat_s:g} ([roles])"
            )
        if self.lost_s < 3 * self.heartbeat_s:
            raise ConfigError(
                f"lost_s must be at least 3 * heartbeat_s = {3 * self.heartbeat_s:g}, got {self.lost_s:g} ([roles]): "
                "one sign of life that comes late is no loss"
            )
        if self.wanted and not self.listen:
            raise ConfigError('listen must be given where roles are asked for: "HOST:PORT" ([roles])')
        if not self.listen:
            return
        host, _ = split_address(self.listen, "listen ([roles])")
        if not self.wanted:
            raise ConfigError(f"listen = {self.listen!r}, and no role is asked for: set engines, say ([roles])")
        if not (self.token_file or is_loopback(host)):
            raise ConfigError(f"token_file must be given where listen is not on the loopback, got {host!r} ([roles])")
        if self.tls_key and not self.tls_certificate:
            raise ConfigError("tls_key is given without a tls_certificate ([roles])")

    @property
    def wanted(self) -> Mapping[str, int]:
        """How many of each kind come from elsewhere; kinds of which none does are missing."""
        counts = (int(self.learner), self.engines, self.environments, self.sandboxes)
        return {kind: count for kind, count in zip(KINDS, counts, strict=True) if count}


def split_address(text: str, setting: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT". Raises: ConfigError naming the setting."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f'{setting} must be "HOST:PORT", got {text!r}')
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether only this host can reach what listens there."""
    return host == "localhost" or host.startswith("127.")


def tls_context(settings: RoleSettings) -> ssl.SSLContext | None:
    """Return what the orchestrator shows to roles; None without a certificate. Raises: ConfigError."""
    if not settings.tls_certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"tls_certificate: {settings.tls_certificate} and its key cannot be used: {error} ([roles])"
        ) from None
    return context
