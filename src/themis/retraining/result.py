"""The result of a retraining: all measurements before and after on judge seeds, as tables and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.judge.estimate import Estimate
from themis.report.table import NONE, Table, format_count, format_number
from themis.retraining.changes import Changes, Shift, changes, corruption_error, paired
from themis.retraining.examine import Reading
from themis.retraining.frontier import FrontierPoint, is_still_rising, join_frontiers, next_point, point_at
from themis.retraining.recipe import Recipe, RetrainingPlan
from themis.retraining.tune import TrainedModel
from themis.runs.display.figure import INK, QUIET, blank_figure
from themis.target.ledger import Ledger
from themis.target.target import Target
from themis.text import counted, percent, printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class RetrainingOutcome:
    """One perturbation at one magnitude: the original model, and every trained one."""

    name: str
    before: Reading
    after: tuple[Reading, ...]
    """One per random seed."""

    @cached_property
    def change(self) -> Changes:
        """All measurements before and after, with intervals."""
        return changes(self.before, self.after)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "before": self.before.as_dict(),
            "after": [reading.as_dict() for reading in self.after],
            "change": asdict(self.change),
        }


@dataclass(frozen=True)
class Stage:
    """One round: the number of faults learned from, the trained models, and their results on the judge seeds."""

    number: int
    n_faults: int
    """The number of faults that the models learned from."""
    models: tuple[TrainedModel, ...]
    outcomes: tuple[RetrainingOutcome, ...]
    """The first is for the run's own perturbation."""
    campaign: dict[str, Any] | None = None
    """The campaign on the search seeds that follows the round: its folder and its faults."""

    @property
    def chosen(self) -> int:
        """The index of the model that is returned: the best on the seeds held out, which no result comes from."""
        return max(range(len(self.models)), key=lambda k: self.models[k].held_out)

    @property
    def model(self) -> TrainedModel:
        return self.models[self.chosen]

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The mean frontier of all models; they are at the same point of it."""
        return join_frontiers([model.frontier for model in self.models])

    @property
    def point(self) -> FrontierPoint:
        """The point of the mean frontier that the models are at."""
        return point_at(self.frontier, self.model.share)

    @property
    def next(self) -> FrontierPoint | None:
        """The next point that was measured and gains more; None if there is none."""
        return next_point(self.frontier, self.model.share)

    @property
    def fault_rate(self) -> float:
        """The share of the uniform tests of judge seeds that the chosen model answers incorrectly."""
        return 1 - self.outcomes[0].after[self.chosen].disturbed_score

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "round": self.number,
            "faults_learnt_from": self.n_faults,
            "fault_rate": self.fault_rate,
            "chosen": self.models[self.chosen].random_seed,
            "frontier": [asdict(point) for point in self.frontier],
            "point": asdict(self.point),
            "models": [model.as_dict() for model in self.models],
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
            "campaign": self.campaign,
        }


@dataclass(frozen=True)
class Retrained:
    """A finished retraining."""

    plan: RetrainingPlan
    recipe: Recipe
    perturbation: str
    stages: tuple[Stage, ...]
    """One per round."""
    kept: int
    """The index of the round whose model is returned."""
    stop: str
    """Why the rounds ended, as a sentence; empty if there was only one round."""
    verdict: tuple[str, ...]
    """The result in sentences; a clean score that fell too far comes first."""
    has_failed: bool
    """Whether the clean score fell by more than the tolerance, and by more than chance."""
    seeds: dict[str, int]
    """The number of seeds in each part."""
    weights: Path | None
    about: dict[str, Any] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    n_trained: int = 1
    """The number of runs, whose perturbations were trained on: the first outcomes."""

    def __repr__(self) -> str:
        return f"<Retrained: {' '.join(self.verdict)}>"

    def _repr_markdown_(self) -> str:
        return markdown(self)

    @property
    def stage(self) -> Stage:
        """The round whose model is returned."""
        return self.stages[self.kept]

    @property
    def outcomes(self) -> tuple[RetrainingOutcome, ...]:
        """Before and after, by perturbation; the first are those of the runs."""
        return self.stage.outcomes

    @property
    def gain(self) -> float:
        """How far the disturbed score on judge seeds rose, mean over random seeds and the runs' perturbations."""
        return mean_score(self.outcomes[: self.n_trained]).difference

    @property
    def mce(self) -> Shift | None:
        """The mean corruption error over the runs' perturbations, relative to the original model, which has 1."""
        return mce(self.outcomes[: self.n_trained])

    @property
    def target(self) -> Target:
        """The retrained model of the random seed that was best on the seeds held out."""
        return self.stage.model.target

    @property
    def ledger(self) -> Ledger:
        """All seeds that its weights were trained on."""
        return self.stage.model.ledger

    def summary(self) -> dict[str, Any]:
        """Plain data, as written to `retrain.json`."""
        return {
            "verdict": list(self.verdict),
            "clean_fell": self.has_failed,
            "perturbation": self.perturbation,
            "seeds": self.seeds,
            "kept_round": self.stage.number,
            "kept_random_seed": self.stage.model.random_seed,
            "weights": None if self.weights is None else str(self.weights),
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
            "mce": None if self.mce is None else asdict(self.mce),
            "rounds": [stage.as_dict() for stage in self.stages],
            "stop": self.stop or None,
            "plan": self.plan.as_dict(),
            "recipe": self.recipe.as_dict(),
            "source": self.about,
            "environment": self.environment,
        }


