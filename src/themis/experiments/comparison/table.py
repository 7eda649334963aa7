"""A comparison as tables: for a terminal 100 columns wide, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from themis.experiments.comparison.plan import BASELINES
from themis.experiments.comparison.statistics import LEAST_FAULTS, LEAST_SPAN, MOST_UNDEFINED
from themis.experiments.comparison.summary import GridSummary, Row
from themis.runs.run import percent

if TYPE_CHECKING:
    from rich.console import Console

    from themis.experiments.comparison.comparing import Comparison

NONE = "-"
FEW_SEEDS = 50
"""Of a part, under which a caution is given."""
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
    spare: tuple[str, ...] = ()
    """Columns that a narrow terminal does without, the first at first."""

    def markdown(self) -> str:
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows] if self.columns else []
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"### {self.title}", *([table] if table else []), *self.notes])

    def within(self, width: int) -> Table:
        """The same without as many of its spare columns as it takes to fit."""
        left, columns, rows = list(self.spare), self.columns, self.rows
        while left and sum(max(map(len, each)) + 2 for each in zip(columns, *rows, strict=True)) > width:
            at = columns.index(left.pop(0))
            columns, *rows = [each[:at] + each[at + 1 :] for each in (columns, *rows)]
        gone = self.spare[: len(self.spare) - len(left)]
        notes = [*self.notes, f"Left out at this width, in table.md: {', '.join(gone)}."] if gone else self.notes
        return Table(self.title, columns, rows, notes, tuple(left))


def tables(comparison: Comparison) -> list[Table]:
    """Faults found and correlations of each grid."""
    return [table for grid in comparison.grids for table in (found_table(grid), r_table(grid))]


def markdown(comparison: Comparison) -> str:
    """The whole comparison as a document."""
    first, *others = opening(comparison)
    parts = [f"## {first}", *others]
    for grid in comparison.grids:
        parts += [each.markdown() for each in (found_table(grid), r_table(grid), magnitude_table(grid))]
    return "\n\n".join(parts)


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables."""
    for line in opening(comparison):
        console.print(line, highlight=False, markup=False)
    console.print()
    for each in tables(comparison):
        show_table(each.within(console.width), console)
        console.print()


def show_table(table: Table, console: Console) -> None:
    """Print one table with what is said below it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Drawn

    console.print(table.title, style="bold", highlight=False, markup=False)
    if table.columns:
        drawn = Drawn(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for k, name in enumerate(table.columns):
            drawn.add_column(name, justify="right" if k else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn, markup=False)
    for note in table.notes:
        console.print(note, highlight=False, markup=False)


def opening(comparison: Comparison) -> list[str]:
    """What was done on which seeds, and a caution where they are few."""
    plan, seeds = comparison.plan, comparison.seeds
    said = [
        f"{comparison.perturbation}: {plan.max_passes:,} passes and {counted(plan.campaigns, 'campaign')} a technique "
        "and magnitude"
    ]
    if seeds:
        parts = ", ".join(f"{n:,} of the {name}" for name, n in seeds.items())
        said.append(f"Seeds that the model answers rightly: {parts}.")
    if few := [name for name, n in seeds.items() if n < FEW_SEEDS]:
        said.append(f"Caution: under {FEW_SEEDS} seeds of the {' and the '.join(few)}, so that figures say little.")
    return said


def found_table(grid: GridSummary) -> Table:
    """How many faults each technique found at the same cost."""
    rows = grid.rows
    columns = ("technique", "distinct faults", "selected", "seeds", "raw", "tests", "coverage", "over the best rival")
    values = {row.technique: row.total["distinct_faults"][0] for row in rows if row.total}
    notes = [
        f"Sums over {counted(len(grid.magnitudes), 'magnitude')}, means over campaigns with their least and most. "
        "Selected: distinct faults among tests that raised the criterion. Seeds: those that failed. Coverage is the "
        "technique's own. Over the best rival: distinct faults as a ratio, with its 95% interval. "
        f"{_rivals(values, {row.technique: row.total.get('rivals', []) for row in rows})}".strip()
    ]
    notes += [*_still_notes(grid), *_interval_notes(grid)]
    if grid.note:
        notes.append(f"The grid: {grid.note}.")
    notes += _stop_notes(grid) + _fit_notes(grid) + _failures(grid)
    title = f"Faults found, {TITLES[grid.name]}"
    return Table(title, columns, [_found_row(row) for row in rows], notes, ("seeds", "raw", "tests"))


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
    return (percent(score) if row.total["is_share"] else f"{score:.3g}") + ("*" if _stood_still(row) else "")


def _stood_still(row: Row) -> bool:
    """In most campaigns."""
    return bool(row.total) and 2 * row.total["plateaus"] > row.n_cells


def r_table(grid: GridSummary) -> Table:
    """How well the faults found follow the error rate."""
    title = f"Correlation of faults with the error rate, {TITLES[grid.name]}"
    rates = f"Error rates {percent(min(grid.rates))} to {percent(max(grid.rates))} on the judge's seeds."
    if grid.degenerate is not None:
        note = f"Degenerate and not scored: {grid.degenerate}. {rates}"
        return Table(title, (), [], [note])
    has_mean = any((row.r.get("over_baselines") or [None])[0] is not None for row in grid.rows)
    last = ("over the four",) if has_mean else ()
    columns = ("technique", "r distinct", "r raw", "selected", "over the best rival", *last)
    rows = []
    for row in grid.rows:
        cells = [
            row.technique,
            figure(row.r.get("distinct")),
            short(row.r.get("faults")),
            short(row.r.get("selected_distinct")),
            figure(row.r.get("over_rival"), signed=True),
        ]
        rows.append((*cells, *([figure(row.r.get("over_baselines"), signed=True)] if has_mean else [])))
    values = {row.technique: row.r["distinct"][0] for row in grid.rows if row.r and row.r["distinct"][0] is not None}
    notes = [
        f"{rates} Pearson's r over {counted(len(grid.magnitudes), 'magnitude')}, of counts that are means over "
        "campaigns; 95% intervals by resampling seeds and campaigns, differences paired and of r distinct. Selected: "
        f"r of distinct faults among tests that raised the criterion. {NONE} is no r: fewer than {LEAST_FAULTS} "
        f"distinct faults a campaign over all magnitudes, counts that are all the same, also in over "
        f"{MOST_UNDEFINED:.0%} of the resamples, or no criterion. "
        f"{_rivals(values, {row.technique: row.r.get('rivals', []) for row in grid.rows})}".strip()
    ]
    if has_mean:
        notes[0] += f" The four: the mean of {', '.join(BASELINES)} at the paper's settings."
    spare = ("r raw", *last, "selected")
    return Table(title, columns, rows, [*notes, *_interval_notes(grid), *_failures(grid)], spare)


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


def counted(n: int, what: str) -> str:
    """As 1 campaign, 2 campaigns."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def number(value: float, digits: int = 3, *, signed: bool = False) -> str:
    """Rounded; what rounds to nothing has no sign."""
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text if float(text) else text.lstrip("+-")


