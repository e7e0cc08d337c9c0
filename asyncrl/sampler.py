"""The sampler as the loop gives it out: what it generates is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.protocols import Sampler, Watch
from asyncrl.types import Completion, TokenIds


class CountingSampler:
    """A `Sampler` that tells of every completion."""

    def __init__(self, sampler: Sampler, count: Callable[[str, Completion], None]) -> None:
        """`count` is called with the trajectory's id."""
        self._sampler = sampler
        self._count = count

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """See `protocols.Sampler`."""
        completion = await self._sampler.sample(
            token_ids, max_tokens=max_tokens, trajectory_id=trajectory_id, stop_token_ids=stop_token_ids, watch=watch
        )
        self._count(trajectory_id, completion)
        return completion