NO_INTERVAL = "interval unknown"
"""Stands for the interval of a difference if all judge seeds and trainings agree."""
EQUAL_SCORES = 5e-6
"""Scores that differ by less are equal: so much is lost in the sums of their means, and no digit shows it."""
MEASUREMENTS = (
    ("clean", "clean score", 1),
    ("disturbed", "disturbed score", 1),
    ("clean_error", "clean error, absolute", None),
    ("disturbed_error", "disturbed error, absolute", None),
    ("held", "withstood a campaign", 1),
    ("distinct_faults", "distinct faults found", 0),
    ("failing_seeds", "failing seeds", 0),
    ("strength", "smallest breaking strength", None),
)
"""What a table shows: the name in `Changes`, the label, and the digits, as in `_row`."""
MAX_CASES = 3
"""Perturbations that have a column of their own in the table of the frontier, at most."""
OUTCOME_COLUMNS = ("on judge seeds", "before", "after", "difference (95%)", "random seeds")


def mean_score(outcomes: Sequence[RetrainingOutcome]) -> Shift:
    """The disturbed score, a mean over perturbations."""
    after = [np.stack([reading.disturbed for reading in outcome.after]) for outcome in outcomes]
    return paired(np.mean([outcome.before.disturbed for outcome in outcomes], 0), np.mean(after, 0))


def mce(outcomes: Sequence[RetrainingOutcome]) -> Shift | None:
    """The mean corruption error over perturbations, relative to the original model."""
    return corruption_error([outcome.before for outcome in outcomes], [outcome.after for outcome in outcomes])


def verdict(
    outcomes: Sequence[RetrainingOutcome], tolerance: float, chosen: int = 0, n_trained: int = 1
) -> tuple[tuple[str, ...], bool]:
    """The result in sentences, and whether the clean score fell too far, which then comes first.

    It must not fall by more than the tolerance and more than chance, on average over random seeds, nor for the model
    `chosen`, which is returned. The first `n_trained` outcomes are of perturbations that were trained on.
    """
    clean = outcomes[0].change.clean
    before, after = outcomes[0].before.clean, outcomes[0].after[chosen].clean
    own = paired(before, after[None])
    sentences = [
        f"THE CLEAN SCORE {whose}FELL {change_words(shift)}, more than the tolerance of {points(tolerance, 2)}: use "
        "more clean seeds, or a smaller --tolerance."
        for whose, shift in (("", clean), ("OF THE RETURNED MODEL ", own))
        if shift.difference < -tolerance and (shift.combined is None or shift.combined.high < 0)
    ][:1]
    has_fallen = bool(sentences)
    if n_trained > 1:
        sentences += _summary(outcomes[:n_trained])
        outcomes = outcomes[n_trained:]
    for outcome in outcomes:
        sentences.append(_gain(outcome.name, outcome.change.disturbed))
        if outcome.change.words:
            sentences.append(f"{outcome.name}: {outcome.change.words}")
    if not has_fallen:
        sentences.append(f"The clean score {_clean_change(clean, tolerance)}.")
    return tuple(sentences), has_fallen


