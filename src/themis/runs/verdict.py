"""What a campaign has shown, in one sentence: the terminal, notebooks and the report begin with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from themis.text import percent

if TYPE_CHECKING:
    from themis.judge.estimate import Estimate

JUDGED_BY_LABEL = ("wrong", "threshold", "top")
"""Tasks whose labels, if there are any, are the right answers; seeds whose clean answer is another are left out."""
COMPARED = ("changed", *JUDGED_BY_LABEL)
"""Tasks whose answers agree with the clean answer or not."""


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
class CleanScores:
    """How well the model answers clean inputs; only the scores that fit the task are known."""

    accuracy: float | None
    error: float | None
    iou: float | None
    map: float | None


@dataclass(frozen=True)
class RunVerdict:
    """What a campaign has shown, and the tone of it: broken, standing or open."""

    tone: str
    text: str


def write_verdict(
    perturbation: str,
    task: str,
    counts: Counts,
    clean: CleanScores,
    fault_rate: Estimate | None,
    *,
    constant: str | None = None,
    is_running: bool = False,
) -> RunVerdict:
    """Say whether the model breaks, and how many answers are left: clean, under random disturbance and at worst.

    constant: why that says nothing, see `Start.constant`.
    """
    if not counts.tests and not counts.faults:
        return RunVerdict("open", "No test has been counted yet." if is_running else "No test was counted.")
    if counts.tests == counts.dropped and not counts.faults:
        text = (
            f"All {counts.tests:,} tests were dropped as too dissimilar from their seeds: lower min_ssim or the "
            "magnitude."
        )
        return RunVerdict("open", text)
    shares = _shares(task, counts, clean, fault_rate)
    says_nothing = f" But {constant}, so that a low fault rate says nothing." if constant else ""
    if counts.faults:
        so_far = f"So far, the model breaks under {perturbation}"
        breaks = so_far if is_running else f"Under {perturbation}, the model breaks"
        return RunVerdict("broken", f"{breaks}: {shares}.{says_nothing}")
    text = "So far, no fault" if is_running else "No fault"
    text += f" in {counts.tests:,} test{'s' * (counts.tests != 1)} on {counts.seeds:,} seeds under {perturbation}"
    return RunVerdict("open" if constant else "standing", f"{text}: {shares}.{says_nothing}")


def describe_clean(clean: CleanScores, task: str = "wrong") -> str:
    """The quality of the clean answers in words; empty if it is not known."""
    if clean.accuracy is not None:
        return f"{accuracy_name(task)} {percent(clean.accuracy)}"
    if clean.error is not None:
        return f"error {clean.error:.3g} on average"
    if clean.map is not None:
        return f"mAP {clean.map:.3g}"
    return "" if clean.iou is None else f"mean IoU {clean.iou:.3g}"


def accuracy_name(task: str) -> str:
    """What the share of right answers is called in a task."""
    if task == "multilabel":
        return "accuracy of the labels"
    return f"top-{task[3:]} accuracy" if task.startswith("top") else "accuracy"


def _shares(task: str, counts: Counts, clean: CleanScores, fault_rate: Estimate | None) -> str:
    """The share of answers that are left, under random disturbance and at worst, called what it is in the task.

    An answer that is wrong without a disturbance counts as wrong under every disturbance.
    """
    kind = "top" if task.startswith("top") else task
    whole = clean.accuracy if clean.accuracy is not None and kind in JUDGED_BY_LABEL else None
    most = 1.0 if whole is None else whole
    parts = [] if whole is None else [f"{percent(whole)} clean"]
    if fault_rate is not None:
        random = f"{percent(most * (1 - fault_rate.value))} under random disturbance"
        least = percent(math.floor(1000 * most * (1 - fault_rate.high)) / 1000)
        parts.append(random if fault_rate.value else f"{random} (95%: at least {least})")
    failing = counts.failing_seeds / max(counts.seeds, 1)
    if fault_rate is not None and failing < fault_rate.value:  # a search of all seeds would have found more
        parts.append(f"at most that at worst ({counts.tests:,} tests are few for {counts.seeds:,} seeds)")
    else:
        parts.append(f"{'at most ' * (failing < 1)}{percent(most * (1 - failing))} at worst, as searched")
    shares = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    if whole is not None:
        return f"{accuracy_name(task)} is {shares}"
    subject = "agreement with the clean answer" if kind in COMPARED else "the share of answers without a fault"
    score = describe_clean(clean, task)
    return f"{subject} is {shares}" + (f" (clean {score})" if score else "")
