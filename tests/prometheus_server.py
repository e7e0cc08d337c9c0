"""A real Prometheus, where there is one: Debian's package `prometheus`, or its own release on the PATH."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from asyncrl.engines import free_port

_READY_S = 30.0


def missing(*programs: str) -> str:
    """Return why tests that need these programs are skipped, empty where they are not."""
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"{' and '.join(lacking)} is not installed (Debian: apt-get install prometheus)" if lacking else ""


needs_promtool = pytest.mark.skipif(bool(missing("promtool")), reason=missing("promtool") or "it is there")
needs_prometheus = pytest.mark.skipif(bool(missing("prometheus")), reason=missing("prometheus") or "it is there")


class Prometheus:
    """A server that scrapes one target every second."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=30.0)

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data that an API route answers. Fails where it answers an error."""
        response = self._client.get(f"/api/v1/{path}", params=parameters)
        answer = response.json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return (labels, value) of every series of an expression, as of now."""
        return [(row["metric"], float(row["value"][1])) for row in self.ask("query", query=expression)["result"]]

    def is_ready(self) -> bool:
        """Tell whether it answers."""
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait(self, expression: str, *, timeout_s: float) -> None:
        """Return when an expression has a series; it is asked again and again, since Prometheus tells of nothing."""
        deadline = time.monotonic() + timeout_s
        while not self.query(expression):
            assert time.monotonic() < deadline, f"still no series: {expression}"
            time.sleep(0.5)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def serving(directory: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """Yield a server that scrapes `target` (host:port) and has the rules; it is ended on leaving."""
    config = directory / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{rules}']\n"
        f"scrape_configs: [{{job_name: asyncrl, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    log_path = directory / "prometheus.log"
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + _READY_S
        while not server.is_ready():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.1)
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait()
