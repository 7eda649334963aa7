"""From cells to figures: for each grid, how many faults a technique found and how they follow the error rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from themis.experiments.comparison.cells import COUNTS
from themis.experiments.comparison.grid import Grid
from themis.experiments.comparison.plan import BASELINES, Cell, Plan, Technique
from themis.experiments.comparison.statistics import (
    Array,
    Measured,
    Weights,
    measure_correlation,
    measure_total,
    why_degenerate,
)

DISTINCT = {"faults": "distinct", "selected": "selected_distinct"}
"""What tells of raw counts how many faults are behind them."""
TOTALS = ("tests", "passes", "faults", "distinct_faults", "failing_seeds", "seconds")


@dataclass(frozen=True)
class Row:
    """One technique on one grid; `total` and `r` are empty where a cell failed, `r` on a degenerate grid too."""

    technique: str
    n_cells: int
    """Its campaigns, over all magnitudes."""
    errors: tuple[str, ...]
    """Why cells failed, each reason once."""
    total: dict[str, Any]
    r: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "errors": list(self.errors)}


@dataclass(frozen=True)
class GridSummary:
    """A grid, its error rates on the judge's seeds, and every technique on it."""

    name: str
    note: str
    magnitudes: tuple[float, ...]
    rates: tuple[float, ...]
    degenerate: str | None
    rows: tuple[Row, ...]
    """The most distinct faults first, failed ones last."""
    counts: dict[str, list[float]]
    """Distinct faults a magnitude, by technique in the order of the rows: means over campaigns."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "rows": [each.as_dict() for each in self.rows]}


def summarise(grid: Grid, errors: dict[float, Array], plan: Plan, records: dict[Cell, dict[str, Any]]) -> GridSummary:
    """All figures of one grid; `errors` are the judge seeds' by magnitude."""
    judged = np.stack([errors[each] for each in grid.magnitudes])
    by_technique = {each.name: _of(each.name, grid, plan, records) for each in plan.chosen()}
    whole = [each for each in plan.chosen() if all("error" not in record for record in by_technique[each.name])]
    degenerate = why_degenerate(judged.mean(1))
    totals: dict[str, dict[str, Any]] = {}
    r: dict[str, dict[str, Any]] = {}
    counts: dict[str, Array] = {}
    if whole:
        cells = [by_technique[each.name] for each in whole]
        shape = (len(whole), len(grid.magnitudes), plan.campaigns)
        counts = {name: _counts(cells, name, shape) for name in COUNTS}
        n_seeds = max(record["seeds"] for some in cells for record in some)
        weights = Weights.draw(plan.resamples, n_seeds, judged.shape[1], plan.campaigns, plan.random_seed)
        totals = _totals(whole, cells, shape, counts, weights)
        if degenerate is None:
            r = _correlations(whole, [some[0]["has_criterion"] for some in cells], judged, counts, weights)
    rows = [
        Row(
            name,
            len(some),
            tuple(dict.fromkeys(record["error"] for record in some if "error" in record)),
            totals.get(name, {}),
            r.get(name, {}),
        )
        for name, some in by_technique.items()
    ]
    rows.sort(key=lambda row: -row.total["distinct_faults"][0] if row.total else np.inf)
    means = dict(zip((each.name for each in whole), counts["distinct"].sum(-1).mean(-1), strict=True)) if whole else {}
    return GridSummary(
        grid.name,
        grid.note,
        grid.magnitudes,
        tuple(float(each) for each in judged.mean(1)),
        degenerate,
        tuple(rows),
        {row.technique: means[row.technique].tolist() for row in rows if row.technique in means},
    )


