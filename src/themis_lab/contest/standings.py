"""The result of a contest by technique, as data, as a table and as a figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.judge.estimate import Estimate
from themis.report.table import NO_VALUE, Table
from themis.retraining.changes import Shift, combine, normal_interval, paired, t_interval
from themis.retraining.examine import Reading
from themis.retraining.recipe import Recipe
from themis.text import counted, percent
from themis_lab.comparison.statistics import format_estimate
from themis_lab.contest.cells import STORED, Record, columns_of
from themis_lab.contest.plan import THEMIS, ContestPlan

if TYPE_CHECKING:
    from rich.console import Console

TABLE_FILE = "contest.md"
HEADINGS = (
    "technique",
    "disturbed",
    "gain",
    "themis above by",
    "over judge seeds",
    "clean",
    "faults",
    "seeds",
    "unchanged",
)
OPTIONAL_HEADINGS = ("unchanged", "seeds", "faults", "over judge seeds")
OWN_COLOUR = "#0072B2"


@dataclass(frozen=True)
class Lead:
    """The lead of themis over a rival, paired by random seed and judge seed."""

    over_runs: Estimate | None
    """Over random seeds: Student's t interval of the difference of the scores; None if there is one, or all agree."""
    over_seeds: Estimate | None
    """Over judge seeds: normal interval of the difference of each seed, a mean over random seeds. None if all agree."""
    combined: Estimate | None
    """Over random seeds and judge seeds, as far as either is known; None if neither is."""
    value: float


@dataclass(frozen=True)
class Standing:
    """The results of a technique, as means over random seeds."""

    technique: str
    n_runs: int
    errors: tuple[str, ...]
    figures: dict[str, float | None] = field(default_factory=dict)
    """Inputs chosen, the faults and seeds among them, distinct faults found, and the number of trainings that left the
    model unchanged; if there were campaigns on the judge seeds, also what they found and the share of faults mended."""
    shifts: dict[str, Shift] = field(default_factory=dict)
    """Before and after, by column: clean, disturbed, and for regression clean_error and disturbed_error."""
    lead: Lead | None = None
    """The lead of themis in the disturbed score over this technique; None for themis itself."""
    clean_lead: Lead | None = None


@dataclass(frozen=True)
class Contested:
    """A finished contest."""

    perturbation: str
    plan: ContestPlan
    recipe: Recipe
    inputs: int
    before: Record
    standings: tuple[Standing, ...]
    environment: Record = field(repr=False)
    records: list[Record] = field(repr=False)

    def as_dict(self) -> Record:
        """Plain data, as written to `contest.json`; columns per judge seed are only in the files of the cells."""
        return {
            "perturbation": self.perturbation,
            "terms": self.plan.as_dict(),
            "recipe": self.recipe.as_dict(),
            "inputs": self.inputs,
            "before": self.before,
            "standings": [asdict(standing) for standing in self.standings],
            "environment": self.environment,
            "cells": [{name: value for name, value in record.items() if name != "by_seed"} for record in self.records],
        }


def summarise(
    perturbation: str, plan: ContestPlan, recipe: Recipe, before: Reading, records: list[Record], environment: Record
) -> Contested:
    """The standing of each technique, from the records of its cells."""
    original = {name: np.array(column) for name, column in columns_of(before).items()}  # rounded as those of the cells
    finished = [record for record in records if "error" not in record]
    themis = {record["random_seed"]: record for record in finished if record["technique"] == THEMIS}
    standings = []
    for technique in plan.chosen():
        name = technique.name
        errors = [record["error"] for record in records if record["technique"] == name and "error" in record]
        own = [record for record in finished if record["technique"] == name]
        reasons = tuple(dict.fromkeys(errors))
        if not own:
            standings.append(Standing(name, 0, reasons))
            continue
        shifts = {column: paired(original[column], _stack(own, column)) for column in STORED if column in original}
        rivals = [record for record in own if name != THEMIS and record["random_seed"] in themis]
        pairs = [themis[record["random_seed"]] for record in rivals]
        leads = [_lead(pairs, rivals, column) for column in ("disturbed", "clean")]
        standings.append(Standing(name, len(own), reasons, _means(own), shifts, *leads))
    return Contested(
        perturbation, plan, recipe, plan.inputs or 0, before.as_dict(), tuple(standings), environment, records
    )


def _lead(themis: list[Record], rivals: list[Record], column: str) -> Lead | None:
    if not themis:
        return None
    difference = _stack(themis, column) - _stack(rivals, column)
    over_runs, over_seeds = t_interval(difference.mean(1)), normal_interval(difference.mean(0))
    return Lead(over_runs, over_seeds, combine(over_seeds, over_runs), float(difference.mean()))


