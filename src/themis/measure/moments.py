"""Streaming moments: all that a normal model needs to know about the sensitivities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from themis.compute.native import accumulate, library_for, sums_of
from themis.errors import ModelError
from themis.target.activations import Layer


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations (M2) of each neuron's sensitivities.

    `count` is int64, one for all neurons (shape `[]`) or one each; `mean` and `m2` are float64 `[neurons]`.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @staticmethod
    def empty(n_neurons: int, device: torch.device | str = "cpu") -> Moments:
        """The moments of no test: merging them changes nothing."""
        zeros = torch.zeros(n_neurons, dtype=torch.float64, device=device)
        return Moments(torch.zeros((), dtype=torch.int64, device=device), zeros, zeros)

    @staticmethod
    def of(chunk: Tensor) -> Moments:
        """The moments of sensitivities `[tests, neurons]`."""
        if len(chunk) == 0:
            return Moments.empty(chunk.shape[1], chunk.device)
        # Deviations from the first test: common values cancel exactly, so a constant neuron has M2 = 0.
        first = chunk[0]
        deviations = chunk - first
        sums = deviations.sum(0)
        squares = deviations.square_().sum(0)
        return Moments.from_sums(len(chunk), first, sums, squares)

    @staticmethod
    def from_sums(count: int, shift: Tensor, sums: Tensor, squares: Tensor) -> Moments:
        """The moments of `count` values, given the sums of `value - shift` and of `(value - shift)**2`."""
        mean = sums.double() / count
        m2 = mean.square().mul_(count)
        torch.sub(squares.double(), m2, out=m2).clamp_(min=0)
        n = torch.tensor(count, dtype=torch.int64, device=sums.device)
        return Moments(n, mean.add_(shift), m2)

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of tests (Chan's pairwise formula)."""
        count = self.count + other.count
        weight = other.count.double() / count.clamp(min=1)
        delta = other.mean - self.mean
        mean = torch.addcmul(self.mean, delta, weight)
        m2 = torch.addcmul(self.m2 + other.m2, delta.square_(), self.count * weight)
        return Moments(count, mean, m2)

    @property
    def variance(self) -> Tensor:
        """Sample variance, infinite where fewer than two tests were seen."""
        return torch.where(self.count > 1, self.m2 / (self.count - 1).clamp(min=1), torch.inf)

    def __getitem__(self, neurons: Tensor) -> Moments:
        """The moments of some neurons."""
        count = self.count if self.count.ndim == 0 else self.count[neurons]
        return Moments(count, self.mean[neurons], self.m2[neurons])

    def checked(self, layers: tuple[Layer, ...]) -> Moments:
        """The same moments; raises if an activation overflowed, and names its layer."""
        is_finite = self.m2.isfinite()
        if not bool(is_finite.all()):
            at = int((~is_finite).nonzero()[0])
            name = next(layer.name for layer in layers if at < layer.stop)
            raise ModelError(
                f"activations must be finite, but layer {name!r} has a NaN or an infinity while the output has none: "
                "leave the layer out with layers=[...], or run the model in float32"
            )
        return self


class Accumulator:
    """Accumulates sensitivities for `Moments`: float64, in place, layer by layer as a forward pass computes them.

    A chunk counts only once it is committed, so one that fails halfway leaves no trace. A shift, the first test seen,
    is subtracted from all values, so that nothing is lost to cancellation.
    """

    def __init__(self, n_neurons: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.count = 0
        self._shift, self._chunk_sums, self._chunk_squares = torch.zeros(3, n_neurons, dtype=dtype, device=device)
        self._sums, self._squares = torch.zeros(2, n_neurons, dtype=torch.float64, device=device)
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # views by first neuron: slicing costs time

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the shift and of the chunk's sums and squares of the neurons from `start` to `stop`."""
        part = self._parts.get(start)
        if part is None:
            shift, sums, squares = self._shift, self._chunk_sums, self._chunk_squares
            part = self._parts[start] = (shift[start:stop], sums[start:stop], squares[start:stop])
        return part

    def add(self, values: Tensor, start: int, stop: int, scratch: Tensor | None = None) -> None:
        """Add `values [tests, stop - start]` of the neurons from `start` to `stop`; `values` is overwritten.

        `scratch`, of the same shape, takes the squares; without it they take the place of `values`.
        """
        shift, sums, squares = self.part(start, stop)
        if self.count == 0:
            shift.copy_(values[0])
        values.sub_(shift)
        torch.sum(values, 0, out=sums)
        torch.sum(torch.mul(values, values, out=values if scratch is None else scratch), 0, out=squares)

    def add_copy(self, values: Tensor, start: int, stop: int, scratch: Tensor) -> None:
        """The same without overwriting `values`; `scratch`, of the same shape, takes a copy if one is needed."""
        native = library_for(values)
        if native is None or self._shift.dtype != torch.float32:
            self.add(scratch.copy_(values), start, stop)
            return
        shift, sums, squares = self.part(start, stop)
        if self.count == 0:
            shift.copy_(values[0])
        sums_of(native, values.contiguous(), shift, sums, squares)

    def commit(self, n_tests: int) -> None:
        """Count the chunk, after all its layers were added."""
        self.commit_sums(self._chunk_sums, self._chunk_squares, n_tests)

    @property
    def shift(self) -> Tensor:
        """What is subtracted from all sensitivities; set by the first chunk."""
        shift: Tensor = self._shift
        return shift

    @property
    def chunk_sums(self) -> tuple[Tensor, Tensor]:
        """The sums of `D - shift` and of its square of the chunk that is being added, `[neurons]`."""
        return self._chunk_sums, self._chunk_squares

    def commit_sums(self, sums: Tensor, squares: Tensor, n_tests: int) -> None:
        """Count a chunk, given the sums of `D - shift` and of its square."""
        native = library_for(sums)
        for total, part in ((self._sums, sums), (self._squares, squares)):
            if native is None:
                total += part
            else:
                accumulate(native, total, part)
        self.count += n_tests

    def begin(self, shift: Tensor, count: int) -> None:
        """Take over the shift of an accumulator in another process that has seen `count` tests."""
        self.count = count
        self._shift.copy_(shift)

    def take_sums(self) -> tuple[Tensor, Tensor]:
        """The sums of `D - shift` and of its square since the last call; they start again from zero."""
        sums, squares = self._sums.clone(), self._squares.clone()
        self._sums.zero_()
        self._squares.zero_()
        return sums, squares

    def moments(self) -> Moments:
        """The moments of everything committed."""
        if self.count == 0:
            return Moments.empty(len(self._sums), self._sums.device)
        return Moments.from_sums(self.count, self._shift, self._sums, self._squares)

    def state(self) -> dict[str, Tensor]:
        """Everything that was committed, as tensors."""
        count = torch.tensor(self.count)
        return {"count": count, "shift": self._shift, "sums": self._sums, "squares": self._squares}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""
        self.count = int(state["count"])
        for mine, saved in ((self._shift, "shift"), (self._sums, "sums"), (self._squares, "squares")):
            mine.copy_(state[saved])


class ChunkSums(Accumulator):
    """Holds the sums of one chunk, for another process to commit."""

    def commit(self, n_tests: int) -> None:
        """Count the chunk; `take_sums` must be called before the next one."""
        self.count += n_tests

    def take_sums(self) -> tuple[Tensor, Tensor]:
        """The sums of the chunk as they were computed; the next chunk overwrites them."""
        return self.chunk_sums
