"""A comparison as tables: for a terminal 100 columns wide, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from themis.comparison.plan import BASELINES
from themis.comparison.statistics import LEAST_SPAN
from themis.comparison.summary import GridSummary, Row
from themis.result import percent

if TYPE_CHECKING:
    from rich.console import Console

    from themis.comparison.comparing import Comparison

NONE = "-"
TITLES = {
    "grid": "magnitudes fixed in advance on other seeds",
    "paper": "the paper's magnitudes",
    "given": "the given magnitudes",
}


@dataclass(frozen=True)
class Table:
    """A heading, columns, rows of text, and what must be said below them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows] if self.columns else []
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"### {self.title}", *([table] if table else []), *self.notes])


def tables(comparison: Comparison) -> list[Table]:
    """Faults found and correlations of each grid."""
    return [table for grid in comparison.grids for table in (found_table(grid), r_table(grid))]


def markdown(comparison: Comparison) -> str:
    """The whole comparison as a document."""
    parts = [f"## {opening(comparison)}"]
    for grid in comparison.grids:
        parts += [each.markdown() for each in (found_table(grid), r_table(grid), magnitude_table(grid))]
    return "\n\n".join(parts)


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Drawn

    console.print(opening(comparison), highlight=False, markup=False)
    for each in tables(comparison):
        console.print(each.title, style="bold", highlight=False, markup=False)
        if each.columns:
            drawn = Drawn(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
            for k, name in enumerate(each.columns):
                drawn.add_column(name, justify="right" if k else "left", overflow="fold")
            for row in each.rows:
                drawn.add_row(*row)
            console.print(drawn, markup=False)
        for note in each.notes:
            console.print(note, highlight=False, markup=False)
        console.print()


def opening(comparison: Comparison) -> str:
    plan = comparison.plan
    return (
        f"{comparison.perturbation}: {plan.max_passes:,} passes and {plan.campaigns} "
        f"campaign{'s' if plan.campaigns > 1 else ''} a technique and magnitude"
    )


def found_table(grid: GridSummary) -> Table:
    """How many faults each technique found at the same cost, the most first."""
    rows = sorted(grid.rows, key=lambda row: -row.total["distinct_faults"][0] if row.total else 1.0)
    columns = ("technique", "distinct faults", "selected", "seeds", "raw", "tests", "coverage", "over the best rival")
    notes = [
        f"Sums over {len(grid.magnitudes)} magnitudes, means over campaigns with their least and most. Selected: "
        "distinct faults among tests that raised the criterion. Seeds: those that failed. Coverage is the technique's "
        "own; * it stood still for the last quarter of some campaigns. Over the best rival: distinct "
        f"faults as a ratio, with its 95% interval. {_rivals([(row.technique, row.total) for row in rows])}"
    ]
    if grid.note:
        notes.append(f"The grid: {grid.note}.")
    notes += _stop_notes(grid) + _fit_notes(grid) + _failures(grid)
    return Table(f"Faults found, {TITLES[grid.name]}", columns, [_found_row(row) for row in rows], notes)


def _found_row(row: Row) -> tuple[str, ...]:
    if not row.total:
        return (row.technique, "failed", *(NONE for _ in range(6)))
    total = row.total
    distinct, least, most = total["distinct_faults"]
    return (
        row.technique,
        f"{count(distinct)} ({count(least)}-{count(most)})" if least < most else count(distinct),
        NONE if total["selected_distinct"] is None else count(total["selected_distinct"]),
        count(total["failing_seeds"][0]),
        count(total["faults"][0]),
        count(total["tests"][0]),
        _coverage(row),
        figure(total["over_rival"], 2),
    )


def _coverage(row: Row) -> str:
    """The technique's own; some criteria are no shares. A star where it stood still."""
    score = row.total["coverage"]
    return (percent(score) if row.total["is_share"] else f"{score:.3g}") + ("*" if row.total["plateaus"] else "")


def r_table(grid: GridSummary) -> Table:
    """How well the faults found follow the error rate."""
    title = f"Correlation of faults with the error rate, {TITLES[grid.name]}"
    rates = f"Error rates {percent(min(grid.rates))} to {percent(max(grid.rates))} on the judge's seeds."
    if grid.degenerate is not None:
        note = f"Degenerate and not scored: {grid.degenerate}. {rates}"
        return Table(title, (), [], [note])
    has_mean = any(row.r.get("over_baselines") for row in grid.rows)
    last = ("over the four",) if has_mean else ()
    columns = ("technique", "r distinct", "r raw", "selected", "over the best rival", *last)
    rows = []
    for row in (ranked := sorted(grid.rows, key=lambda row: -_r(row))):
        cells = [
            row.technique,
            figure(row.r.get("distinct")),
            short(row.r.get("faults")),
            short(row.r.get("selected_distinct")),
            figure(row.r.get("over_rival"), signed=True),
        ]
        rows.append((*cells, *([figure(row.r.get("over_baselines"), 2, signed=True)] if has_mean else [])))
    notes = [
        f"{rates} Pearson's r over {len(grid.magnitudes)} magnitudes, of counts that are means over campaigns; 95% "
        "intervals by resampling seeds and campaigns, differences paired and of r distinct. Selected: r of distinct "
        f"faults among tests that raised the criterion. {NONE} is undefined: counts that are all the same, or no "
        f"criterion. {_rivals([(row.technique, row.r) for row in ranked])}"
    ]
    if has_mean:
        notes[0] += f" The four: the mean of {', '.join(BASELINES)}."
    return Table(title, columns, rows, notes + _failures(grid))


def magnitude_table(grid: GridSummary) -> Table:
    """Distinct faults by magnitude."""
    columns = ("magnitude", "error rate", *grid.counts)
    rows = [
        (f"{magnitude:g}", percent(rate), *(count(counts[k]) for counts in grid.counts.values()))
        for k, (magnitude, rate) in enumerate(zip(grid.magnitudes, grid.rates, strict=True))
    ]
    notes = [f"A span under {LEAST_SPAN:.2f}, also without any one magnitude, would be degenerate."]
    return Table(f"Distinct faults by magnitude, {TITLES[grid.name]}", columns, rows, notes)


def count(value: float) -> str:
    """A count, or a mean of counts."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def figure(values: Sequence[float | None] | None, digits: int = 3, *, signed: bool = False) -> str:
    """A value with its interval, as 0.95 (0.90..0.98)."""
    if values is None or values[0] is None:
        return NONE
    value, low, high = values
    sign = "+" if signed else ""
    if low is None or high is None:
        return f"{value:{sign}.{digits}f}"
    return f"{value:{sign}.{digits}f} ({low:{sign}.{digits}f}..{high:{sign}.{digits}f})"


def short(values: Sequence[float | None] | None) -> str:
    return NONE if values is None or values[0] is None else f"{values[0]:.3f}"


def _rivals(rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Who the best rival is, and who is its own."""
    rivals = {name: figures["rival"] for name, figures in rows if figures and figures["rival"] is not None}
    if not rivals:
        return ""
    best = next(reversed(rivals.values()))
    own = f", its own is {rivals[best]}" if best in rivals else ""
    return f"The best rival is {best}{own}."


def _r(row: Row) -> float:
    """Its r of distinct faults, to sort by: undefined comes last."""
    value = row.r["distinct"][0] if row.r else None
    return -2.0 if value is None else float(value)


def _stop_notes(grid: GridSummary) -> list[str]:
    """Who stopped before the passes were spent."""
    early = {
        row.technique: sum(n for why, n in row.total["stops"].items() if why != "passes")
        for row in grid.rows
        if row.total
    }
    said = [f"{name} in {n}" for name, n in early.items() if n]
    return [f"Stopped before all passes were spent: {', '.join(said)} campaigns."] if said else []


def _fit_notes(grid: GridSummary) -> list[str]:
    """What criteria cost before the first test."""
    said = [
        f"{row.technique} {row.total['fit_inputs']:,} ({row.total['fit_seconds']:.1f} s)"
        for row in grid.rows
        if row.total and row.total["fit_inputs"]
    ]
    return [f"Training inputs learnt from, not charged: {', '.join(said)}."] if said else []


def _failures(grid: GridSummary) -> list[str]:
    return [f"{row.technique} failed: {'; '.join(row.errors)}" for row in grid.rows if row.errors]
