"""Three views of a fault (its wrong outcome, its theta, its layer signature), and how far two sets of faults differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
CELLS = 100
"""Cells that a range is cut into before they are joined: edges are right to a hundredth of it."""
WIDEST = 3
"""A bin holds at most a third of the range: flat stretches still tell low, middle and high."""
COMPONENTS, EXPLAINED = 3, 0.9
"""Principal components of the signatures: as many as hold nine tenths of their variance, three at most."""
ALIKE = 0.25
"""Signatures that lie as near as this are alike, in spreads of those of all faults: a difference must be seen among
them, else the smallest that theta does not explain would be a story of its own."""


@dataclass(frozen=True)
class Views:
    """What is compared of faults: answers as numbers from 0, and matrices `[faults, dimensions]`."""

    answer: Ints
    theta: Floats
    signature: Floats

    @staticmethod
    def of(answer: Ints, theta: NDArray[np.float32], signature: NDArray[np.float32]) -> Views:
        """`signature` has the share of each layer; its square roots are compared, as Hellinger does."""
        roots = np.sqrt(signature.astype(np.float64))
        roots -= roots.mean(0)
        u, sizes, _ = np.linalg.svd(roots, full_matrices=False)
        power = np.cumsum(sizes**2)
        n = 0
        if power[-1] > 1e-12 * len(roots):
            n = min(COMPONENTS, int(np.searchsorted(power / power[-1], EXPLAINED)) + 1)
        return Views(np.unique(answer, return_inverse=True)[1], theta.astype(np.float64), (u * sizes)[:, :n])

    def columns(self) -> list[Ints]:
        """Each dimension in bins; one that is constant is left out."""
        binned = [bins(column, column.min(), column.max()) for column in self.theta.T]
        binned += [bins(column, *np.quantile(column, [0.01, 0.99])) for column in self.signature.T]
        return [column for column in (self.answer, *binned) if column.max() > 0]

    def difference(self, a: Ints, b: Ints) -> float:
        """How far the faults `a` differ from `b` in two of the three views, 0 to 1."""
        shares = [np.bincount(self.answer[rows], minlength=int(self.answer.max()) + 1) / len(rows) for rows in (a, b)]
        answer = 0.5 * float(np.abs(shares[0] - shares[1]).sum())
        theta = max((_gap(x, y) for x, y in zip(self.theta[a].T, self.theta[b].T, strict=True)), default=0.0)
        return sorted([answer, theta, self._signature_difference(a, b)])[1]

    def _signature_difference(self, a: Ints, b: Ints) -> float:
        """Less what theta explains inside the two, and up to a few spreads: two ends of one range are no two layers."""
        causes, effects = (_centred(values, a, b) for values in (self._causes, self.signature))
        slopes = np.linalg.lstsq(causes, effects, rcond=1e-6)[0]
        mine, others = (self.signature[rows] - self._causes[rows] @ slopes for rows in (a, b))
        slack = ALIKE * np.sqrt(self.signature.var(0).sum())
        return max(
            (min(_gap(x + shift, y) for shift in (-slack, 0.0, slack)) for x, y in zip(mine.T, others.T, strict=True)),
            default=0.0,
        )

    @cached_property
    def _causes(self) -> Floats:
        """Theta and its squares, in units of its range."""
        theta = self.theta - self.theta.mean(0)
        theta /= np.maximum(np.abs(theta).max(0), np.finfo(np.float64).tiny)
        return np.concatenate([theta, theta**2], 1)


def bins(values: Floats, low: float, high: float) -> Ints:
    """Numbers of bins with edges where the density changes: the best piecewise constant one (Bayesian blocks).

    A further bin must earn the logarithm of the number of values.
    """
    if not high > low:
        return np.zeros(len(values), dtype=np.int64)
    cells = np.clip((values - low) / (high - low) * CELLS, 0, CELLS - 1).astype(np.int64)
    up_to = np.concatenate([[0], np.bincount(cells, minlength=CELLS).cumsum()])
    best, before = np.zeros(CELLS + 1), np.zeros(CELLS + 1, dtype=np.int64)
    for right in range(1, CELLS + 1):
        n = up_to[right] - up_to[:right]
        fitness = n * np.log(np.maximum(n, 1) / (right - np.arange(right))) - np.log(len(values)) + best[:right]
        before[right] = fitness.argmax()
        best[right] = fitness.max()
    edges, right = [], CELLS
    while right > 0:
        left = int(before[right])
        pieces = -(-(right - left) * WIDEST // CELLS)
        edges += [left + (right - left) * piece / pieces for piece in range(pieces)]
        right = left
    return np.unique(np.searchsorted(sorted(edges), cells, side="right"), return_inverse=True)[1]


def interval(mine: Floats, others: Floats) -> tuple[float, float, float]:
    """The interval that tells two samples best apart: the difference of its probabilities, and its ends (Kuiper)."""
    at = np.unique(np.concatenate([mine, others]))
    ahead = _up_to(mine, at) - _up_to(others, at)
    before = np.concatenate([[0.0], ahead])  # intervals hold their ends: probability up to the value before
    gains = ahead - np.minimum.accumulate(before)[:-1]
    last = int(gains.argmax())
    first = int(before[: last + 1].argmin())
    return float(gains[last]), float(at[first]), float(at[last])


def _up_to(values: Floats, at: Floats) -> Floats:
    return np.searchsorted(np.sort(values), at, side="right") / len(values)


def _gap(mine: Floats, others: Floats) -> float:
    """The largest difference in probability of any interval (Kuiper's statistic)."""
    at = np.concatenate([mine, others])
    ahead = _up_to(mine, at) - _up_to(others, at)
    return float(ahead.max() - ahead.min())


def _centred(values: Floats, a: Ints, b: Ints) -> Floats:
    """Values of two sets of rows, less the mean of their own."""
    return np.concatenate([values[rows] - values[rows].mean(0) for rows in (a, b)])
