"""The clean inputs, their outputs, and as many of their activations as fit into memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from themis.data.files import available_bytes
from themis.data.rows import Rows
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.tests import Ints
from themis.oracle import Motion, Oracle
from themis.oracle.oracle import Verdict
from themis.target.activations import Layer
from themis.target.blackbox import BlackBox
from themis.target.target import AnyTarget, Target

SPARE_SHARE, SPARE_SHARE_OF_GPU = 0.25, 0.5
"""Shares of the free memory for clean activations by default. The rest is for chunks, and for other processes, which
may be campaigns too."""
NO_SEEDS = np.zeros(0, dtype=np.int64)
Activations = dict[str, Tensor]
"""Activations `[inputs, neurons]` by layer."""


class CleanActivations:
    """The activations of as many seeds as fit in `max_bytes`, at least `least` of them; each of these seeds has a row.

    If others are needed, they take the rows of the least used seeds. If all seeds fit, the row of a seed is its number.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        n_seeds: int,
        max_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        least: int = 0,
    ) -> None:
        bytes_per_seed = sum(layer.n_neurons for layer in layers) * dtype.itemsize
        self.n_kept = min(n_seeds, max(least, max_bytes // bytes_per_seed))
        self.nbytes = self.n_kept * bytes_per_seed
        self.by_layer = {layer.name: _allocate(self.n_kept, layer.n_neurons, dtype, device) for layer in layers}
        self.is_short = self.n_kept < n_seeds
        self.n_empty = self.n_kept
        self._row, self._seed = np.full(n_seeds, -1), np.full(self.n_kept, -1)
        self._n_uses = np.zeros(n_seeds)

    @property
    def is_complete(self) -> bool:
        """Whether the activations of all seeds are kept."""
        return not self.is_short and not self.n_empty

    def rows(self, seeds: Ints) -> Ints:
        """The rows of seeds; their activations must be kept."""
        return self._row[seeds] if self.is_short else seeds

    def n_fitting(self, seeds: Ints) -> int:
        """How many of the first `seeds`, which may be repeated, can have rows at the same time."""
        firsts = np.unique(seeds, return_index=True)[1]
        return len(seeds) if len(firsts) <= self.n_kept else int(np.sort(firsts)[self.n_kept])

    def make_room(self, seeds: Ints, in_use: Ints = NO_SEEDS) -> tuple[Ints, Ints]:
        """Return the seeds without rows, and rows emptied for them; after writing these, call `filled`.

        Seeds `in_use` keep their rows; there must be room for them and `seeds` together.
        """
        wanted, n_uses = np.unique(seeds, return_counts=True)
        self._n_uses[wanted] += n_uses
        missing = rows = wanted[self._row[wanted] < 0]
        if self.is_short:
            uses = np.where(self._seed < 0, -1, self._n_uses[self._seed])
            uses[self._row[np.union1d(np.setdiff1d(wanted, missing), in_use)]] = np.inf
            rows = np.argsort(uses, kind="stable")[: len(missing)]
            before = self._seed[rows]
            self._row[before[before >= 0]] = self._seed[rows] = -1
        return missing, rows

    def index(self, rows: Ints) -> slice | Tensor:
        """Rows as an index of the activations of any layer."""
        if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return slice(int(rows[0]), int(rows[0]) + len(rows))
        return torch.from_numpy(rows).to(next(iter(self.by_layer.values())).device)

    def filled(self, seeds: Ints, rows: Ints) -> None:
        """Assign rows to seeds after all layers were written."""
        self._row[seeds], self._seed[rows] = rows, seeds
        self.n_empty = int((self._seed < 0).sum())


def _allocate(n_rows: int, n_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(n_rows, n_columns, dtype=dtype, device=device)
    # NumPy asks for huge pages, which Linux fills in less than half the time of small ones.
    return torch.from_numpy(np.empty((n_rows, n_columns), dtype=str(dtype).removeprefix("torch.")))


@dataclass(frozen=True)
class Clean:
    """The clean outputs and activations, and what tests are compared with; empty before the sweep."""

    oracle: Oracle
    outputs: Tensor
    reference: Tensor
    """The answers that the seeds should keep."""
    labels: Tensor | None
    kept: CleanActivations

    @cached_property
    def usable(self) -> Tensor:
        """The seeds that can be tested."""
        return self.oracle.check(self.outputs, self.labels).nonzero().squeeze(1)

    def compare(self, rows: Tensor, outputs: Tensor, motion: Motion | None) -> Verdict:
        """The oracle's verdict on tests of the seeds `rows`, whose pictures have moved."""
        labels = None if self.labels is None else self.labels.index_select(0, rows)
        return self.oracle.verdict(self.outputs.index_select(0, rows), outputs, labels, motion)


def spare_bytes(device: torch.device) -> int:
    """The default memory for clean activations: a share of the free memory."""
    if device.type != "cuda":
        return int(SPARE_SHARE * available_bytes())
    return int(SPARE_SHARE_OF_GPU * _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    """The free memory of a GPU, including what torch has reserved."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def place(inputs: Tensor | Rows, device: torch.device) -> Tensor | Rows:
    """Move the inputs to the device if they fit into half of its free memory; else each row when it is read."""
    if not isinstance(inputs, Tensor) or device.type != "cuda" or inputs.is_cuda:
        return inputs.to(device)
    if inputs.nbytes <= _free_bytes(device) // 2:
        return inputs.to(device)
    tensor = inputs
    return Rows(lambda k: tensor[k], torch.arange(len(tensor)), tuple(tensor.shape[1:]), device=device, cache_bytes=0)


def place_others(target: AnyTarget, seeds: Seeds, rows: Tensor) -> None:
    """If examples have several inputs, give the target the other inputs of the seeds `rows`, which it runs next."""
    if isinstance(target, Target | BlackBox):
        target.side_inputs.others = None if seeds.others is None else seeds.others.part(rows.cpu()).to(target.device)


BOUNDS_TOLERANCE = 1e-6
"""Inputs outside the bounds by up to this share of the range are rounding errors, and clamped."""
BYTE_THRESHOLD = 16
"""Pictures with a larger maximum are taken for bytes; the digits of scikit-learn reach 16."""


def within_bounds(inputs: Tensor, bounds: tuple[float, float], seed_id: Tensor) -> Tensor:
    """Return the inputs, clamped if rounding took them outside the bounds; refuse inputs that are further outside.

    For common mistakes, the message has a specific remedy.
    """
    low, high = bounds
    least, most = (float(extreme) for extreme in inputs.aminmax())
    if low <= least and most <= high:
        return inputs
    slack = BOUNDS_TOLERANCE * (high - low)
    if low - slack <= least and most <= high + slack:
        return inputs.clamp(low, high)
    is_outside = ((inputs < low) | (inputs > high)).flatten(1).any(1)
    first = int(seed_id[min(int(is_outside.nonzero()[0]), len(seed_id) - 1)])
    remedy = "rescale the inputs or pass their true bounds"
    if inputs.ndim == 2:
        remedy += "; --bounds auto, or bounds=(-inf, inf), takes those of a table"
    elif high <= 1 and BYTE_THRESHOLD < most <= 255 and least >= 0:
        remedy = (
            "divide by 255 or pass bounds=(0, 255), which is --bounds 0,255; a model that expects 0..1 then needs "
            "Normalize(0, 255), which is --mean 0 --std 255"
        )
    elif inputs.ndim == 3 and -1 <= least < 0 <= low and most <= 1:
        remedy = "sound in -1..1 needs bounds=(-1, 1), which is --bounds -1,1"
    elif least < 0 <= low:
        remedy = "give raw inputs, and pass the normalisation as preprocess=Normalize(mean, std)"
    raise DataError(
        f"inputs must lie in bounds ({low:g}, {high:g}), got {least:g} to {most:g}, first in seed {first}: {remedy}"
    )