def _of(name: str, grid: Grid, plan: Plan, records: dict[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """A technique's cells, campaigns innermost."""
    return [records[Cell(name, each, campaign)] for each in grid.magnitudes for campaign in range(plan.campaigns)]


def _counts(cells: list[list[dict[str, Any]]], name: str, shape: tuple[int, int, int]) -> Array:
    """`[techniques, magnitudes, campaigns, seeds]`, of the seeds that fail in some cell."""
    flat = [record["by_seed"] for some in cells for record in some]
    failing = np.unique(np.concatenate([np.asarray(each["seed_id"], dtype=np.int64) for each in flat]))
    counts = np.zeros((len(flat), len(failing)))
    for row, each in zip(counts, flat, strict=True):
        row[np.searchsorted(failing, np.asarray(each["seed_id"], dtype=np.int64))] = each[name]
    return counts.reshape(*shape, len(failing))


def _totals(
    techniques: list[Technique],
    cells: list[list[dict[str, Any]]],
    shape: tuple[int, int, int],
    counts: dict[str, Array],
    weights: Weights,
) -> dict[str, dict[str, Any]]:
    """Sums over magnitudes: mean, least and most of the campaigns; distinct faults over those of the best rival."""
    distinct = measure_total(counts["distinct"], weights)
    found = {}
    for k, (technique, some) in enumerate(zip(techniques, cells, strict=True)):
        total: dict[str, Any] = {}
        for name in TOTALS:
            sums = np.array([record[name] for record in some], dtype=np.float64).reshape(shape[1:]).sum(0)
            total[name] = [float(sums.mean()), float(sums.min()), float(sums.max())]
        rivals = [each for each in distinct.best_rivals(k) if distinct.values[each] > 0]
        total |= {
            "rivals": [techniques[each].name for each in rivals],
            "over_rival": distinct.ratio(k, rivals[0]).as_list() if rivals else None,
            "selected_distinct": _selected(some, counts["selected_distinct"][k]),
            "coverage": float(np.mean([record["coverage"] for record in some])),
            "is_share": all(record["is_share"] for record in some),
            "scc": float(np.mean([record["scc"] for record in some])),
            "plateaus": sum(record["is_plateau"] for record in some),
            "stops": {why: sum(record["stop_reason"] == why for record in some) for why in _stops(some)},
            "fit_inputs": max(record["fit_inputs"] for record in some),
            "fit_seconds": max(record["fit_seconds"] for record in some),
        }
        found[technique.name] = total
    return found


def _selected(cells: list[dict[str, Any]], counts: Array) -> float | None:
    return float(counts.sum((0, 2)).mean()) if cells[0]["has_criterion"] else None


def _stops(cells: list[dict[str, Any]]) -> list[str]:
    return sorted({str(record["stop_reason"]) for record in cells})


def _correlations(
    techniques: list[Technique], is_guided: list[bool], judged: Array, counts: dict[str, Array], weights: Weights
) -> dict[str, dict[str, Any]]:
    """Each technique's r of every count, and how far its r of distinct faults is from its rivals'."""
    measured = {
        name: measure_correlation(judged, counts[name], weights, counts[DISTINCT.get(name, name)]) for name in COUNTS
    }
    four = baselines(techniques)
    found = {}
    for k, technique in enumerate(techniques):
        names = COUNTS if is_guided[k] else COUNTS[:2]
        found[technique.name] = {
            **{name: measured[name].figure(k).as_list() for name in names},
            **_against(measured["distinct"], techniques, k, four),
        }
    return found


def _against(measured: Measured, techniques: list[Technique], k: int, four: list[int]) -> dict[str, Any]:
    rivals = measured.best_rivals(k)
    return {
        "rivals": [techniques[each].name for each in rivals],
        "over_rival": measured.difference(k, rivals[:1]).as_list() if rivals else None,
        "over_baselines": measured.difference(k, four).as_list() if four and k not in four else None,
    }


def baselines(techniques: list[Technique]) -> list[int]:
    """Where the paper's four baselines stand, at its settings; empty unless all are there."""
    names = [each.name for each in techniques]
    return [names.index(name) for name in BASELINES] if set(BASELINES) <= set(names) else []
