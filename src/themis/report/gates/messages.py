"""The messages of robustness tests: what failed, the most telling faults, and where to find more."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.runs.display.fault import describe_answer
from themis.runs.fault import describe_change
from themis.text import percent

if TYPE_CHECKING:
    from themis.report.gates.gates import GateResults
    from themis.runs.fault import Fault, Replay
    from themis.runs.run import Run

PREFIX = "themis_"
SHOWN = ("perturbation", "tests", "stop", "report", "run")
PACKAGE = str(Path(__file__).parents[3])


def describe_failure(run: Run, results: GateResults, folder: Path, report: str, test: str | None) -> str:
    """The message of a failing test. `test` is named to replay faults if the run cannot build its model again."""
    from themis.runs.display.text import summary_rows

    shown = ("faults", "fault rate", "coverage", "tests")
    rows = {name: text for name, text in summary_rows(run, is_verbose=True) if name in shown}
    ranges = ", ".join(f"{theta.name} {theta.low:g} to {theta.high:g}" for theta in run.start.theta)
    lines = [*describe_results(results), "", f"{'perturbation':<13}  {run.start.perturbation} ({ranges})"]
    lines += [f"{name:<13}  {text}" for name, text in rows.items()]
    lines.append(run.stop)
    telling = results.telling
    if telling:
        lines += ["", "The most telling faults:" if len(telling) > 1 else "The most telling fault:"]
    for fault in telling:
        lines += [f"  {describe_fault(fault)}"]
        lines += [f"    replay: {replay_command(folder, fault.id, test)}"]
    return "\n".join([*lines, "", f"report: {report}", f"run: {folder}"])


def describe_results(results: GateResults) -> list[str]:
    """The failed gates with their remedies, then the passed ones, without the one on the end of the campaign."""
    lines = []
    for result in results.results:
        if not result.has_passed:
            lines += [f"{result.gate}: {result.text}", *([f"  {result.remedy}"] if result.remedy else [])]
    passed = [result for result in results.results if result.has_passed and result.gate != "campaign"]
    return lines + [f"{result.gate} passed: {result.text}" for result in passed]


def describe_fault(fault: Fault) -> str:
    """One line: the test, the answer of the model and the size of the disturbance."""
    theta = ", ".join(f"{name} {value:.4g}" for name, value in fault.theta.items())
    answer = _describe_answer(fault, fault)
    clean = fault.clean_answer if fault.clean_value is None else f"{fault.clean_value:.6g}"
    change = describe_change(clean, fault.answer, answer)
    label = "" if fault.label is None or fault.label == fault.clean_answer else f", label {fault.label}"
    ssim = "" if fault.ssim is None else f", SSIM {fault.ssim:.3f}"
    return f"fault {fault.id}: seed {fault.seed_id}, {change}{label}; {theta}{ssim}, L2 {fault.distance:.3g}"


def describe_replay(fault: Fault, replay: Replay) -> str:
    """Whether it is still a fault, its answer now, and what has changed since the run."""
    state = "still a fault" if replay.is_fault else "no longer a fault"
    answer = _describe_answer(fault, replay)
    same = ", as recorded" if replay.is_same else ""
    changes = "" if not replay.changes else f"\nchanged since the run: {'; '.join(replay.changes)}"
    return f"{state}: now {describe_change(None, replay.answer, answer)}{same}\n{describe_fault(fault)}{changes}"


def _describe_answer(fault: Fault, test: Fault | Replay) -> str:
    """The answer to a test of the fault, when it was found or now."""
    if fault.is_number and test.value is not None:
        return f"{test.value:.6g}"
    return describe_answer(test.answer, test.value, test.confidence, replace(fault, answer=test.answer).outcome)


def replay_command(folder: Path, id: int, test: str | None) -> str:
    """The command that replays a fault; `test` is the test that builds the model, if only a test can."""
    if test is None:
        return f"themis replay {quote(str(folder))} {id}"
    return f"pytest {quote(test)} --themis-replay {quote(f'{folder}:{id}')}"


def describe_error(error: Exception) -> str:
    """The error in one line, and the line of the user's code that raised it."""
    cause, place = error.__cause__, None
    trace = None if cause is None else cause.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_library(code.co_filename):
            place = f"  at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
    return "\n".join([f"themis: {error}", *([] if place is None else [place]), *notes])


def _is_library(file: str) -> bool:
    return file.startswith((PACKAGE + os.sep, "<")) or f"{os.sep}site-packages{os.sep}" in file


def properties_of(run: Run, folder: Path, report: Path | None, call: int) -> list[tuple[str, Any]]:
    """Plain values for JUnit XML and the end of the session; the names of a second call end in _2."""
    last, rate = run.rounds[-1], run.fault_rate
    values: dict[str, Any] = {
        "perturbation": run.start.perturbation,
        "tests": last.tests,
        "faults": last.faults,
        "distinct_faults": last.distinct_faults,
        "fault_rate": None if rate is None else rate.value,
        "fault_rate_low": None if rate is None else rate.low,
        "fault_rate_high": None if rate is None else rate.high,
        "coverage": run.coverage if run.start.covers_neurons else None,
        "stop": run.stop,
        "run": str(folder),
        "report": None if report is None else str(report),
    }
    ending = "" if call == 1 else f"_{call}"
    return [(f"{PREFIX}{name}{ending}", value) for name, value in values.items() if value is not None]


def describe_properties(properties: dict[str, Any]) -> list[str]:
    """Two lines per campaign of a test."""
    lines = []
    for call in range(1, 1 + sum(name.startswith(f"{PREFIX}tests") for name in properties)):
        ending = "" if call == 1 else f"_{call}"
        values = {name: properties.get(f"{PREFIX}{name}{ending}") for name in SHOWN}
        rates = "unknown"
        if properties.get(f"{PREFIX}fault_rate{ending}") is not None:
            ends = (percent(properties[f"{PREFIX}fault_rate{end}{ending}"], 2) for end in ("", "_low", "_high"))
            rates = "{} (95%: {} to {})".format(*ends)
        text = f"{values['perturbation']}, fault rate {rates}"
        coverage = properties.get(f"{PREFIX}coverage{ending}")
        if coverage is not None:
            text += f", coverage {percent(coverage)}"
        place = values["report"] or values["run"]
        lines += [f"  {text}, {values['tests']:,} tests", f"  {values['stop']} See {place}"]
    return lines
