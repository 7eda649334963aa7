"""What a robustness test demands of its campaign."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from themis.report.gates.gates import Verdicts
    from themis.report.gates.limits import Gates
    from themis.runs.run import Run

GATES = ("max_fault_rate", "fail_under", "max_new_faults", "baseline")
"""Options that are gates; the others are the campaign's."""


def check(run: Run, gates: Gates, folder: Path) -> Verdicts:
    """Hold a run against its gates; without any, no fault is allowed."""
    from themis.report.gates.gates import Verdict, check_gates

    verdicts = check_gates(run, gates, folder=folder)
    if gates:
        return verdicts
    n, distinct = len(run.faults), run.rounds[-1].distinct_faults
    text = f"{n:,} fault{'s' * (n != 1)}, {distinct:,} distinct, where none is allowed"
    none = Verdict("faults", not n, float(n), 0.0, text, "mend the model, or say what it may do: max_fault_rate=0.05")
    return replace(verdicts, verdicts=(*verdicts.verdicts, none))


def lines_of(verdicts: Verdicts) -> list[str]:
    """What failed first, with what to do about it; that the campaign ran to its end goes without saying."""
    lines = []
    for each in verdicts.verdicts:
        if not each.has_passed:
            lines += [f"{each.gate}: {each.text}", *([f"  {each.remedy}"] if each.remedy else [])]
    passed = [each for each in verdicts.verdicts if each.has_passed and each.gate != "campaign"]
    return lines + [f"{each.gate} has passed: {each.text}" for each in passed]
