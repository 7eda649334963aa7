"""Groups of faults that are the same story, so that thousands become a few to look at.

Latent classes of (wrong outcome, theta, layer signature) first; of these, those that do not differ in two of the three
views are one story. One view alone is no other story: the same noise may turn a 4 to a 9 and a 3 to a 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.runs.analysis.stories import Table, find_classes, ordered
from themis.runs.analysis.views import Views, interval
from themis.runs.faults import Column, Fault, Faults, telling

Ints = NDArray[np.int64]
SAMPLE = 2000
"""Faults that groups are made from, spread over the campaign; the others join the group they most likely belong to."""
CLASSES = 20
"""Latent classes at most, before those of one story are joined: more are parts of stories again."""
APART = 0.75
"""A view tells two groups apart where what is found in the one is missing in the other three times of four."""
UNUSUAL = 0.5
"""A group's theta is worth a word where it lies in a range that half fewer of the other faults lie in."""
GROWN = 1.25
"""A layer's share of the change is worth a word where it is a quarter more than in the other faults."""


@dataclass(frozen=True)
class Outcome:
    """A wrong outcome in a group, and the share of its faults that have it."""

    clean_answer: int | None
    answer: int
    share: float


@dataclass(frozen=True)
class Range:
    """Where a dimension of theta lies in a group: the share of its faults in there, and that of all others."""

    low: float
    high: float
    share: float
    elsewhere: float


@dataclass(frozen=True)
class Group:
    """Faults that are the same story."""

    text: str
    """What they share, in words."""
    ids: tuple[int, ...] = field(repr=False)
    """Numbers of the faults."""
    n_seeds: int
    representatives: tuple[Fault, ...] = field(repr=False)
    """Those to look at, the most telling first; each seed and wrong outcome once."""
    outcomes: tuple[Outcome, ...]
    """The three that are most frequent."""
    theta: dict[str, Range]
    """Dimensions that are unlike those of the other faults."""
    layers: dict[str, tuple[float, float]]
    """Layers with more of the change than in the other faults: mean share here, and there."""

    def __len__(self) -> int:
        return len(self.ids)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "text": self.text,
            "faults": len(self.ids),
            "seeds": self.n_seeds,
            "representatives": [fault.id for fault in self.representatives],
            "outcomes": [vars(each) for each in self.outcomes],
            "theta": {name: vars(each) for name, each in self.theta.items()},
            "layers": {name: {"share": here, "elsewhere": there} for name, (here, there) in self.layers.items()},
            "ids": list(self.ids),
        }


