"""A retraining as tables and sentences: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from themis.experiments.comparison.table import NONE, Table, count, counted, number, show_table
from themis.judge.estimate import Estimate
from themis.runs.run import percent

if TYPE_CHECKING:
    from rich.console import Console

    from themis.experiments.retraining.changes import Shift
    from themis.experiments.retraining.retrained import Outcome, Retrained, Stage

COLUMNS = ("on judge seeds", "before", "after", "difference (95%)", "random seeds")


def verdict(outcomes: Sequence[Outcome], tolerance: float, chosen: int = 0) -> tuple[tuple[str, ...], bool]:
    """What came of it, in sentences, and whether the clean score fell too far: if so, that is said first.

    It must neither fall on average over random seeds, nor that of the model `chosen`, which is given back.
    """
    clean = outcomes[0].change.clean
    own = outcomes[0].after[chosen].clean_score
    has_fallen = clean.difference < -tolerance
    said = []
    if not has_fallen and own - outcomes[0].before.clean_score < -tolerance:
        said.append(
            f"THE CLEAN SCORE OF THE MODEL GIVEN BACK FELL by {points(clean.before - own)}, from "
            f"{percent(clean.before)} to {percent(own)}, more than the tolerance of {points(tolerance)}, though on "
            "average over random seeds it did not: give more clean seeds, fewer epochs, or a lower learning rate."
        )
    if has_fallen:
        said.append(
            f"THE CLEAN SCORE FELL by {points(-clean.difference)}, from {percent(clean.before)} to "
            f"{percent(clean.after)} (95%: {_between(clean.over_seeds)} points), more than the tolerance of "
            f"{points(tolerance)}: give more clean seeds, fewer epochs, or a lower learning rate."
        )
    for outcome in outcomes:
        said += [_gain(outcome), *([f"{outcome.name}: {outcome.change.words}"] if outcome.change.words else [])]
    if not has_fallen:
        kept = f", within the tolerance of {points(tolerance)}" if clean.difference < 0 else ""
        said.append(f"The clean score went from {percent(clean.before)} to {percent(clean.after)}{kept}.")
    return tuple(said), has_fallen or own - outcomes[0].before.clean_score < -tolerance


def _gain(outcome: Outcome) -> str:
    """What became of the disturbed score."""
    own = outcome.change.disturbed
    if own.before == own.after:
        return f"{outcome.name}: the disturbed score is {percent(own.after)} as before."
    moved = "rose" if own.difference > 0 else "fell"
    clear = "" if own.over_seeds.low > 0 or own.over_seeds.high < 0 else ", which may be chance"
    return (
        f"{outcome.name}: the disturbed score {moved} by {points(abs(own.difference))}, from {percent(own.before)} "
        f"to {percent(own.after)} (95%: {_between(own.over_seeds)} points){clear}."
    )


def tables(result: Retrained) -> list[Table]:
    """Before and after, by perturbation; then the rounds."""
    many = [round_table(result)] if len(result.stages) > 1 or result.stop else []
    return [*(outcome_table(each) for each in result.outcomes), *many]


def opening(result: Retrained) -> list[str]:
    """What was done on which seeds."""
    seeds, stage = result.seeds, result.stage
    models = counted(len(stage.models), "random seed")
    return [
        f"Retrained on {stage.n_faults:,} faults ({result.perturbation}), with {models}",
        f"Seeds: {seeds['search']:,} searched, {seeds['train']:,} trained on clean, {seeds['judge']:,} to judge by, "
        "which no model has seen.",
    ]


def closing(result: Retrained) -> list[str]:
    """What the figures are, and which model is given back."""
    stage, plan = result.stage, result.plan
    models, tests = counted(len(stage.models), "random seed"), counted(plan.draws, "uniform test")
    said = [
        f"After: the mean over {models}, with the least and the most. Differences are paired by judge seed, with 95% "
        f"intervals over seeds. Disturbed: {tests} a seed, the same for every model. The campaigns before and after "
        "spend the same passes.",
        f"The model given back is that of random seed {stage.model.random_seed}"
        + (f" in round {stage.number}" if len(result.stages) > 1 else "")
        + f", epoch {stage.model.best}: the best on seeds that training held out, none of which is judged on.",
    ]
    if len(result.stages) > 1:
        said.append("Which round is kept was decided on the judge seeds: its figures are a little too good.")
    if untouched := [str(each.random_seed) for each in stage.models if not each.best]:
        said.append(
            f"With random seed {', '.join(untouched)} no epoch was better on the seeds held out than the model as it "
            "came, so it was left as it is: give more seeds, more epochs or another learning rate."
        )
    return said


def outcome_table(outcome: Outcome) -> Table:
    """One perturbation: every figure before and after."""
    change = outcome.change
    rows = [_row("clean score", change.clean, 1), _row("disturbed score", change.disturbed, 1)]
    for name, shift in (("clean error", change.clean_error), ("disturbed error", change.disturbed_error)):
        rows += [_row(f"{name}, absolute", shift, None)] if shift is not None else []
    rows += [_row("withstood a campaign", change.held, 1)] if change.held is not None else []
    for name, shift in (("distinct faults found", change.distinct_faults), ("failing seeds", change.failing_seeds)):
        rows += [_row(name, shift, 0)] if shift is not None else []
    if change.mended is not None:
        mean, least, most = change.mended
        spread = _spread(percent(least), percent(most), len(outcome.after))
        rows.append((f"{change.n_old:,} old faults now right", NONE, percent(mean), NONE, spread))
    return Table(outcome.name, COLUMNS, rows, [], ("random seeds",))


def round_table(result: Retrained) -> Table:
    """How the fault rate fell, round by round."""
    first = result.stages[0].outcomes[0].before
    columns = ("round", "faults learnt from", "fault rate", "clean score", "distinct faults", "next campaign")
    found = NONE if first.found is None else count(first.found.distinct_faults)
    rows: list[tuple[str, ...]] = [
        ("as it came", NONE, percent(1 - first.disturbed_score, 2), percent(first.clean_score), found, NONE)
    ]
    rows += [_round_row(stage) for stage in result.stages]
    notes = [
        "Fault rate: the share of uniform tests of judge seeds that is answered wrongly, by the model that the next "
        "round begins with. Distinct faults: of a campaign on judge seeds. Next campaign: distinct faults on search "
        "seeds, which the next round learns from beside all earlier ones.",
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
        NONE if after.found is None else count(after.found.distinct_faults),
        NONE if stage.campaign is None else f"{stage.campaign['distinct_faults']:,}",
    )


def markdown(result: Retrained) -> str:
    """The whole retraining as a document."""
    first, *others = opening(result)
    said = "\n".join(
        f"- **{each}**" if result.has_failed and not k else f"- {each}" for k, each in enumerate(result.verdict)
    )
    parts = [f"## {first}", *others, said, *(each.markdown() for each in tables(result)), *closing(result)]
    return "\n\n".join(parts)


def show(result: Retrained, console: Console) -> None:
    """Print the verdict and the tables."""
    for line in opening(result):
        console.print(line, highlight=False, markup=False)
    console.print()
    for each in tables(result):
        show_table(each.within(console.width), console)
        console.print()
    for line in closing(result):
        console.print(line, style="dim", highlight=False, markup=False)
    for k, line in enumerate(result.verdict):
        style = "bold red" if result.has_failed and not k else "bold"
        console.print(line, style=style, highlight=False, markup=False)


def points(share: float) -> str:
    """A difference of shares, as 1.3 points."""
    text = f"{100 * share:.1f}"
    return f"{text} point{'' if text == '1.0' else 's'}"


def _row(name: str, shift: Shift, digits: int | None) -> tuple[str, ...]:
    """digits: 1 of shares, which are shown in percent, 0 of counts, None of other numbers."""

    def say(value: float) -> str:
        return percent(value) if digits == 1 else count(round(value, 6)) if digits == 0 else f"{value:.4g}"

    over, scale = shift.over_seeds, 100 if digits == 1 else 1
    places = 4 if digits is None else 1
    ends = [number(scale * each, places, signed=True) for each in (shift.difference, over.low, over.high)]
    spread = _spread(say(shift.least), say(shift.most), 2 if shift.over_runs is not None else 1)
    return (name, say(shift.before), say(shift.after), f"{ends[0]} ({ends[1]}..{ends[2]})", spread)


def _spread(least: str, most: str, n: int) -> str:
    return NONE if n < 2 else least if least == most else f"{least} to {most}"


def _between(estimate: Estimate) -> str:
    low, high = (number(100 * each, 1, signed=True) for each in (estimate.low, estimate.high))
    return f"{low} to {high}"
