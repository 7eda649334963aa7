"""The results of a comparison: the faults of each technique on a grid, and their correlation with the error rate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import StoreError
from themis.report.table import NO_VALUE, Table, format_count
from themis.text import counted, percent, printable
from themis_lab.comparison.cells import TALLIES
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan, Grid
from themis_lab.comparison.statistics import (
    MAX_UNDEFINED,
    MIN_FAULTS,
    MIN_SPAN,
    Array,
    Weights,
    agreed_lead,
    format_estimate,
    measure_correlation,
    measure_total,
    why_degenerate,
)
from themis_lab.techniques import BASELINES

if TYPE_CHECKING:
    from rich.console import Console

Record = dict[str, Any]
DISTINCT = {"faults": "distinct", "selected": "selected_distinct"}
"""The count of distinct faults that belongs to a raw count."""
LEAD_COLUMNS = ("over_rival", "over_baselines")
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
    campaigns = {
        technique.name: [
            records[CampaignCell(technique.name, magnitude, campaign)]
            for magnitude in grid.magnitudes
            for campaign in range(plan.campaigns)
        ]
        for technique in plan.chosen()
    }
    complete = {name: own for name, own in campaigns.items() if all("error" not in record for record in own)}
    degenerate, box_degenerate = why_degenerate(judged.mean(1)), why_degenerate(box.mean(1))
    totals: dict[str, dict[str, Any]] = {}
    r: dict[str, dict[str, Any]] = {}
    r_box: dict[str, dict[str, Any]] = {}
    means: dict[str, list[float]] = {}
    if complete:
        shape = (len(complete), len(grid.magnitudes), plan.campaigns)
        counts = {name: _counts(list(complete.values()), name, shape) for name in TALLIES}
        n_seeds = max(record["seeds"] for own in complete.values() for record in own)
        if (n_failing := counts["faults"].shape[-1]) > n_seeds:
            raise StoreError(
                f"the campaigns must have faults on at most their {n_seeds:,} seeds, but they name {n_failing:,}: "
                "remove the cells that were changed to measure them again"
            )
        weights = Weights.draw(plan.resamples, n_seeds, judged.shape[1], plan.campaigns, plan.random_seed)
        totals = _totals(complete, counts, weights)
        means = dict(zip(complete, counts["distinct"].sum(-1).mean(-1).tolist(), strict=True))
        if degenerate is None:
            r = _correlations(complete, judged, counts, weights)
        if box_degenerate is None:
            r_box = _correlations(complete, box, counts, weights)
    rows = [
        Row(
            name,
            len(own),
            tuple(dict.fromkeys(record["error"] for record in own if "error" in record)),
            totals.get(name, {}),
            r.get(name, {}),
            r_box.get(name, {}),
            {over: agreed_lead(*(by.get(name, {}).get(over) for by in (r, r_box))) for over in LEAD_COLUMNS},
        )
        for name, own in campaigns.items()
    ]
    rows.sort(key=lambda row: -row.total["distinct_faults"][0] if row.total else np.inf)
    return GridSummary(
        grid.name,
        grid.note,
        grid.magnitudes,
        tuple(judged.mean(1).tolist()),
        degenerate,
        tuple(box.mean(1).tolist()),
        box_degenerate,
        tuple(rows),
        {row.technique: means[row.technique] for row in rows if row.technique in means},
    )


def _counts(campaigns: list[list[Record]], name: str, shape: tuple[int, int, int]) -> Array:
    """`[techniques, magnitudes, campaigns, seeds]`, for the seeds that fail in any campaign."""
    by_seed = [record["by_seed"] for own in campaigns for record in own]
    failing = np.unique(np.concatenate([np.asarray(columns["seed_id"], dtype=np.int64) for columns in by_seed]))
    counts = np.zeros((len(by_seed), len(failing)))
    for row, columns in zip(counts, by_seed, strict=True):
        row[np.searchsorted(failing, np.asarray(columns["seed_id"], dtype=np.int64))] = columns[name]
    return counts.reshape(*shape, len(failing))


def _totals(campaigns: dict[str, list[Record]], counts: dict[str, Array], weights: Weights) -> dict[str, Record]:
    """Sums over magnitudes: mean, least and most over campaigns; and the ratio of distinct faults to the best rival."""
    distinct, names = measure_total(counts["distinct"], weights), list(campaigns)
    n_magnitudes = counts["distinct"].shape[1]
    totals = {}
    for k, (technique, own) in enumerate(campaigns.items()):
        total: dict[str, Any] = {}
        for name in TOTALS:
            sums = np.array([record[name] for record in own], dtype=np.float64).reshape(n_magnitudes, -1).sum(0)
            total[name] = [float(sums.mean()), float(sums.min()), float(sums.max())]
        rivals = [rival for rival in distinct.best_rivals(k) if distinct.values[rival] > 0]
        selected = float(counts["selected_distinct"][k].sum((0, 2)).mean())
        totals[technique] = total | {
            "rivals": [names[rival] for rival in rivals],
            "over_rival": distinct.ratio(k, rivals[0]).as_list() if rivals else None,
            "selected_distinct": selected if own[0]["has_criterion"] else None,
            "coverage": float(np.mean([record["coverage"] for record in own])),
            "is_share": all(record["is_share"] for record in own),
            "scc": float(np.mean([record["scc"] for record in own])),
            "plateaus": sum(record["is_plateau"] for record in own),
            "stops": dict(sorted(Counter(str(record["stop_reason"]) for record in own).items())),
            "fit_inputs": max(record["fit_inputs"] for record in own),
            "fit_seconds": max(record["fit_seconds"] for record in own),
        }
    return totals


def _correlations(
    campaigns: dict[str, list[Record]], judged: Array, counts: dict[str, Array], weights: Weights
) -> dict[str, Record]:
    """The r of every count, and how far the r of distinct faults is from that of the rivals, by technique."""
    measured = {
        name: measure_correlation(judged, counts[name], weights, counts[DISTINCT.get(name, name)]) for name in TALLIES
    }
    distinct, names = measured["distinct"], list(campaigns)
    baselines = baseline_indices(names)
    correlations = {}
    for k, (technique, own) in enumerate(campaigns.items()):
        rivals, has_criterion = distinct.best_rivals(k), own[0]["has_criterion"]
        has_baselines = baselines and k not in baselines
        correlations[technique] = {
            **{name: measured[name].estimate(k).as_list() for name in (TALLIES if has_criterion else TALLIES[:2])},
            "rivals": [names[rival] for rival in rivals],
            "over_rival": distinct.difference(k, rivals[:1]).as_list() if rivals else None,
            "over_baselines": distinct.difference(k, baselines).as_list() if has_baselines else None,
        }
    return correlations


def baseline_indices(names: list[str]) -> list[int]:
    """The indices of the paper's four baselines, at its settings; empty unless all four are present."""
    return [names.index(name) for name in BASELINES] if set(BASELINES) <= set(names) else []


