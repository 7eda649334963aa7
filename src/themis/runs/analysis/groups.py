"""Groups of related faults, so that thousands become a few to look at.

Faults are first divided into latent classes of (wrong outcome, theta, layer signature); classes that do not differ in
two of these three views are then merged. A difference in one view alone does not separate groups: the same noise may
turn a 4 into a 9 and a 3 into a 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from themis.errors import UsageError
from themis.runs.fault import Fault, describe_change, gives_answers, name_outcome
from themis.runs.faults import Array, Faults, telling
from themis.text import percent

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SAMPLE = 2000
"""Faults that groups are formed from, spread over the campaign; every other fault joins its most likely group."""
CLASSES = 20
"""Most latent classes before they are merged: more classes would only be parts of groups."""
APART = 0.75
"""A view separates two groups if what occurs in one is missing in the other three times out of four."""
UNUSUAL = 0.5
"""A group's theta is mentioned if it lies in a range that contains half fewer of the other faults."""
GROWN = 1.25
"""A layer's share of the change is mentioned if it is a quarter larger than in the other faults."""
CHANCE = 0.01
"""What distinguishes a group is mentioned if as many faults drawn at random would show it less often than this."""
CELLS = 100
"""Cells that a range is divided into before they are joined to bins: edges are accurate to a hundredth of it."""
WIDEST = 3
"""A bin holds at most a third of the range, so that low, middle and high differ even where the density is flat."""
COMPONENTS, EXPLAINED = 3, 0.9
"""Principal components of the signatures: as many as explain this share of their variance, three at most."""
ALIKE = 0.25
"""Signatures within this many standard deviations of all signatures count as alike: otherwise the smallest difference
that theta does not explain would separate groups."""


@dataclass(frozen=True)
class OutcomeShare:
    """A wrong outcome in a group, and the share of the group's faults that have it."""

    clean_answer: int | None
    answer: int
    share: float


@dataclass(frozen=True)
class ThetaRange:
    """Where a dimension of theta lies in a group: the share of its faults in this range, and that of all others."""

    low: float
    high: float
    share: float
    elsewhere: float


@dataclass(frozen=True)
class Group:
    """Related faults."""

    text: str
    """What the faults have in common, in words."""
    ids: tuple[int, ...] = field(repr=False)
    """Numbers of the faults."""
    n_seeds: int
    representatives: tuple[Fault, ...] = field(repr=False)
    """Faults to look at, the most telling first; one per seed and wrong outcome."""
    outcomes: tuple[OutcomeShare, ...]
    """The three most frequent wrong outcomes."""
    theta: dict[str, ThetaRange]
    """Dimensions of theta that differ from those of the other faults."""
    layers: dict[str, tuple[float, float]]
    """Layers with more of the change than in the other faults: mean share in the group, and elsewhere."""

    def __len__(self) -> int:
        return len(self.ids)

    def as_dict(self) -> dict[str, Any]:
        """The group as plain data."""
        return {
            "text": self.text,
            "faults": len(self.ids),
            "seeds": self.n_seeds,
            "representatives": [fault.id for fault in self.representatives],
            "outcomes": [vars(outcome) for outcome in self.outcomes],
            "theta": {name: vars(values) for name, values in self.theta.items()},
            "layers": {name: {"share": here, "elsewhere": there} for name, (here, there) in self.layers.items()},
            "ids": list(self.ids),
        }