def _clean_change(shift: Shift, tolerance: float) -> str:
    before, after = percent(shift.before), percent(shift.after)
    if before == after:
        return f"stayed at {after}"
    text = f"went from {before} to {after}"
    if shift.difference >= 0:
        return text
    if shift.difference >= -tolerance:
        return f"{text}, within the tolerance of {points(tolerance, 2)}"
    return f"{text}{_between(shift.combined)}, which may be due to chance"


def _summary(outcomes: Sequence[RetrainingOutcome]) -> list[str]:
    """How the scores under several perturbations changed."""
    sentences = [_gain(f"mean of {len(outcomes)} perturbations", mean_score(outcomes))]
    if (error := mce(outcomes)) is not None:
        over = error.combined
        ends = "" if over is None else f" (95%: {percent(1 + over.low)} to {percent(1 + over.high)})"
        sentences.append(f"mCE is {percent(error.after)}{ends} of the original model's.")
    fell = [_gain(each.name, each.change.disturbed) for each in outcomes if each.change.disturbed.difference < 0]
    return sentences + fell


def _gain(name: str, shift: Shift) -> str:
    """How a disturbed score changed."""
    if abs(shift.difference) < EQUAL_SCORES:
        return f"{name}: the disturbed score is unchanged at {percent(shift.after)}."
    verb = "rose" if shift.difference > 0 else "fell"
    over = shift.combined
    doubt = "" if over is not None and (over.low > 0 or over.high < 0) else ", which may be due to chance"
    return f"{name}: the disturbed score {verb} {change_words(shift)}{doubt}."


def change_words(shift: Shift) -> str:
    """By how much a score changed, with as many digits as it takes for the ends and their difference to agree."""

    def agrees(digits: int) -> bool:
        before, after, difference = (
            round(100 * share, digits) for share in (shift.before, shift.after, shift.difference)
        )
        return before != after and round(after - before, digits) == difference

    digits = next(filter(agrees, (1, 2)), 3)
    before, after = percent(shift.before, digits), percent(shift.after, digits)
    return f"by {points(abs(shift.difference), digits)}, from {before} to {after}{_between(shift.combined, digits)}"


def tables(result: Retrained, *, is_whole: bool) -> list[Table]:
    """Before and after, the frontier, and the rounds; unless `is_whole`, one table for all that was trained on."""
    by_perturbation = [outcome_table(outcome) for outcome in result.outcomes]
    if result.n_trained > 1:
        by_perturbation = [suite_table(result), *by_perturbation[0 if is_whole else result.n_trained :]]
    rounds = [round_table(result)] if len(result.stages) > 1 or result.stop else []
    return [*by_perturbation, frontier_table(result), *rounds]


def opening(result: Retrained) -> list[str]:
    """What was done on which seeds."""
    seeds, stage = result.seeds, result.stage
    models = counted(len(stage.models), "random seed")
    return [
        f"Retrained on {inputs_of(result)} ({result.perturbation}), with {models}",
        f"Seeds: {seeds['search']:,} searched, {seeds['train']:,} trained on clean, and {seeds['judge']:,} judge "
        "seeds, which no model was trained on.",
    ]


def inputs_of(result: Retrained) -> str:
    """What the models were trained on."""
    faults, fresh = counted(result.stage.n_faults, "fault"), "fresh disturbances"
    return fresh if result.recipe.fresh == 1 else faults if not result.recipe.fresh else f"{fresh} and {faults}"


