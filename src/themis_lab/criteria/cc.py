"""Cluster coverage (CC): tests that are far from all tests kept before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from themis.criteria import Laws
from themis.errors import UsageError
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Layout, Readings
from themis_lab.criteria.spans import LayerSpan, layer_spans

NUMBERS_AT_ONCE = 2**24
"""Activations and distances held at a time."""
COMPARED_TESTS = 1024
"""Tests compared with each other at a time."""
MAX_KEPT_BYTES = 2**32
"""Bytes that the kept tests may take."""
EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class _Candidates:
    """Tests that some layers may keep; their numbers differ between layers, so that some rows are padding."""

    span: LayerSpan
    values: Tensor
    """`[layers, candidates, neurons]`."""
    rows: Tensor
    """The test that each of them is, int64 `[layers, candidates]`."""
    is_real: Tensor
    is_near: Tensor
    """Which pairs of them are near each other, bool `[layers, candidates, candidates]`."""
    is_unsure: Tensor
    """For which pairs this is still open."""


class CC(Criterion):
    """Tests kept, summed over layers: a layer keeps a test that is farther than `threshold` from all kept before.

    The distance is squared Euclidean, as in TensorFuzz; NeuraL-Coverage takes 10 for CIFAR-10 and 1,000 for ImageNet,
    TensorFuzz 1 on the output layer. The first test is kept and counted (the published code keeps it but does not count
    it); neighbours are found exactly, not with an approximate index. The score is a count, not a share, and depends on
    the order. Kept tests may take 4 GiB; neighbouring layers of equal width each take as much as the one that keeps
    most.
    """

    name = "cc"
    laws = Laws(bounded=False, monotone=True, order_free=False, mergeable=False)
    learns = False
    variants: ClassVar = {
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: CC; "
        "github.com/brain-research/tensorfuzz, lib/corpus.py: Updater"
    }

    def __init__(self, threshold: float = 10.0, **options: Unpack[CriterionOptions]) -> None:
        if not 0 <= threshold < math.inf:
            raise UsageError(f"cc: threshold must be a number, 0 or more, got {threshold!r}")
        super().__init__(**options)
        self.threshold = threshold

    def score(self) -> float:
        return float(sum(int(tensor.sum()) for key, tensor in self.state.items() if key.startswith("counts/")))

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        device, state = readings.values.device, dict[str, Tensor]()
        for span in layer_spans(readings.layout):
            kept = torch.zeros(len(span), 0, span.width, dtype=torch.float64, device=device)
            state |= as_state(span, kept, kept.sum(2), kept.sum((1, 2)), kept.sum((1, 2)).long())
        return state

    def _update(self, readings: Readings) -> Tensor:
        parts = torch.split(readings.values, max(1, min(COMPARED_TESTS, NUMBERS_AT_ONCE // readings.layout.n_neurons)))
        return torch.cat([self._update_part(part, readings.layout) for part in parts])

    def _update_part(self, values: Tensor, layout: Layout) -> Tensor:
        is_finite = values.isfinite()
        values = values.where(is_finite, 0.0).double()
        parts = [(span, span.of(values).transpose(0, 1), span.of(is_finite).all(2).T) for span in layer_spans(layout)]
        # All layers are checked at once: waiting for a GPU costs more than its work here.
        rough, bounds = zip(*(self._rough_distances(span, part) for span, part, _ in parts), strict=True)
        nearest, error = torch.cat(rough), (max(layout.widths) + 8) * EPSILON * torch.cat(bounds).square()
        is_open = torch.cat([is_usable for *_, is_usable in parts]) & ~(nearest <= self.threshold - error)
        is_unsure = is_open & ~(nearest > self.threshold + error)  # also where something overflows
        counts = torch.cat([self._kept(span)[3] for span, *_ in parts])
        n_open, n_unsure, n_needed = torch.stack([is_open.sum(1), is_unsure.sum(1), counts + is_open.sum(1)]).tolist()
        raised, at, found = torch.zeros(len(values), dtype=torch.bool, device=values.device), 0, list[_Candidates]()
        for span, part, _ in parts:
            layers = slice(at, at + len(span))
            if n := max(n_open[layers]):
                self._reserve(span, max(n_needed[layers]))
                found.append(self._candidates(span, part, is_open[layers], n, is_sure=not any(n_unsure[layers])))
            at += len(span)
        for candidates, is_new in zip(found, self._select(found), strict=True):
            self._store(candidates.span, candidates.values, is_new)
            rows = torch.zeros(len(is_new), len(values), dtype=torch.bool, device=values.device)
            raised |= rows.scatter_(1, candidates.rows, is_new).any(0)
        return raised

    def _rough_distances(self, span: LayerSpan, values: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distance of `values [layers, tests, neurons]` from the nearest kept test, and a bound on the error.

        Both are `[layers, tests]`; the distance is computed by a matrix product, the bound is a length, not squared.
        """
        kept, squares, longest, _ = self._kept(span)
        lengths = norms(values)
        if kept.shape[1] == 0:
            return torch.full_like(lengths, torch.inf), torch.zeros_like(lengths)
        parts = torch.split(values, max(1, NUMBERS_AT_ONCE // squares.numel()), 1)
        smallest = [torch.baddbmm(squares[:, None], part, kept.mT, alpha=-2).amin(2) for part in parts]
        return torch.cat(smallest, 1) + lengths.square(), lengths + longest[:, None]

    def _candidates(
        self, span: LayerSpan, values: Tensor, is_open: Tensor, n_open: int, *, is_sure: bool
    ) -> _Candidates:
        """The open `values`, and which of them are near one another.

        A layer has at most `n_open` open ones; some of them may be near a kept test unless `is_sure`.
        """
        if not is_sure:
            kept, _, _, counts = self._kept(span)
            is_kept = torch.arange(kept.shape[1], device=kept.device) < counts[:, None]
            parts = torch.split(values, max(1, NUMBERS_AT_ONCE // is_kept.numel()), 1)
            near = [self._measured(part, kept, *self._is_near(part, kept, is_kept)).any(2) for part in parts]
            is_open = is_open & ~torch.cat(near, 1)
        rows = (~is_open).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_open]  # the open ones, in order
        candidates, is_real = values.take_along_dim(rows[:, :, None], 1), is_open.gather(1, rows)
        return _Candidates(span, candidates, rows, is_real, *self._is_near(candidates, candidates, is_real))

    def _select(self, found: list[_Candidates]) -> list[Tensor]:
        """Which candidates of each span are new, that is, near no earlier new one; bool `[layers, tests]`."""
        if not found:
            return []
        is_unsure = torch.stack([candidates.is_unsure.any() for candidates in found]).tolist()
        near = [
            self._measured(candidates.values, candidates.values, candidates.is_near, candidates.is_unsure)
            if needs_measuring
            else candidates.is_near
            for candidates, needs_measuring in zip(found, is_unsure, strict=True)
        ]
        is_real = [candidates.is_real for candidates in found]
        if not is_real[0].is_cuda:
            return [first_apart(*pair) for pair in zip(near, is_real, strict=True)]
        # All layers at once: each step waits for the GPU.
        n = max(flags.shape[1] for flags in is_real)
        squares = [pad(flags, (0, n - flags.shape[2], 0, n - flags.shape[1])) for flags in near]
        is_new = first_apart(torch.cat(squares), torch.cat([pad(flags, (0, n - flags.shape[1])) for flags in is_real]))
        sizes = [len(flags) for flags in is_real]
        return [part[:, : flags.shape[1]] for part, flags in zip(torch.split(is_new, sizes), is_real, strict=True)]

    def _is_near(self, left: Tensor, right: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `left` and of `right` without padding, `[layers, tests, neurons]`, are within the threshold.

        A matrix product decides except for pairs that its rounding leaves open; these are returned too.
        """
        left_length, right_length = norms(left)[:, :, None], norms(right)[:, None]
        rough = torch.baddbmm(right_length.square(), left, right.mT, alpha=-2).add_(left_length.square())
        # The rounding error of a sum of products (Higham, 3.1), twice and a bit more.
        error = (left.shape[2] + 8) * EPSILON * (left_length + right_length.amax(2, keepdim=True)).square()
        excess = rough.sub_(self.threshold)
        is_near = (excess < 0) & is_real[:, None]
        return is_near, ~(excess.abs() > error) & is_real[:, None]  # also where something overflows

    def _measured(self, left: Tensor, right: Tensor, is_near: Tensor, is_unsure: Tensor) -> Tensor:
        """`is_near`, after computing pairs from differences if the matrix product was not precise enough."""
        pairs = is_unsure.nonzero(as_tuple=True)
        size = max(1, NUMBERS_AT_ONCE // left.shape[2])
        for first in range(0, len(pairs[0]), size):
            layer, i, j = (index[first : first + size] for index in pairs)
            is_near[layer, i, j] = norms(left[layer, i] - right[layer, j]) <= math.sqrt(self.threshold)
        return is_near

    def _store(self, span: LayerSpan, values: Tensor, is_new: Tensor) -> None:
        """Store the new `values` in the reserved memory; others are written to its last row."""
        kept, squares, longest, counts = self._kept(span)
        place = torch.where(is_new, counts[:, None] + is_new.cumsum(1) - 1, kept.shape[1] - 1)
        lengths = norms(values)
        kept.scatter_(1, place[:, :, None].expand_as(values), values)
        squares.scatter_(1, place, lengths.square().where(is_new, torch.inf))
        longest = longest.maximum(lengths.where(is_new, 0.0).amax(1))
        self.state |= as_state(span, kept, squares, longest, counts + is_new.sum(1))

    def _reserve(self, span: LayerSpan, n_needed: int) -> None:
        """Reserve memory for `n_needed` tests per layer, plus one, plus 50% so that it rarely grows."""
        kept, squares, *rest = self._kept(span)
        if n_needed < kept.shape[1]:
            return
        held = sum(tensor.nbytes for key, tensor in self.state.items() if key not in state_keys(span))
        limit = (MAX_KEPT_BYTES - held) // (8 * len(span) * (span.width + 1))
        if n_needed >= limit:
            raise UsageError(
                f"cc takes at most {MAX_KEPT_BYTES / 2**30:g} GiB for the tests that it keeps, but they may need more: "
                "use neurons='channel', a larger threshold, or fewer layers with layers=[...]"
            )
        n_more = min(n_needed + n_needed // 2 + 1, limit) - kept.shape[1]
        kept, squares = pad(kept, (0, 0, 0, n_more)), pad(squares, (0, n_more), value=torch.inf)
        self.state |= as_state(span, kept, squares, *rest)

    def _kept(self, span: LayerSpan) -> list[Tensor]:
        """The tests that some layers keep `[layers, rows, neurons]`, their squared lengths (infinite for unused rows),
        the largest length in each layer and the number of tests that it keeps.
        """
        return [self.state[key] for key in state_keys(span)]


def state_keys(span: LayerSpan) -> list[str]:
    """The keys of the tensors that the state holds for some layers."""
    return [f"{prefix}/{span.names[0]}" for prefix in ("kept", "squares", "longest", "counts")]


def as_state(span: LayerSpan, *tensors: Tensor) -> dict[str, Tensor]:
    """The tensors of some layers, as entries of the state."""
    return dict(zip(state_keys(span), tensors, strict=True))


def first_apart(is_near: Tensor, is_open: Tensor) -> Tensor:
    """Which of the open tests `[layers, tests]` are not near an earlier selected test.

    The first test is correct from the start, and each step corrects those that depend only on correct ones: once two
    steps change nothing, the result is correct. This usually takes few steps.
    """
    before, is_selected = is_near.tril(-1), is_open
    while True:
        previous = is_selected
        for _ in range(2):
            is_selected = is_open > (before & is_selected[:, None]).any(2)  # open, and near none of them
        if torch.equal(is_selected, previous):
            return is_selected


def norms(values: Tensor) -> Tensor:
    """Lengths of vectors `[..., neurons]`."""
    lengths: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return lengths
