"""Two techniques on one model: what each of them found, and how much of it the other found too."""

from __future__ import annotations

from dataclasses import dataclass

from themis.errors import DataError
from themis.runs.diff.sides import Side
from themis.runs.diff.statistics import LEVEL, mcnemar

ALIKE = 0.05
"""Budgets that differ by no more than this are alike."""


@dataclass(frozen=True)
class Overlap:
    """Distinct faults, and seeds that failed, of either run alone and of both."""

    faults_both: int
    faults_first: int
    faults_second: int
    seeds_both: int
    seeds_first: int
    seeds_second: int
    p_value: float
    """McNemar's, exact, over seeds that one of the two broke: of these two campaigns, not of others."""

    def lines(self) -> list[str]:
        """What they share."""
        return [
            f"distinct faults: {self.faults_both:,} found by both, {self.faults_first:,} by the first alone, "
            f"{self.faults_second:,} by the second alone",
            f"failing seeds: {self.seeds_both:,} broken by both, {self.seeds_first:,} by the first alone, "
            f"{self.seeds_second:,} by the second alone (McNemar p = {self.p_value:.2g})",
            "one campaign each, so the luck of a search is in it: themis compare repeats them at equal cost",
        ]


def compare_techniques(first: Side, second: Side) -> tuple[str, str, Overlap, list[str]]:
    """Verdict, sentence, overlap and notes."""
    if first.data != second.data:
        raise DataError(
            f"two techniques must have had the same data, {first.name} and {second.name} had not: run one of them "
            "again on the other's"
        )
    one, two = ({(fault.seed_id, fault.answer) for fault in each.faults()} for each in (first, second))
    seeds_one, seeds_two = ({seed for seed, _ in each} for each in (one, two))
    only_one, only_two = len(seeds_one - seeds_two), len(seeds_two - seeds_one)
    overlap = Overlap(
        len(one & two),
        len(one - two),
        len(two - one),
        len(seeds_one & seeds_two),
        only_one,
        only_two,
        mcnemar(only_one, only_two),
    )
    has_difference = overlap.p_value < LEVEL
    verdict = "even" if not has_difference else "more" if only_two > only_one else "fewer"
    a, b = first.facts(), second.facts()
    said = {
        "even": "no difference that seeds can tell",
        "more": "the second broke more",
        "fewer": "the first broke more",
    }
    sentence = (
        f"{first.name} ({a['policy']}) broke {len(seeds_one):,} seeds with {a['passes']:,} passes, {second.name} "
        f"({b['policy']}) {len(seeds_two):,} with {b['passes']:,}: {said[verdict]} (McNemar p = {overlap.p_value:.2g})."
    )
    notes = []
    if abs(a["passes"] - b["passes"]) > ALIKE * max(a["passes"], b["passes"]):
        notes.append("the budgets differ: who spends more passes finds more")
    if first.theta != second.theta:
        notes.append("the ranges of theta differ: the wider one breaks more")
    return verdict, sentence, overlap, notes