def closing(result: Retrained) -> list[str]:
    """What the numbers mean, and which model is returned."""
    stage, plan = result.stage, result.plan
    models, tests = counted(len(stage.models), "random seed"), counted(plan.draws, "uniform test")
    over = "judge seeds and trainings" if len(stage.models) > 1 else "judge seeds alone, as there is one training"
    place = f" in round {stage.number}" if len(result.stages) > 1 else ""
    sentences = [
        f"After: the mean over {models}; the last column has least and most. Differences are paired by judge seed; "
        f"their 95% intervals are over {over}; '{NO_INTERVAL}' means that all of them agree. "
        f"Disturbed: {tests} per seed, the same for every model. The campaigns before and after spend the same number "
        "of passes.",
        f"The returned model is that of random seed {stage.model.random_seed}{place}, epoch {stage.model.best}: the "
        "best on the seeds that training held out, which are not judge seeds.",
    ]
    if len(result.stages) > 1:
        sentences.append("The round was chosen on the judge seeds, so its numbers are slightly too good.")
    if not stage.model.best:
        sentences.append(
            "No point of the frontier was better than the original model on the seeds held out at this tolerance, so "
            "the model is unchanged: use more seeds or a larger --tolerance."
        )
    return sentences


def suite_table(result: Retrained) -> Table:
    """The scores under all perturbations that were trained on, and mCE."""
    outcomes, n_runs = result.outcomes[: result.n_trained], len(result.stage.models)
    shifts = {"clean": outcomes[0].change.clean}
    shifts |= {outcome.name: outcome.change.disturbed for outcome in outcomes}
    shifts[f"mean of {len(outcomes)} perturbations"] = mean_score(outcomes)
    if result.mce is not None:
        shifts["mCE, relative to the original"] = result.mce
    rows = [_row(name, shift, 1, n_runs) for name, shift in shifts.items()]
    return Table("Scores", OUTCOME_COLUMNS, rows, [], ("random seeds",))


def outcome_table(outcome: RetrainingOutcome) -> Table:
    """All measurements under one perturbation, before and after."""
    change, n_runs = outcome.change, len(outcome.after)
    rows = [
        _row(label, shift, digits, n_runs)
        for name, label, digits in MEASUREMENTS
        if (shift := getattr(change, name)) is not None
    ]
    if change.mended is not None:
        mean, least, most = change.mended
        spread = _spread(percent(least), percent(most), n_runs)
        rows.append((f"{change.n_old:,} old faults now correct", NONE, percent(mean), NONE, spread))
    return Table(outcome.name, OUTCOME_COLUMNS, rows, [], ("random seeds",))


def frontier_table(result: Retrained) -> Table:
    """Clean and disturbed score over the share of the way to the trained weights, a mean over random seeds."""
    stage = result.stage
    first, cases = stage.frontier[0], tuple(stage.frontier[0].by_perturbation)
    cases = cases if len(cases) <= MAX_CASES else ()
    columns = ("share of the way", "clean", "expected loss", *(cases or ("disturbed",)), "gain", "")
    rows = []
    for share in sorted({stage.model.share, *(point.share for point in stage.frontier)}):
        point = point_at(stage.frontier, share)
        scores = [percent(point.by_perturbation[name]) for name in cases] or [percent(point.disturbed)]
        lost, gained = (
            NONE if not share else format_number(100 * change, 2, signed=True)
            for change in (point.lost, point.disturbed - first.disturbed)
        )
        mark = "chosen" if share == stage.model.share else "next" if point == stage.next else ""
        rows.append((percent(share, 0), percent(point.clean), lost, *scores, gained, mark))
    return Table("The frontier, on seeds held out of training", columns, rows, [frontier_note(result)])


def frontier_note(result: Retrained) -> str:
    """Why a point of the frontier was chosen, and what the next one would give and cost."""
    stage, recipe = result.stage, result.recipe
    point = stage.point
    chosen = f"{percent(point.share, 0)} of the way from the old weights to the trained ones"
    if recipe.share is not None:
        reason = f"The weights are {chosen}, as requested with --share."
    else:
        reason = (
            f"The weights are {chosen}: the highest disturbed score at which the clean score is expected to fall by at "
            f"most {points(recipe.tolerance, 2)} (--tolerance). The searched seeds held out of training show "
            f"this with a standard error of {points(point.lost_error, 2)}."
        )
    if stage.next is None:
        if point.share == 1 and is_still_rising(stage.frontier):
            return f"{reason} The disturbed score still rises there: more training (--batches, --epochs) may gain more."
        return f"{reason} No further point gains more."
    further = stage.next
    gain, cost = further.disturbed - point.disturbed, further.lost - point.lost
    price = "at no further clean loss" if cost <= 0 else f"and cost {points(cost, 2)} of clean score"
    return f"{reason} The next point, {percent(further.share, 0)}, would give {points(gain, 2)} more {price}."


