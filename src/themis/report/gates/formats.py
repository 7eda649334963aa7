"""The results of gates for a CI job: as Markdown for its summary page, and as JUnit XML."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from themis.report.gates.gates import GateResults


def write_markdown(path: str | Path, results: GateResults, *, report: str | Path | None = None) -> None:
    """Append a summary to a file: CI systems collect the summaries of all steps in one file."""
    append_markdown(path, markdown(results, report))


def append_markdown(path: str | Path, text: str) -> None:
    """Append text to a file, completely or not at all."""
    from themis.runs.store.files import explained

    content = text.encode("utf-8", "replace")
    with explained(Path(path)), Path(path).open("ab", buffering=0) as file:
        is_regular = S_ISREG(os.fstat(file.fileno()).st_mode)  # it may be a pipe or a terminal
        size = file.seek(0, os.SEEK_END) if is_regular else 0
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            if is_regular:  # nothing stays half written
                file.truncate(size)
            raise


def markdown(results: GateResults, report: str | Path | None = None) -> str:
    """The overall result, the gates, the key figures, the most telling faults and how to replay them."""
    from themis.runs.diff.result import code, describe_fault, escape, replay_command, table

    mark = "❌" if results.has_failed else "✅" if results.has_limits else "▫️"
    gates = [
        (
            "✅ passed" if result.has_passed else "❌ failed",
            result.gate,
            result.text,
            "" if result.has_passed else result.remedy,
        )
        for result in results.results
    ]
    lines = [f"## {mark} Themis: {escape(results.sentence)}", "", *table(("", "gate", "result", "remedy"), gates), ""]
    lines += [*table(("figure", "value", "95% interval"), _figures(results.summary)), ""]
    if results.telling:
        lines += [
            "The most telling faults:",
            "",
            *(f"- {escape(describe_fault(fault))}" for fault in results.telling),
            "",
        ]
        if results.folder is not None:
            command = replay_command(str(results.folder), *(fault.id for fault in results.telling))
            lines += [f"Replay them: {code(command)}", ""]
    if results.diff is not None:
        lines += [results.diff.markdown(), ""]
    if report is not None:
        lines += [f"Report: {code(str(report))}", ""]
    return "\n".join(lines)


def _figures(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    from themis.text import percent

    rows = [
        ("tests", f"{summary['tests']:,}", ""),
        ("faults", f"{summary['faults']:,} raw, {summary['distinct_faults']:,} distinct", ""),
    ]
    if summary.get("failing_seeds") is not None and summary.get("seeds"):
        rows.append(("failing seeds", f"{summary['failing_seeds']:,} of {summary['seeds']:,}", ""))
    names = {
        "fault_rate": "fault rate",
        "residual_risk": "residual risk",
        "coverage_interval": "coverage of all neurons",
    }
    for key, name in names.items():
        estimate = summary.get(key)
        if estimate is not None:
            low, high = percent(estimate["low"], 2), percent(estimate["high"], 2)
            rows.append((name, percent(estimate["value"], 2), f"{low} to {high}"))
        elif key != "coverage_interval":
            rows.append((name, "unknown: no uniform tests", ""))
    reachable = summary.get("reachable_faults")
    if reachable is not None:
        low, high = f"{reachable['low']:,.0f}", f"{reachable['high']:,.0f}"
        rows.append(("distinct faults within reach", f"{reachable['value']:,.0f}", f"{low} to {high}"))
    if summary["coverage"] is not None:
        rows.append(("coverage of the sampled neurons", percent(summary["coverage"]), ""))
    return rows


_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def legal(text: str) -> str:
    """The text with a replacement character for each character that XML does not allow."""
    return _ILLEGAL.sub("\ufffd", text)


def write_junit(
    path: str | Path,
    results: GateResults | Sequence[GateResults],
    *,
    report: str | Path | None = None,
    suite: str = "",
) -> None:
    """Write one test suite per run; an earlier file of this function is replaced, any other is refused.

    report: the report of the run, named in the output. suite: the name of the suite, by default the name of the run.
    """
    from themis.runs.store.files import COMMENT, write_fresh

    runs = list(results) if isinstance(results, Sequence) else [results]
    root = ElementTree.Element("testsuites")
    for number, result in enumerate(runs):
        root.append(_suite(result, number, suite or f"themis {result.run}", report))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    content = f"<?xml version='1.0' encoding='utf-8'?>\n{COMMENT}\n{text}\n".encode("utf-8", "xmlcharrefreplace")
    write_fresh(Path(path), content, remedy="choose another, or remove it")


def _suite(results: GateResults, number: int, name: str, report: str | Path | None) -> ElementTree.Element:
    from datetime import UTC, datetime
    from platform import node

    failed = sum(not result.has_passed for result in results.results)
    seconds = (results.summary.get("seconds") or {}).get("total") or 0.0
    suite = _element(
        None,
        "testsuite",
        name=name,
        package="themis",
        id=str(number),
        tests=str(len(results.results)),
        failures=str(failed),
        errors="0",
        skipped="0",
        time=f"{seconds:.3f}",
        timestamp=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        hostname=node() or "localhost",
    )
    properties = _element(suite, "properties")
    for key in ("version", "perturbation", "random_seed", "tests", "passes", "distinct_faults", "coverage"):
        if key != "coverage" or results.summary.get(key) is not None:
            _element(properties, "property", name=key, value=str(results.summary.get(key)))
    for k, result in enumerate(results.results):
        time = seconds if k == 0 else 0.0  # the first case is the campaign itself
        case = _element(suite, "testcase", classname=f"themis.{results.run}", name=result.gate, time=f"{time:.3f}")
        if not result.has_passed:
            failure = _element(case, "failure", message=result.text, type="GateFailed")
            failure.text = legal("\n".join([result.line, *_telling_lines(results)]))
    out = _element(suite, "system-out")
    out.text = legal("\n".join([*results.lines, *_telling_lines(results), *_report(report)]))
    _element(suite, "system-err")
    return suite


def _telling_lines(results: GateResults) -> list[str]:
    """One line per fault, and the command that replays them."""
    from themis.runs.diff.result import describe_fault, replay_command

    if not results.telling:
        return []
    lines = [describe_fault(fault) for fault in results.telling]
    if results.folder is None:
        return lines
    return [*lines, replay_command(str(results.folder), *(fault.id for fault in results.telling))]


def _report(report: str | Path | None) -> list[str]:
    return [] if report is None else [f"report: {report}"]


def _element(parent: ElementTree.Element | None, tag: str, **attributes: str) -> ElementTree.Element:
    plain = {name: legal(value) for name, value in attributes.items()}
    return ElementTree.Element(tag, plain) if parent is None else ElementTree.SubElement(parent, tag, plain)
