"""The result of a retraining: all measurements before and after on judge seeds, as tables and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.report.table import NO_VALUE, Table, format_count, format_number
from themis.retraining.changes import Changes, Shift, changes, corruption_error, paired
from themis.retraining.examine import Reading
from themis.retraining.frontier import FrontierPoint, is_still_rising, join_frontiers, point_at
from themis.retraining.recipe import Recipe, RetrainingPlan
from themis.retraining.tune import TrainedModel
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
class Retrained:
    """A finished retraining."""

    plan: RetrainingPlan
    recipe: Recipe
    perturbation: str
    models: tuple[TrainedModel, ...]
    """One per random seed; all are at the same point of their mean frontier."""
    chosen: int
    """The index of the model that is returned: the best on the seeds held out, which no result comes from."""
    outcomes: tuple[RetrainingOutcome, ...]
    """Before and after, by perturbation; the first are those of the runs."""
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
    def model(self) -> TrainedModel:
        """The model that is returned."""
        return self.models[self.chosen]

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The mean frontier of all models."""
        return join_frontiers([model.frontier for model in self.models])

    @property
    def point(self) -> FrontierPoint:
        """The point of the mean frontier that the models are at."""
        return point_at(self.frontier, self.model.share)

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
        return self.model.target

    @property
    def ledger(self) -> Ledger:
        """All seeds that its weights were trained on."""
        return self.model.ledger

    def summary(self) -> dict[str, Any]:
        """Plain data, as written to `retrain.json`."""
        return {
            "verdict": list(self.verdict),
            "clean_fell": self.has_failed,
            "perturbation": self.perturbation,
            "seeds": self.seeds,
            "kept_random_seed": self.model.random_seed,
            "weights": None if self.weights is None else str(self.weights),
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
            "mce": None if self.mce is None else asdict(self.mce),
            "frontier": [asdict(point) for point in self.frontier],
            "point": asdict(self.point),
            "models": [model.as_dict() for model in self.models],
            "plan": self.plan.as_dict(),
            "recipe": self.recipe.as_dict(),
            "source": self.about,
            "environment": self.environment,
        }


NO_INTERVAL = "interval unknown"
"""Stands for the interval of a difference if all judge seeds and trainings agree."""
MEASUREMENTS = (
    ("clean", "clean score", 1),
    ("disturbed", "disturbed score", 1),
    ("clean_error", "clean error, absolute", None),
    ("disturbed_error", "disturbed error, absolute", None),
    ("held", "withstood a campaign", 1),
    ("distinct_faults", "distinct faults found", 0),
    ("failing_seeds", "failing seeds", 0),
)
"""What a table shows: the name in `Changes`, the label, and the digits, as in `_row`."""
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
        f"THE CLEAN SCORE {whose}FELL {change_words(shift)}, more than the tolerance of {points(tolerance)}: use "
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
    text = f"went from {before} to {after}" if before != after else f"stayed at {after}"
    if shift.difference >= 0 or before == after:
        return text
    is_within = shift.difference >= -tolerance
    return f"{text}, {f'within the tolerance of {points(tolerance)}' if is_within else 'which may be due to chance'}"


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
    if abs(shift.difference) < 5e-5:  # no digit would show it
        return f"{name}: the disturbed score is unchanged at {percent(shift.after)}."
    verb = "rose" if shift.difference > 0 else "fell"
    over = shift.combined
    doubt = "" if over is not None and (over.low > 0 or over.high < 0) else ", which may be due to chance"
    return f"{name}: the disturbed score {verb} {change_words(shift)}{doubt}."


def change_words(shift: Shift) -> str:
    """By how much a score changed."""
    text = f"by {points(abs(shift.difference))}, from {percent(shift.before, 2)} to {percent(shift.after, 2)}"
    if shift.combined is None:
        return text
    low, high = (format_number(100 * end, 2, signed=True) for end in (shift.combined.low, shift.combined.high))
    return f"{text} (95%: {low} to {high} points)"