def round_table(result: Retrained) -> Table:
    """How the fault rate fell from round to round."""
    original = result.stages[0].outcomes[0].before
    columns = ("round", "faults so far", "fault rate", "clean score", "distinct faults", "next campaign")
    rows: list[tuple[str, ...]] = [("original", NONE, *_measured(original), NONE)]
    for stage in result.stages:
        found = NONE if stage.campaign is None else f"{stage.campaign['distinct_faults']:,}"
        rows.append(
            (str(stage.number), f"{stage.n_faults:,}", *_measured(stage.outcomes[0].after[stage.chosen]), found)
        )
    notes = [
        "Fault rate: the share of uniform tests of judge seeds that the model with which the next round starts answers "
        "incorrectly. Distinct faults: those of a campaign on judge seeds. Next campaign: distinct faults on search "
        "seeds, which the next round learns from in addition to all earlier ones.",
        result.stop,
    ]
    return Table("Rounds", columns, rows, notes, ("clean score",))


def _measured(reading: Reading) -> tuple[str, str, str]:
    """The fault rate, the clean score and the distinct faults of a reading."""
    distinct = NONE if reading.distinct is None else format_count(reading.distinct.sum())
    return percent(1 - reading.disturbed_score, 2), percent(reading.clean_score), distinct


def markdown(result: Retrained) -> str:
    """The retraining as a document."""
    heading, *lines = opening(result)
    sentences = list(result.verdict)
    if result.has_failed:
        sentences[0] = f"**{sentences[0]}**"
    verdict_list = "\n".join(f"- {sentence}" for sentence in sentences)
    shown = [table.markdown() for table in tables(result, is_whole=True)]
    return "\n\n".join([f"## {heading}", *lines, verdict_list, *shown, *closing(result)])


def show(result: Retrained, console: Console) -> None:
    """Print the tables and the verdict."""
    for line in opening(result):
        console.print(printable(line), highlight=False, markup=False)
    console.print()
    for table in tables(result, is_whole=False):
        table.show(console)
        console.print()
    for line in closing(result):
        console.print(printable(line), style="dim", highlight=False, markup=False)
    for k, line in enumerate(result.verdict):
        style = "bold red" if result.has_failed and not k else "bold"
        console.print(printable(line), style=style, highlight=False, markup=False)


def points(share: float, digits: int = 1) -> str:
    """A difference of shares, such as 1.3 points."""
    text = f"{100 * share:.{digits}f}"
    return f"{text} point{'' if float(text) == 1 else 's'}"


def _row(name: str, shift: Shift, digits: int | None, n_runs: int) -> tuple[str, ...]:
    """digits: 1 for shares, which are shown in percent, 0 for counts, None for other numbers."""

    def text(value: float) -> str:
        return percent(value) if digits == 1 else format_count(round(value, 6)) if digits == 0 else f"{value:.4g}"

    over, scale = shift.combined, 100 if digits == 1 else 1
    places = 4 if digits is None else 1
    difference = format_number(scale * shift.difference, places, signed=True)
    ends = () if over is None else (over.low, over.high)
    interval = "..".join(format_number(scale * end, places, signed=True) for end in ends) or NO_INTERVAL
    spread = _spread(text(shift.least), text(shift.most), n_runs)
    return (name, text(shift.before), text(shift.after), f"{difference} ({interval})", spread)


def _spread(least: str, most: str, n: int) -> str:
    return NONE if n < 2 else least if least == most else f"{least} to {most}"


def _between(estimate: Estimate | None, digits: int = 1) -> str:
    if estimate is None:
        return ""
    low, high = (format_number(100 * end, digits, signed=True) for end in (estimate.low, estimate.high))
    return f" (95%: {low} to {high} points)"


