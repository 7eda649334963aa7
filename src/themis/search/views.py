"""Three views of a fault (its wrong outcome, its theta, its layer signature), and how far two sets of faults differ."""

from __future__ import annotations

from dataclasses import dataclass

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
STEPS = 64
"""Quantiles at which distributions are compared."""


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

    def differences(self, classes: Ints) -> Floats:
        """How far any two classes differ in each view, 0 to 1, `[views, classes, classes]`."""
        n = int(classes.max()) + 1
        shares = _counts(self.answer, classes, n)
        shares /= shares.sum(1, keepdims=True)
        answer = 0.5 * np.abs(shares[:, None] - shares).sum(-1)
        return np.stack([answer, *(_largest(each, classes, n) for each in (self.theta, self._own_signature(classes)))])

    def _own_signature(self, classes: Ints) -> Floats:
        """Signatures less what theta explains inside the classes: two ends of one range are no two layers."""
        theta = self.theta - self.theta.mean(0)
        theta /= np.maximum(np.abs(theta).max(0), np.finfo(np.float64).tiny)
        causes = np.concatenate([theta, theta**2], 1)
        slopes = np.linalg.lstsq(_centred(causes, classes), _centred(self.signature, classes), rcond=1e-6)[0]
        return np.asarray(self.signature - causes @ slopes)


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


def _largest(values: Floats, classes: Ints, n: int) -> Floats:
    """The largest difference in probability of any interval of any dimension (Kuiper's statistic)."""
    largest = np.zeros((n, n))
    for column in values.T:
        edges = np.unique(np.quantile(column, np.linspace(0, 1, STEPS + 1)[1:-1]))
        up_to = _counts(np.searchsorted(edges, column, side="right"), classes, n).cumsum(1)
        up_to /= up_to[:, -1:]
        ahead = up_to[:, None] - up_to
        largest = np.maximum(largest, ahead.max(-1).clip(0) - ahead.min(-1).clip(None, 0))
    return largest


def _centred(values: Floats, classes: Ints) -> Floats:
    """Values less the mean of their class."""
    sums = np.zeros((int(classes.max()) + 1, values.shape[1]))
    np.add.at(sums, classes, values)
    return np.asarray(values - (sums / np.bincount(classes)[:, None])[classes])


def _counts(codes: Ints, classes: Ints, n: int) -> Floats:
    width = int(codes.max()) + 1
    return np.bincount(classes * width + codes, minlength=n * width).reshape(n, width).astype(np.float64)
