"""The processes that hold one model between them, and what they tell each other.

Every rank runs the same program on the same batch: the first is told what to do by the orchestrator and passes it on.
A rank forwards its share of the segments. What belongs to the whole batch (log-probs, the loss's own metrics, the norm
of the gradient) is put together over all ranks before anything is decided from it, and decisions are the first's.

Where several ranks read one share between them (`context`), all of them come to the same log-probs and loss; what is
put together counts one of them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
import torch
from torch import distributed

from asyncrl import __version__, wire
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.context import Context
from asyncrl.losses import reduce, reduction
from asyncrl.losses.reduction import Record
from asyncrl.packing import Microbatch

_COLLECTIVE_TIMEOUT = datetime.timedelta(
    minutes=30
)  # far above a step's longest wait; a rank that hangs ends the run then
_IDLE_TIMEOUT = datetime.timedelta(days=30)  # between two requests, while groups are being rolled out
_PACKAGES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among the ranks."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Among the ranks of its host: the GPU that it takes."""
    local_count: int = 1
    rendezvous: str = "env://"
    """Where the ranks find each other: torch.distributed's `init_method`."""

    @classmethod
    def of_environment(cls) -> Place:
        """Return what `torchrun` sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE); without it, one rank alone."""
        rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, count, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", count)))