BEFORE, AFTER, CLEAN = "#D55E00", "#0072B2", "#009E73"
"""Colours of the palette of Okabe and Ito, which colour-blind readers can tell apart."""
GREY = "#bbbbbb"
DPI = 130
LONGEST = 20
"""The number of letters of a name that fit."""


def draw(result: Retrained) -> bytes:
    """The figure as PNG."""
    rows = [(outcome.name[:LONGEST], outcome.change.disturbed) for outcome in reversed(result.outcomes)]
    rows.append(("clean", result.outcomes[0].change.clean))
    height, width = max(3.4, 1.8 + 0.55 * len(rows)), 10.0
    figure = blank_figure(width, height)
    seeds = counted(result.seeds["judge"], "judge seed")
    title = f"Before and after retraining on {inputs_of(result)}, on {seeds}"
    figure.suptitle(title, x=0.15 / width, y=1 - 0.1 / height, ha="left", va="top", fontsize=11, color=INK)
    for left, wide, draw_panel in ((1.7, 3.8, _draw_scores), (6.9, 2.9, _draw_frontier)):
        axes = figure.add_axes((left / width, 0.65 / height, wide / width, 1 - 1.35 / height))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=QUIET, labelsize=8)
        draw_panel(axes, result, rows)
    content = BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    return content.getvalue()


def _draw_scores(axes: Any, result: Retrained, rows: list[tuple[str, Shift]]) -> None:
    """Scores before and after, with the interval of the difference."""
    for y, (_, shift) in enumerate(rows):
        before, after, over = 100 * shift.before, 100 * shift.after, shift.combined
        axes.plot([before, after], [y, y], color=QUIET, linewidth=1.0, linestyle=":")
        if over is not None:
            ends = [min(max(before + 100 * end, 0.0), 100.0) for end in (over.low, over.high)]
            axes.plot(ends, [y, y], color=AFTER, linewidth=1.6)
        names = (None, None) if y else ("before", "after")
        axes.plot(
            before, y, "o", color=BEFORE, markerfacecolor="white", markersize=9, label=names[0]
        )  # a ring if equal
        axes.plot(after, y, "o", color=AFTER, markersize=6, label=names[1])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], color=INK, fontsize=8)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("score in %, with the 95% interval of the difference", color=INK, fontsize=8.5)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _draw_frontier(axes: Any, result: Retrained, rows: list[tuple[str, Shift]]) -> None:
    """Gained disturbed score over lost clean score on the seeds held out: the mean, and each random seed in grey."""
    stage, first = result.stage, result.stage.frontier[0].disturbed
    for frontier in (*(model.frontier for model in stage.models), stage.frontier):
        lost = [100 * point.lost for point in frontier]
        gained = [100 * (point.disturbed - frontier[0].disturbed) for point in frontier]
        is_mean = frontier is stage.frontier
        style = {"color": AFTER, "marker": "o", "zorder": 3} if is_mean else {"color": GREY, "linewidth": 0.8}
        axes.plot(lost, gained, markersize=4, **style)
    place = 100 * stage.point.lost, 100 * (stage.point.disturbed - first)
    axes.plot(*place, "o", color=CLEAN, markersize=10, zorder=4)
    is_end = stage.point.share == 1  # the curve leads up to it, and otherwise goes on to the right
    where = {"xytext": (0, 8), "ha": "center"} if is_end else {"xytext": (7, -3), "ha": "left", "va": "top"}
    style = {"textcoords": "offset points", "fontsize": 8, "color": INK, "zorder": 5, **where}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # legible where it lies on a line
    axes.annotate(f"{percent(stage.point.share, 0)} of the way", place, bbox=box, **style)
    has_limit = result.recipe.share is None and result.recipe.tolerance < 1
    if has_limit:
        axes.axvline(100 * result.recipe.tolerance, color=QUIET, linewidth=0.8, linestyle=":")
    axes.margins(x=0.3, y=0.1)
    axes.set_xlabel(f"clean score lost, points{' (dotted: tolerance)' * has_limit}", color=INK, fontsize=8.5)
    axes.set_ylabel("disturbed score gained, points", color=INK, fontsize=8.5)
