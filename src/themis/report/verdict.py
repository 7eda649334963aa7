"""What a campaign has shown, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from themis.runs.run import percent

if TYPE_CHECKING:
    from themis.judge.estimate import Estimate


@dataclass(frozen=True)
class Counts:
    """How many tests, faults, seeds and neurons a run has."""

    tests: int
    dropped: int
    passes: int
    faults: int
    distinct_faults: int
    failing_seeds: int
    seeds: int
    seeds_given: int
    neurons: int
    layers: int


@dataclass(frozen=True)
class ReportVerdict:
    """The sentence at the top of a report, and its tone: broken, standing or open."""

    tone: str
    text: str


def write_verdict(perturbation: str, counts: Counts, fault_rate: Estimate | None, *, is_running: bool) -> ReportVerdict:
    """Say whether the perturbation breaks the model, and how often."""
    if not counts.tests and not counts.faults:
        return ReportVerdict("open", "No test has been counted yet." if is_running else "No test was counted.")
    if counts.faults:
        subject = (
            f"So far, the model breaks under {perturbation}"
            if is_running
            else f"Under {perturbation}, the model breaks"
        )
        text = (
            f"{subject}: {counts.distinct_faults:,} distinct "
            f"fault{'s' * (counts.distinct_faults != 1)} on {counts.failing_seeds:,} of {counts.seeds:,} seeds in "
            f"{counts.tests:,} tests"
        )
        if fault_rate is not None:
            low, high = percent(fault_rate.low, 2), percent(fault_rate.high, 2)
            rate = f"{percent(fault_rate.value, 2)} of random disturbances break it (95%: {low} to {high})"
            none = f"the search found them, and no random disturbance broke it (95%: at most {high})"
            text += f"; {rate if fault_rate.value else none}"
        return ReportVerdict("broken", f"{text}.")
    if counts.tests == counts.dropped:
        text = (
            f"All {counts.tests:,} tests were dropped as too dissimilar from their seeds: lower min_ssim or the "
            "magnitude."
        )
        return ReportVerdict("open", text)
    text = "So far, no fault" if is_running else "No fault"
    text += f" in {counts.tests:,} tests on {counts.seeds:,} seeds under {perturbation}"
    if fault_rate is not None:
        text += f"; with 95% confidence, at most {percent(fault_rate.high, 2)} of random disturbances break the model"
    return ReportVerdict("standing", f"{text}.")
