"""Configurations of neurons across layers: path coverage (DeepPath) and pairs of neurons (Sekhon and Fleming)."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache, reduce
from math import prod
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.options import check_count
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Readings
from themis_lab.criteria.tway import Combinations

PATH_KINDS = ("sap", "oap", "fsp")
MAX_PATH_LENGTH = 5
DEFAULT_SETS = 40_000
"""Approximate number of sets of neurons between the same layers, by default."""

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""The layers that the neurons of a set belong to, and how many of their states count: 2, or 1 for on only."""


class Configurations(Combinations):
    """Configurations of neurons of several layers. A subclass says which layers and states are combined."""

    def __init__(
        self, size: int, threshold: float, max_neurons: int | None, **options: Unpack[CriterionOptions]
    ) -> None:
        """size: neurons per set."""
        if max_neurons is not None:
            check_count(f"{self.name}: max_neurons", max_neurons, 2)
        super().__init__(**options)
        self._size, self.threshold, self.max_neurons = size, threshold, max_neurons

    @abstractmethod
    def blocks(self, n_layers: int) -> list[Block]:
        """Which neurons are combined: those of the same layer in ascending order, those of other layers in any."""

    def n_items(self) -> int:
        if self.layout is None:
            return 0
        self._check_size(sum(_n_dense(self._widths(), block) for block in self._blocks()))
        return sum(len(self._numbers(block, torch.device("cpu"))) for block in self._blocks())

    def items(self, readings: Readings) -> Tensor:
        states, parts, start = self._states(readings).flatten(1), [], 0
        self.n_items()  # raises an error if there are too many
        for block in self._blocks():
            numbers = self._numbers(block, states.device)
            shows = reduce(torch.logical_and, [states[:, at] for at in self._places(block, numbers)])
            parts.append(torch.where(shows, start + torch.arange(len(numbers), device=states.device), -1))
            start += len(numbers)
        return torch.cat(parts, 1)

    def _shown(self, states: Tensor) -> Tensor:
        dtype, shown = torch.float16 if states.is_cuda else torch.float32, []
        starts = _starts(self._widths())
        for block in self._blocks():
            *first, last = (
                states[:, starts[layer] : starts[layer + 1], 2 - n_states :].flatten(1)
                for layer, n_states in zip(*block, strict=True)
            )
            rest = reduce(lambda left, right: (left[:, :, None] & right[:, None, :]).flatten(1), first)
            shown.append((rest.to(dtype).mT @ last.to(dtype) > 0).flatten()[self._numbers(block, states.device)])
        return torch.cat(shown)

    def _first_tests(self, fresh: Tensor, states: Tensor) -> Tensor:
        rows, tests, start = states.flatten(1).mT, [], 0
        for block in self._blocks():
            numbers = self._numbers(block, states.device)
            own = fresh[(fresh >= start) & (fresh < start + len(numbers))] - start
            shows = [rows[at] for at in self._places(block, numbers[own])]
            tests.append(reduce(torch.logical_and, shows).to(torch.uint8).argmax(1))  # the first true one
            start += len(numbers)
        return torch.cat(tests)

    def _places(self, block: Block, numbers: Tensor) -> list[Tensor]:
        return _places(self._widths(), block, numbers)

    def _numbers(self, block: Block, device: torch.device) -> Tensor:
        return _numbers(self._widths(), block, device)

    def _blocks(self) -> list[Block]:
        return self.blocks(len(self._widths()))

    def _widths(self) -> tuple[int, ...]:
        if self.layout is None:
            return ()
        most = self.max_neurons or int(DEFAULT_SETS ** (1 / self._size) + 1e-9)
        return tuple(min(width, most) for width in self.layout.widths)