FEW_SEEDS = 50
"""A part with fewer seeds than this gets a warning."""
GRID_TITLES = {
    "grid": "magnitudes chosen in advance on separate seeds",
    "paper": "the paper's magnitudes",
    "given": "the given magnitudes",
}

DIFFERENCES = ("over the best, full strength", "over the best, whole range")
"""Columns of the difference in r from the best of the other techniques, under each definition of the error rate."""


def tables(comparison: Comparison) -> list[Table]:
    """The faults found and the correlations of every grid."""
    return [table for grid in comparison.grids for table in (fault_table(grid), r_table(grid))]


def markdown(comparison: Comparison) -> str:
    """The comparison as a document."""
    heading, *lines = opening(comparison)
    parts = [f"## {heading}", *lines]
    for grid in comparison.grids:
        parts += [table.markdown() for table in (fault_table(grid), r_table(grid), magnitude_table(grid))]
    return "\n\n".join(parts)


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables."""
    for line in opening(comparison):
        console.print(printable(line), highlight=False, markup=False)
    console.print()
    for table in tables(comparison):
        table.show(console)
        console.print()


def opening(comparison: Comparison) -> list[str]:
    """What was run on which seeds, with a warning if there are few seeds."""
    plan, seeds = comparison.plan, comparison.seeds
    lines = [
        f"{comparison.perturbation}: {plan.max_passes:,} passes per campaign, {counted(plan.campaigns, 'campaign')} "
        "per technique and magnitude"
    ]
    if seeds:
        parts = ", ".join(f"{n:,} {name}" for name, n in seeds.items())
        lines.append(f"Seeds that the model answers correctly: {parts}.")
    if few := [name for name, n in seeds.items() if n < FEW_SEEDS]:
        lines.append(f"Warning: fewer than {FEW_SEEDS} {' and '.join(few)} seeds, so the results are uncertain.")
    return lines


def fault_table(grid: GridSummary) -> Table:
    """The faults of each technique at the same cost."""
    rows = grid.rows
    columns = ("technique", "distinct faults", "selected", "seeds", "raw", "tests", "coverage", "over the best rival")
    notes = [
        f"Sums over {counted(len(grid.magnitudes), 'magnitude')}; means over campaigns, with least and most. "
        "Selected: distinct faults among tests that raised the criterion. Seeds: those that failed. Coverage: the "
        "technique's own. Over the best rival: the ratio of distinct faults, with its 95% interval."
    ]
    plateaus = [f"{row.technique} in {row.total['plateaus']} of {row.n_cells}" for row in rows if _has_plateau(row)]
    if plateaus:
        notes.append(f"* Coverage did not rise in the last quarter of most campaigns: {', '.join(plateaus)}.")
    notes += _interval_notes(grid)
    if grid.note:
        notes.append(f"The grid: {grid.note}.")
    whole = [(row.technique, row.total) for row in rows if row.total]
    early = {name: sum(n for reason, n in total["stops"].items() if reason != "passes") for name, total in whole}
    if stopped := [f"{name} in {counted(n, 'campaign')}" for name, n in early.items() if n]:
        notes.append(f"Stopped before all passes were spent: {', '.join(stopped)}.")
    fitted = [(name, total["fit_inputs"], total["fit_seconds"]) for name, total in whole if total["fit_inputs"]]
    if costs := [f"{name} {n:,} ({seconds:.1f} s)" for name, n, seconds in fitted]:
        notes.append(f"Training inputs that criteria were fitted to, at no charge: {', '.join(costs)}.")
    notes += _failures(grid)
    title = f"Faults found, {GRID_TITLES[grid.name]}"
    return Table(title, columns, [_fault_row(row) for row in rows], notes, ("seeds", "raw", "tests"))


def _fault_row(row: Row) -> tuple[str, ...]:
    if not row.total:
        return (row.technique, "failed", *(NO_VALUE for _ in range(6)))
    total = row.total
    mean, least, most = total["distinct_faults"]
    spread = f" ({format_count(least)}-{format_count(most)})" if least < most else ""
    return (
        row.technique,
        f"{format_count(mean)}{spread}",
        NO_VALUE if total["selected_distinct"] is None else format_count(total["selected_distinct"]),
        format_count(total["failing_seeds"][0]),
        format_count(total["faults"][0]),
        format_count(total["tests"][0]),
        _coverage(row),
        format_estimate(total["over_rival"], 2),
    )


def _coverage(row: Row) -> str:
    """The technique's own coverage, which is not a share for some criteria; with a star if it reached a plateau."""
    score = row.total["coverage"]
    return (percent(score) if row.total["is_share"] else f"{score:.3g}") + ("*" if _has_plateau(row) else "")


