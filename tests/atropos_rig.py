"""A server of the Atropos contract over a queue on disk, and what a test says to it over real connections."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from asyncrl.atropos.store import Store, open_store
from asyncrl.atropos.trainer import serve_store
from asyncrl.serving import listen

REGISTRATION = {
    "wandb_group": "group", "wandb_project": "project", "batch_size": 4, "max_token_len": 64,
    "checkpoint_dir": "/checkpoints", "save_checkpoint_interval": 50, "starting_step": 0, "num_steps": 400,
}  # fmt: skip
ENVIRONMENT = {
    "max_token_length": 2048, "desired_name": "sums", "weight": 1.0, "group_size": 4, "min_batch_allocation": None,
}  # fmt: skip


def group(first: int, size: int = 4, *, env_id: int | None = 0, **more: Any) -> dict[str, Any]:
    """Return a group that is told from others by its first token."""
    tokens = [[first, 12, 13 + place] for place in range(size)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [float(place % 2) for place in range(size)],
        "inference_logprobs": [[1.0, -0.25, -0.5] for _ in tokens],
        "env_id": env_id,
        **more,
    }


def firsts(batch: Sequence[dict[str, Any]]) -> list[int]:
    """Return what tells the groups of a batch from others."""
    return [found["tokens"][0][0] for found in batch]


@dataclass
class Server:
    """A server that answers, and a client."""

    store: Store
    client: httpx.AsyncClient
    url: str

    async def get(self, path: str, **more: Any) -> Any:
        """Return what `GET path` answers."""
        answer = await self.client.get(path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        """Return what `POST path` answers."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def status_env(self, env_id: int) -> Any:
        """Return what an environment is told, asked as the clients ask: GET with a body."""
        answer = await self.client.request("GET", "/status-env", json={"env_id": env_id})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def start(self, *environments: dict[str, Any], **registration: Any) -> None:
        """Register a trainer that asks for a batch, and environments."""
        await self.post("/register", {**REGISTRATION, **registration})
        assert (await self.get("/batch"))["batch"] is None
        for environment in environments:
            assert (await self.post("/register-env", {**ENVIRONMENT, **environment}))["status"] == "success"

    async def batch(self, **more: Any) -> list[int] | None:
        """Return the first tokens of the next batch's groups."""
        found = (await self.get("/batch", **more))["batch"]
        return None if found is None else firsts(found)


@asynccontextmanager
async def serving(directory: Path, *, max_body_bytes: int = 2**22, **more: Any) -> AsyncIterator[Server]:
    """Serve the queue in a directory, and end that on leaving."""
    listener = listen("127.0.0.1", 0, setting="port")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        open_store(directory, **more) as store,
        httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False, verify=False) as client,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(partial(serve_store, store, listener, max_body_bytes=max_body_bytes))
        yield Server(store, client, url)
        nursery.cancel_scope.cancel()


def run(directory: Path, body: Callable[[Server], Awaitable[None]], **more: Any) -> None:
    """Run an async test body with a server."""

    async def main() -> None:
        with trio.fail_after(60):
            async with serving(directory, **more) as server:
                await body(server)

    trio.run(main)


def zipped(value: Any) -> bytes:
    """Return JSON as gzip."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode())
