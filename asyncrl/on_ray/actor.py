"""What runs on a node of the cluster: an actor that keeps one process there. Knows nothing of what the process does.

Ray restarts the actor, and the process is started again by whoever asks it to; Ray's worker logs hold its output.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

_PIECE = 2**22
_STOP_MARGIN_S = 15.0  # beyond the grace: two keepers' margins


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A process that an actor is to start. {host}, {port}, {stream} and {token_file} are filled in on its node."""

    name: str
    """In messages and logs."""
    argv: Sequence[str]
    """What follows the Python, which is the node's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to what Ray gives the actor."""
    token: str = ""
    """What {token_file} holds; nobody but the process can read it."""
    niceness: int = 0
    grace_s: float = 10.0
    """For it to end by itself when it is told to."""
    remove_on_exit: Sequence[str] = ()
    """Glob patterns of files on its node that must not outlive it."""
    own_scratch: bool = False
    """Whether its temporary files have a directory of their own, which goes with it: see `children.start_child`."""


class RoleActor:
    """Keeps one process. Several of its methods run at a time, in threads of Ray's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._host: subprocess.Popen[bytes] | None = None
        self._stream: socket.socket | None = None
        self._events = -1

    def __repr__(self) -> str:
        """Return what Ray puts before each line that the process writes."""
        return self._name

    def free_address(self) -> str:
        """Return a "HOST:PORT" of this node that was free a moment ago."""
        host = ray.util.get_node_ip_address()
        return f"{host}:{_free_port(host)}"

    def start(self, order: Order) -> str:
        """Start the process, and return "HOST:PORT" of where it is to listen, if it does.

        One that was started by a call whose answer was lost is ended first.
        """
        self.stop(order.grace_s)
        host, _, port = self.free_address().rpartition(":")
        values = {"host": host, "port": port}
        ours, theirs = socket.socketpair()
        token = os.memfd_create("token", os.MFD_CLOEXEC)
        os.write(token, order.token.encode())
        values |= {"stream": str(theirs.fileno()), "token_file": f"/proc/self/fd/{token}"}
        argv = [sys.executable, *(_filled(word, values) for word in order.argv)]
        if order.niceness:
            argv = ["nice", "-n", str(order.niceness), *argv]
        passed = [theirs.fileno(), token]
        try:
            self._host = self._run(
                {
                    "name": order.name,
                    "argv": argv,
                    "environment": dict(order.environment),
                    "log_path": _own_log(),
                    "pass_fds": passed,
                    "grace_s": order.grace_s,
                    "remove_on_exit": list(order.remove_on_exit),
                    "own_scratch": order.own_scratch,
                },
                passed,
            )
        finally:
            theirs.close()
            os.close(token)
        self._stream = ours
        return f"{host}:{port}"

    def _run(self, order: Mapping[str, Any], passed: Sequence[int]) -> subprocess.Popen[bytes]:
        orders, orders_in = os.pipe()
        self._events, events_in = os.pipe()
        command = [sys.executable, "-m", "asyncrl.on_ray.hosting", "--order", str(orders), "--events", str(events_in)]
        try:
            host = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=[orders, events_in, *passed],
                start_new_session=True,  # Ray ends the process group of an actor that died, before it has cleaned up
            )
        finally:
            os.close(orders)
            os.close(events_in)
        with os.fdopen(orders_in, "w", encoding="utf-8") as file:
            json.dump(order, file)
        return host

    def wait_exit(self) -> str:
        """Return how the process ended, in words."""
        with os.fdopen(self._events, encoding="utf-8") as told:
            text = told.read()
        return json.loads(text) if text else f"{self._name} was ended"

    def send(self, data: bytes) -> None:
        """Write to the process's {stream}. Raises: OSError where it is gone."""
        assert self._stream is not None
        self._stream.sendall(data)

    def receive(self) -> bytes:
        """Return what comes next out of the process's {stream}; b"" once it is closed."""
        assert self._stream is not None
        try:
            return self._stream.recv(_PIECE)
        except ConnectionResetError:
            return b""

    def stop(self, grace_s: float) -> None:
        """End the process and all that came from it, within its grace; another may be started then."""
        if self._host is None or self._stream is None:
            return
        self._stream.close()
        assert self._host.stdin is not None
        self._host.stdin.close()
        try:
            self._host.wait(grace_s + _STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._host.kill()  # the keeper sees to the rest
            self._host.wait()
        self._host = self._stream = None


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def _own_log() -> str:
    """Return the file that Ray keeps this actor's output in, from where it shows it to the driver."""
    path = os.readlink("/proc/self/fd/1")
    if not Path(path).is_file():
        raise RuntimeError(
            f"Ray keeps the output of its workers in {path}, which is no file: do not rotate it by pipes"
        )
    return path


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