def _has_plateau(row: Row) -> bool:
    return bool(row.total) and 2 * row.total["plateaus"] > row.n_cells


def r_table(grid: GridSummary) -> Table:
    """The correlation of the faults with the error rate, under both definitions of this rate."""
    title = f"Correlation of faults with the error rate, {GRID_TITLES[grid.name]}"
    rates = _rate_notes(grid)
    if grid.degenerate is not None and grid.box_degenerate is not None:
        return Table(title, (), [], rates)
    has_mean = any((r.get("over_baselines") or [None])[0] is not None for row in grid.rows for r in (row.r, row.r_box))
    four = ("over the four",) if has_mean else ()
    columns = ("technique", "r full strength", "r whole range", "lead", *four, "selected", "r raw", *DIFFERENCES)
    rows = []
    for row in grid.rows:
        both = (row.r, row.r_box)
        cells = [row.technique, *(format_estimate(r.get("distinct")) for r in both), _lead(row, "over_rival")]
        cells += [_lead(row, "over_baselines")] if has_mean else []
        cells += [_pair(both, name) for name in ("selected_distinct", "faults")]
        rows.append((*cells, *(format_estimate(r.get("over_rival"), signed=True) for r in both)))
    notes = [
        f"Pearson's r over {counted(len(grid.magnitudes), 'magnitude')}, by the error rate at full strength and by its "
        "mean over the whole range of theta that techniques search; counts are means over campaigns. 95% intervals "
        "come from resampling seeds and campaigns; differences are paired and compare r of distinct faults. Lead: "
        "ahead of or behind the best of the other techniques, if both definitions show it by intervals that exclude "
        "zero; otherwise open. Selected and raw: r of distinct faults among tests that raised the criterion, and of "
        f"all faults, under both definitions. {NO_VALUE} means that r is undefined: no criterion, fewer than "
        f"{MIN_FAULTS} distinct faults per campaign over all magnitudes, or equal counts at all magnitudes, as "
        f"measured or in more than {MAX_UNDEFINED:.0%} of the resamples."
    ]
    if has_mean:
        notes[0] += f" The four: the mean of {', '.join(BASELINES)} at the paper's settings."
    optional = (*reversed(DIFFERENCES), "r raw", "selected", *four)
    return Table(title, columns, rows, [*rates, *notes, *_interval_notes(grid), *_failures(grid)], optional)