def group(faults: Faults, most: int = 20, apart: float = APART) -> list[Group]:
    """Group related faults, largest group first: at most `most` groups, with about `most` representatives in total.

    apart: how far two groups must differ in two of the three views, 0 to 1; a smaller value gives more groups.
    """
    if most < 1:
        raise UsageError(f"most must be 1 or more groups, got {most}: leave it out for 20")
    if not 0 <= apart <= 1:
        raise UsageError(f"apart must lie in 0 to 1, got {apart}: leave it out for {APART}")
    if not len(faults):
        return []
    columns = faults.columns
    groups = find_groups(columns, most, apart)
    n = int(groups.max()) + 1
    return [_describe(faults, columns, groups == k, max(1, most // n)) for k in range(n)]


def find_groups(columns: dict[str, Array], most: int = 20, apart: float = APART) -> Ints:
    """The number of each fault's group, from 0, largest group first."""
    views = FaultViews.of(columns["answer"], columns["theta"], columns["signature"])
    binned = views.binned()
    n = len(columns["id"])
    if not binned:
        return np.zeros(n, dtype=np.int64)
    table = CategoryTable.of(binned)
    at = np.arange(n) if n <= SAMPLE else np.linspace(0, n - 1, SAMPLE).round().astype(np.int64)
    sample = table.rows(at)
    sampled_views = FaultViews(views.answer[at], views.theta[at], views.signature[at])
    groups = _merge(sampled_views, find_classes(sample, CLASSES), most, apart)
    if n > SAMPLE:
        sampled, groups = groups, table.likeliest(sample.counts(groups, int(groups.max()) + 1))
        groups[at] = sampled
    return order_by_size(groups)


def _merge(views: FaultViews, classes: Ints, most: int, apart: float) -> Ints:
    """Merge the classes that fewer than two views separate, the closest first."""
    rows = {k: np.flatnonzero(classes == k) for k in range(int(classes.max()) + 1)}
    differences = {(a, b): views.difference(rows[a], rows[b]) for a, b in combinations(rows, 2)}
    while differences:
        first, second = min(differences, key=differences.__getitem__)
        if differences[first, second] >= apart and len(rows) <= most:
            break
        rows[first] = np.concatenate([rows[first], rows.pop(second)])
        classes = np.where(classes == second, first, classes)
        differences = {
            (a, b): views.difference(rows[a], rows[b]) if first in (a, b) else differences[a, b]
            for a, b in combinations(rows, 2)
        }
    return order_by_size(classes)


@dataclass(frozen=True)
class FaultViews:
    """The three views in which faults are compared: answers as numbers from 0, and matrices `[faults, dimensions]`."""

    answer: Ints
    theta: Floats
    signature: Floats

    @staticmethod
    def of(answer: Ints, theta: NDArray[np.float32], signature: NDArray[np.float32]) -> FaultViews:
        """`signature` has the share of each layer; its square roots are compared, as in the Hellinger distance."""
        roots = np.sqrt(signature.astype(np.float64))
        roots -= roots.mean(0)
        u, sizes, _ = np.linalg.svd(roots, full_matrices=False)
        power = np.cumsum(sizes**2)
        n = 0
        if power[-1] > 1e-12 * len(roots):
            n = min(COMPONENTS, int(np.searchsorted(power / power[-1], EXPLAINED)) + 1)
        return FaultViews(np.unique(answer, return_inverse=True)[1], theta.astype(np.float64), (u * sizes)[:, :n])

    def binned(self) -> list[Ints]:
        """Each dimension in bins; constant ones are left out."""
        columns = [bins(column, column.min(), column.max()) for column in self.theta.T]
        columns += [bins(column, *np.quantile(column, [0.01, 0.99])) for column in self.signature.T]
        return [column for column in (self.answer, *columns) if column.max() > 0]

    def difference(self, a: Ints, b: Ints) -> float:
        """How far the faults `a` differ from `b` in two of the three views, 0 to 1."""
        shares = [np.bincount(self.answer[rows], minlength=int(self.answer.max()) + 1) / len(rows) for rows in (a, b)]
        answer = 0.5 * float(np.abs(shares[0] - shares[1]).sum())
        theta = max((_kuiper(x, y) for x, y in zip(self.theta[a].T, self.theta[b].T, strict=True)), default=0.0)
        return sorted([answer, theta, self._signature_difference(a, b)])[1]

    def _signature_difference(self, a: Ints, b: Ints) -> float:
        """The difference that theta does not explain, beyond a slack: the two ends of one range are not two layers."""
        causes, effects = (_centred(values, a, b) for values in (self._causes, self.signature))
        slopes = np.linalg.lstsq(causes, effects, rcond=1e-6)[0]
        in_a, in_b = (self.signature[rows] - self._causes[rows] @ slopes for rows in (a, b))
        slack = ALIKE * np.sqrt(self.signature.var(0).sum())
        return max(
            (min(_kuiper(x + shift, y) for shift in (-slack, 0.0, slack)) for x, y in zip(in_a.T, in_b.T, strict=True)),
            default=0.0,
        )

    @cached_property
    def _causes(self) -> Floats:
        """Theta and its squares, in units of its range."""
        theta = self.theta - self.theta.mean(0)
        theta /= np.maximum(np.abs(theta).max(0), np.finfo(np.float64).tiny)
        return np.concatenate([theta, theta**2], 1)


def bins(values: Floats, low: float, high: float) -> Ints:
    """Bin numbers, with edges where the density changes: the best piecewise constant density (Bayesian blocks).

    Each further bin must improve the fit by the logarithm of the number of values.
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


def interval(values: Floats, others: Floats) -> tuple[float, float, float]:
    """The interval that best separates two samples: the difference of its probabilities, and its ends (Kuiper)."""
    at = np.unique(np.concatenate([values, others]))
    ahead = _cumulative(values, at) - _cumulative(others, at)
    before = np.concatenate([[0.0], ahead])  # intervals include their ends: probability up to the value before
    gains = ahead - np.minimum.accumulate(before)[:-1]
    last = int(gains.argmax())
    first = int(before[: last + 1].argmin())
    return float(gains[last]), float(at[first]), float(at[last])


def _cumulative(values: Floats, at: Floats) -> Floats:
    return np.searchsorted(np.sort(values), at, side="right") / len(values)


def _kuiper(values: Floats, others: Floats) -> float:
    """The largest difference in probability of any interval (Kuiper's statistic)."""
    at = np.concatenate([values, others])
    ahead = _cumulative(values, at) - _cumulative(others, at)
    return float(ahead.max() - ahead.min())


def kuiper_chance(statistic: float, n: int, n_others: int) -> float:
    """The probability that two samples of these sizes from one distribution differ at least as much (Stephens)."""
    root = math.sqrt(n * n_others / (n + n_others))
    size = (root + 0.155 + 0.24 / root) * statistic
    if size < 0.4:
        return 1.0
    j = np.arange(1, 101)
    return float(min(1.0, (2 * (4 * (j * size) ** 2 - 1) * np.exp(-2 * (j * size) ** 2)).sum()))


def growth_chance(shares: Floats, is_member: NDArray[np.bool_], seed_id: Array) -> Floats:
    """The probability, by layer, that a group's mean share is larger by chance; Welch's test over means of seeds.

    Faults of one seed are alike, so the seeds are counted. One or two seeds cannot be told from chance.
    """
    from scipy.special import stdtr

    means = [_means_by_seed(shares[rows], seed_id[rows]) for rows in (is_member, ~is_member)]
    if min(map(len, means)) < 3:
        return np.ones(shares.shape[1])
    with np.errstate(all="ignore"):  # values that are all the same
        first, second = (each.var(0, ddof=1) / len(each) for each in means)
        freedom = (first + second) ** 2 / (first**2 / (len(means[0]) - 1) + second**2 / (len(means[1]) - 1))
        chance: Floats = stdtr(freedom, -(means[0].mean(0) - means[1].mean(0)) / np.sqrt(first + second))
    differs = means[0].mean(0) > means[1].mean(0)
    return np.where(np.isnan(chance), np.where(differs, 0.0, 1.0), chance)


def _means_by_seed(values: Floats, seed_id: Array) -> Floats:
    seeds, row, n = np.unique(seed_id, return_inverse=True, return_counts=True)
    sums = np.zeros((len(seeds), values.shape[1]))
    np.add.at(sums, row, values)
    return sums / n[:, None]


def _centred(values: Floats, a: Ints, b: Ints) -> Floats:
    """The values of two sets of rows, each less its own mean."""
    return np.concatenate([values[rows] - values[rows].mean(0) for rows in (a, b)])


def _describe(faults: Faults, columns: dict[str, Array], is_member: NDArray[np.bool_], n_shown: int) -> Group:
    at = np.flatnonzero(is_member)
    seeds = columns["seed_id"][at]
    outcomes = _outcomes(columns, at)
    theta, layers = _unusual_theta(faults, columns, is_member), _grown_layers(faults, columns, is_member)
    n_seeds = len(np.unique(seeds))
    counts = f"{len(at):,} fault{'s' * (len(at) != 1)} on {n_seeds:,} seed{'s' * (n_seeds != 1)}"
    ranges = [f"{name} {_describe_range(values)}" for name, values in theta.items()]
    text = f"{', '.join([_describe_outcomes(faults, columns, at, outcomes), *ranges])}; {counts}"
    if layers:
        name, (here, there) = next(iter(layers.items()))
        text += f"; change concentrated in {name} ({percent(here, 0)} of it, elsewhere {percent(there, 0)})"
    shown = _representatives(columns, at, n_shown)
    ids = tuple(columns["id"][at].tolist())
    return Group(text, ids, n_seeds, tuple(faults[k] for k in shown), outcomes, theta, layers)


def _representatives(columns: dict[str, Array], at: Ints, n: int) -> list[int]:
    """Positions of the most telling faults: every outcome once before any twice, and no seed twice.

    Among the outcomes, frequent ones come first.
    """
    score = telling(columns["distance"][at], columns["confidence"][at])
    pairs = list(zip(columns["clean_answer"][at].tolist(), columns["answer"][at].tolist(), strict=True))
    seeds = columns["seed_id"][at].tolist()
    frequency = {pair: pairs.count(pair) for pair in set(pairs)}
    turn: dict[tuple[int, int], int] = {}
    used_seeds: set[int] = set()
    places: list[tuple[int, int, int, int]] = []
    for place, k in enumerate(np.argsort(score, kind="stable").tolist()):
        if seeds[k] not in used_seeds:
            used_seeds.add(seeds[k])
            turn[pairs[k]] = turn.get(pairs[k], 0) + 1
            places.append((turn[pairs[k]], -frequency[pairs[k]], place, k))
    chosen = sorted(places)[:n]
    return [int(at[k]) for _, _, _, k in chosen]


def _outcomes(columns: dict[str, Array], at: Ints) -> tuple[OutcomeShare, ...]:
    pairs = np.stack([columns["clean_answer"][at], columns["answer"][at]], 1)
    kinds, n = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-n, kind="stable")[:3].tolist()
    return tuple(
        OutcomeShare(int(kinds[k, 0]) if kinds[k, 0] >= 0 else None, int(kinds[k, 1]), float(n[k] / len(at)))
        for k in order
    )


def _unusual_theta(faults: Faults, columns: dict[str, Array], is_member: NDArray[np.bool_]) -> dict[str, ThetaRange]:
    ranges: dict[str, ThetaRange] = {}
    if is_member.all():
        return ranges
    for name, values in zip(faults.theta, columns["theta"].astype(np.float64).T, strict=True):
        gap, low, high = interval(values[is_member], values[~is_member])
        if gap >= UNUSUAL and kuiper_chance(gap, int(is_member.sum()), int((~is_member).sum())) < CHANCE:
            is_inside = (values >= low) & (values <= high)
            share, elsewhere = float(is_inside[is_member].mean()), float(is_inside[~is_member].mean())
            ranges[name] = ThetaRange(low, high, share, elsewhere)
    return ranges


def _grown_layers(
    faults: Faults, columns: dict[str, Array], is_member: NDArray[np.bool_]
) -> dict[str, tuple[float, float]]:
    if is_member.all():
        return {}
    shares = columns["signature"].astype(np.float64)
    here, there = shares[is_member].mean(0), shares[~is_member].mean(0)
    is_certain = growth_chance(shares, is_member, columns["seed_id"]) * shares.shape[1] < CHANCE
    order = np.argsort(there - here, kind="stable").tolist()
    grown = [k for k in order if here[k] > GROWN * there[k] and is_certain[k]]
    return {faults.layers[k]: (float(here[k]), float(there[k])) for k in grown}


def _describe_outcomes(faults: Faults, columns: dict[str, Array], at: Ints, outcomes: tuple[OutcomeShare, ...]) -> str:
    answers, n = np.unique(columns["answer"][at], return_counts=True)
    share = float(n.max() / len(at))
    if faults.task and not gives_answers(faults.task):
        return ", ".join(_describe_most_frequent(faults, answers, n / len(at)))
    first = outcomes[0]
    if first.share >= 0.5 and first.clean_answer is not None:
        return f"{describe_change(first.clean_answer, first.answer)}{_describe_share(first.share)}"
    if share >= 0.5:
        return f"{describe_change(None, int(answers[n.argmax()]))}{_describe_share(share)}"
    texts = [f"{_describe_answer(outcome.answer)} {percent(outcome.share, 0)}" for outcome in outcomes]
    if first.clean_answer is not None:
        texts = [f"{outcome.clean_answer} as {text}" for outcome, text in zip(outcomes, texts, strict=True)]
    return f"several outcomes ({', '.join(texts)})"


def _describe_most_frequent(faults: Faults, answers: Ints, shares: NDArray[np.float64]) -> list[str]:
    """What happened most often, in tasks whose outcomes are not answers."""
    names = [name_outcome(faults.task, answer, faults.classes) for answer in answers.tolist()]
    order = np.argsort(-shares, kind="stable").tolist()[:3]
    return [f"{names[k]}{_describe_share(float(shares[k]))}" for k in order]


def _describe_answer(answer: int) -> str:
    return "not finite" if answer < 0 else str(answer)


def _describe_share(share: float) -> str:
    return "" if share == 1 else f" ({percent(share, 0)})"


def _describe_range(values: ThetaRange) -> str:
    where = f"at {values.low:.3g}" if values.low == values.high else f"{values.low:.3g} to {values.high:.3g}"
    return f"{where} ({percent(values.share, 0)}, elsewhere {percent(values.elsewhere, 0)})"


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
