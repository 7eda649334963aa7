"""Streaming moments of sensitivities, which determine a normal model, and further sums for a panel of neurons."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from themis.compute.native import expect, library_for
from themis.compute.rng import mix
from themis.errors import ModelError
from themis.target.activations import Layer


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations (M2) of each neuron's sensitivities.

    `count` is int64, one for all neurons (shape `[]`) or one per neuron; `mean` and `m2` are float64 `[neurons]`.
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
        self.shift = torch.zeros(n_neurons, dtype=dtype, device=device)
        """The numbers that are subtracted from all sensitivities, set by the first chunk."""
        self.chunk_sums = torch.zeros(2, n_neurons, dtype=dtype, device=device)
        """The sums of `D - shift` and of its square in the chunk that is being added."""
        self._sums = torch.zeros(2, n_neurons, dtype=torch.float64, device=device)
        self._means: dict[int, tuple[Tensor, Tensor]] = {}
        """The variance and the mean of the values that `add_copy` was given on an accelerator, by first neuron."""

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the shift and of the chunk's sums and squares of the neurons from `start` to `stop`."""
        sums, squares = self.chunk_sums
        return self.shift[start:stop], sums[start:stop], squares[start:stop]

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

    def add_copy(self, values: Tensor, start: int, stop: int) -> None:
        """Like `add`, but without overwriting `values`, which an accelerator reads only once."""
        native = library_for(values)
        if values.is_cpu and (native is None or self.shift.dtype != torch.float32):
            self.add(values.clone(), start, stop)
            return
        shift, sums, squares = self.part(start, stop)
        if self.count == 0:
            shift.copy_(values[0])
        if native is None:
            self._means[start] = torch.var_mean(values, 0, correction=0)
        else:
            native.themis_sums(values.contiguous(), *values.shape, shift, sums, squares)

    def commit(self, n_tests: int) -> None:
        """Count the chunk, after all its layers were added."""
        if self._means:
            variance, mean = (torch.cat(parts) for parts in zip(*self._means.values(), strict=True))
            sums, squares = self.chunk_sums
            torch.sub(mean, self.shift, out=sums).mul_(n_tests)
            torch.addcmul(variance.mul_(n_tests), sums, sums / n_tests, out=squares)
        self.commit_sums(self.chunk_sums, n_tests)

    def commit_sums(self, sums: Tensor, n_tests: int) -> None:
        """Count tests, given the sums of `D - shift` and of its square `[2, neurons]`."""
        native = library_for(sums)
        if native is None:
            self._sums += sums
        else:
            expect(tuple(sums.shape), self._sums)
            native.themis_accumulate(self._sums, sums, sums.numel())
        self.count += n_tests

    def begin(self, shift: Tensor, count: int) -> None:
        """Use the shift of an accumulator in another process, which has seen `count` tests."""
        self.count = count
        self.shift.copy_(shift)

    def take_sums(self) -> Tensor:
        """Return the sums of `D - shift` and of its square since the last call, `[2, neurons]`, and reset them."""
        sums = self._sums.clone()
        self._sums.zero_()
        return sums

    def moments(self) -> Moments:
        """The moments of everything committed."""
        if self.count == 0:
            return Moments.empty(len(self.shift), self.shift.device)
        return Moments.from_sums(self.count, self.shift, *self._sums)

    def state(self) -> dict[str, Tensor]:
        """Everything that was committed, as tensors."""
        sums, squares = self._sums
        return {"count": torch.tensor(self.count), "shift": self.shift, "sums": sums, "squares": squares}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""
        self.count = int(state["count"])
        self.shift.copy_(state["shift"])
        self._sums.copy_(torch.stack([state["sums"], state["squares"]]))


N_BLOCKS = 20
_TABLE_SIZE = 4096
_FOLD_TESTS = 1024


def choose_panel(n_neurons: int, size: int = 1000, random_seed: int = 0) -> Tensor:
    """A uniform random sample of neurons, int64 `[min(size, n_neurons)]`, ascending."""
    chosen = np.random.default_rng(random_seed).choice(n_neurons, min(size, n_neurons), replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen))


def block_table(n_blocks: int = N_BLOCKS) -> Tensor:
    """The block of each seed, by its index modulo 4,096: int64 `[4096]`, random but always the same.

    Blocks must be random samples of the seeds. The index modulo 20 would put data whose classes alternate into blocks
    by class (too much variance between blocks), and data sorted by class evenly into all blocks (too little). Random
    blocks are slightly uneven, which the jackknife allows for.
    """
    return torch.from_numpy(mix(np.arange(_TABLE_SIZE)) % n_blocks)


