"""A delta's values into the weights that run, one by one. Runs inside vLLM's worker processes, on a CPU.

To load a whole version means to pack every linear weight anew, whatever little has changed. So where deltas are sent,
linear weights are packed such that single elements can be written (`vllm_packing`), right after vLLM's own loader has
loaded a whole version. Which tensor of the checkpoint lies in which parameter, and from which row on, is read off the
names (`packed_modules_mapping`), and then proven: a plain parameter holds the version's bits, and a packed weight makes
of random inputs what the one that vLLM has packed makes of them. A model for which that fails is loaded as before.

Of everything that is written there are two: what the model reads, and a spare. While tokens are produced, the spare is
made equal to the other and the changed values are written into it. The two swap while the engine is paused between two
decode steps, so that for every step the weights are all of one version, and the pause does not grow with the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from asyncrl.types import TensorEntry
from asyncrl.weight_sync.vllm_packing import Layout, Layouts, PackedLinear, Places, UnknownLayoutError, Words, words_of

_HEAD = "lm_head.weight"
_PROOF_ROWS = 4
_ROUNDING = 0.02  # of the largest output; a row that lies elsewhere moves some output by about as much as that one

Tensor = Callable[[TensorEntry], torch.Tensor]
"""The tensor of an entry, as the version has it."""


class UnpatchableError(Exception):
    """This model's weights cannot be written one by one; the words say why."""


class _Twin:
    """Memory that the model reads, behind an attribute of `holder`, and its spare."""

    def __init__(self, holder: Any, attribute: str, layout: Layout) -> None:
        self._holder, self._attribute = holder, attribute
        self._layout = layout
        self._spare: torch.Tensor | None = None
        self.staged: list[tuple[int, Places, Words]] = []
        """Row where a tensor begins, positions in it, and the values that come there."""

    def prepare(self) -> None:
        """Make the spare what is read now, with what is staged written over it."""
        held: torch.Tensor = getattr(self._holder, self._attribute)
        if self._spare is None:
            self._spare = held.clone()
        words = words_of(self._spare)
        words[:] = words_of(held)
        width = len(self._layout.columns)
        for first_row, positions, values in self.staged:
            rows = positions // width
            columns = positions - rows * width
            words[self._layout.rows[rows + first_row] + self._layout.columns[columns]] = values
        self.staged.clear()

    def swap(self) -> None:
        spare, self._spare = self._spare, getattr(self._holder, self._attribute)
        setattr(self._holder, self._attribute, spare)


