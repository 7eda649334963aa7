"""A retraining as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from themis.experiments.retraining.changes import Shift
from themis.experiments.retraining.result import Retrained, RetrainingOutcome, Stage
from themis.experiments.table import NONE, Table, format_count, format_number, plural
from themis.judge.estimate import Estimate
from themis.runs.run import percent
from themis.text import printable

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "interval unknown"
"""Stands for the interval of a difference if all judge seeds and trainings agree."""
COLUMNS = ("on judge seeds", "before", "after", "difference (95%)", "random seeds")


def verdict(outcomes: Sequence[RetrainingOutcome], tolerance: float, chosen: int = 0) -> tuple[tuple[str, ...], bool]:
    """The result in sentences, and whether the clean score fell too far, which then comes first.

    It must not fall on average over random seeds, nor for the model `chosen`, which is returned.
    """
    clean = outcomes[0].change.clean
    own = outcomes[0].after[chosen].clean_score
    has_fallen = clean.difference < -tolerance
    own_has_fallen = own - outcomes[0].before.clean_score < -tolerance
    remedy = "use more clean seeds, fewer epochs, or a lower learning rate"
    sentences = []
    if own_has_fallen and not has_fallen:
        sentences.append(
            f"THE CLEAN SCORE OF THE RETURNED MODEL FELL by {points(clean.before - own)}, from "
            f"{percent(clean.before)} to {percent(own)}, more than the tolerance of {points(tolerance)}, although it "
            f"did not on average over random seeds: {remedy}."
        )
    if has_fallen:
        sentences.append(
            f"THE CLEAN SCORE FELL by {points(-clean.difference)}, from {percent(clean.before)} to "
            f"{percent(clean.after)}{_between(clean.combined)}, more than the tolerance of {points(tolerance)}: "
            f"{remedy}."
        )
    for outcome in outcomes:
        sentences.append(_gain(outcome))
        if outcome.change.words:
            sentences.append(f"{outcome.name}: {outcome.change.words}")
    if not has_fallen:
        within = f", within the tolerance of {points(tolerance)}" if clean.difference < 0 else ""
        before, after = percent(clean.before), percent(clean.after)
        change = f"stayed at {after}" if before == after else f"went from {before} to {after}{within}"
        sentences.append(f"The clean score {change}.")
    return tuple(sentences), has_fallen or own_has_fallen


def _gain(outcome: RetrainingOutcome) -> str:
    """How the disturbed score changed."""
    shift = outcome.change.disturbed
    if shift.before == shift.after:
        return f"{outcome.name}: the disturbed score is unchanged at {percent(shift.after)}."
    verb = "rose" if shift.difference > 0 else "fell"
    over = shift.combined
    doubt = "" if over is not None and (over.low > 0 or over.high < 0) else ", which may be due to chance"
    return (
        f"{outcome.name}: the disturbed score {verb} by {points(abs(shift.difference))}, from {percent(shift.before)} "
        f"to {percent(shift.after)}{_between(over)}{doubt}."
    )


def tables(result: Retrained) -> list[Table]:
    """Before and after, by perturbation; then the rounds."""
    rounds = [round_table(result)] if len(result.stages) > 1 or result.stop else []
    return [*(outcome_table(outcome) for outcome in result.outcomes), *rounds]


def opening(result: Retrained) -> list[str]:
    """What was done on which seeds."""
    seeds, stage = result.seeds, result.stage
    models = plural(len(stage.models), "random seed")
    return [
        f"Retrained on {plural(stage.n_faults, 'fault')} ({result.perturbation}), with {models}",
        f"Seeds: {seeds['search']:,} searched, {seeds['train']:,} trained on clean, and {seeds['judge']:,} judge "
        "seeds, which no model was trained on.",
    ]


def closing(result: Retrained) -> list[str]:
    """What the numbers mean, and which model is returned."""
    stage, plan = result.stage, result.plan
    models, tests = plural(len(stage.models), "random seed"), plural(plan.draws, "uniform test")
    place = f" in round {stage.number}" if len(result.stages) > 1 else ""
    sentences = [
        f"After: the mean over {models}; the last column has least and most. Differences are paired by judge seed; "
        f"their 95% intervals are over {_sources(len(stage.models))}; '{UNKNOWN}' means that all of them agree. "
        f"Disturbed: {tests} per seed, the same for every model. The campaigns before and after spend the same number "
        "of passes.",
        f"The returned model is that of random seed {stage.model.random_seed}{place}, epoch {stage.model.best}: the "
        "best on the seeds that training held out, which are not judge seeds.",
    ]
    if len(result.stages) > 1:
        sentences.append("The round was chosen on the judge seeds, so its numbers are slightly too good.")
    if unchanged := [str(model.random_seed) for model in stage.models if not model.best]:
        sentences.append(
            f"With random seed {', '.join(unchanged)}, no epoch was better than the original model on the seeds held "
            "out, so the model is unchanged: use more seeds, more epochs or another learning rate."
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
    if change.mended is not None:
        mean, least, most = change.mended
        spread = _spread(percent(least), percent(most), n_runs)
        rows.append((f"{change.n_old:,} old faults now correct", NONE, percent(mean), NONE, spread))
    return Table(outcome.name, COLUMNS, rows, [], ("random seeds",))


def round_table(result: Retrained) -> Table:
    """How the fault rate fell from round to round."""
    original = result.stages[0].outcomes[0].before
    columns = ("round", "faults learned from", "fault rate", "clean score", "distinct faults", "next campaign")
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


def points(share: float) -> str:
    """A difference of shares, such as 1.3 points."""
    text = f"{100 * share:.1f}"
    return f"{text} point{'' if text == '1.0' else 's'}"


def _row(name: str, shift: Shift, digits: int | None, n_runs: int) -> tuple[str, ...]:
    """digits: 1 for shares, which are shown in percent, 0 for counts, None for other numbers."""

    def text(value: float) -> str:
        return percent(value) if digits == 1 else format_count(round(value, 6)) if digits == 0 else f"{value:.4g}"

    over, scale = shift.combined, 100 if digits == 1 else 1
    places = 4 if digits is None else 1
    difference = format_number(scale * shift.difference, places, signed=True)
    ends = () if over is None else (over.low, over.high)
    interval = "..".join(format_number(scale * end, places, signed=True) for end in ends) or UNKNOWN
    spread = _spread(text(shift.least), text(shift.most), n_runs)
    return (name, text(shift.before), text(shift.after), f"{difference} ({interval})", spread)


def _spread(least: str, most: str, n: int) -> str:
    return NONE if n < 2 else least if least == most else f"{least} to {most}"


def _sources(n_runs: int) -> str:
    """What the intervals account for."""
    if n_runs > 1:
        return "judge seeds and trainings"
    return "judge seeds alone, because one training does not show how much trainings vary"


def _between(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    low, high = (format_number(100 * end, 1, signed=True) for end in (estimate.low, estimate.high))
    return f" (95%: {low} to {high} points)"
