"""Tables of campaigns at equal budgets: correlations of faults with the error rate, and faults."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from themis.report.table import NONE, Table, format_count, format_estimate, format_number
from themis.text import counted, percent
from themis_lab.comparison.statistics import LEAST_SPAN
from themis_lab.comparison.summary import TITLES
from themis_lab.evaluation.paper import PAPER_R
from themis_lab.evaluation.summary import STRONG, THEMIS, Evaluation, Record, name_pair, themis_first

DEGENERATE = "degenerate"
BUDGETS = {"passes": "equal passes", "tests": "equal tests"}
DEFINITIONS = {"r": ("degenerate", "at full strength"), "r_box": ("box_degenerate", "over the whole range")}
"""The key of an r, the key that says why it is not scored, and which error rate it is with."""


def capability_tables(evaluation: Evaluation) -> Iterable[Table]:
    """The correlations of faults with the error rate at equal passes, counted over all cells."""
    for name, budget in _grids(evaluation):
        if budget == "passes":
            yield _count_table(_cells(evaluation, name, budget), name, budget)


def capability_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Error rates and correlations cell by cell."""
    for name in TITLES:
        if any(grid["name"] == name for pair in evaluation.content["pairs"] for grid in pair["grids"]):
            yield _rate_table(evaluation.content["pairs"], name)
    for name, budget in _grids(evaluation):
        cells = _cells(evaluation, name, budget)
        if budget != "passes":
            yield _count_table(cells, name, budget)
        for key in DEFINITIONS:
            if scored := [(pair, grid) for pair, grid in cells if grid[DEFINITIONS[key][0]] is None]:
                yield _r_table(scored, name, budget, key)


def _rate_table(pairs: list[Record], name: str) -> Table:
    """Error rates on a grid under both definitions, and which cells are degenerate."""
    cells = [(pair, grid) for pair in pairs for grid in pair["grids"] if grid["name"] == name]
    rows: list[tuple[str, ...]] = [
        (
            name_pair(pair),
            *(
                ", ".join(percent(rate, 0) for rate in grid[rates]) + ("" if grid[why] is None else f" ({DEGENERATE})")
                for rates, why in (("rates", "degenerate"), ("box_rates", "box_degenerate"))
            ),
        )
        for pair, grid in cells
    ]
    n_full, n_box = (sum(grid[why] is not None for _, grid in cells) for why, _ in DEFINITIONS.values())
    refused: dict[str, list[str]] = {}
    for pair in pairs:
        if pair["grid_refused"] and name == "grid":
            refused.setdefault(pair["grid_refused"], []).append(name_pair(pair))
    notes = [
        f"Error rates by magnitude. Degenerate are {n_full} of {counted(len(cells), 'cell')} at full strength and "
        f"{n_box} over the whole range: they span less than {LEAST_SPAN:.2f}, or depend on one magnitude.",
        *(f"No grid for {', '.join(names)}: {reason}." for reason, names in refused.items()),
    ]
    columns = ("cell", "at full strength", "over the whole range")
    return Table(f"Error rates, {TITLES[name]}", columns, rows, notes)


