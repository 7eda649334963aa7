"""Groups related faults, so that a few of thousands need to be looked at.

Faults are first divided into latent classes by (wrong outcome, theta, layer signature). Classes that do not differ in
at least two of these three views are then merged. A difference in only one view does not separate groups: the same
noise may turn a 4 into a 9 and a 3 into a 5.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from themis.errors import UsageError
from themis.runs.display.fault import describe_change
from themis.runs.fault import Fault, gives_answers, show_outcome
from themis.runs.faults import Array, Faults, telling
from themis.text import counted, percent

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_SAMPLED = 2000
"""Faults from which groups are formed, spread over the campaign; every other fault joins its most likely group."""
MAX_CLASSES = 20
"""Most latent classes before merging; more classes would only split groups."""
MIN_DIFFERENCE = 0.75
"""How far two groups must differ in at least two views, 0 to 1; otherwise they are merged."""
MIN_THETA_GAP = 0.5
"""A group's range of theta is mentioned if the share of faults in it is this much larger than in the other faults."""
MIN_LAYER_GROWTH = 1.25
"""A layer is mentioned if its share of the change is at least this many times that in the other faults."""
SIGNIFICANCE_LEVEL = 0.01
"""A difference is mentioned only if random faults would show it less often than this."""
DENSITY_CELLS = 100
"""Cells into which a range is divided before they are joined into bins."""
MIN_BINS = 3
"""Bins of a range, at least, so that low, middle and high differ even where the density is flat."""
MAX_COMPONENTS, EXPLAINED_VARIANCE = 3, 0.9
"""As many principal components of the signatures are used as explain this share of the variance, three at most."""
SIGNATURE_SLACK = 0.25
"""Signatures that differ by less than this many standard deviations count as equal. Otherwise, the smallest difference
that theta does not explain would separate groups."""


@dataclass(frozen=True)
class OutcomeShare:
    """A wrong outcome in a group, and the share of the group's faults that have it."""

    clean_answer: int | None
    answer: int
    share: float


@dataclass(frozen=True)
class ThetaRange:
    """A range of one dimension of theta, with the share of a group's faults in it and that of all other faults."""

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
    n_seeds: int
    representatives: tuple[Fault, ...] = field(repr=False)
    """Faults to look at, the most telling first; one per seed and wrong outcome."""
    outcomes: tuple[OutcomeShare, ...]
    """The three most frequent wrong outcomes."""
    theta: dict[str, ThetaRange]
    """Dimensions of theta that differ from those of the other faults."""
    layers: dict[str, tuple[float, float]]
    """Layers with a larger share of the change than in the other faults: mean share in the group, and elsewhere."""

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


