"""`themis.diff`: which of two runs' models is better, or which technique found more."""

from __future__ import annotations

from contextlib import ExitStack

from themis.errors import UsageError
from themis.runs.analysis.bench import TestBench, open_bench
from themis.runs.analysis.robustness import Robustness, robustness
from themis.runs.diff.replays import Paired, Replayed, judged_alike, replay_on_other, right_on_both, run_paired
from themis.runs.diff.result import Diff
from themis.runs.diff.sides import (
    Common,
    Side,
    check_perturbations,
    common_box,
    common_seeds,
    is_same_model,
    side,
)
from themis.runs.diff.statistics import LEVEL
from themis.runs.diff.techniques import compare_techniques
from themis.runs.replay import RunSource
from themis.runs.run import Run, percent

TESTS = 2000
"""Tests that are drawn anew and run on both models."""
NAMES = ("the first run", "the second run")
"""How runs that have no folder are called."""
KINDS = ("auto", "versions", "techniques")


def diff(
    before: RunSource,
    after: RunSource,
    *,
    kind: str = "auto",
    tests: int = TESTS,
    curves: bool = False,
    random_seed: int = 0,
    names: tuple[str, str] = NAMES,
    remedies: tuple[str, str] = ("", ""),
) -> Diff:
    """Compare two runs, each as `themis.run` gave it, a run folder, or a `Replayer` with its target and data.

    kind: versions replays the faults of both, and `tests` drawn anew, on both models; techniques, of one model, sets
    what was found side by side; auto is techniques where both tested the same model. curves: robustness curves too.
    names, remedies: how messages call the runs, and what they advise where a model is not the one tested.
    """
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if tests < 1:
        raise UsageError(f"tests must be 1 or more, got {tests}: it is how many are drawn anew")
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(side(each, name if isinstance(each, Run) or name not in NAMES else "", remedy))
            for each, name, remedy in zip((before, after), names, remedies, strict=True)
        )
        check_perturbations(one, other)
        is_same = is_same_model(one, other)
        if kind == "techniques" and one.model != other.model:
            raise UsageError(
                "two techniques must have tested one model, the models' hashes differ: compare them as versions"
            )
        if kind == "techniques" or (kind == "auto" and is_same):
            verdict, sentence, overlap, notes = compare_techniques(one, other)
            drawn = _curves(one, other, notes) if curves else None
            facts = (one.facts(), other.facts())
            return Diff("techniques", verdict, sentence, *facts, overlap=overlap, curves=drawn, notes=tuple(notes))
        return _versions(one, other, tests, curves, random_seed)


def _versions(one: Side, other: Side, tests: int, has_curves: bool, random_seed: int) -> Diff:
    facts = (one.facts(), other.facts())
    for each in (one, other):
        each.make()
    box = common_box(one, other)
    with open_bench(one.source) as first, open_bench(other.source) as second:
        benches = (first, second)
        _check_oracles(one, other, benches)
        with judged_alike(benches):
            shared = common_seeds(one, other, benches)
            right, *only = right_on_both(shared, benches)
            paired = run_paired(right, benches, box, tests, random_seed)
            faults = (one.faults(), other.faults())
            gone = replay_on_other(faults[0], faults[1], right, benches, box)
            new = replay_on_other(faults[1], faults[0], right, benches, box, is_swapped=True)
        notes = [*_notes_of_benches(benches), *_notes_of_seeds(benches, shared, *only)]
    if one.theta != other.theta:
        said = ", ".join(f"{t[0]} {a:g} to {b:g}" for t, a, b in zip(one.theta, *box, strict=True))
        notes.append(f"the ranges of theta differ: only what both allow was compared, {said}")
    notes += [*_notes_of_faults(one.name, gone), *_notes_of_faults(other.name, new)]
    if one.model == other.model and not (paired.only_before or paired.only_after or gone.gone or new.gone):
        notes.append("both models have the same weights and behave alike: compare the techniques instead")
    drawn = _curves(one, other, notes) if has_curves else None
    verdict, sentence = _judge(paired)
    return Diff("versions", verdict, sentence, *facts, paired, gone, new, curves=drawn, notes=tuple(notes))


def _notes_of_benches(benches: tuple[TestBench, TestBench]) -> list[str]:
    first, second = (bench.calculator for bench in benches)
    notes = []
    if first.perturbation.passes:
        notes.append("an attack is made anew on each model, from its own gradient")
    if first.oracle.spec() != second.oracle.spec():
        notes.append(f"both were judged by the first run's oracle, {first.oracle.spec()}")
    return notes


def _notes_of_seeds(benches: tuple[TestBench, TestBench], shared: Common, only_one: int, only_other: int) -> list[str]:
    notes = []
    if only_one or only_other:
        notes.append(
            f"clean: {only_one:,} seeds only the model before answers rightly, {only_other:,} only the one after; they "
            "were left out"
        )
    n, n_shared = [len(bench.seeds) for bench in benches], len(shared.seed_id)
    if max(n) > n_shared:
        notes.append(f"of {n[0]:,} and {n[1]:,} seeds the {n_shared:,} that both have were compared")
    return notes


def _notes_of_faults(name: str, replayed: Replayed) -> list[str]:
    counts = {
        "did not show again on their own model": len(replayed.lost),
        "lie outside what was compared": len(replayed.apart),
        "were not replayed: there are more than can be": replayed.left_out,
    }
    return [f"{n:,} faults of {name} {what}" for what, n in counts.items() if n]


def _check_oracles(one: Side, other: Side, benches: tuple[TestBench, TestBench]) -> None:
    specs = [bench.calculator.oracle.spec() for bench in benches]
    if specs[0].partition(":")[0] != specs[1].partition(":")[0]:
        raise UsageError(
            f"both runs must mean the same by a fault, {one.name} has oracle {specs[0]!r}, {other.name} {specs[1]!r}: "
            "run one of them again with the other's"
        )


def _judge(paired: Paired) -> tuple[str, str]:
    """McNemar's test decides; the interval says by how much, and may not be able to."""
    gap, p = paired.difference, paired.p_value
    has_one_way = (paired.seeds_worse > paired.seeds_better) == (gap.value > 0)
    verdict = "even" if p >= LEVEL or not has_one_way else "worse" if gap.value > 0 else "better"
    said = "No difference that these tests can tell" if verdict == "even" else f"The model after is {verdict}"
    if verdict != "even" and gap.low <= 0 <= gap.high:
        said += ", by how much in fault rate these tests cannot tell"
    rates = f"fault rate {percent(paired.after.value, 2)} after, {percent(paired.before.value, 2)} before"
    points = f"difference {100 * gap.value:+.2f} points, 95%: {100 * gap.low:+.2f} to {100 * gap.high:+.2f}"
    return verdict, (
        f"{said}: {rates} on the same {paired.tests:,} tests of {paired.seeds:,} seeds ({points}; McNemar p = {p:.2g}, "
        f"{paired.seeds_worse:,} seeds worse, {paired.seeds_better:,} better)."
    )


def _curves(one: Side, other: Side, notes: list[str]) -> tuple[Robustness, Robustness] | None:
    if one.theta != other.theta:
        notes.append("no robustness curves: a strength is a share of the range, and the ranges differ")
        return None
    for each in (one, other):
        each.make()
    return robustness(one.source), robustness(other.source)
