"""The panel: a sample of neurons observed in more detail, to know how far figures about all neurons can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from themis.compute.native import add_panel, add_powers, library_for
from themis.compute.rng import mix
from themis.measure.moments import Moments

N_BLOCKS = 20
_TABLE_SIZE = 4096
_FOLD_TESTS = 1024


def choose_panel(n_neurons: int, size: int = 1000, random_seed: int = 0) -> Tensor:
    """A uniform random sample of neurons, int64 `[min(size, n_neurons)]`, ascending."""
    chosen = np.random.default_rng(random_seed).choice(n_neurons, min(size, n_neurons), replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen))


def block_table(n_blocks: int = N_BLOCKS) -> Tensor:
    """The block of each seed, by its index modulo 4,096: int64 `[4096]`, random but always the same.

    Blocks must be random samples of the seeds. The index modulo 20 would group data whose classes alternate into blocks
    by class (too much variance between blocks); assigning each run of 20 neighbours to 20 blocks would spread data
    sorted by class evenly (too little). Random blocks are slightly uneven, which the jackknife allows for.
    """
    return torch.from_numpy(mix(np.arange(_TABLE_SIZE)) % n_blocks)


@dataclass
class Panel:
    """Sums of the panel's sensitivities by seed block, in place; tensors and counts, so that they can be stored.

    `neurons` are flat indices `[panel]`; `count` is int64 `[blocks]`; `sums` is float64 `[2, blocks, panel]`: of
    `D - shift` and of its square. The shift is the first test, so that nothing is lost to cancellation. `recent` holds
    the sums of the last tests, up to about a thousand, in float32: folding them in costs as much as adding a chunk.
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
            add_panel(native, differences.contiguous(), seed_index, self.table, self.count, self.shift, self.recent)
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
        n_recent = torch.tensor(self.n_recent)
        return {
            "count": self.count,
            "shift": self.shift,
            "sums": self.sums,
            "recent": self.recent,
            "n_recent": n_recent,
        }

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
        """The same for accelerators: index_add_ adds in any order there and bincount waits for the device."""
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

    def merge(self, other: Panel) -> Panel:
        """The panel of both sets of tests; both must observe the same neurons in the same blocks."""
        if len(self.shift) == 0 or len(other.shift) == 0:
            return other if len(self.shift) == 0 else self
        self._fold()
        other._fold()
        move = other.shift.double() - self.shift
        first = other.sums[0] + other.count[:, None] * move
        second = other.sums[1] + 2 * move * other.sums[0] + other.count[:, None] * move.square()
        sums = self.sums + torch.stack([first, second])
        return Panel(
            self.neurons, self.table, self.count + other.count, self.shift, sums, torch.zeros_like(self.recent)
        )


@dataclass
class Shape:
    """Sums of powers of the panel's differences, for how normal they are; in place, float64 `[6, panel]`.

    Rows: powers 1 to 4 of the signed difference, then 1 and 3 of the absolute one, whose even powers are the same.
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
            add_powers(native, signed.contiguous(), self.sums)
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
    # Chunks are summed in float32: a spread this far under the mean is rounding.
    variance = torch.where(variance > 1e-6 * second, variance, torch.nan)
    central3 = third - 3 * mean * second + 2 * mean**3
    central4 = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean**4
    return central3 / variance**1.5, central4 / variance.square() - 3
