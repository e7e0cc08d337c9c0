"""A Ray cluster of several nodes on this machine, each under a keeper, so that a whole node can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from process_tree import descendants

from asyncrl import keeper
from asyncrl.engines import free_port

_START_S = 120.0

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # it would leave a token in the home directory
    "RAY_raylet_start_wait_time_s": "120",  # of a machine with much else to do
    "PYTHONPATH": str(Path(__file__).parent),
    "PYTHONUNBUFFERED": "1",
}


class Node:
    """One node: a raylet and all that it has started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], write: int, log: Path) -> None:
        self.name = name
        self.process = process
        """Its keeper, which all of the node's processes come from."""
        self.log = log
        self._write = write

    def descendants(self) -> dict[int, str]:
        """Return pid -> command line of every process of the node."""
        return descendants(self.process.pid)

    def kill(self) -> None:
        """Kill every process of the node, as when its host loses power: none is told beforehand."""
        self.process.send_signal(signal.SIGSTOP)  # or it would tell the rest as soon as the first is gone
        for pid in self.descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.send_signal(signal.SIGCONT)
        self.end()

    def end(self) -> None:
        """End the node."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
            self.process.wait(60)


class Cluster:
    """Some nodes, the first of which holds Ray's own state."""

    def __init__(self, directory: Path) -> None:
        self.address = f"127.0.0.2:{free_port()}"
        self.environment = {**os.environ, **_ENVIRONMENT}
        """For programs that connect to it."""
        self.nodes: dict[str, Node] = {}
        self._directory = directory

    def add(self, name: str, resources: Mapping[str, float]) -> None:
        """Start a node with these resources, and return when it is there: two that start at a time collide."""
        where = ["--head", "--port", self.address.partition(":")[2], "--include-dashboard", "false"]
        where += ["--temp-dir", str(self._directory / "ray")]
        if self.nodes:
            where = ["--address", self.address]
        address = f"127.0.0.{len(self.nodes) + 2}"  # of each its own, on the loopback
        options = ["--node-ip-address", address, "--num-gpus", "0", "--num-cpus", "0"]
        options += ["--object-store-memory", str(80 * 2**20), "--resources", json.dumps(dict(resources)), "--block"]
        read, write = os.pipe()
        log = self._directory / f"{name}.log"
        command = [sys.executable, "-I", "-S", keeper.__file__, "--pipe", str(read), "--grace", "0", "--"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", "ray.scripts.scripts", "start", *where, *options],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[read],
            )
        os.close(read)
        node = self.nodes[name] = Node(name, process, write, log)
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            if time.monotonic() > deadline:
                node.end()
            time.sleep(0.1)

    def end(self) -> None:
        """End every node."""
        for node in self.nodes.values():
            node.end()

    def node_of(self, words: str) -> Node:
        """Return the one node that runs a process with these words in its command line."""
        (found,) = (n for n in self.nodes.values() if any(words in line for line in n.descendants().values()))
        return found


@contextmanager
def running_cluster(nodes: Mapping[str, Mapping[str, float]]) -> Iterator[Cluster]:
    """Start nodes with these custom resources and no CPUs; whatever happens, nothing of them is left."""
    directory = Path(tempfile.mkdtemp(prefix="r-", dir="/tmp"))  # short: Ray's sockets lie below it
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        cluster = Cluster(directory)
        stack.callback(cluster.end)
        for name, resources in nodes.items():
            cluster.add(name, resources)
        yield cluster