def _stack(records: list[Record], column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One column of all records: `[records, judge seeds]`."""
    return np.array([record["by_seed"][column] for record in records])


def _means(records: list[Record]) -> dict[str, float | None]:
    """Means over random seeds; None if something was not measured."""
    names = ("inputs", "faults_chosen", "seeds_chosen", "faults_found", "seeds_found")
    means: dict[str, float | None] = {name: float(np.mean([record[name] for record in records])) for name in names}
    means["untouched"] = float(sum(not record["best_epoch"] for record in records))
    for name in ("distinct_faults", "failing_seeds", "held", "mended"):
        values = [record["reading"][name] for record in records]
        means[name] = None if None in values else float(np.mean(values))
    return means


def ranked(standings: tuple[Standing, ...]) -> list[Standing]:
    """Themis first, then the other techniques from best to worst, and last those that failed."""

    def rank(standing: Standing) -> tuple[bool, float]:
        shift = standing.shifts.get("disturbed")
        return standing.technique != THEMIS, float("inf") if shift is None else -shift.after

    return sorted(standings, key=rank)


def contest_table(contested: Contested) -> Table:
    """The table of the results by technique."""
    before, plan = contested.before, contested.plan
    rows = [_row(standing) for standing in ranked(contested.standings)]
    scores = f"disturbed {percent(before['disturbed'])}, clean {percent(before['clean'])}"
    runs = counted(plan.random_seeds, "random seed")
    sources = "random seeds and judge seeds" if plan.random_seeds > 1 else "judge seeds alone"
    notes = [
        f"Before: {scores}, on {before['seeds']:,} judge seeds x {counted(before['draws'], 'draw')}. Each technique "
        f"searched for {plan.passes:,} passes, chose {counted(contested.inputs, 'input')} and trained with the same "
        f"recipe, with {runs} each. Disturbed and clean: the mean score after training, with least and most, in "
        f"percent. Gain: in points, with the 95% interval over {sources}. Themis above by: its "
        "disturbed score minus the technique's, paired by random seed and judge seed, with the same interval; over "
        "judge seeds: the same difference with the interval over judge seeds alone. A difference without an interval "
        "is one that is equal for all of them. Faults and seeds: those among the chosen inputs. "
        "Unchanged: trainings in which no epoch was better on the seeds held out, so the original model was kept."
    ]
    notes += [
        f"{standing.technique} failed: {'; '.join(standing.errors)}"
        for standing in contested.standings
        if standing.errors
    ]
    if note := _error_note(contested):
        notes.append(note)
    title = f"Retraining from what techniques choose, {contested.perturbation}"
    return Table(title, HEADINGS, rows, notes, OPTIONAL_HEADINGS, TABLE_FILE)


def markdown(contested: Contested) -> str:
    """The contest as Markdown."""
    return contest_table(contested).markdown()


def show(contested: Contested, console: Console) -> None:
    """Print the table."""
    contest_table(contested).show(console)


def draw(contested: Contested, path: Path) -> None:
    """The gain of each technique, with both intervals."""
    from themis.runs.display.figure import BLACK, GREY, blank_figure, save_figure

    rows = [standing for standing in reversed(ranked(contested.standings)) if standing.shifts]
    if not rows:
        return
    height = 1.4 + 0.38 * len(rows)
    figure = blank_figure(7.2, height)
    axes = figure.add_subplot()
    figure.subplots_adjust(left=0.2, right=0.97, top=1 - 0.5 / height, bottom=0.24)
    for y, standing in enumerate(rows):
        shift, colour = standing.shifts["disturbed"], OWN_COLOUR if standing.technique == THEMIS else BLACK
        _draw_interval(axes, shift.over_seeds, y - 0.12, GREY, 1.2)
        _draw_interval(axes, shift.combined, y + 0.12, colour, 2.0)
        axes.plot(100 * shift.difference, y, marker="o", color=colour, markersize=6)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [standing.technique for standing in rows], color=BLACK)
    axes.set_xlabel("gain in disturbed score, points; 95% over both (thick), judge seeds alone (thin)", color=BLACK)
    axes.set_title(contested.perturbation, loc="left", color=BLACK, fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_figure(figure, path, dpi=130)


def _draw_interval(axes: Any, interval: Estimate | None, y: float, colour: str, width: float) -> None:
    if interval is not None:
        axes.plot([100 * interval.low, 100 * interval.high], [y, y], color=colour, linewidth=width)


def _row(standing: Standing) -> tuple[str, ...]:
    if not standing.shifts:
        return (standing.technique, "failed", *(NO_VALUE for _ in HEADINGS[2:]))
    disturbed, lead, figures = standing.shifts["disturbed"], standing.lead, standing.figures
    return (
        standing.technique,
        _spread(disturbed),
        _points(disturbed.combined, disturbed.difference),
        NO_VALUE if lead is None else _points(lead.combined, lead.value),
        NO_VALUE if lead is None else _points(lead.over_seeds, lead.value),
        _spread(standing.shifts["clean"]),
        f"{figures['faults_chosen']:,.0f}",
        f"{figures['seeds_chosen']:,.0f}",
        f"{figures['untouched']:,.0f} of {standing.n_runs}",
    )


def _error_note(contested: Contested) -> str:
    """The mean absolute errors in a sentence, for regression."""
    texts = [
        f"{standing.technique} {standing.shifts['disturbed_error'].after:.4g}"
        for standing in ranked(contested.standings)
        if "disturbed_error" in standing.shifts
    ]
    before = contested.before["disturbed_error"]
    return f"Mean absolute error, disturbed: {before:.4g} before; {', '.join(texts)}." if texts else ""


def _spread(shift: Shift) -> str:
    return f"{100 * shift.after:.2f} ({100 * shift.least:.2f}-{100 * shift.most:.2f})"


def _points(interval: Estimate | None, value: float) -> str:
    if interval is None:
        return format_estimate([100 * value, None, None], 2, signed=True)
    return format_estimate([100 * interval.value, 100 * interval.low, 100 * interval.high], 2, signed=True)
