"""Comparing two techniques on one model: what each of them found, and how much of it the other found too."""

from __future__ import annotations

from themis.errors import DataError
from themis.runs.diff.result import Diff, Overlap
from themis.runs.diff.sides import Side
from themis.runs.diff.statistics import mcnemar

LUCK = 0.02
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
    luck = LUCK / comparisons
    has_difference = overlap.p_value < luck
    verdict = "even" if not has_difference else "more" if only_second > only_first else "fewer"
    limit = "" if has_difference else f", and a difference takes less than {luck:.2g}"
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
