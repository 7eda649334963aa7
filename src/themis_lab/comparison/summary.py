"""The results of a comparison: how many faults each technique found on a grid, and how they follow the error rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from themis.runs.run import counted
from themis_lab.comparison.cells import COUNTS
from themis_lab.comparison.grid import Grid
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan
from themis_lab.comparison.statistics import (
    Array,
    Measured,
    Weights,
    agreed_lead,
    measure_correlation,
    measure_total,
    why_degenerate,
)
from themis_lab.techniques import BASELINES, Technique

Record = dict[str, Any]
DISTINCT = {"faults": "distinct", "selected": "selected_distinct"}
"""The count of distinct faults that belongs to a raw count."""
LEADS = ("over_rival", "over_baselines")
"""Differences in r that both definitions of the error rate must show."""
TOTALS = ("tests", "passes", "faults", "distinct_faults", "failing_seeds", "seconds")


@dataclass(frozen=True)
class Row:
    """One technique on one grid; all are empty if a campaign failed, `r` and `r_box` also on a degenerate grid."""

    technique: str
    n_cells: int
    """The number of its campaigns over all magnitudes."""
    errors: tuple[str, ...]
    """Why campaigns failed, every reason once."""
    total: dict[str, Any]
    r: dict[str, Any]
    """By the error rate at full strength."""
    r_box: dict[str, Any]
    """By the error rate over the box of theta that techniques search."""
    r_lead: dict[str, str | None]
    """`ahead` or `behind` where both definitions show it, over the best rival and over the four baselines."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "errors": list(self.errors)}


@dataclass(frozen=True)
class GridSummary:
    """A grid, its error rates on the judge seeds, and every technique on it."""

    name: str
    note: str
    magnitudes: tuple[float, ...]
    rates: tuple[float, ...]
    """At full strength."""
    degenerate: str | None
    box_rates: tuple[float, ...]
    """Over the box of theta that techniques search."""
    box_degenerate: str | None
    rows: tuple[Row, ...]
    """In descending order of distinct faults; failed techniques come last."""
    counts: dict[str, list[float]]
    """Distinct faults per magnitude, by technique in the order of the rows: means over campaigns."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    plan: ComparisonPlan
    perturbation: str
    seeds: dict[str, int]
    """The number of seeds that the model answers correctly, by purpose: search, judge, and grid if one was chosen."""
    grids: tuple[GridSummary, ...]
    cells: list[Record] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)

    def __repr__(self) -> str:
        techniques = ", ".join(technique.name for technique in self.plan.chosen())
        return f"<Comparison: {techniques} under {self.perturbation}, {counted(len(self.cells), 'campaign')}>"

    def _repr_markdown_(self) -> str:
        from themis_lab.comparison.table import markdown

        return markdown(self)

    @property
    def failed(self) -> list[Record]:
        """Campaigns without a result."""
        return [record for record in self.cells if "error" in record]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as written to `compare.json`; counts per seed are only in the files of the campaigns."""
        techniques = self.plan.chosen()
        return {
            "plan": self.plan.as_dict(),
            "perturbation": self.perturbation,
            "criteria": {
                technique.name: technique.criterion for technique in techniques if technique.criterion is not None
            },
            "seeds": self.seeds,
            "grids": [grid.as_dict() for grid in self.grids],
            "degenerate_grids": sum(grid.degenerate is not None for grid in self.grids),
            "box_degenerate_grids": sum(grid.box_degenerate is not None for grid in self.grids),
            "failed_cells": len(self.failed),
            "cells": [{name: value for name, value in record.items() if name != "by_seed"} for record in self.cells],
            "environment": self.environment,
        }


def summarise(
    grid: Grid,
    errors: dict[float, Array],
    box_errors: dict[float, Array],
    plan: ComparisonPlan,
    records: dict[CampaignCell, Record],
) -> GridSummary:
    """The summary of one grid; errors are those of the judge seeds, by magnitude: at full strength and over the box."""
    judged, box = (np.stack([by[magnitude] for magnitude in grid.magnitudes]) for by in (errors, box_errors))
    by_technique = {technique.name: _campaigns(technique, grid, plan, records) for technique in plan.chosen()}
    complete = [
        technique
        for technique in plan.chosen()
        if all("error" not in record for record in by_technique[technique.name])
    ]
    degenerate, box_degenerate = why_degenerate(judged.mean(1)), why_degenerate(box.mean(1))
    totals: dict[str, dict[str, Any]] = {}
    r: dict[str, dict[str, Any]] = {}
    r_box: dict[str, dict[str, Any]] = {}
    counts: dict[str, Array] = {}
    if complete:
        campaigns = [by_technique[technique.name] for technique in complete]
        shape = (len(complete), len(grid.magnitudes), plan.campaigns)
        counts = {name: _counts(campaigns, name, shape) for name in COUNTS}
        n_seeds = max(record["seeds"] for own in campaigns for record in own)
        weights = Weights.draw(plan.resamples, n_seeds, judged.shape[1], plan.campaigns, plan.random_seed)
        totals = _totals(complete, campaigns, shape, counts, weights)
        is_guided = [own[0]["has_criterion"] for own in campaigns]
        if degenerate is None:
            r = _correlations(complete, is_guided, judged, counts, weights)
        if box_degenerate is None:
            r_box = _correlations(complete, is_guided, box, counts, weights)
    rows = [
        Row(
            name,
            len(own),
            tuple(dict.fromkeys(record["error"] for record in own if "error" in record)),
            totals.get(name, {}),
            r.get(name, {}),
            r_box.get(name, {}),
            {over: agreed_lead(*(by.get(name, {}).get(over) for by in (r, r_box))) for over in LEADS},
        )
        for name, own in by_technique.items()
    ]
    rows.sort(key=lambda row: -row.total["distinct_faults"][0] if row.total else np.inf)
    means = (
        dict(zip((technique.name for technique in complete), counts["distinct"].sum(-1).mean(-1), strict=True))
        if complete
        else {}
    )
    return GridSummary(
        grid.name,
        grid.note,
        grid.magnitudes,
        tuple(float(rate) for rate in judged.mean(1)),
        degenerate,
        tuple(float(rate) for rate in box.mean(1)),
        box_degenerate,
        tuple(rows),
        {row.technique: means[row.technique].tolist() for row in rows if row.technique in means},
    )


