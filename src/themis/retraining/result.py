"""The result of a retraining: all measurements before and after, on judge seeds only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from themis.judge.estimate import Estimate
from themis.report.table import NONE, Table, format_count, format_number
from themis.retraining.changes import Changes, Shift, changes, paired
from themis.retraining.checkpoint import put_weights
from themis.retraining.examine import Reading
from themis.retraining.frontier import FrontierPoint, is_still_rising, join_frontiers, next_point
from themis.retraining.recipe import Recipe, RetrainingPlan
from themis.retraining.tune import Epoch, interpolate
from themis.target.ledger import Ledger
from themis.target.target import Target
from themis.text import counted, percent, printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class TrainedModel:
    """A copy of the model that was trained with one random seed."""

    random_seed: int
    target: Target = field(repr=False)
    ledger: Ledger = field(repr=False)
    history: tuple[Epoch, ...] = field(repr=False)
    best: int
    """The epoch that the weights are on the way to; 0 if they are those of the original model."""
    frontier: tuple[FrontierPoint, ...] = field(repr=False)
    """Shares of the way to the trained weights, measured on the seeds that training held out."""
    chosen: int
    """The index of the point of the frontier that the weights are at."""
    weights: Path | None
    ends: tuple[dict[str, Tensor], dict[str, Tensor]] = field(repr=False)
    """The weights at both ends of the frontier."""

    def at(self, chosen: int) -> TrainedModel:
        """The model with its weights moved to a point of the frontier, which changes the target's module."""
        put_weights(self.target.module, interpolate(*self.ends, self.frontier[chosen].share))
        best = max(range(1, len(self.history)), key=lambda k: (self.history[k].score, -self.history[k].loss))
        return replace(self, chosen=chosen, best=best if chosen else 0)

    @property
    def point(self) -> FrontierPoint:
        """The point of the frontier that the weights are at."""
        return self.frontier[self.chosen]

    @property
    def held_out(self) -> float:
        """The score on the seeds that training held out, clean and disturbed in equal parts."""
        return (self.point.clean + self.point.disturbed) / 2

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "random_seed": self.random_seed,
            "best_epoch": self.best,
            "share": self.point.share,
            "frontier": [{**asdict(point), "is_chosen": k == self.chosen} for k, point in enumerate(self.frontier)],
            "held_out": self.held_out,
            "epochs": [asdict(epoch) for epoch in self.history],
            "weights": None if self.weights is None else str(self.weights),
        }


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
            "change": self.change.as_dict(),
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
    def next(self) -> int | None:
        """The index of the next point of the frontier that gains more; None if there is none."""
        return next_point(self.frontier, self.model.chosen)

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
            "frontier": [
                {**asdict(point), "is_chosen": k == self.model.chosen, "is_next": k == self.next}
                for k, point in enumerate(self.frontier)
            ],
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
        return fmean(outcome.change.disturbed.difference for outcome in self.outcomes[: self.n_trained])

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
OUTCOME_COLUMNS = ("on judge seeds", "before", "after", "difference (95%)", "random seeds")


def verdict(outcomes: Sequence[RetrainingOutcome], tolerance: float, chosen: int = 0) -> tuple[tuple[str, ...], bool]:
    """The result in sentences, and whether the clean score fell too far, which then comes first.

    It must not fall by more than the tolerance and more than chance, on average over random seeds, nor for the model
    `chosen`, which is returned.
    """
    clean = outcomes[0].change.clean
    before, after = outcomes[0].before.clean, outcomes[0].after[chosen].clean
    own = paired(before, after[None])
    has_fallen, own_has_fallen = (_has_fallen(shift, tolerance) for shift in (clean, own))
    remedy = "use more clean seeds, or a smaller --tolerance"
    sentences = []
    if own_has_fallen and not has_fallen:
        sentences.append(
            f"THE CLEAN SCORE OF THE RETURNED MODEL FELL {change_words(own)}, more than the tolerance of "
            f"{points(tolerance, 2)}, although it did not on average over random seeds: {remedy}."
        )
    if has_fallen:
        sentences.append(
            f"THE CLEAN SCORE FELL {change_words(clean)}, more than the tolerance of {points(tolerance, 2)}: {remedy}."
        )
    for outcome in outcomes:
        sentences.append(_gain(outcome))
        if outcome.change.words:
            sentences.append(f"{outcome.name}: {outcome.change.words}")
    if not has_fallen:
        sentences.append(f"The clean score {_clean_change(clean, tolerance)}.")
    return tuple(sentences), has_fallen or own_has_fallen


