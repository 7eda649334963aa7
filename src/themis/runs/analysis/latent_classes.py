"""Latent classes of a table of categories, found by greedily maximising the exact integrated likelihood.

Each row belongs to one class; in a class each column is distributed either as in the entire table or in its own way.
The score is the probability of the table and the classes with all parameters integrated out, so it determines both the
number of classes that the rows support and the columns in which a class differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MASS = 1.0
"""Weight, in rows, of the prior of a class's own distribution, which is that of the entire table: the least weight that
is proper for any number of categories, so that a column with many categories does not outweigh a few rows."""
SWEEPS = 20
"""Most times that all rows are reassigned to their likeliest class; a handful is normal."""


@dataclass(frozen=True)
class CategoryTable:
    """Categories as numbers from 0, one column per variable; `share` has the categories of all columns side by side."""

    codes: Ints  # [rows, columns]
    offsets: Ints  # where each column's categories begin, and where the last one's end
    share: Floats  # of each category in its column, in the entire table

    @staticmethod
    def of(columns: Sequence[Ints]) -> CategoryTable:
        """A table of columns in which every number up to the largest occurs."""
        codes = np.stack(columns, 1)
        offsets = np.concatenate([[0], np.cumsum(codes.max(0) + 1)])
        share = np.bincount((codes + offsets[:-1]).ravel(), minlength=offsets[-1]) / len(codes)
        return CategoryTable(codes, offsets, share)

    def rows(self, at: Ints) -> CategoryTable:
        """A subset of the rows; the shares stay those of the entire table."""
        return replace(self, codes=self.codes[at])

    @cached_property
    def flat(self) -> Ints:
        """Codes that number the categories over all columns."""
        return self.codes + self.offsets[:-1]

    def counts(self, classes: Ints, n_classes: int) -> Floats:
        """How often each category occurs in each class, `[classes, categories]`."""
        n_all = int(self.offsets[-1])
        at = classes[:, None] * n_all + self.flat
        return np.bincount(at.ravel(), minlength=n_classes * n_all).reshape(n_classes, n_all).astype(np.float64)

    def by_column(self, values: Floats) -> Floats:
        """Sums over the categories of each column."""
        return np.add.reduceat(values, self.offsets[:-1], axis=-1)

    def evidence(self, counts: Floats) -> tuple[Floats, Floats]:
        """Log probability of each class's columns: distributed as in the entire table, and in their own way."""
        prior = MASS * self.share
        n = self.by_column(counts)
        own = self.by_column(gammaln(counts + prior) - gammaln(prior)) + gammaln(MASS) - gammaln(n + MASS)
        return self.by_column(counts * np.log(self.share)), own

    def weigh(self, counts: Floats) -> Floats:
        """Log probability of each class's rows; both distributions of a column are equally likely beforehand."""
        rows: Floats = (np.logaddexp(*self.evidence(counts)) - np.log(2)).sum(-1) + gammaln(self.sizes(counts) + 1)
        return rows

    def sizes(self, counts: Floats) -> Floats:
        """Rows of each class."""
        sizes: Floats = counts[..., : self.offsets[1]].sum(-1)
        return sizes

    def score(self, counts: Floats) -> float:
        """Log probability of the table and its classes; all divisions into this many classes are equally likely."""
        n_classes = len(counts)
        return float(self.weigh(counts).sum() + gammaln(n_classes) - gammaln(len(self.codes) + n_classes))

    def likeliest(self, counts: Floats) -> Ints:
        """The class that each row most likely belongs to."""
        shared, own = self.evidence(counts)
        is_own = np.exp(own - np.logaddexp(shared, own))
        n = self.by_column(counts)
        widths = np.diff(self.offsets)
        mean = (counts + MASS * self.share) / np.repeat(n + MASS, widths, axis=-1)
        weight = np.repeat(is_own, widths, axis=-1)
        logs = np.log(weight * mean + (1 - weight) * self.share)
        odds = np.tile(np.log(self.sizes(counts) + 1), (len(self.codes), 1))
        for column in self.flat.T:
            odds += logs[:, column].T
        return np.asarray(odds.argmax(1))

    def one_hot(self) -> Floats:
        """One column of zeros and ones per category."""
        ones = np.zeros((len(self.codes), self.offsets[-1]))
        np.put_along_axis(ones, self.flat, 1.0, 1)
        return ones


def find_classes(table: CategoryTable, most: int = 20) -> Ints:
    """The class of each row, largest class first: many small classes by Ward's method, merged to the best score."""
    classes = np.zeros(len(table.codes), dtype=np.int64)
    if len(classes) > 1:
        from scipy.cluster.hierarchy import fcluster, linkage

        classes = fcluster(linkage(table.one_hot(), "ward"), 2 * most, "maxclust").astype(np.int64) - 1
    best_score, best = -np.inf, classes
    while True:
        counts, classes = _reassign(table, classes)
        score = table.score(counts)
        if len(counts) <= most and score > best_score:
            best_score, best = score, classes
        if len(counts) == 1:
            return best
        a, b = _closest(table, counts)
        classes = np.where(classes == b, a, classes)


def _reassign(table: CategoryTable, classes: Ints) -> tuple[Floats, Ints]:
    """Move rows to their likeliest classes for as long as the score rises; empty classes disappear."""
    classes = order_by_size(classes)
    counts = table.counts(classes, int(classes.max()) + 1)
    score = table.score(counts)
    for _ in range(SWEEPS):
        moved = order_by_size(table.likeliest(counts))
        after = table.counts(moved, int(moved.max()) + 1)
        if table.score(after) <= score:
            break
        classes, counts, score = moved, after, table.score(after)
    return counts, classes


def _closest(table: CategoryTable, counts: Floats) -> tuple[int, int]:
    """The two classes whose merging gains most, or loses least."""
    alone = table.weigh(counts)
    first, second = np.triu_indices(len(counts), 1)
    k = int((table.weigh(counts[first] + counts[second]) - alone[first] - alone[second]).argmax())
    return int(first[k]), int(second[k])


def order_by_size(classes: Ints) -> Ints:
    """The same classes numbered by size, largest first; classes of equal size by their first row."""
    _, first, at, n = np.unique(classes, return_index=True, return_inverse=True, return_counts=True)
    order = np.lexsort((first, -n))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place[at]