class DeepPath(Configurations):
    """Paths of `length` neurons, one in each of as many adjacent layers, in the states that tests have shown.

    `kind` is one of DeepPath's criteria: `sap`, the strong activated paths, whose neurons are all on; `oap`, the output
    activated paths, whose last neuron is on while each of the others may be on or off; `fsp`, the full state paths,
    each neuron of which may be on or off. A path thus has 1, 2^(length-1) or 2^length configurations; the score is the
    share of all configurations of all paths that some test showed. The names and the idea are the paper's; how `oap`
    counts the states of the other neurons, and that every two neurons of adjacent layers are connected, also in
    convolutions, are readings of it.

    threshold: a neuron is on above it. max_neurons: how many neurons of a layer are combined at most; a wider layer is
    sampled at even distances. By default 200 for paths of two, and fewer for longer ones: about 40,000 paths.
    """

    name = "path"
    variants: ClassVar = {
        "deeppath": "Wang et al., DeepPath: Path-driven Testing Criteria for Deep Neural Networks, AITest 2019"
    }

    def __init__(
        self,
        kind: str = "sap",
        length: int = 2,
        threshold: float = 0.0,
        max_neurons: int | None = None,
        **options: Unpack[CriterionOptions],
    ) -> None:
        if kind not in PATH_KINDS:
            raise UsageError(f"path: kind must be one of {', '.join(PATH_KINDS)}, got {kind!r}")
        if not 2 <= length <= MAX_PATH_LENGTH:
            raise UsageError(
                f"path: length must be 2 to {MAX_PATH_LENGTH}, got {length}: longer paths are too many to count"
            )
        super().__init__(length, threshold, max_neurons, **options)
        self.kind, self.length = kind, length

    def blocks(self, n_layers: int) -> list[Block]:
        if n_layers < self.length:
            raise UsageError(
                f"path: length must be at most the number of layers, got {self.length} for {n_layers}: pass more "
                "layers, or a shorter length"
            )
        states = {"sap": (1,) * self.length, "oap": (*(2,) * (self.length - 1), 1), "fsp": (2,) * self.length}
        layers = range(n_layers - self.length + 1)
        return [(tuple(range(first, first + self.length)), states[self.kind]) for first in layers]


class NeuronPairs(Configurations):
    """On/off configurations that occurred in pairs of neurons, of one layer or of two adjacent layers.

    This is the criterion that Sekhon and Fleming propose, as the survey of Zhang et al. (Machine Learning Testing, TSE
    2020) summarises it: all pairs of neurons in the same layer, and all pairs in consecutive layers, show all possible
    combinations of values. Values are taken as on and off. The score is the share of all configurations of all pairs.

    threshold: a neuron is on above it. max_neurons: how many neurons of a layer are combined at most, 200 by default; a
    wider layer is sampled at even distances.
    """

    name = "pairs"
    variants: ClassVar = {"sekhon": "Sekhon and Fleming, Towards Improved Testing for Deep Learning, ICSE-NIER 2019"}

    def __init__(
        self, threshold: float = 0.0, max_neurons: int | None = None, **options: Unpack[CriterionOptions]
    ) -> None:
        super().__init__(2, threshold, max_neurons, **options)

    def blocks(self, n_layers: int) -> list[Block]:
        within = [((layer, layer), (2, 2)) for layer in range(n_layers)]
        return [*within, *(((layer, layer + 1), (2, 2)) for layer in range(n_layers - 1))]


def _n_dense(widths: tuple[int, ...], block: Block) -> int:
    """The configurations of a block as if all its layers were different."""
    return prod(widths[layer] * n_states for layer, n_states in zip(*block, strict=True))


def _starts(widths: tuple[int, ...]) -> list[int]:
    """The first combined neuron of each layer, and the total number."""
    return [sum(widths[:layer]) for layer in range(len(widths) + 1)]


@lru_cache(maxsize=256)
def _numbers(widths: tuple[int, ...], block: Block, device: torch.device) -> Tensor:
    """The configurations of a block that count, int64: within a layer, neurons are in ascending order."""
    layers, _ = block
    numbers = torch.arange(_n_dense(widths, block), device=device)
    if len(set(layers)) == len(layers):
        return numbers
    first, second = (place // 2 for place in _places(widths, block, numbers))
    return numbers[first < second]


def _places(widths: tuple[int, ...], block: Block, numbers: Tensor) -> list[Tensor]:
    starts, places = _starts(widths), []
    for layer, n_states in reversed(list(zip(*block, strict=True))):
        numbers, within = numbers // (widths[layer] * n_states), numbers % (widths[layer] * n_states)
        places.append(2 * (starts[layer] + within // n_states) + within % n_states + 2 - n_states)
    return places[::-1]
