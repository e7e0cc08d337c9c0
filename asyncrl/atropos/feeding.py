"""asyncrl's environments for a trainer of Atropos: its groups are posted to the trainer's server.

It registers, asks how things stand, begins as many groups as the trainer has use for, and posts what they bring:
literal tokens, the log-probs that they were sampled with, and the versions (`weight_versions`, which asyncrl's own
server keeps). A post that fails on the way is sent again; a group that comes twice is the server's to recognise.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import trio

from asyncrl.atropos.messages import UNTRAINED
from asyncrl.collecting import GroupCollector
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import Environment, Sampler
from asyncrl.types import Segment, Task, Trajectory

_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5  # before the second attempt; each further one waits twice as long
_BATCHES_AHEAD = 3  # groups under way and waiting, in batches: as environments of Atropos have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """How an environment feeds a trainer."""

    name: str
    """What it registers as."""
    group_size: int
    max_running: int = 64
    """Groups at a time."""
    max_groups: int = 0
    """Posted, after which it ends; 0 goes on until the trainer's last step."""
    weight: float = 1.0
    max_token_length: int = 2048
    ask_every_s: float = 1.0
    """How often it asks how things stand: the contract has no way for the server to speak first."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        for name, least in (("group_size", 2), ("max_running", 1), ("max_groups", 0), ("max_token_length", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)}")


class Feeder:
    """Plays an environment for a trainer of Atropos.

    Example:
        >>> feeder = Feeder(environment, sampler, Feeding(name="sums", group_size=8))    # doctest: +SKIP
        >>> await feeder.run("http://127.0.0.1:8000")                                     # doctest: +SKIP
    """

    def __init__(self, environment: Environment, sampler: Sampler, feeding: Feeding) -> None:
        self._environment = environment
        self._sampler = sampler
        self._feeding = feeding
        self._collector = GroupCollector(environment)
        self._running = self._begun = 0
        self.posted = 0
        """Groups that the server has taken."""
        self.dropped: Counter[str] = Counter()
        """reason -> groups that were not posted, or refused"""

    async def run(self, url: str) -> None:
        """Feed the trainer behind `url` until its last step, `max_groups`, or the end of the tasks.

        Raises: EnvironmentFault where the server cannot be reached, or answers what the contract does not have.
        """
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
            registered = await self._register(client)
            info = await self._ask(client, "GET", "/info")
            env_id, num_steps = registered["env_id"], registered["num_steps"]
            async with trio.open_nursery() as nursery:
                while not self._is_done:
                    status = await self._ask(client, "GET", "/status-env", {"env_id": env_id})
                    if 0 <= num_steps <= status["current_step"]:
                        nursery.cancel_scope.cancel()  # nobody will train on what is under way
                        break
                    wanted = _BATCHES_AHEAD * info["batch_size"] // self._feeding.group_size - status["queue_size"]
                    if not self._begin(nursery, client, env_id, min(wanted, self._feeding.max_running)):
                        break
                    await trio.sleep(self._feeding.ask_every_s)
            await self._ask(client, "POST", "/disconnect-env", {"env_id": env_id})

    @property
    def _is_done(self) -> bool:
        return bool(self._feeding.max_groups) and self._begun >= self._feeding.max_groups and not self._running

    def _begin(self, nursery: trio.Nursery, client: httpx.AsyncClient, env_id: int, most: int) -> bool:
        """Begin groups until `most` run; return False once there are no tasks any more."""
        while self._running < most and not 0 < self._feeding.max_groups <= self._begun:
            try:
                task = self._environment.get_item()
            except StopIteration:
                return False
            self._running += 1
            self._begun += 1
            nursery.start_soon(self._play, client, env_id, task, self._begun)
        return True

    async def _play(self, client: httpx.AsyncClient, env_id: int, task: Task, number: int) -> None:
        trajectories = await self._collector.collect(
            task, self._sampler, group_id=f"{env_id}.{number}", group_size=self._feeding.group_size
        )
        group = scored_group(trajectories)
        if len(group["tokens"]) < 2 or len(set(group["scores"])) < 2:
            self.dropped["no two different scores"] += 1
        elif await self._post(client, {**group, "env_id": env_id}):
            self.posted += 1
        self._running -= 1

    async def _register(self, client: httpx.AsyncClient) -> dict[str, Any]:
        said = {
            "max_token_length": self._feeding.max_token_length,
            "desired_name": self._feeding.name,
            "weight": self._feeding.weight,
            "group_size": self._feeding.group_size,
        }
        while True:
            answer = await self._ask(client, "POST", "/register-env", said)
            if answer["status"] == "success":
                return answer
            await trio.sleep(self._feeding.ask_every_s)

    async def _post(self, client: httpx.AsyncClient, group: dict[str, Any]) -> bool:
        """Post a group; return whether it was taken."""
        body = gzip.compress(msgspec.json.encode(group))
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await _again(lambda: client.post("/scored_data", content=body, headers=headers))
        if answer.status_code == 200:
            return True
        self.dropped[f"refused with {answer.status_code}"] += 1
        return False

    async def _ask(self, client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = await _again(lambda: client.request(method, path, json=body))
        if answer.status_code != 200:
            raise EnvironmentFault(f"{method} {path} was answered {answer.status_code}: {answer.text[:200]}")
        return answer.json()  # type: ignore[no-any-return]


async def _again(send: Any) -> httpx.Response:
    """Send a request until it is answered with less than 500. Raises: EnvironmentFault after the last attempt."""
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            await trio.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            answer: httpx.Response = await send()
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if answer.status_code < 500:
            return answer
        reason = f"{answer.status_code}: {answer.text[:200]}"
    raise EnvironmentFault(f"the trainer's server did not answer {_ATTEMPTS} times; the last time: {reason}")


def scored_group(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return what is posted for a group: a sequence for each segment, failed episodes left out.

    Example:
        >>> from asyncrl.types import Logprobs, TokenIds, TokenSpan, TrajectoryStatus
        >>> segment = Segment(token_ids=TokenIds([7, 5]), loss_mask=bytes([0, 1]),
        ...                   behaviour_logprobs=Logprobs([0, -0.5]), spans=(TokenSpan(start=1, end=2, version=3),))
        >>> done = Trajectory(trajectory_id="0-0", task_id="a", environment="e", segments=(segment,), reward=1.0,
        ...                   status=TrajectoryStatus.COMPLETED)
        >>> group = scored_group([done])
        >>> group["tokens"], group["masks"], group["inference_logprobs"], group["weight_versions"]
        ([[7, 5]], [[-100, 5]], [[1.0, -0.5]], [[[1, 2, 3]]])
    """
    found = [(t, segment) for t in trajectories if t.reward is not None for segment in t.segments]
    group: dict[str, Any] = {
        "tokens": [list(segment.token_ids) for _, segment in found],
        "masks": [_masked(segment, list(segment.token_ids), UNTRAINED) for _, segment in found],
        "scores": [t.reward for t, _ in found],
        "inference_logprobs": [_masked(segment, list(segment.behaviour_logprobs), 1.0) for _, segment in found],
        "weight_versions": [[[span.start, span.end, span.version] for span in segment.spans] for _, segment in found],
    }
    advantages = [segment.advantages for _, segment in found]
    if found and all(own is not None and not any(value != value for value in own) for own in advantages):
        group["advantages"] = [list(own or ()) for own in advantages]
    return group


def _masked(segment: Segment, values: list[Any], elsewhere: Any) -> list[Any]:
    return [value if trained else elsewhere for value, trained in zip(values, segment.loss_mask, strict=True)]
