"""Comparing two runs: as versions of a model (see versions.py), or as techniques, by what each of them found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from themis.errors import DataError, UsageError
from themis.runs.analysis.robustness import robustness
from themis.runs.diff.result import Diff, Overlap
from themis.runs.diff.sides import Side, check_perturbations, is_same_model, open_side
from themis.runs.diff.versions import compare_versions, mcnemar
from themis.runs.replay import RunSource
from themis.runs.run import Run
from themis.runs.trust import Trusted

TESTS = 2000
"""New tests that are drawn and run on both models."""
NAMES = ("the first run", "the second run")
"""Names of runs that have no folder."""
KINDS = ("auto", "versions", "techniques")


def diff_runs(
    before: RunSource,
    after: RunSource,
    *,
    kind: str = "auto",
    tests: int = TESTS,
    curves: bool = False,
    random_seed: int = 0,
    comparisons: int = 1,
    names: tuple[str, str] = NAMES,
    remedies: tuple[str, str] = ("", ""),
    trust: Trusted = False,
) -> Diff:
    """Compare two runs, as `themis.diff` does.

    comparisons: how many pairs of runs are compared together; verdicts and intervals allow for it. names: how messages
    name the runs. remedies: what they recommend if a model is not the one that was tested.
    """
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if tests < 1:
        raise UsageError(f"tests must be 1 or more, got {tests}: it is the number of new tests")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                open_side(source, name if isinstance(source, Run) or name not in NAMES else "", remedy, trust)
            )
            for source, name, remedy in zip((before, after), names, remedies, strict=True)
        )
        check_perturbations(first, second)
        is_same = is_same_model(first, second)
        if kind == "techniques" and first.model != second.model:
            raise UsageError(
                "two techniques must have tested the same model, but the models' hashes differ: compare them as "
                "versions"
            )
        if kind == "techniques" or (kind == "auto" and is_same):
            result = compare_techniques(first, second, comparisons)
        else:
            result = compare_versions(first, second, tests, random_seed, comparisons)
        return _with_curves(result, first, second) if curves else result


def _with_curves(result: Diff, first: Side, second: Side) -> Diff:
    if first.theta != second.theta:
        note = "no robustness curves: strength is a share of the range of theta, and the ranges differ"
        return replace(result, notes=(*result.notes, note))
    for side in (first, second):
        side.check_model()
    return replace(result, curves=(robustness(first.source), robustness(second.source)))


SIGNIFICANCE = 0.02
"""The p value below which there is a difference. A search that has luck on one seed goes on to others like it, so that
at 0.05 one in twelve pairs of runs of one policy would differ; at this level it is one in twenty."""
ALIKE = 0.05
"""Budgets that differ by at most this share are alike."""
VERDICTS = {
    "even": "no difference that the seeds can show",
    "more": "the second broke more",
    "fewer": "the first broke more",
}


def compare_techniques(first: Side, second: Side, comparisons: int = 1) -> Diff:
    """Compare the distinct faults and the failing seeds of two runs; one of `comparisons` that are made together."""
    if first.data != second.data:
        raise DataError(
            f"two techniques must have had the same data, but {first.name} and {second.name} did not: run one of them "
            "again on the other's data"
        )
    faults_first, faults_second = (
        {(fault.seed_id, fault.answer) for fault in side.faults()} for side in (first, second)
    )
    seeds_first, seeds_second = ({seed for seed, _ in faults} for faults in (faults_first, faults_second))
    only_first, only_second = len(seeds_first - seeds_second), len(seeds_second - seeds_first)
    overlap = Overlap(
        len(faults_first & faults_second),
        len(faults_first - faults_second),
        len(faults_second - faults_first),
        len(seeds_first & seeds_second),
        only_first,
        only_second,
        mcnemar(only_first, only_second),
    )
    level = SIGNIFICANCE / comparisons
    has_difference = overlap.p_value < level
    verdict = "even" if not has_difference else "more" if only_second > only_first else "fewer"
    limit = "" if has_difference else f", and a difference takes less than {level:.2g}"
    a, b = first.facts(), second.facts()
    sentence = (
        f"{first.name} ({a['policy']}) broke {len(seeds_first):,} seeds with {a['passes']:,} passes, {second.name} "
        f"({b['policy']}) {len(seeds_second):,} with {b['passes']:,}: {VERDICTS[verdict]} "
        f"(McNemar p = {overlap.p_value:.2g}{limit})."
    )
    notes = []
    if abs(a["passes"] - b["passes"]) > ALIKE * max(a["passes"], b["passes"]):
        notes.append("the budgets differ: more passes find more faults")
    if first.theta != second.theta:
        notes.append("the ranges of theta differ: the wider range breaks more seeds")
    return Diff("techniques", verdict, sentence, a, b, overlap=overlap, notes=tuple(notes))