def group(faults: Faults, most: int = 20, apart: float = MIN_DIFFERENCE) -> list[Group]:
    """Group related faults, largest group first: at most `most` groups, with about `most` representatives in total.

    apart: how far two groups must differ in at least two of the three views, 0 to 1; a smaller value gives more groups.
    """
    if most < 1:
        raise UsageError(f"most must be 1 or more groups, got {most}: leave it out for 20")
    if not 0 <= apart <= 1:
        raise UsageError(f"apart must lie in 0 to 1, got {apart}: leave it out for {MIN_DIFFERENCE}")
    if not len(faults):
        return []
    groups = find_groups(faults.columns, most, apart)
    n = int(groups.max()) + 1
    return [describe_members(faults, groups == k, max(1, most // n)) for k in range(n)]


def find_groups(columns: dict[str, Array], most: int = 20, apart: float = MIN_DIFFERENCE) -> Ints:
    """The number of each fault's group, from 0, largest group first."""
    views = FaultViews.of(columns["answer"], columns["theta"], columns["signature"])
    binned = views.binned()
    n = len(columns["id"])
    if not binned:
        return np.zeros(n, dtype=np.int64)
    at = np.arange(n) if n <= MAX_SAMPLED else np.linspace(0, n - 1, MAX_SAMPLED).round().astype(np.int64)
    sampled_views = FaultViews(views.answer[at], views.theta[at], views.signature[at])
    groups = _merge(sampled_views, find_classes([column[at] for column in binned]), most, apart)
    if n > MAX_SAMPLED:
        table = one_hot(binned)
        sampled, groups = groups, likeliest_class(table, table[at], groups)
        groups[at] = sampled
    return order_by_size(groups)


def _merge(views: FaultViews, classes: Ints, most: int, apart: float) -> Ints:
    """Merge the classes that differ in fewer than two views, the closest first."""
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
        """Build the views; the square roots of the layers' shares are compared, as in the Hellinger distance."""
        roots = np.sqrt(signature.astype(np.float64))
        roots -= roots.mean(0)
        u, sizes, _ = np.linalg.svd(roots, full_matrices=False)
        power = np.cumsum(sizes**2)
        n = 0
        if power[-1] > 1e-12 * len(roots):
            n = min(MAX_COMPONENTS, int(np.searchsorted(power / power[-1], EXPLAINED_VARIANCE)) + 1)
        return FaultViews(np.unique(answer, return_inverse=True)[1], theta.astype(np.float64), (u * sizes)[:, :n])

    def binned(self) -> list[Ints]:
        """Each dimension in bins; constant ones are left out."""
        columns = [bins(column, column.min(), column.max()) for column in self.theta.T]
        columns += [bins(column, *np.quantile(column, [0.01, 0.99])) for column in self.signature.T]
        return [column for column in (self.answer, *columns) if column.max() > 0]

    def difference(self, a: Ints, b: Ints) -> float:
        """How far the faults `a` differ from `b` in at least two of the three views, 0 to 1."""
        shares = [np.bincount(self.answer[rows], minlength=int(self.answer.max()) + 1) / len(rows) for rows in (a, b)]
        answer = 0.5 * float(np.abs(shares[0] - shares[1]).sum())
        theta = max((_kuiper(x, y) for x, y in zip(self.theta[a].T, self.theta[b].T, strict=True)), default=0.0)
        return sorted([answer, theta, self._signature_difference(a, b)])[1]

    def _signature_difference(self, a: Ints, b: Ints) -> float:
        """The difference of the signatures beyond `SIGNATURE_SLACK` that is not explained by theta."""
        causes, effects = (
            np.concatenate([values[rows] - values[rows].mean(0) for rows in (a, b)])
            for values in (self._causes, self.signature)
        )
        slopes = np.linalg.lstsq(causes, effects, rcond=1e-6)[0]
        in_a, in_b = (self.signature[rows] - self._causes[rows] @ slopes for rows in (a, b))
        slack = SIGNATURE_SLACK * np.sqrt(self.signature.var(0).sum())
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
    """The bin of each value, with edges where the density changes: Bayesian blocks, a piecewise constant density.

    Each additional bin must improve the fit by the logarithm of the number of values.
    """
    if not high > low:
        return np.zeros(len(values), dtype=np.int64)
    cells = np.clip((values - low) / (high - low) * DENSITY_CELLS, 0, DENSITY_CELLS - 1).astype(np.int64)
    up_to = np.concatenate([[0], np.bincount(cells, minlength=DENSITY_CELLS).cumsum()])
    best, before = np.zeros(DENSITY_CELLS + 1), np.zeros(DENSITY_CELLS + 1, dtype=np.int64)
    for right in range(1, DENSITY_CELLS + 1):
        n = up_to[right] - up_to[:right]
        fitness = n * np.log(np.maximum(n, 1) / (right - np.arange(right))) - np.log(len(values)) + best[:right]
        before[right] = fitness.argmax()
        best[right] = fitness.max()
    edges, right = [], DENSITY_CELLS
    while right > 0:
        left = int(before[right])
        pieces = -(-(right - left) * MIN_BINS // DENSITY_CELLS)
        edges += [left + (right - left) * piece / pieces for piece in range(pieces)]
        right = left
    return np.unique(np.searchsorted(sorted(edges), cells, side="right"), return_inverse=True)[1]


def interval(values: Floats, others: Floats) -> tuple[float, float, float]:
    """The interval that best separates two samples (Kuiper): the difference of its probabilities, and its two ends."""
    at = np.unique(np.concatenate([values, others]))
    ahead = _lead(values, others, at)
    before = np.concatenate([[0.0], ahead])  # up to the previous value, because intervals include their ends
    gains = ahead - np.minimum.accumulate(before)[:-1]
    last = int(gains.argmax())
    first = int(before[: last + 1].argmin())
    return float(gains[last]), float(at[first]), float(at[last])


def _lead(values: Floats, others: Floats, at: Floats) -> Floats:
    """The difference of the distribution functions of two samples at each of these values."""
    first, second = (np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (values, others))
    return np.asarray(first - second)


def _kuiper(values: Floats, others: Floats) -> float:
    """The largest difference of the two samples' probabilities over all intervals (Kuiper's statistic)."""
    ahead = _lead(values, others, np.concatenate([values, others]))
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
    """The probability, by layer, that a group's mean share is larger by chance: Welch's test on the means of seeds.

    Faults of one seed are alike, so each seed counts once. With fewer than three seeds, the probability is 1.
    """
    from scipy.stats import ttest_ind

    means = []
    for rows in (is_member, ~is_member):
        seeds, row, n = np.unique(seed_id[rows], return_inverse=True, return_counts=True)
        sums = np.zeros((len(seeds), shares.shape[1]))
        np.add.at(sums, row, shares[rows])
        means.append(sums / n[:, None])
    if min(map(len, means)) < 3:
        return np.ones(shares.shape[1])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # all values may be equal
        chance = ttest_ind(*means, equal_var=False, alternative="greater").pvalue
    differs = means[0].mean(0) > means[1].mean(0)
    return np.where(np.isnan(chance), np.where(differs, 0.0, 1.0), chance)


def describe_members(faults: Faults, is_member: NDArray[np.bool_], n_shown: int) -> Group:
    """Describe what the members of a group have in common, and choose representatives."""
    at, columns = np.flatnonzero(is_member), faults.columns
    pairs = np.stack([columns["clean_answer"][at], columns["answer"][at]], 1)
    kinds, n = np.unique(pairs, axis=0, return_counts=True)
    outcomes = tuple(
        OutcomeShare(int(clean) if clean >= 0 else None, int(answer), float(n[k] / len(at)))
        for k, (clean, answer) in sorted(enumerate(kinds), key=lambda kind: -n[kind[0]])[:3]
    )
    theta, layers = dict[str, ThetaRange](), dict[str, tuple[float, float]]()
    if not is_member.all():
        theta, layers = _unusual_theta(faults, is_member), _grown_layers(faults, is_member)
    n_seeds = len(np.unique(columns["seed_id"][at]))
    counts = f"{counted(len(at), 'fault')} on {counted(n_seeds, 'seed')}"
    ranges = [
        f"{name} {f'at {of.low:.3g}' if of.low == of.high else f'{of.low:.3g} to {of.high:.3g}'} "
        f"({percent(of.share, 0)}, elsewhere {percent(of.elsewhere, 0)})"
        for name, of in theta.items()
    ]
    text = f"{', '.join([_describe_outcomes(faults, at, outcomes), *ranges])}; {counts}"
    if layers:
        name, (here, there) = next(iter(layers.items()))
        text += f"; change concentrated in {name} ({percent(here, 0)} of it, elsewhere {percent(there, 0)})"
    shown = tuple(faults[k] for k in _representatives(columns, at, n_shown))
    return Group(text, tuple(columns["id"][at].tolist()), n_seeds, shown, outcomes, theta, layers)


def _representatives(columns: dict[str, Array], at: Ints, n: int) -> list[int]:
    """The positions of the most telling faults, with distinct seeds; each outcome once before any outcome twice."""
    score = telling(columns["distance"][at], columns["confidence"][at])
    pairs = list(zip(columns["clean_answer"][at].tolist(), columns["answer"][at].tolist(), strict=True))
    seeds = columns["seed_id"][at].tolist()
    frequency, turn = Counter(pairs), Counter[tuple[int, int]]()
    used_seeds: set[int] = set()
    places: list[tuple[int, int, int, int]] = []
    for place, k in enumerate(np.argsort(score, kind="stable").tolist()):
        if seeds[k] not in used_seeds:
            used_seeds.add(seeds[k])
            turn[pairs[k]] += 1
            places.append((turn[pairs[k]], -frequency[pairs[k]], place, k))
    return [int(at[k]) for _, _, _, k in sorted(places)[:n]]


def _unusual_theta(faults: Faults, is_member: NDArray[np.bool_]) -> dict[str, ThetaRange]:
    ranges: dict[str, ThetaRange] = {}
    for name, values in zip(faults.theta, faults.columns["theta"].astype(np.float64).T, strict=True):
        gap, low, high = interval(values[is_member], values[~is_member])
        if (
            gap >= MIN_THETA_GAP
            and kuiper_chance(gap, int(is_member.sum()), int((~is_member).sum())) < SIGNIFICANCE_LEVEL
        ):
            is_inside = (values >= low) & (values <= high)
            share, elsewhere = float(is_inside[is_member].mean()), float(is_inside[~is_member].mean())
            ranges[name] = ThetaRange(low, high, share, elsewhere)
    return ranges


def _grown_layers(faults: Faults, is_member: NDArray[np.bool_]) -> dict[str, tuple[float, float]]:
    shares = faults.columns["signature"].astype(np.float64)
    here, there = shares[is_member].mean(0), shares[~is_member].mean(0)
    is_certain = growth_chance(shares, is_member, faults.columns["seed_id"]) * shares.shape[1] < SIGNIFICANCE_LEVEL
    order = np.argsort(there - here, kind="stable").tolist()
    grown = [k for k in order if here[k] > MIN_LAYER_GROWTH * there[k] and is_certain[k]]
    return {faults.layers[k]: (float(here[k]), float(there[k])) for k in grown}


def _describe_outcomes(faults: Faults, at: Ints, outcomes: tuple[OutcomeShare, ...]) -> str:
    task = faults.task or "wrong"

    def show(answer: int) -> str:
        return show_outcome(task, answer, faults.classes)

    answers, n = np.unique(faults.columns["answer"][at], return_counts=True)
    order = np.argsort(-n, kind="stable").tolist()[:3]
    frequent = [(show(int(answers[k])), float(n[k] / len(at))) for k in order]
    if not gives_answers(task):
        return ", ".join(f"{outcome}{_describe_share(share)}" for outcome, share in frequent)
    first, (answer, share) = outcomes[0], frequent[0]
    if first.share >= 0.5:
        return f"{describe_change(first.clean_answer, show(first.answer))}{_describe_share(first.share)}"
    if share >= 0.5:
        return f"{describe_change(None, answer)}{_describe_share(share)}"
    texts = []
    for outcome in outcomes:
        clean = "" if outcome.clean_answer is None else f"{outcome.clean_answer} as "
        texts.append(f"{clean}{show(outcome.answer)} {percent(outcome.share, 0)}")
    return f"several outcomes ({', '.join(texts)})"


def _describe_share(share: float) -> str:
    return "" if share == 1 else f" ({percent(share, 0)})"


PRIOR_MASS = 1.0
"""Weight, in rows, of the prior of a class's own distribution, which is the distribution in the entire table. It does
not grow with the number of categories, so that a column with many categories does not outweigh a few rows."""


def find_classes(columns: Sequence[Ints], most: int = MAX_CLASSES) -> Ints:
    """The latent class of each row of categories, largest class first: the cut of Ward's tree that fits best."""
    from scipy.cluster.hierarchy import fcluster, linkage

    columns = [np.unique(column, return_inverse=True)[1] for column in columns]  # from 0, each of which occurs

    if len(columns[0]) < 2:
        return np.zeros(len(columns[0]), dtype=np.int64)
    table = one_hot(columns)
    tree = linkage(table, "ward")
    cuts = [fcluster(tree, n_classes, "maxclust").astype(np.int64) - 1 for n_classes in range(1, most + 1)]
    cuts = [order_by_size(likeliest_class(table, table, cut)) for cut in cuts]
    return max(cuts, key=lambda cut: log_probability(columns, cut) - np.log(len(cut)) * cut.max())


def likeliest_class(table: Floats, known: Floats, classes: Ints) -> Ints:
    """The most likely class of each row of a table, given rows whose classes are known (naive Bayes)."""
    n = np.bincount(classes)
    counts = np.stack([known[classes == k].sum(0) for k in range(len(n))])
    logs = np.log((counts + PRIOR_MASS * table.mean(0)) / (n[:, None] + PRIOR_MASS))
    return np.asarray((table @ logs.T + np.log(n + 1)).argmax(1))


def one_hot(columns: Sequence[Ints]) -> Floats:
    """One column of zeros and ones per category."""
    return np.concatenate([np.eye(column.max() + 1)[column] for column in columns], 1)


def log_probability(columns: Sequence[Ints], classes: Ints) -> float:
    """The log probability of a table and its classes; all divisions into this many classes are equally likely a priori.

    In each class, a column has either the distribution of the entire table or its own, with equal prior probability.
    """
    n = np.bincount(classes)
    total = gammaln(n + 1).sum() + gammaln(len(n)) - gammaln(len(classes) + len(n))
    for column in columns:
        width = int(column.max()) + 1
        counts = np.bincount(classes * width + column, minlength=len(n) * width).reshape(len(n), width)
        share = counts.sum(0) / len(column)
        prior = PRIOR_MASS * share
        own = (gammaln(counts + prior) - gammaln(prior)).sum(1) + gammaln(PRIOR_MASS) - gammaln(n + PRIOR_MASS)
        total += (np.logaddexp(counts @ np.log(share), own) - np.log(2)).sum()
    return float(total)


def order_by_size(classes: Ints) -> Ints:
    """Renumber classes by size, largest first; classes of equal size are numbered by their first row."""
    _, first, at, n = np.unique(classes, return_index=True, return_inverse=True, return_counts=True)
    order = np.lexsort((first, -n))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place[at]
