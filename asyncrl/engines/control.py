"""The control routes of one vLLM server: what is not sampling, asked over the connections of its engine's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from asyncrl.engines.answers import first_line, named
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.types import PolicyVersion

_ONCE = {"Connection": "close"}  # after an error in a control route the server drops the connection unannounced
REPORT: Mapping[str, Any] = {"method": "asyncrl_weight_report"}
"""Asks `/collective_rpc` what each rank holds; `asyncrl.weight_sync.vllm_engine` answers."""
PROGRESS: Mapping[str, Any] = {"method": "asyncrl_weight_progress"}
"""Asks how far each rank's update is, with the argument `wait_s`."""


class ControlRoutes:
    """Asks one server. `client` is the engine's, who closes it."""

    def __init__(self, name: str, url: str, client: httpx.AsyncClient) -> None:
        self._name = name
        self._url = url
        self._client = client

    async def post(self, path: str, body: Mapping[str, Any] | None, params: Mapping[str, str]) -> Any:
        """Return the JSON that a route answers. Raises: WeightSyncError."""
        try:
            response = await self._client.post(path, json=body, params=dict(params), headers=_ONCE)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"the server does not answer: {named(error)}") from error
        if response.status_code != 200:
            raise WeightSyncError(first_line(response.text))
        return response.json()

    async def need(self, path: str, body: Mapping[str, Any], flag: str) -> httpx.Response:
        """Return what a route answers. Raises: EngineError naming what the server lacks; httpx.TransportError."""
        response = await self._client.post(path, json=body, headers=_ONCE)
        if response.status_code != 200:
            raise EngineError(
                f"{self._name} at {self._url} cannot serve a run: {path} answers {response.status_code} "
                f"({first_line(response.text)}). It needs {flag}"
            )
        return response

    async def reports(self) -> list[dict[str, Any]]:
        """Return what each of the server's ranks says that it holds; nothing if that cannot be learnt."""
        try:
            response = await self._client.post("/collective_rpc", json=REPORT, headers=_ONCE)
            return list(response.json()["results"]) if response.status_code == 200 else []
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    async def need_every_rank(self) -> None:
        """Raise EngineError where some of the server's ranks do not say what they hold; httpx.TransportError."""
        needs = "--worker-extension-cls asyncrl.weight_sync.vllm_engine.WorkerReport"
        heard = len((await self.need("/collective_rpc", REPORT, needs)).json().get("results", ()))
        response = await self._client.get("/get_world_size", params={"include_dp": "true"}, headers=_ONCE)
        number = response.json().get("world_size", 0) if response.status_code == 200 else 0
        if number > heard:
            raise EngineError(
                f"{self._name} at {self._url} cannot serve a run: of its {number} ranks {heard} say what they hold. Of "
                "a data-parallel server only the first engine does: start several servers, and name each by urls"
            )

    async def metrics(self) -> str:
        """Return the server's own metrics in Prometheus' text form; empty where they cannot be had."""
        if self._client.is_closed:  # who watches a run asks until the very end, and while a server is replaced
            return ""
        try:
            response = await self._client.get("/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    async def answers(self, path: str, body: Mapping[str, Any] | None = None) -> bool:
        """Tell whether a route answers that it did what was asked."""
        try:
            return (await self._client.post(path, json=body, headers=_ONCE)).status_code == 200
        except httpx.HTTPError:
            return False

    async def abandon_update(self) -> None:
        """End an update that is under way in the server; it answers with an error, whether there is one or not."""
        await self.answers("/update_weights", {"update_info": {"abandon": True}})


def held_versions(reports: Sequence[Mapping[str, Any]]) -> set[PolicyVersion | None]:
    """Return the versions that a server's ranks hold; None stands for one that is not whole."""
    return {None if report["broken"] else report["version"] for report in reports}