def _campaigns(
    technique: Technique, grid: Grid, plan: ComparisonPlan, records: dict[CampaignCell, Record]
) -> list[Record]:
    """The records of a technique, by magnitude and then by campaign."""
    return [
        records[CampaignCell(technique.name, magnitude, campaign)]
        for magnitude in grid.magnitudes
        for campaign in range(plan.campaigns)
    ]


def _counts(campaigns: list[list[Record]], name: str, shape: tuple[int, int, int]) -> Array:
    """`[techniques, magnitudes, campaigns, seeds]`, for the seeds that fail in any campaign."""
    by_seed = [record["by_seed"] for own in campaigns for record in own]
    failing = np.unique(np.concatenate([np.asarray(columns["seed_id"], dtype=np.int64) for columns in by_seed]))
    counts = np.zeros((len(by_seed), len(failing)))
    for row, columns in zip(counts, by_seed, strict=True):
        row[np.searchsorted(failing, np.asarray(columns["seed_id"], dtype=np.int64))] = columns[name]
    return counts.reshape(*shape, len(failing))


def _totals(
    techniques: list[Technique],
    campaigns: list[list[Record]],
    shape: tuple[int, int, int],
    counts: dict[str, Array],
    weights: Weights,
) -> dict[str, dict[str, Any]]:
    """Sums over magnitudes: mean, least and most over campaigns; and the ratio of distinct faults to the best rival."""
    distinct = measure_total(counts["distinct"], weights)
    totals = {}
    for k, (technique, own) in enumerate(zip(techniques, campaigns, strict=True)):
        total: dict[str, Any] = {}
        for name in TOTALS:
            sums = np.array([record[name] for record in own], dtype=np.float64).reshape(shape[1:]).sum(0)
            total[name] = [float(sums.mean()), float(sums.min()), float(sums.max())]
        rivals = [rival for rival in distinct.best_rivals(k) if distinct.values[rival] > 0]
        reasons = sorted({str(record["stop_reason"]) for record in own})
        total |= {
            "rivals": [techniques[rival].name for rival in rivals],
            "over_rival": distinct.ratio(k, rivals[0]).as_list() if rivals else None,
            "selected_distinct": _selected(own, counts["selected_distinct"][k]),
            "coverage": float(np.mean([record["coverage"] for record in own])),
            "is_share": all(record["is_share"] for record in own),
            "scc": float(np.mean([record["scc"] for record in own])),
            "plateaus": sum(record["is_plateau"] for record in own),
            "stops": {reason: sum(record["stop_reason"] == reason for record in own) for reason in reasons},
            "fit_inputs": max(record["fit_inputs"] for record in own),
            "fit_seconds": max(record["fit_seconds"] for record in own),
        }
        totals[technique.name] = total
    return totals


def _selected(campaigns: list[Record], counts: Array) -> float | None:
    return float(counts.sum((0, 2)).mean()) if campaigns[0]["has_criterion"] else None


def _correlations(
    techniques: list[Technique], is_guided: list[bool], judged: Array, counts: dict[str, Array], weights: Weights
) -> dict[str, dict[str, Any]]:
    """The r of every count, and how far the r of distinct faults is from that of the rivals, by technique."""
    measured = {
        name: measure_correlation(judged, counts[name], weights, counts[DISTINCT.get(name, name)]) for name in COUNTS
    }
    baselines = baseline_indices(techniques)
    correlations = {}
    for k, technique in enumerate(techniques):
        names = COUNTS if is_guided[k] else COUNTS[:2]
        correlations[technique.name] = {
            **{name: measured[name].estimate(k).as_list() for name in names},
            **_over_rivals(measured["distinct"], techniques, k, baselines),
        }
    return correlations


def _over_rivals(measured: Measured, techniques: list[Technique], k: int, baselines: list[int]) -> dict[str, Any]:
    rivals = measured.best_rivals(k)
    has_baselines = baselines and k not in baselines
    return {
        "rivals": [techniques[rival].name for rival in rivals],
        "over_rival": measured.difference(k, rivals[:1]).as_list() if rivals else None,
        "over_baselines": measured.difference(k, baselines).as_list() if has_baselines else None,
    }


def baseline_indices(techniques: list[Technique]) -> list[int]:
    """The indices of the paper's four baselines, at its settings; empty unless all four are present."""
    names = [technique.name for technique in techniques]
    return [names.index(name) for name in BASELINES] if set(BASELINES) <= set(names) else []
