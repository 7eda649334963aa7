"""A comparison as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from themis.report.table import NONE, Table, format_count, format_estimate, format_value
from themis.runs.run import counted, percent
from themis.text import printable
from themis_lab.comparison.statistics import LEAST_FAULTS, LEAST_SPAN, MOST_UNDEFINED
from themis_lab.comparison.summary import Comparison, GridSummary, Row
from themis_lab.techniques import BASELINES

if TYPE_CHECKING:
    from rich.console import Console

FEW_SEEDS = 50
"""A part with fewer seeds than this gets a warning."""
TITLES = {
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
    """What was run on which seeds, with a warning if there are few of them."""
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
    """How many faults each technique found at the same cost."""
    rows = grid.rows
    columns = ("technique", "distinct faults", "selected", "seeds", "raw", "tests", "coverage", "over the best rival")
    values = {row.technique: row.total["distinct_faults"][0] for row in rows if row.total}
    notes = [
        f"Sums over {counted(len(grid.magnitudes), 'magnitude')}; means over campaigns, with least and most. "
        "Selected: distinct faults among tests that raised the criterion. Seeds: those that failed. Coverage: the "
        "technique's own. Over the best rival: the ratio of distinct faults, with its 95% interval. "
        f"{_best_rival(values, {row.technique: row.total.get('rivals', []) for row in rows})}".strip()
    ]
    notes += [*_plateau_notes(grid), *_interval_notes(grid)]
    if grid.note:
        notes.append(f"The grid: {grid.note}.")
    notes += _stop_notes(grid) + _fit_notes(grid) + _failures(grid)
    title = f"Faults found, {TITLES[grid.name]}"
    return Table(title, columns, [_fault_row(row) for row in rows], notes, ("seeds", "raw", "tests"))


def _fault_row(row: Row) -> tuple[str, ...]:
    if not row.total:
        return (row.technique, "failed", *(NONE for _ in range(6)))
    total = row.total
    mean, least, most = total["distinct_faults"]
    spread = f" ({format_count(least)}-{format_count(most)})" if least < most else ""
    return (
        row.technique,
        f"{format_count(mean)}{spread}",
        NONE if total["selected_distinct"] is None else format_count(total["selected_distinct"]),
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
    """Whether coverage stopped rising early in most campaigns."""
    return bool(row.total) and 2 * row.total["plateaus"] > row.n_cells


def r_table(grid: GridSummary) -> Table:
    """How well the faults found follow the error rate, under both of its definitions."""
    title = f"Correlation of faults with the error rate, {TITLES[grid.name]}"
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
        f"all faults, under both definitions. {NONE} means that r is undefined: no criterion, fewer than "
        f"{LEAST_FAULTS} distinct faults per campaign over all magnitudes, or equal counts at all magnitudes, as "
        f"measured or in more than {MOST_UNDEFINED:.0%} of the resamples. {_lead_note(grid)}"
    ]
    if has_mean:
        notes[0] += f" The four: the mean of {', '.join(BASELINES)} at the paper's settings."
    optional = (*reversed(DIFFERENCES), "r raw", "selected", *four)
    return Table(title, columns, rows, [*rates, *notes, *_interval_notes(grid), *_failures(grid)], optional)


def _rate_notes(grid: GridSummary) -> list[str]:
    """The error rates under both definitions, and which of them do not allow a correlation."""
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
    return NONE


def _lead_note(grid: GridSummary) -> str:
    """Which technique is ahead of all others in r; under one definition alone, none is."""
    for row in grid.rows:
        if row.r_lead["over_rival"] == "ahead":
            return f"In r, {row.technique} is ahead of all others under both definitions."
    best = {}
    for where, name in (("at full strength", "r"), ("over the whole range", "r_box")):
        values = {row.technique: (getattr(row, name).get("distinct") or [None])[0] for row in grid.rows}
        defined = {technique: value for technique, value in values.items() if value is not None}
        if defined:
            best[where] = max(defined, key=lambda technique: defined[technique])
    if len(best) < 2:
        return "No lead in r is stated, because only one definition of the error rate can be scored." if best else ""
    values_text = " and ".join(f"{technique} {where}" for where, technique in best.items())
    return f"No technique is ahead of all others in r under both definitions; the highest values are of {values_text}."


def _pair(both: tuple[dict[str, Any], dict[str, Any]], name: str) -> str:
    """A correlation under both definitions."""
    values = [format_value(r.get(name)) for r in both]
    return NONE if set(values) == {NONE} else " / ".join(values)


def magnitude_table(grid: GridSummary) -> Table:
    """Distinct faults by magnitude."""
    columns = ("magnitude", "error rate", "over the range", *grid.counts)
    rows = [
        (f"{magnitude:g}", percent(rate), percent(box), *(format_count(counts[k]) for counts in grid.counts.values()))
        for k, (magnitude, rate, box) in enumerate(zip(grid.magnitudes, grid.rates, grid.box_rates, strict=True))
    ]
    notes = [
        "Error rates at full strength, and as a mean over the range of theta that techniques search. A grid whose "
        f"error rates span less than {LEAST_SPAN:.2f}, even without any one of them, is degenerate."
    ]
    return Table(f"Distinct faults by magnitude, {TITLES[grid.name]}", columns, rows, notes)


def _best_rival(values: dict[str, float], rivals: dict[str, list[str]]) -> str:
    """Which technique is the best rival of the others, and which one is its rival; several if they are equal."""
    best = [name for name, value in values.items() if value == max(values.values())]
    if not best or not any(best[0] in names for names in rivals.values()):
        return ""
    if len(best) > 1:
        return f"The best rivals are {', '.join(best[:-1])} and {best[-1]}, which are equal."
    own = f"; it is itself compared with {' or '.join(rivals[best[0]])}" if rivals[best[0]] else ""
    return f"The best rival is {best[0]}{own}."


def _plateau_notes(grid: GridSummary) -> list[str]:
    """Which techniques reached a plateau, and how often."""
    texts = [f"{row.technique} in {row.total['plateaus']} of {row.n_cells}" for row in grid.rows if _has_plateau(row)]
    return [f"* Coverage did not rise in the last quarter of most campaigns: {', '.join(texts)}."] if texts else []


def _interval_notes(grid: GridSummary) -> list[str]:
    """What the intervals account for."""
    if max(row.n_cells for row in grid.rows) <= len(grid.magnitudes):
        return ["With one campaign, the intervals account for the choice of seeds only, not for the campaigns."]
    return ["The intervals tend to be too wide, unless campaigns differ a lot."]


def _stop_notes(grid: GridSummary) -> list[str]:
    """Which techniques stopped before all passes were spent."""
    early = {
        row.technique: sum(n for reason, n in row.total["stops"].items() if reason != "passes")
        for row in grid.rows
        if row.total
    }
    texts = [f"{name} in {counted(n, 'campaign')}" for name, n in early.items() if n]
    return [f"Stopped before all passes were spent: {', '.join(texts)}."] if texts else []


def _fit_notes(grid: GridSummary) -> list[str]:
    """What criteria cost before the first test."""
    texts = [
        f"{row.technique} {row.total['fit_inputs']:,} ({row.total['fit_seconds']:.1f} s)"
        for row in grid.rows
        if row.total and row.total["fit_inputs"]
    ]
    return [f"Training inputs that criteria were fitted to, at no charge: {', '.join(texts)}."] if texts else []


def _failures(grid: GridSummary) -> list[str]:
    return [f"{row.technique} failed: {'; '.join(row.errors)}" for row in grid.rows if row.errors]