def _has_fallen(shift: Shift, tolerance: float) -> bool:
    """Whether a score fell by more than the tolerance and by more than chance."""
    return shift.difference < -tolerance and (shift.combined is None or shift.combined.high < 0)


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


def _gain(outcome: RetrainingOutcome) -> str:
    """How the disturbed score changed."""
    shift = outcome.change.disturbed
    if abs(shift.difference) < EQUAL_SCORES:
        return f"{outcome.name}: the disturbed score is unchanged at {percent(shift.after)}."
    verb = "rose" if shift.difference > 0 else "fell"
    over = shift.combined
    doubt = "" if over is not None and (over.low > 0 or over.high < 0) else ", which may be due to chance"
    return f"{outcome.name}: the disturbed score {verb} {change_words(shift)}{doubt}."


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


def tables(result: Retrained) -> list[Table]:
    """Before and after, by perturbation; then the frontier and the rounds."""
    rounds = [round_table(result)] if len(result.stages) > 1 or result.stop else []
    return [*(outcome_table(outcome) for outcome in result.outcomes), frontier_table(result), *rounds]


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
    place = f" in round {stage.number}" if len(result.stages) > 1 else ""
    sentences = [
        f"After: the mean over {models}; the last column has least and most. Differences are paired by judge seed; "
        f"their 95% intervals are over {_sources(len(stage.models))}; '{NO_INTERVAL}' means that all of them agree. "
        f"Disturbed: {tests} per seed, the same for every model. The campaigns before and after spend the same number "
        "of passes.",
        f"The returned model is that of random seed {stage.model.random_seed}{place}, epoch {stage.model.best}: the "
        "best on the seeds that training held out, which are not judge seeds.",
    ]
    if len(result.stages) > 1:
        sentences.append("The round was chosen on the judge seeds, so its numbers are slightly too good.")
    if unchanged := [str(model.random_seed) for model in stage.models if not model.best]:
        sentences.append(
            f"With random {'seed' if len(unchanged) == 1 else 'seeds'} {', '.join(unchanged)}, no point of the "
            "frontier was better than the original model on the seeds held out at this tolerance, so the model is "
            "unchanged: use more seeds or a larger --tolerance."
        )
    return sentences


def outcome_table(outcome: RetrainingOutcome) -> Table:
    """All measurements under one perturbation, before and after."""
    change, n_runs = outcome.change, len(outcome.after)
    rows = [_row("clean score", change.clean, 1, n_runs), _row("disturbed score", change.disturbed, 1, n_runs)]
    for name, shift in (("clean error", change.clean_error), ("disturbed error", change.disturbed_error)):
        rows += [_row(f"{name}, absolute", shift, None, n_runs)] if shift is not None else []
    rows += [_row("withstood a campaign", change.held, 1, n_runs)] if change.held is not None else []
    for name, shift in (("distinct faults found", change.distinct_faults), ("failing seeds", change.failing_seeds)):
        rows += [_row(name, shift, 0, n_runs)] if shift is not None else []
    rows += [_row("smallest breaking strength", change.strength, None, n_runs)] if change.strength is not None else []
    if change.mended is not None:
        mean, least, most = change.mended
        spread = _spread(percent(least), percent(most), n_runs)
        rows.append((f"{change.n_old:,} old faults now correct", NONE, percent(mean), NONE, spread))
    return Table(outcome.name, OUTCOME_COLUMNS, rows, [], ("random seeds",))


def frontier_table(result: Retrained) -> Table:
    """Clean and disturbed score over the share of the way to the trained weights, a mean over random seeds."""
    stage = result.stage
    first, cases = stage.frontier[0], tuple(stage.frontier[0].by_perturbation)
    columns = ("share of the way", "clean", "estimated loss", *cases, "gain", "")
    rows = []
    for k, point in enumerate(stage.frontier):
        scores = [percent(point.by_perturbation[name]) for name in cases]
        lost, gained = (
            NONE if not k else format_number(100 * change, 2, signed=True)
            for change in (point.lost, point.disturbed - first.disturbed)
        )
        mark = "chosen" if k == stage.model.chosen else "next" if k == stage.next else ""
        rows.append((percent(point.share, 0), percent(point.clean), lost, *scores, gained, mark))
    return Table("The frontier, on seeds held out of training", columns, rows, [frontier_note(result)])