def group(faults: Faults, most: int = 20, apart: float = APART) -> list[Group]:
    """Groups of faults, the largest first: `most` of them at most, with about `most` representatives in all.

    apart: how far two groups must differ in two of the three views, 0 to 1; less gives more groups.
    """
    if most < 1:
        raise UsageError(f"most must be 1 or more groups, got {most}: leave it out for 20")
    if not 0 <= apart <= 1:
        raise UsageError(f"apart must lie in 0 to 1, got {apart}: leave it out for {APART}")
    if not len(faults):
        return []
    columns = faults.columns
    classes = find_groups(columns, most, apart)
    n = int(classes.max()) + 1
    return [_describe(faults, columns, classes == k, max(1, most // n)) for k in range(n)]


def find_groups(columns: dict[str, Column], most: int = 20, apart: float = APART) -> Ints:
    """The number of each fault's group, from 0, the largest group first."""
    views = Views.of(columns["answer"], columns["theta"], columns["signature"])
    columns_of_codes = views.columns()
    n = len(columns["id"])
    if not columns_of_codes:
        return np.zeros(n, dtype=np.int64)
    table = Table.of(columns_of_codes)
    at = np.arange(n) if n <= SAMPLE else np.linspace(0, n - 1, SAMPLE).round().astype(np.int64)
    sample = table.rows(at)
    seen = Views(views.answer[at], views.theta[at], views.signature[at])
    classes = _join(seen, find_classes(sample, CLASSES), most, apart)
    if n > SAMPLE:
        found, classes = classes, table.likeliest(sample.counts(classes, int(classes.max()) + 1))
        classes[at] = found
    return ordered(classes)


def _join(views: Views, classes: Ints, most: int, apart: float) -> Ints:
    """Classes with those joined, the nearest first, that fewer than two views tell apart."""
    rows = {k: np.flatnonzero(classes == k) for k in range(int(classes.max()) + 1)}
    found = {(a, b): views.difference(rows[a], rows[b]) for a, b in combinations(rows, 2)}
    while found:
        one, other = min(found, key=found.__getitem__)
        if found[one, other] >= apart and len(rows) <= most:
            break
        rows[one] = np.concatenate([rows[one], rows.pop(other)])
        classes = np.where(classes == other, one, classes)
        found = {
            (a, b): views.difference(rows[a], rows[b]) if one in (a, b) else found[a, b]
            for a, b in combinations(rows, 2)
        }
    return ordered(classes)


def _describe(faults: Faults, columns: dict[str, Column], is_in: NDArray[np.bool_], n_shown: int) -> Group:
    at = np.flatnonzero(is_in)
    seeds = columns["seed_id"][at]
    outcomes = _outcomes(columns, at)
    theta, layers = _ranges(faults, columns, is_in), _layers(faults, columns, is_in)
    n_seeds = len(np.unique(seeds))
    counts = f"{len(at):,} fault{'s' * (len(at) != 1)} on {n_seeds:,} seed{'s' * (n_seeds != 1)}"
    parts = [_say_outcomes(columns, at, outcomes), *(f"{name} {_say_range(each)}" for name, each in theta.items())]
    text = f"{', '.join(parts)}; {counts}"
    if layers:
        name, (here, there) = next(iter(layers.items()))
        text += f"; change concentrated in {name} ({here:.0%} of it, elsewhere {there:.0%})"
    shown = _representatives(columns, at, n_shown)
    ids = tuple(columns["id"][at].tolist())
    return Group(text, ids, n_seeds, tuple(faults[k] for k in shown), outcomes, theta, layers)


def _representatives(columns: dict[str, Column], at: Ints, n: int) -> list[int]:
    """Positions of the most telling faults: every outcome once before any twice, no seed twice while there are others.

    Among outcomes the frequent come first.
    """
    score = telling(columns["distance"][at], columns["confidence"][at])
    pairs = list(zip(columns["clean_answer"][at].tolist(), columns["answer"][at].tolist(), strict=True))
    seeds = columns["seed_id"][at].tolist()
    frequency = {pair: pairs.count(pair) for pair in set(pairs)}
    turn: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    places: list[tuple[int, int, int, int]] = []
    for place, k in enumerate(np.argsort(score, kind="stable").tolist()):
        if seeds[k] not in seen:
            seen.add(seeds[k])
            turn[pairs[k]] = turn.get(pairs[k], 0) + 1
            places.append((turn[pairs[k]], -frequency[pairs[k]], place, k))
    chosen = sorted(places)[:n]
    return [int(at[k]) for _, _, _, k in chosen]


def _outcomes(columns: dict[str, Column], at: Ints) -> tuple[Outcome, ...]:
    pairs = np.stack([columns["clean_answer"][at], columns["answer"][at]], 1)
    kinds, n = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-n, kind="stable")[:3].tolist()
    return tuple(
        Outcome(int(kinds[k, 0]) if kinds[k, 0] >= 0 else None, int(kinds[k, 1]), float(n[k] / len(at))) for k in order
    )


def _ranges(faults: Faults, columns: dict[str, Column], is_in: NDArray[np.bool_]) -> dict[str, Range]:
    ranges: dict[str, Range] = {}
    if is_in.all():
        return ranges
    for name, values in zip(faults.theta, columns["theta"].astype(np.float64).T, strict=True):
        gap, low, high = interval(values[is_in], values[~is_in])
        if gap >= UNUSUAL:
            inside = (values >= low) & (values <= high)
            ranges[name] = Range(low, high, float(inside[is_in].mean()), float(inside[~is_in].mean()))
    return ranges


def _layers(faults: Faults, columns: dict[str, Column], is_in: NDArray[np.bool_]) -> dict[str, tuple[float, float]]:
    if is_in.all():
        return {}
    shares = columns["signature"].astype(np.float64)
    here, there = shares[is_in].mean(0), shares[~is_in].mean(0)
    more = [k for k in np.argsort(there - here, kind="stable").tolist() if here[k] > GROWN * there[k]]
    return {faults.layers[k]: (float(here[k]), float(there[k])) for k in more}


def _say_outcomes(columns: dict[str, Column], at: Ints, outcomes: tuple[Outcome, ...]) -> str:
    answers, n = np.unique(columns["answer"][at], return_counts=True)
    share = float(n.max() / len(at))
    most = _name(int(answers[n.argmax()]))
    first = outcomes[0]
    if first.share >= 0.5 and first.clean_answer is not None:
        return f"{first.clean_answer} answered as {_name(first.answer)}{_portion(first.share)}"
    if share >= 0.5:
        return f"answered as {most}{_portion(share)}"
    each = [f"{_name(o.answer)} {o.share:.0%}" for o in outcomes]
    if first.clean_answer is not None:
        each = [f"{o.clean_answer} as {_name(o.answer)} {o.share:.0%}" for o in outcomes]
    return f"several outcomes ({', '.join(each)})"


def _name(answer: int) -> str:
    return "not finite" if answer < 0 else str(answer)


def _portion(share: float) -> str:
    return "" if share > 0.99 else f" ({share:.0%})"


def _say_range(each: Range) -> str:
    where = f"at {each.low:.3g}" if each.low == each.high else f"{each.low:.3g} to {each.high:.3g}"
    return f"{where} ({each.share:.0%}, elsewhere {each.elsewhere:.0%})"
