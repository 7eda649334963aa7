"""Cluster coverage (CC): tests far from all kept before."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from themis.criteria.criterion import Common, Criterion, Laws
from themis.criteria.readings import Layout, Readings
from themis.criteria.runs import Run, runs
from themis.errors import UsageError

CHUNK = 2**24
"""Activations and distances held at a time."""
TESTS = 1024
"""Tests compared with one another at a time."""
LARGEST = 2**32
"""Bytes that may be kept."""
EPSILON = torch.finfo(torch.float64).eps


class CC(Criterion):
    """Tests kept, summed over layers: in a layer, one farther than `threshold` from all kept before is kept.

    The distance is squared Euclidean, as in TensorFuzz; NeuraL-Coverage takes 10 for CIFAR-10 and 1,000 for ImageNet,
    TensorFuzz 1 on the output layer. The first test is kept and counted (the published code keeps and does not count
    it); neighbours are found exactly, not by an approximate index. A count, not a share; it depends on the order. What
    it keeps may take 4 GiB; of neighbouring layers of one width each takes as much as the one that keeps most.
    """

    name = "cc"
    laws = Laws(bounded=False, monotone=True, order_free=False, mergeable=False)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: CC; "
        "github.com/brain-research/tensorfuzz, lib/corpus.py: Updater"
    }

    def __init__(self, threshold: float = 10.0, **common: Unpack[Common]) -> None:
        if not 0 <= threshold < math.inf:
            raise UsageError(f"cc: threshold must be a number, 0 or more, got {threshold!r}")
        super().__init__(**common)
        self.threshold = threshold

    def score(self) -> float:
        return float(sum(int(each.sum()) for key, each in self.state.items() if key.startswith("counts/")))

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        device, state = readings.values.device, dict[str, Tensor]()
        for run in runs(readings.layout):
            kept = torch.zeros(len(run), 0, run.width, dtype=torch.float64, device=device)
            state |= in_state(run, kept, kept.sum(2), kept.sum((1, 2)), kept.sum((1, 2)).long())
        return state

    def _take(self, readings: Readings) -> Tensor:
        parts = torch.split(readings.values, max(1, min(TESTS, CHUNK // readings.layout.n_neurons)))
        return torch.cat([self._take_some(each, readings.layout) for each in parts])

    def _take_some(self, values: Tensor, layout: Layout) -> Tensor:
        is_finite = values.isfinite()
        values = values.where(is_finite, 0.0).double()
        parts = [(run, run.of(values).transpose(0, 1), run.of(is_finite).all(2).T) for run in runs(layout)]
        # All layers' doubts are heard at once: to ask a GPU costs more than what it does here.
        rough, bounds = zip(*(self._roughly(run, part) for run, part, _ in parts), strict=True)
        near, error = torch.cat(rough), (max(layout.widths) + 8) * EPSILON * torch.cat(bounds).square()
        is_open = torch.cat([each for *_, each in parts]) & ~(near <= self.threshold - error)
        is_unsure = is_open & ~(near > self.threshold + error)  # also where something overflows
        counts = torch.cat([self._known(run)[3] for run, *_ in parts])
        n_open, n_unsure, n_most = torch.stack([is_open.sum(1), is_unsure.sum(1), counts + is_open.sum(1)]).tolist()
        raised, at = torch.zeros(len(values), dtype=torch.bool, device=values.device), 0
        for run, part, _ in parts:
            layers = slice(at, at + len(run))
            if n := max(n_open[layers]):
                self._make_room(run, max(n_most[layers]))
                raised |= self._keep(run, part, is_open[layers], n, is_sure=not any(n_unsure[layers]))
            at += len(run)
        return raised

    def _roughly(self, run: Run, values: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances of `values [layers, tests, neurons]` from what is kept, and what bounds their error.

        Both `[layers, tests]`; the distance by a matrix product, the bound as lengths, not squared.
        """
        kept, squares, longest, _ = self._known(run)
        lengths = norms(values)
        if kept.shape[1] == 0:
            return torch.full_like(lengths, torch.inf), torch.zeros_like(lengths)
        parts = torch.split(values, max(1, CHUNK // squares.numel()), 1)
        least = [torch.baddbmm(squares[:, None], each, kept.mT, alpha=-2).amin(2) for each in parts]
        return torch.cat(least, 1) + lengths.square(), lengths + longest[:, None]

    def _keep(self, run: Run, values: Tensor, is_open: Tensor, n_open: int, *, is_sure: bool) -> Tensor:
        """Keep which of the open `values` are new, in order; which tests are new in some layer. A layer has `n_open`
        open ones at most; some may be near what is kept unless `is_sure`.
        """
        if not is_sure:
            kept, _, _, counts = self._known(run)
            is_kept = torch.arange(kept.shape[1], device=kept.device) < counts[:, None]
            parts = torch.split(values, max(1, CHUNK // is_kept.numel()), 1)
            is_open = is_open & ~torch.cat([self._is_near(each, kept, is_kept).any(2) for each in parts], 1)
        rows = (~is_open).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_open]  # the open ones, in order
        some, is_some = values.take_along_dim(rows[:, :, None], 1), is_open.gather(1, rows)
        is_new = first_apart(self._is_near(some, some, is_some), is_some)
        self._store(run, some, is_new)
        return torch.zeros_like(is_open).scatter_(1, rows, is_new).any(0)

    def _is_near(self, ones: Tensor, others: Tensor, is_real: Tensor) -> Tensor:
        """Which of `ones` and the real `others [layers, tests, neurons]` are within the threshold of one another.

        A matrix product says so but for pairs that its rounding leaves open; these are measured by differences.
        """
        one_long, other_long = norms(ones)[:, :, None], norms(others)[:, None]
        rough = torch.baddbmm(other_long.square(), ones, others.mT, alpha=-2).add_(one_long.square())
        # The bound of a sum of products as it is rounded (Higham, 3.1), twice and a bit over.
        error = (ones.shape[2] + 8) * EPSILON * (one_long + other_long.amax(2, keepdim=True)).square()
        over = rough.sub_(self.threshold)
        is_near, is_unsure = (over < 0) & is_real[:, None], ~(over.abs() > error) & is_real[:, None]  # as overflows are
        if bool(is_unsure.any()):
            layer, one, other = is_unsure.nonzero(as_tuple=True)
            size = max(1, CHUNK // ones.shape[2])
            for first in range(0, len(layer), size):
                at, i, j = (each[first : first + size] for each in (layer, one, other))
                is_near[at, i, j] = norms(ones[at, i] - others[at, j]) <= math.sqrt(self.threshold)
        return is_near

    def _store(self, run: Run, values: Tensor, is_new: Tensor) -> None:
        """Keep the new ones of `values`, for which there is room; the others are lost in its last place."""
        kept, squares, longest, counts = self._known(run)
        place = torch.where(is_new, counts[:, None] + is_new.cumsum(1) - 1, kept.shape[1] - 1)
        lengths = norms(values)
        kept.scatter_(1, place[:, :, None].expand_as(values), values)
        squares.scatter_(1, place, lengths.square().where(is_new, torch.inf))
        longest = longest.maximum(lengths.where(is_new, 0.0).amax(1))
        self.state |= in_state(run, kept, squares, longest, counts + is_new.sum(1))

    def _make_room(self, run: Run, need: int) -> None:
        """Room for `need` in each layer and one more, and half as much again so that it seldom grows."""
        kept, squares, *others = self._known(run)
        if need < kept.shape[1]:
            return
        held = sum(each.nbytes for key, each in self.state.items() if key not in keys_of(run))
        limit = (LARGEST - held) // (8 * len(run) * (run.width + 1))
        if need >= limit:
            raise UsageError(
                f"cc takes {LARGEST / 2**30:g} GiB at most for what it keeps, these tests may need more: take "
                "neurons='channel', a larger threshold, or fewer layers by layers=[...]"
            )
        more = min(need + need // 2 + 1, limit) - kept.shape[1]
        kept, squares = pad(kept, (0, 0, 0, more)), pad(squares, (0, more), value=torch.inf)
        self.state |= in_state(run, kept, squares, *others)

    def _known(self, run: Run) -> list[Tensor]:
        """What is kept of some layers `[layers, room, neurons]`, the squares of its lengths (of empty room infinite),
        the greatest length in each layer and how many it keeps.
        """
        return [self.state[key] for key in keys_of(run)]


def keys_of(run: Run) -> list[str]:
    """Under which names the state has what is known of some layers."""
    return [f"{what}/{run.names[0]}" for what in ("kept", "squares", "longest", "counts")]


def in_state(run: Run, *known: Tensor) -> dict[str, Tensor]:
    """What is known of some layers, as the state has it."""
    return dict(zip(keys_of(run), known, strict=True))


def first_apart(is_near: Tensor, is_open: Tensor) -> Tensor:
    """Which of the open ones `[layers, tests]` are near none before them that is itself one of these.

    The first is right from the start, and each step sets right what depends only on those that are: what two steps
    leave as it was is the answer, after few of them as a rule.
    """
    before, found = is_near.tril(-1), is_open
    while True:
        last = found
        for _ in range(2):
            found = is_open > (before & found[:, None]).any(2)  # open, and none of them
        if torch.equal(found, last):
            return found


def norms(values: Tensor) -> Tensor:
    """Lengths of vectors `[..., neurons]`."""
    found: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return found