class Ranks:
    """One process's view of all. A single one tells nobody anything."""

    def __init__(self, place: Place) -> None:
        """Meet the others, where there are any. Raises: ConfigError where they are not of the same version."""
        self.place = place
        self.context = Context()
        self._waiting: Any = None
        if place.count == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(
            backend,
            init_method=place.rendezvous,
            rank=place.rank,
            world_size=place.count,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        self._waiting = distributed.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        check_same(self.gather(wire.encode(versions())))

    @property
    def count(self) -> int:
        """How many there are."""
        return self.place.count

    def form_contexts(self, size: int) -> None:
        """Let `size` ranks after the other read one share between them; all ranks call it, before anything else."""
        if size == 1:
            self.context = Context()
            return
        groups = [
            distributed.new_group(range(first, first + size), timeout=_COLLECTIVE_TIMEOUT)
            for first in range(0, self.count, size)
        ]
        share, place = divmod(self.place.rank, size)
        self.context = Context(place, size, groups[share])

    def check_devices(self, device: torch.device) -> None:
        """Raise ConfigError where the others compute on another kind of device than this one; all ranks call it."""
        if self.count > 1:
            check_same(
                self.gather(wire.encode(device_of(device))), "compute on devices of one kind and size ([learner])"
            )

    @property
    def num_shares(self) -> int:
        """Into how many shares a batch is dealt."""
        return self.count // self.context.count

    @property
    def share(self) -> int:
        """Which of them this rank reads."""
        return self.place.rank // self.context.count

    @property
    def is_first(self) -> bool:
        """Whether this one speaks with the orchestrator, and reads and writes what belongs to all."""
        return self.place.rank == 0

    @property
    def in_host_memory(self) -> Any:
        """The process group whose collectives take tensors in host memory; None alone."""
        return self._waiting

    def pass_on(self, data: bytes | None) -> bytes:
        """Return on every rank what the first one gives; the others wait for it, for days if need be."""
        if self.count == 1:
            assert data is not None
            return data
        length = torch.tensor([0 if data is None else len(data)])
        distributed.broadcast(length, 0, group=self._waiting)
        found = torch.empty(int(length), dtype=torch.uint8)
        if data:
            found.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(found):
            distributed.broadcast(found, 0, group=self._waiting)
        return bytes(found.numpy())

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gives, in their order."""
        if self.count == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        distributed.all_gather(lengths, torch.tensor([len(data)]))
        size = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        rows = [torch.zeros_like(padded) for _ in range(self.count)]
        distributed.all_gather(rows, padded)
        return [bytes(row[: int(length)].numpy()) for row, length in zip(rows, lengths, strict=True)]

    def add_up(self, *tensors: torch.Tensor) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def total(self, value: float) -> float:
        """Return the sum of what every rank gives."""
        number = torch.tensor([value], dtype=torch.float64)
        self.add_up(number)
        return float(number)

    def add_up_shares(self, *tensors: torch.Tensor) -> None:
        """As `add_up`, over all shares."""
        for tensor in tensors:
            if self.context.place:
                tensor.zero_()
        self.add_up(*tensors)

    def total_of_shares(self, value: float) -> float:
        """As `total`, over all shares."""
        return self.total(0.0 if self.context.place else value)

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Replace a tensor in host memory, of one shape on all ranks, by the first rank's."""
        if self.count > 1:
            distributed.broadcast(tensor, 0)

    def first_says(self, value: float) -> float:
        """Return the first rank's value: what is decided from numbers is decided once."""
        number = torch.tensor([value], dtype=torch.float64)
        if self.count > 1:
            distributed.broadcast(number, 0)
        return float(number)

    def in_step(self, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        """Yield this rank's microbatches, then None until as many passes were made as the rank with most has.

        A pass through a sharded model is made by all ranks at once, so each must make as many.
        """
        passes = len(microbatches)
        if self.count > 1:
            most = torch.tensor([passes])
            distributed.all_reduce(most, distributed.ReduceOp.MAX)
            passes = int(most)
        yield from microbatches
        yield from [None] * (passes - len(microbatches))

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise a LearnerError that any rank raises inside on all of them, so that none waits for one that has left.

        All ranks enter it at once; nothing that they do together may be inside.
        """
        said = ""
        try:
            yield
        except LearnerError as error:
            if self.count == 1:
                raise
            said = str(error) or "it does not say why"
        for rank, data in enumerate(self.gather(said.encode())):
            if data:
                raise LearnerError(f"learner rank {rank}: {data.decode()}")

    def wait_all(self) -> None:
        """Return once every rank has come here."""
        if self.count > 1:
            distributed.barrier()

    def close(self) -> None:
        """Leave the others. May be called twice."""
        if self._waiting is not None:
            self._waiting = None
            distributed.destroy_process_group()


ALONE = Ranks(Place())
"""One process that holds the whole model."""


def merge_over(ranks: Ranks, records: Mapping[str, Record]) -> dict[str, Record]:
    """Return the records of all shares together, the same on each rank."""
    if ranks.count == 1:
        return dict(records)
    given = ranks.gather(wire.encode(_tables(records)))[:: ranks.context.count]
    tables = [wire.decode(data, dict[str, tuple[str, Any]]) for data in given]
    return reduce(
        [
            {name: msgspec.convert(fields, getattr(reduction, kind)) for name, (kind, fields) in table.items()}
            for table in tables
        ]
    )


def _tables(records: Mapping[str, Record]) -> dict[str, tuple[str, Any]]:
    return {name: (type(record).__name__, record) for name, record in records.items()}


def versions() -> dict[str, str]:
    """Return what ranks must have alike to compute alike, by name."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"asyncrl": __version__, "python": python, **{name: metadata.version(name) for name in _PACKAGES}}


def device_of(device: torch.device) -> dict[str, str]:
    """Return what of the devices must be alike, by name: each rank holds as much, and all wait for the slowest."""
    if device.type != "cuda":
        return {"device": device.type}
    found = torch.cuda.get_device_properties(device)
    return {"device": device.type, "GPU": found.name, "GPU memory": f"{found.total_memory / 2**30:.1f} GiB"}


def check_same(given: Sequence[bytes], must: str = "run the same versions") -> None:
    """Raise ConfigError naming what differs from the first rank's, of a table that every rank encoded."""
    first: Mapping[str, str] = wire.decode(given[0], dict[str, str])
    for rank, data in enumerate(given[1:], start=1):
        theirs: Mapping[str, str] = wire.decode(data, dict[str, str])
        differing = [
            f"{name} {theirs.get(name, 'missing')} and not {first.get(name, 'missing')}"
            for name in sorted({*first, *theirs})
            if theirs.get(name) != first.get(name)
        ]
        if differing:
            raise ConfigError(f"learner rank {rank} has {', '.join(differing)} as rank 0 has: all ranks must {must}")