def figure(values: Sequence[float | None] | None, digits: int = 3, *, signed: bool = False) -> str:
    """A value with its interval, as 0.95 (0.90..0.98)."""
    value, low, high = values or (None, None, None)
    if value is None:
        return NONE
    said = number(value, digits, signed=signed)
    if low is None or high is None:
        return said
    return f"{said} ({number(low, digits, signed=signed)}..{number(high, digits, signed=signed)})"


def short(values: Sequence[float | None] | None) -> str:
    value = None if values is None else values[0]
    return NONE if value is None else number(value)


def _rivals(values: dict[str, float], rivals: dict[str, list[str]]) -> str:
    """Who the best rival is, and who is its own; several where they are equal."""
    best = [name for name, value in values.items() if value == max(values.values())]
    if not best or not any(best[0] in each for each in rivals.values()):
        return ""
    if len(best) > 1:
        return f"The best rivals are {', '.join(best[:-1])} and {best[-1]}, equal."
    own = f", its own is {' or '.join(rivals[best[0]])}" if rivals[best[0]] else ""
    return f"The best rival is {best[0]}{own}."


def _still_notes(grid: GridSummary) -> list[str]:
    """Whose coverage stood still, and how often."""
    said = [f"{row.technique} in {row.total['plateaus']} of {row.n_cells}" for row in grid.rows if _stood_still(row)]
    return [f"* Coverage stood still for the last quarter of most campaigns: {', '.join(said)}."] if said else []


def _interval_notes(grid: GridSummary) -> list[str]:
    """What the intervals hold."""
    if max(row.n_cells for row in grid.rows) <= len(grid.magnitudes):
        return ["With one campaign the intervals hold seeds only, not how campaigns differ."]
    return ["The intervals err on the wide side, except where campaigns differ much."]


def _stop_notes(grid: GridSummary) -> list[str]:
    """Who stopped before the passes were spent."""
    early = {
        row.technique: sum(n for why, n in row.total["stops"].items() if why != "passes")
        for row in grid.rows
        if row.total
    }
    said = [f"{name} in {counted(n, 'campaign')}" for name, n in early.items() if n]
    return [f"Stopped before all passes were spent: {', '.join(said)}."] if said else []


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