def tables(result: Retrained, *, is_whole: bool) -> list[Table]:
    """Before and after, and the frontier; unless `is_whole`, one table for all that was trained on."""
    by_perturbation = [outcome_table(outcome) for outcome in result.outcomes]
    if result.n_trained > 1:
        by_perturbation = [suite_table(result), *by_perturbation[0 if is_whole else result.n_trained :]]
    return [*by_perturbation, frontier_table(result)]


def opening(result: Retrained) -> list[str]:
    """What was done on which seeds."""
    seeds, fresh = result.seeds, result.recipe.fresh
    inputs = "fresh disturbances" if fresh == 1 else "fresh disturbances and faults" if fresh else "faults"
    return [
        f"Retrained on {inputs} ({result.perturbation}), with {counted(len(result.models), 'random seed')}",
        f"Seeds: {seeds['search']:,} searched, {seeds['train']:,} trained on clean, and {seeds['judge']:,} judge "
        "seeds, which no model was trained on.",
    ]


def closing(result: Retrained) -> list[str]:
    """What the numbers mean, and which model is returned."""
    n_models, model = len(result.models), result.model
    after = f"After: the mean over {n_models:,} random seeds; the last column has least and most."
    if n_models == 1:
        after = "After: one training; of several, the last column has least and most."
    over = "judge seeds and trainings" if n_models > 1 else "judge seeds alone, as there is one training"
    sentences = [
        f"{after} Differences are paired by judge seed; their 95% intervals are over {over}; '{NO_INTERVAL}' means "
        f"that all of them agree. Disturbed: {counted(result.plan.draws, 'uniform test')} per seed, the same for every "
        "model. The campaigns before and after spend the same number of passes.",
        f"The returned model is that of random seed {model.random_seed}, epoch {model.best}: the best on the seeds "
        "that training held out, which are not judge seeds.",
    ]
    if not model.best:
        sentences.append(
            "No point of the frontier was better than the original model on the seeds held out at this tolerance, so "
            "the model is unchanged: use more seeds or a larger --tolerance."
        )
    return sentences


def suite_table(result: Retrained) -> Table:
    """The scores under all perturbations that were trained on, and mCE."""
    outcomes, n_runs = result.outcomes[: result.n_trained], len(result.models)
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
        rows.append((f"{change.n_old:,} old faults now correct", NO_VALUE, percent(mean), NO_VALUE, spread))
    return Table(outcome.name, OUTCOME_COLUMNS, rows, [], ("random seeds",))


def frontier_table(result: Retrained) -> Table:
    """Clean and disturbed score over the share of the way to the trained weights, a mean over random seeds."""
    chosen, first = result.point, result.frontier[0]
    shown = {point.share: point for point in (*result.frontier, chosen)}
    rows: list[tuple[str, ...]] = []
    for share, point in sorted(shown.items()):
        lost, gained = (
            NO_VALUE if not share else format_number(100 * change, 2, signed=True)
            for change in (point.lost, point.disturbed - first.disturbed)
        )
        mark = "chosen" if share == chosen.share else ""
        rows.append((percent(share, 0), percent(point.clean), lost, percent(point.disturbed), gained, mark))
    columns = ("share of the way", "clean", "expected loss", "disturbed", "gain", "")
    return Table("The frontier, on seeds held out of training", columns, rows, [frontier_note(result)])


def frontier_note(result: Retrained) -> str:
    """Why a point of the frontier was chosen, and whether more training may pay."""
    recipe, point = result.recipe, result.point
    chosen = f"{percent(point.share, 0)} of the way from the old weights to the trained ones"
    if recipe.share is not None:
        reason = f"The weights are {chosen}, as requested with --share."
    else:
        reason = (
            f"The weights are {chosen}: the highest disturbed score at which the clean score is expected to fall by at "
            f"most {points(recipe.tolerance)} (--tolerance). The searched seeds held out of training show this with a "
            f"standard error of {points(point.lost_error)}."
        )
    if point.share == 1 and is_still_rising(result.frontier):
        return f"{reason} The disturbed score still rises there: more training (--batches, --epochs) may gain more."
    return reason


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


def points(share: float) -> str:
    """A difference of shares, such as 1.30 points."""
    return f"{100 * share:.2f} points"


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
    return NO_VALUE if n < 2 else least if least == most else f"{least} to {most}"
