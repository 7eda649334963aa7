"""A contest as a table, for a terminal and as Markdown, and as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from themis.experiments.comparison.table import NONE, Table, counted, figure, show_table
from themis.experiments.retraining.changes import Shift
from themis.experiments.retraining.techniques import THEMIS
from themis.judge.estimate import Estimate
from themis.runs.run import percent

if TYPE_CHECKING:
    from rich.console import Console

    from themis.experiments.retraining.compare import Contested, Standing

COLUMNS = (
    "technique",
    "disturbed",
    "gain",
    "themis above by",
    "over judge seeds",
    "clean",
    "faults",
    "seeds",
    "untouched",
)


def table(contested: Contested) -> Table:
    """How each technique came out, best first after themis."""
    before, terms = contested.before, contested.terms
    rows = [_row(each) for each in ranked(contested.standings)]
    shares = f"disturbed {percent(before['disturbed'])}, clean {percent(before['clean'])}"
    runs = counted(terms.random_seeds, "random seed")
    notes = [
        f"Before: {shares}, on {before['seeds']:,} judge seeds x {counted(before['draws'], 'draw')}. Each technique "
        f"searched for {terms.passes:,} passes, chose {counted(contested.inputs, 'input')} and trained by the same "
        f"recipe, {runs} each. Disturbed and clean: the mean after training with its least and most, in percent. Gain "
        "in points, with the 95% interval over random seeds (Student's t). Themis above by: its disturbed score less "
        "the technique's, paired by random seed, with that interval; over judge seeds: the same difference with a "
        "normal interval over these. Faults and seeds: those among the inputs chosen. Untouched: trainings of which no "
        "epoch was better on the seeds held out, so that the model was left as it came."
    ]
    notes += [
        f"{each.technique} failed: {'; '.join(each.errors)}" for each in contested.standings if each.errors
    ]  # fmt: skip
    if extra := _errors_table(contested):
        notes.append(extra)
    return Table(f"Retraining from what techniques choose, {contested.perturbation}", COLUMNS, rows, notes, SPARE)


SPARE = ("untouched", "seeds", "faults", "over judge seeds")


def ranked(standings: tuple[Standing, ...]) -> list[Standing]:
    """Themis first, then the others from the best down; last those that failed."""

    def rank(each: Standing) -> tuple[bool, float]:
        shift = each.shifts.get("disturbed")
        return each.technique != THEMIS, float("inf") if shift is None else -shift.after

    return sorted(standings, key=rank)


def markdown(contested: Contested) -> str:
    """The contest as Markdown."""
    return table(contested).markdown()


def show(contested: Contested, console: Console) -> None:
    """Print the table."""
    each = table(contested).within(console.width)
    notes = [note.replace("in table.md", "in contest.md") for note in each.notes]
    show_table(replace(each, notes=notes), console)


def draw(contested: Contested, path: Path) -> None:
    """Each technique's gain, a point a random seed's mean with both intervals."""
    from themis.runs.display.figure import INK, QUIET, blank_figure

    rows = [each for each in reversed(ranked(contested.standings)) if each.shifts]
    if not rows:
        return
    drawn = blank_figure(7.2, 1.4 + 0.38 * len(rows))
    axes = drawn.add_subplot()
    drawn.subplots_adjust(left=0.2, right=0.97, top=1 - 0.5 / (1.4 + 0.38 * len(rows)), bottom=0.24)
    for at, each in enumerate(rows):
        shift, colour = each.shifts["disturbed"], OWN if each.technique == THEMIS else INK
        _line(axes, shift.over_seeds, at - 0.12, QUIET, 1.2)
        if shift.over_runs is not None:
            _line(axes, shift.over_runs, at + 0.12, colour, 2.0)
        axes.plot(100 * shift.difference, at, marker="o", color=colour, markersize=6)
    axes.axvline(0, color=QUIET, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [each.technique for each in rows], color=INK)
    axes.set_xlabel("points of disturbed score gained; 95% over random seeds (thick), judge seeds (thin)", color=INK)
    axes.set_title(contested.perturbation, loc="left", color=INK, fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawn.savefig(path, dpi=130)


OWN = "#0072B2"


def _line(axes: object, interval: Estimate, at: float, colour: str, width: float) -> None:
    ends = [100 * interval.low, 100 * interval.high]
    axes.plot(ends, [at, at], color=colour, linewidth=width)  # type: ignore[attr-defined]


def _row(each: Standing) -> tuple[str, ...]:
    if not each.shifts:
        return (each.technique, "failed", *(NONE for _ in COLUMNS[2:]))
    disturbed, lead = each.shifts["disturbed"], each.lead
    return (
        each.technique,
        _spread(disturbed),
        _points(disturbed.over_runs, disturbed.difference),
        NONE if lead is None else _points(lead.over_runs, lead.over_seeds.value),
        NONE if lead is None else _points(lead.over_seeds, lead.over_seeds.value),
        _spread(each.shifts["clean"]),
        f"{each.figures['faults_chosen']:,.0f}",
        f"{each.figures['seeds_chosen']:,.0f}",
        f"{each.figures['untouched']:,.0f} of {each.n_runs}",
    )


def _errors_table(contested: Contested) -> str:
    """Mean absolute errors in a sentence, in tasks whose answer is a number."""
    said = [
        f"{each.technique} {each.shifts['disturbed_error'].after:.4g}"
        for each in ranked(contested.standings)
        if "disturbed_error" in each.shifts
    ]
    before = contested.before["disturbed_error"]
    return f"Mean absolute error, disturbed: {before:.4g} before; {', '.join(said)}." if said else ""


def _spread(shift: Shift) -> str:
    return f"{100 * shift.after:.2f} ({100 * shift.least:.2f}-{100 * shift.most:.2f})"


def _points(interval: Estimate | None, value: float) -> str:
    if interval is None:
        return figure([100 * value, None, None], 2, signed=True)
    return figure([100 * interval.value, 100 * interval.low, 100 * interval.high], 2, signed=True)