def frontier_note(result: Retrained) -> str:
    """Why a point of the frontier was chosen, and what the next one would give and cost."""
    stage, recipe = result.stage, result.recipe
    point = stage.frontier[stage.model.chosen]
    chosen = f"{percent(point.share, 0)} of the way from the old weights to the trained ones"
    if recipe.share is not None:
        reason = f"The weights are {chosen}, as requested with --share."
    else:
        reason = (
            f"The weights are {chosen}: the highest disturbed score at which the clean score falls by at most "
            f"{points(recipe.tolerance, 2)} (--tolerance), as estimated on the searched seeds held out of training. "
            "With few of them, the estimate is rough."
        )
        searched, everywhere = (fall for fall, _, _ in point.falls)
        if searched <= recipe.tolerance < everywhere:
            reason += (
                f" On all seeds held out it falls by {points(everywhere, 2)}: those that were not searched do not "
                "count, because a model may know them by heart."
            )
    if stage.next is None:
        if stage.model.chosen == len(stage.frontier) - 1 and is_still_rising(stage.frontier):
            return f"{reason} The disturbed score still rises there: more training (--batches, --epochs) may gain more."
        return f"{reason} No further point gains more."
    further = stage.frontier[stage.next]
    gain, cost = further.disturbed - point.disturbed, further.lost - point.lost
    price = "at no further clean loss" if cost <= 0 else f"and cost {points(cost, 2)} of clean score"
    return f"{reason} The next point, {percent(further.share, 0)}, would give {points(gain, 2)} more {price}."


def round_table(result: Retrained) -> Table:
    """How the fault rate fell from round to round."""
    original = result.stages[0].outcomes[0].before
    columns = ("round", "faults so far", "fault rate", "clean score", "distinct faults", "next campaign")
    distinct = NONE if original.found is None else format_count(original.found.distinct_faults)
    rate, clean = percent(1 - original.disturbed_score, 2), percent(original.clean_score)
    rows: list[tuple[str, ...]] = [("original", NONE, rate, clean, distinct, NONE)]
    rows += [_round_row(stage) for stage in result.stages]
    notes = [
        "Fault rate: the share of uniform tests of judge seeds that the model with which the next round starts answers "
        "incorrectly. Distinct faults: those of a campaign on judge seeds. Next campaign: distinct faults on search "
        "seeds, which the next round learns from in addition to all earlier ones.",
        result.stop,
    ]
    return Table("Rounds", columns, rows, notes, ("clean score",))


def _round_row(stage: Stage) -> tuple[str, ...]:
    after = stage.outcomes[0].after[stage.chosen]
    return (
        str(stage.number),
        f"{stage.n_faults:,}",
        percent(stage.fault_rate, 2),
        percent(after.clean_score),
        NONE if after.found is None else format_count(after.found.distinct_faults),
        NONE if stage.campaign is None else f"{stage.campaign['distinct_faults']:,}",
    )


def markdown(result: Retrained) -> str:
    """The retraining as a document."""
    heading, *lines = opening(result)
    sentences = list(result.verdict)
    if result.has_failed:
        sentences[0] = f"**{sentences[0]}**"
    verdict_list = "\n".join(f"- {sentence}" for sentence in sentences)
    parts = [f"## {heading}", *lines, verdict_list, *(table.markdown() for table in tables(result)), *closing(result)]
    return "\n\n".join(parts)


def show(result: Retrained, console: Console) -> None:
    """Print the tables and the verdict."""
    for line in opening(result):
        console.print(printable(line), highlight=False, markup=False)
    console.print()
    for table in tables(result):
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


def _sources(n_runs: int) -> str:
    """What the intervals account for."""
    if n_runs > 1:
        return "judge seeds and trainings"
    return "judge seeds alone, because one training does not show how much trainings vary"


def _between(estimate: Estimate | None, digits: int = 1) -> str:
    if estimate is None:
        return ""
    low, high = (format_number(100 * end, digits, signed=True) for end in (estimate.low, estimate.high))
    return f" (95%: {low} to {high} points)"