def _grids(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The grids and budgets that have results."""
    pairs = evaluation.content["pairs"]
    return [
        (name, budget)
        for name in TITLES
        for budget in BUDGETS
        if any(grid["name"] == name for pair in pairs for grid in pair["budgets"].get(budget, []))
    ]


def _cells(evaluation: Evaluation, name: str, budget: str) -> list[tuple[Record, Record]]:
    """The pairs that have results on a grid at a budget, each with them."""
    return [
        (pair, grid)
        for pair in evaluation.content["pairs"]
        for grid in pair["budgets"].get(budget, [])
        if grid["name"] == name
    ]


def _techniques(grids: Iterable[Record]) -> list[str]:
    """All techniques, Themis first."""
    return themis_first({row["technique"] for grid in grids for row in grid["rows"]})


def _row(grid: Record, technique: str) -> Record:
    return next((row for row in grid["rows"] if row["technique"] == technique), {"r": {}, "r_box": {}, "total": {}})


def _count_table(cells: list[tuple[Record, Record]], name: str, budget: str) -> Table:
    """How often each technique has a strong correlation, by both definitions, for distinct and for raw faults."""
    rows = []
    for technique in _techniques(grid for _, grid in cells):
        texts = [technique]
        for count in ("distinct", "faults"):
            for key in DEFINITIONS:
                values = [(_row(grid, technique)[key].get(count) or [None])[0] for _, grid in cells]
                defined = [value for value in values if value is not None]
                strong = sum(value >= STRONG for value in defined)
                median = format_number(float(np.median(defined)), 2) if defined else NONE
                texts.append(f"{strong} of {len(defined)}, {median}" if defined else NONE)
        leads = sum(_row(grid, technique).get("r_lead", {}).get("over_rival") == "ahead" for _, grid in cells)
        rows.append((*texts, str(leads)))
    degenerate = [sum(grid[why] is not None for _, grid in cells) for why, _ in DEFINITIONS.values()]
    columns = ("technique", "full strength", "whole range", "raw, full strength", "raw, whole range", "ahead")
    notes = [
        f"Cells with r of at least {STRONG} among those that have one, and the median r; distinct faults, then all "
        "faults. Ahead: cells in which it is ahead of all others under both definitions. Degenerate, and not scored: "
        f"{degenerate[0]} of {counted(len(cells), 'cell')} by the error rate at full strength, {degenerate[1]} by that "
        f"over the whole range; their error rates span less than {LEAST_SPAN:.2f}, or depend on one magnitude."
    ]
    return Table(f"Strong correlations, {TITLES[name]}, {BUDGETS[budget]}", columns, rows, notes)


def _r_table(cells: list[tuple[Record, Record]], name: str, budget: str, key: str) -> Table:
    """Pearson's r of distinct faults in every cell, with its interval."""
    techniques, rows = _techniques(grid for _, grid in cells), []
    for pair, grid in cells:
        spans = grid["rates"] if key == "r" else grid["box_rates"]
        published = PAPER_R.get(pair["model"], {}).get(pair["perturbation"])
        spread = f"{percent(min(spans), 0)}..{percent(max(spans), 0)}"
        values = [format_estimate(_row(grid, technique)[key].get("distinct"), 2) for technique in techniques]
        rows.append((name_pair(pair), spread, NONE if published is None else f"{published:.2f}", *values))
    title = f"r with the error rate {DEFINITIONS[key][1]}, {TITLES[name]}, {BUDGETS[budget]}"
    notes = [
        "Distinct faults, with 95% intervals; paper: its value for Themis. Degenerate cells are left out. "
        f"{NONE}: undefined, see themis compare.",
    ]
    return Table(title, ("cell", "error rates", "paper", *techniques), rows, notes)


def fault_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Distinct faults at equal budgets, cell by cell."""
    for name, budget in _grids(evaluation):
        cells = _cells(evaluation, name, budget)
        techniques = _techniques(grid for _, grid in cells)
        rows = [
            (
                name_pair(pair),
                *(_found(_row(grid, technique)) for technique in techniques),
                *(_ratio(grid["ratios"].get(technique, {}).get("over_best")) for technique in THEMIS),
            )
            for pair, grid in cells
        ]
        columns = ("cell", *techniques, *(f"{technique} / best" for technique in THEMIS))
        budgets = sorted({pair["limits"][budget] for pair, _ in cells})
        notes = [
            f"Sums over magnitudes of distinct faults after {_any_of([f'{limit:,}' for limit in budgets])} {budget}: "
            "means over campaigns, with the lowest and the highest where they differ. Best: the best technique other "
            f"than {_any_of(THEMIS)}.",
        ]
        yield Table(f"Distinct faults, {TITLES[name]}, {BUDGETS[budget]}", columns, rows, notes)


def _any_of(words: Iterable[str]) -> str:
    """Such as: a, b or c."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _found(row: Record) -> str:
    """The mean over campaigns, with the lowest and the highest if they differ."""
    if not row["total"]:
        return NONE
    mean, low, high = row["total"]["distinct_faults"]
    return format_count(mean) + (f" ({format_count(low)}..{format_count(high)})" if low < high else "")


def _ratio(value: float | None) -> str:
    return NONE if value is None else format_number(value, 2)
