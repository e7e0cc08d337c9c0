"""Hosts of one machine: network namespaces behind a switch that delays, loses and cuts, all in user space.

    python slow_network.py DELAY_S LOSS NAME...

prints "NAME PID ADDRESS" for each host, PID being of a process that holds its namespace. It takes "cut NAME" and
"mend NAME" by its standard input, and ends with it, whatever ended the tests: it kills all that runs on the hosts, and
the namespaces are gone. Packets pass through tunnels, as the kernel's own emulator (netem) is not everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SET_TUNNEL, _TUNNEL, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI


def cannot_network() -> str:
    """Return why this machine has no such hosts; empty if it has."""
    if os.geteuid() != 0:
        return "network namespaces with tunnels need root"
    missing = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    return f"{' and '.join(missing)} missing" if missing else "" if Path("/dev/net/tun").exists() else "no /dev/net/tun"


# --- the tests' side --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """One of the hosts."""

    name: str
    holder: int
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return what runs a command on it."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *argv]

    def processes(self) -> list[int]:
        """Return what runs on it."""
        ours, found = os.readlink(f"/proc/{self.holder}/ns/net"), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.readlink(entry / "ns/net") == ours and int(entry.name) != self.holder:
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """Kill all that runs on it."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)  # a process that has just been killed is still listed


class Network:
    """The hosts, by name, and the switch between them."""

    def __init__(self, process: subprocess.Popen[str], names: Sequence[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.hosts = {}
        for _ in names:
            name, pid, address = process.stdout.readline().split()
            self.hosts[name] = Host(name, int(pid), address)

    def cut(self, name: str) -> None:
        """Deliver nothing to a host and from it, and tell nobody."""
        self._tell(f"cut {name}")

    def mend(self, name: str) -> None:
        """Deliver again."""
        self._tell(f"mend {name}")

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == words + "\n"


@contextlib.contextmanager
def network(*names: str, delay_s: float, loss: float) -> Iterator[Network]:
    """Yield hosts; leaving ends all that runs on them."""
    argv = [sys.executable, __file__, str(delay_s), str(loss), *names]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        made = Network(process, names)
        try:
            yield made
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)


# --- the switch -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Switch packets until the standard input ends."""
    delay_s, loss, names = float(arguments[0]), float(arguments[1]), arguments[2:]
    tunnels: dict[bytes, int] = {}
    address_of: dict[str, bytes] = {}
    hosts = []
    for number, name in enumerate(names, start=1):
        address = f"10.77.0.{number}"
        pid, tunnel = _make_host(address)
        hosts.append(Host(name, pid, address))
        address_of[name] = socket.inet_aton(address)
        tunnels[address_of[name]] = tunnel
        print(name, pid, address, flush=True)
    _switch(tunnels, address_of, delay_s, loss)
    for host in hosts:
        host.kill()
    return 0


def _make_host(address: str) -> tuple[int, int]:
    """Return a process in a network of its own, and its tunnel."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _, (tunnel,), _, _ = socket.recv_fds(ours, 1, 1)
        ours.close()
        return pid, tunnel
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0) or libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespace")
    tunnel = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tunnel, _SET_TUNNEL, struct.pack("16sH", b"host", _TUNNEL | _NO_HEADER))
    for words in ("link set lo up", f"addr add {address}/24 dev host", "link set host up"):
        subprocess.run(["ip", *words.split()], check=True)
    socket.send_fds(theirs, [b"x"], [tunnel])
    os.close(tunnel)
    os.close(0)
    while True:
        signal.pause()


def _switch(tunnels: dict[bytes, int], address_of: dict[str, bytes], delay_s: float, loss: float) -> None:
    rng, cut = random.Random(0), set[bytes]()
    under_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, a number that orders equals, whereto, what
    number = 0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([0, *tunnels.values()], [], [], wait_s)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            verb, name = line.split()
            (cut.add if verb == "cut" else cut.discard)(address_of[name])
            print(line, end="", flush=True)
        for tunnel in (tunnel for tunnel in ready if tunnel):
            packet = os.read(tunnel, 65536)
            source, target = packet[12:16], packet[16:20]
            if packet[0] >> 4 == 4 and target in tunnels and not {source, target} & cut and rng.random() >= loss:
                number += 1
                heapq.heappush(under_way, (time.monotonic() + delay_s, number, tunnels[target], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, tunnel, packet = heapq.heappop(under_way)
            os.write(tunnel, packet)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