@dataclass
class Panel:
    """Sums of the panel's sensitivities by seed block, in place; tensors and counts, so that they can be stored.

    `neurons` are flat indices `[panel]`; `count` is int64 `[blocks]`; `sums` is float64 `[2, blocks, panel]`: of
    `D - shift` and of its square. The shift is the first test, so that nothing is lost to cancellation. `recent` holds
    the sums of the last tests in float32, up to about a thousand of them, because adding them to `sums` is slow.
    """

    neurons: Tensor
    table: Tensor
    count: Tensor
    shift: Tensor
    sums: Tensor
    recent: Tensor
    n_recent: int = 0

    @staticmethod
    def empty(neurons: Tensor, n_blocks: int = N_BLOCKS) -> Panel:
        """A panel that has seen no test."""
        count = torch.zeros(n_blocks, dtype=torch.int64)
        sums = torch.zeros(2, n_blocks, len(neurons), dtype=torch.float64)
        return Panel(neurons, block_table(n_blocks), count, torch.empty(0), sums, sums.float())

    def add(self, differences: Tensor, seed_index: Tensor) -> None:
        """Add the sensitivities `|differences|`, `[tests, panel]`, of tests on these seeds, int64 `[tests]`."""
        if len(differences) == 0:
            return
        if len(self.shift) == 0:
            self._start(differences.float().abs())
        native = library_for(differences)
        if native is not None:
            table, ends = self.table, (self.shift, *self.recent)
            native.themis_add_panel(
                differences.contiguous(), seed_index, *differences.shape, table, len(table), self.count, *ends
            )
        else:
            block = self.table[seed_index % _TABLE_SIZE]
            self._add_in_torch(block, differences.float().abs().sub_(self.shift))
        self.n_recent += len(differences)
        if self.n_recent >= _FOLD_TESTS:
            self._fold()

    def _add_in_torch(self, block: Tensor, values: Tensor) -> None:
        """Add `values`, which are overwritten, and their squares to the sums of their blocks."""
        if values.device.type == "cpu":
            self.count.add_(torch.bincount(block, minlength=len(self.count)))
            self.recent[0].index_add_(0, block, values)
            self.recent[1].index_add_(0, block, values.square_())
        else:
            self._add_by_product(block, values)

    def state(self) -> dict[str, Tensor]:
        """Everything that was added, as tensors."""
        tensors = {name: getattr(self, name) for name in ("count", "shift", "sums", "recent")}
        return {**tensors, "n_recent": torch.tensor(self.n_recent)}

    def restore(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Continue from a state."""
        if len(state["shift"]) not in (0, len(self.neurons)):
            raise ValueError(f"the panel has {len(self.neurons)} neurons, and its shift {len(state['shift'])}")
        if len(state["shift"]):
            self._start(state["shift"][None].to(device))
        for name in ("count", "sums", "recent"):
            getattr(self, name).copy_(state[name])
        self.n_recent = int(state["n_recent"])

    def _add_by_product(self, block: Tensor, values: Tensor) -> None:
        """Do the same on accelerators, where `index_add_` adds in any order and `bincount` waits for the device."""
        is_in = torch.arange(len(self.count), device=block.device)[:, None] == block
        self.count.add_(is_in.sum(1))
        self.recent.add_(is_in.to(values) @ torch.stack([values, values.square()]))

    def _start(self, values: Tensor) -> None:
        """Take the shift and the device from the first test."""
        self.shift = values[0].clone()
        for name in ("table", "count", "sums", "recent"):
            setattr(self, name, getattr(self, name).to(values.device))

    def _fold(self) -> None:
        self.sums.add_(self.recent)
        self.recent.zero_()
        self.n_recent = 0

    def blocks(self) -> Moments:
        """The moments of each block: count `[blocks, 1]`, mean and M2 `[blocks, panel]`."""
        self._fold()
        count = self.count[:, None]
        deviation = self.sums[0] / count.clamp(min=1)
        m2 = (self.sums[1] - deviation.square() * count).clamp_(min=0)
        if len(self.shift) == 0:
            return Moments(count, deviation, m2)
        return Moments(count, torch.where(count > 0, deviation + self.shift, 0.0), m2)


@dataclass
class Shape:
    """Sums of powers of the panel's differences, which show how normal these are; float64 `[6, panel]`, in place.

    Rows: powers 1 to 4 of the signed differences, then 1 and 3 of the absolute ones, whose even powers are the same.
    """

    sums: Tensor
    n_tests: int = 0

    @staticmethod
    def empty(n_neurons: int) -> Shape:
        """The shape of no test."""
        return Shape(torch.zeros(6, n_neurons, dtype=torch.float64))

    def add(self, signed: Tensor) -> None:
        """Add signed differences `[tests, panel]`."""
        self.n_tests += len(signed)
        native = library_for(signed)
        if native is not None:
            native.themis_add_powers(signed.contiguous(), *signed.shape, self.sums)
            return
        first = signed.float()
        second = first.square()
        third = second * first
        parts = [first.sum(0), second.sum(0), third.sum(0), second.square_().sum(0)]
        parts += [first.abs().sum(0), third.abs_().sum(0)]
        self.sums = self.sums.to(first.device).add_(torch.stack(parts))

    def state(self) -> dict[str, Tensor]:
        """Everything that was added, as tensors."""
        return {"sums": self.sums, "n_tests": torch.tensor(self.n_tests)}

    def restore(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Continue from a state."""
        self.sums, self.n_tests = state["sums"].to(device), int(state["n_tests"])

    def signed(self) -> tuple[Tensor, Tensor]:
        """Skewness and excess kurtosis of the signed differences, each `[panel]`; NaN where nothing varies."""
        return _skewness_and_kurtosis(self.sums[:4] / max(self.n_tests, 1))

    def absolute(self) -> tuple[Tensor, Tensor]:
        """Skewness and excess kurtosis of the sensitivities, each `[panel]`; NaN where nothing varies."""
        return _skewness_and_kurtosis(self.sums[[4, 1, 5, 3]] / max(self.n_tests, 1))


def _skewness_and_kurtosis(raw: Tensor) -> tuple[Tensor, Tensor]:
    """From the raw moments `[4, neurons]`."""
    mean, second, third, fourth = raw
    variance = second - mean.square()
    # Chunks are summed in float32, so that a variance this small relative to the mean is rounding.
    variance = torch.where(variance > 1e-6 * second, variance, torch.nan)
    central3 = third - 3 * mean * second + 2 * mean**3
    central4 = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean**4
    return central3 / variance**1.5, central4 / variance.square() - 3
