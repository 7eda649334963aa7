"""A robustness test in words: what failed, the most telling faults, where the rest is."""

from __future__ import annotations

import math
import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.report.gates.gates import Verdicts
    from themis.runs.faults import Fault
    from themis.runs.run import Run

PREFIX = "themis_"
SHOWN = ("perturbation", "tests", "stop", "report", "run")
HERE = str(Path(__file__).parent.parent)


def describe_failure(run: Run, verdicts: Verdicts, folder: Path, report: str, test: str | None) -> str:
    """The message of a test that failed. `test` runs again what has no other way to make its model."""
    from themis.report.gates.testing.gating import lines_of
    from themis.runs.display.text import summary_rows

    rows = {name: text for name, text in summary_rows(run) if name in ("faults", "fault rate", "coverage", "tests")}
    theta = ", ".join(f"{each.name} {each.low:g} to {each.high:g}" for each in run.start.theta)
    lines = [*lines_of(verdicts), "", f"{'perturbation':<13}  {run.start.perturbation} ({theta})"]
    lines += [f"{name:<13}  {text}" for name, text in rows.items()]
    lines.append(run.stop)
    telling = verdicts.telling
    if telling:
        lines += ["", "The most telling faults:" if len(telling) > 1 else "The most telling fault:"]
    for fault in telling:
        lines += [f"  {describe_fault(fault)}"]
        lines += [f"    replay: {replay_line(folder, fault.id, test)}"]
    return "\n".join([*lines, "", f"report: {report}", f"run: {folder}"])


def describe_fault(fault: Fault) -> str:
    """One line: which test, what it was answered, how little it took."""
    theta = ", ".join(f"{name} {value:.4g}" for name, value in fault.theta.items())
    answer = describe_answer(fault.answer, fault.value, fault.confidence)
    clean = fault.clean_answer if fault.clean_value is None else f"{fault.clean_value:.6g}"
    said = f"answered as {answer}" if clean is None else f"{clean} answered as {answer}"
    label = "" if fault.label is None or fault.label == fault.clean_answer else f", label {fault.label}"
    ssim = "" if fault.ssim is None else f", SSIM {fault.ssim:.3f}"
    return f"fault {fault.id}: seed {fault.seed_id}, {said}{label}; {theta}{ssim}, L2 {fault.distance:.3g}"


def describe_answer(answer: int, value: float | None, confidence: float) -> str:
    """Its number, what it measures, and how sure it is, where there are such."""
    if answer < 0:
        return "not finite"
    details = [] if value is None else [f"{value:.6g}"]
    details += [] if math.isnan(confidence) else [f"{confidence:.1%}"]
    return f"{answer} ({', '.join(details)})" if details else str(answer)


def replay_line(folder: Path, id: int, test: str | None) -> str:
    """What to type; a model that lives in a test is made by the test."""
    if test is None:
        return f"themis replay {quote(str(folder))} {id}"
    return f"pytest {quote(test)} --themis-replay {quote(f'{folder}:{id}')}"


def describe_error(error: Exception) -> str:
    """What went wrong in one line, and where the user's own code raised it."""
    cause, place = error.__cause__, None
    trace = None if cause is None else cause.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_library(code.co_filename):
            place = f"  at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    notes = [f"  {each}" for each in getattr(error, "__notes__", ())]
    return "\n".join([f"themis: {error}", *([] if place is None else [place]), *notes])


def _is_library(file: str) -> bool:
    return file.startswith((HERE + os.sep, "<")) or f"{os.sep}site-packages{os.sep}" in file


def properties_of(run: Run, folder: Path, report: Path | None, call: int) -> list[tuple[str, Any]]:
    """What JUnit XML and the end of the session show, as plain values; a second call's names end in _2."""
    last, rate = run.rounds[-1], run.fault_rate
    values: dict[str, Any] = {
        "perturbation": run.start.perturbation,
        "tests": last.tests,
        "faults": last.faults,
        "distinct_faults": last.distinct_faults,
        "fault_rate": None if rate is None else rate.value,
        "fault_rate_low": None if rate is None else rate.low,
        "fault_rate_high": None if rate is None else rate.high,
        "coverage": run.coverage,
        "stop": run.stop,
        "run": str(folder),
        "report": None if report is None else str(report),
    }
    ending = "" if call == 1 else f"_{call}"
    return [(f"{PREFIX}{name}{ending}", value) for name, value in values.items() if value is not None]


def describe_properties(properties: dict[str, Any]) -> list[str]:
    """Two lines for each campaign of a test."""
    lines = []
    for call in range(1, 1 + sum(name.startswith(f"{PREFIX}tests") for name in properties)):
        ending = "" if call == 1 else f"_{call}"
        found = {name: properties.get(f"{PREFIX}{name}{ending}") for name in SHOWN}
        rate, low, high = (properties.get(f"{PREFIX}fault_rate{each}{ending}") for each in ("", "_low", "_high"))
        rates = "unknown" if rate is None else f"{rate:.2%} (95%: {low:.2%} to {high:.2%})"
        text = f"{found['perturbation']}, fault rate {rates}, coverage {properties[f'{PREFIX}coverage{ending}']:.1%}"
        where = found["report"] or found["run"]
        lines += [f"  {text}, {found['tests']:,} tests", f"  {found['stop']} See {where}"]
    return lines