def _rate_notes(grid: GridSummary) -> list[str]:
    notes = []
    for where, rates, why in (
        ("at full strength", grid.rates, grid.degenerate),
        ("over the whole range", grid.box_rates, grid.box_degenerate),
    ):
        text = f"Error rates on the judge seeds {where}: {percent(min(rates))} to {percent(max(rates))}."
        notes.append(text if why is None else f"{text} Degenerate and not scored: {why}.")
    return notes


def _lead(row: Row, over: str) -> str:
    """A lead that both definitions of the error rate show; `open` if r is defined, but they do not."""
    if any((r.get(over) or [None])[0] is not None for r in (row.r, row.r_box)):
        return row.r_lead[over] or "open"
    return NO_VALUE


def _pair(both: tuple[dict[str, Any], dict[str, Any]], name: str) -> str:
    values = [format_estimate([(r.get(name) or [None])[0], None, None]) for r in both]
    return NO_VALUE if set(values) == {NO_VALUE} else " / ".join(values)


def magnitude_table(grid: GridSummary) -> Table:
    """Distinct faults by magnitude."""
    columns = ("magnitude", "error rate", "over the range", *grid.counts)
    rows = [
        (f"{magnitude:g}", percent(rate), percent(box), *(format_count(counts[k]) for counts in grid.counts.values()))
        for k, (magnitude, rate, box) in enumerate(zip(grid.magnitudes, grid.rates, grid.box_rates, strict=True))
    ]
    notes = [
        "Error rates at full strength, and as a mean over the range of theta that techniques search. A grid whose "
        f"error rates span less than {MIN_SPAN:.2f}, even without any one of them, is degenerate."
    ]
    return Table(f"Distinct faults by magnitude, {GRID_TITLES[grid.name]}", columns, rows, notes)


def _interval_notes(grid: GridSummary) -> list[str]:
    if max(row.n_cells for row in grid.rows) <= len(grid.magnitudes):
        return ["With one campaign, the intervals account for the choice of seeds only, not for the campaigns."]
    return ["The intervals tend to be too wide, unless campaigns differ a lot."]


def _failures(grid: GridSummary) -> list[str]:
    return [f"{row.technique} failed: {'; '.join(row.errors)}" for row in grid.rows if row.errors]