class Patch:
    """Writes deltas into one model, whose weights are those of the version that it was made from.

    It is made from a shadow that holds a whole version, beside the model that runs. Once the two have been exchanged,
    `take_over` gives the model's layers packed weights that can be written.
    Raises, when made: UnpatchableError.
    """

    def __init__(self, model: Any, entries: Sequence[TensorEntry], tensor: Tensor, layouts: Layouts) -> None:
        self._layouts = layouts
        self._twins: list[_Twin] = []
        self._places: dict[str, list[tuple[_Twin, int]]] = {}
        """By tensor, where it lies: in which memory, and from which row on."""
        by_name = {entry.name: entry for entry in entries}
        plain: set[int] = set()
        has_head = any(isinstance(layer, ParallelLMHead) for layer in model.modules())
        self._linears: list[tuple[str, PackedLinear | None, int]] = []
        """By the path of their layers, with the width of what they multiply; None where they multiply nothing."""
        for path, layer, parameter, names in _sources(model, by_name):
            sources = [by_name[name] for name in names]
            if parameter.numel() and id(parameter) not in plain:  # a tied head lends the embedding's
                plain.add(id(parameter))
                self._plain(parameter, sources, tensor)
            if "cpu_linear" in layer.__dict__ and parameter is layer._parameters.get("weight"):
                if has_head and isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
                    self._linears.append((path, None, 0))  # an input embedding
                else:
                    self._linears.append((path, *self._packed(parameter, sources, tensor)))
        if unplaced := by_name.keys() - self._places.keys() - {_HEAD}:
            raise UnpatchableError(f"{sorted(unplaced)[0]} is in no parameter of the engine's model")

    def take_over(self, model: Any) -> None:
        """Give the layers of a model that holds the version the packed weights which can be written.

        The model must not be running: beside it vLLM's kernel, which they are compared with, errs at times.
        Raises: UnpatchableError; the layers keep what they have.
        """
        layers = [(model.get_submodule(path), linear, width, path) for path, linear, width in self._linears]
        for layer, linear, width, path in layers:
            if linear is not None:
                _prove(layer, linear, width, path)
        for layer, linear, _, _ in layers:
            layer.__dict__["cpu_linear"] = linear or torch.nn.functional.linear  # as vLLM's own, which is no submodule

    def _plain(self, parameter: torch.nn.Parameter, sources: Sequence[TensorEntry], tensor: Tensor) -> None:
        data, first = parameter.data, 0
        if not data.is_contiguous():
            raise UnpatchableError(f"{sources[0].name} is in a parameter that is not contiguous")
        row_size = data.numel() // data.shape[0]
        layout = Layout(np.arange(data.shape[0], dtype=np.intp) * row_size, np.arange(row_size, dtype=np.intp))
        twin = self._twin(parameter, "data", layout)
        for source in sources:
            held, sent = data[first : first + source.shape[0]], tensor(source)
            if held.shape != sent.shape or held.dtype != sent.dtype or not torch.equal(_bits(held), _bits(sent)):
                raise UnpatchableError(f"the engine's model holds {source.name} in another form")
            self._places.setdefault(source.name, []).append((twin, first))
            first += source.shape[0]

    def _packed(
        self, parameter: torch.nn.Parameter, sources: Sequence[TensorEntry], tensor: Tensor
    ) -> tuple[PackedLinear, int]:
        parts = [parameter.data] if parameter.numel() else [tensor(source) for source in sources]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        if weight.dtype != parameter.dtype:
            raise UnpatchableError(f"{sources[0].name} is {weight.dtype}, the engine computes in {parameter.dtype}")
        try:
            layout = self._layouts.of(weight.shape, weight.dtype)
        except UnknownLayoutError as error:
            raise UnpatchableError(f"{sources[0].name}: {error}") from error
        linear = PackedLinear(weight)
        twin, first = self._twin(linear, "packed", layout), 0
        for source in sources:
            self._places.setdefault(source.name, []).append((twin, first))
            first += source.shape[0]
        return linear, weight.shape[1]

    def _twin(self, holder: Any, attribute: str, layout: Layout) -> _Twin:
        twin = _Twin(holder, attribute, layout)
        self._twins.append(twin)
        return twin

    def stage(self, name: str, positions: Places, values: Words) -> None:
        """Take note of the changed values of one tensor."""
        for twin, first_row in self._places.get(name, ()):
            twin.staged.append((first_row, positions, values))

    @torch.no_grad()
    def prepare(self) -> None:
        """Write what is staged. Nothing that the model uses changes before `commit`; may run beside it."""
        for twin in self._twins:
            twin.prepare()

    def drop(self) -> None:
        """Forget what is staged; what is prepared will be prepared anew."""
        for twin in self._twins:
            twin.staged.clear()

    def commit(self) -> None:
        """Let the model read what is prepared; it must not be running."""
        for twin in self._twins:
            twin.swap()


def _sources(
    model: Any, by_name: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter, tuple[str, ...]]]:
    """Yield every parameter in each layer that has it: the layer's path, it, and the tensors in it, in row order.

    Raises: UnpatchableError naming a parameter whose tensors are not known.
    """
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    lent: dict[int, tuple[str, ...]] = {}
    for path, layer in model.named_modules():
        parent, _, own = path.rpartition(".")
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            names: tuple[str, ...] = (f"{path}.{name}",)
            if id(parameter) in lent:
                names = lent[id(parameter)]
            elif names[0] not in by_name and own in fused:
                names = tuple(f"{parent}.{part}.{name}" for part in fused[own])
            if missing := [part for part in names if part not in by_name]:
                raise UnpatchableError(f"{path}.{name} of the engine's model has no tensor {missing[0]}")
            lent[id(parameter)] = names
            yield path, layer, parameter, names


def _prove(layer: Any, linear: PackedLinear, width: int, path: str) -> None:
    weight = layer._parameters["weight"]
    x = torch.randn(_PROOF_ROWS, width).to(weight.dtype)
    found, wanted = linear(x, None, None), layer.cpu_linear(x, weight, None)
    if found.shape != wanted.shape or not (found - wanted).abs().max() <= _ROUNDING * wanted.abs().max():
        raise UnpatchableError(f"{path} is packed otherwise than it was thought")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
