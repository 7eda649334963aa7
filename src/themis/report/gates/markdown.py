"""The results of gates as Markdown, for the summary page of a CI job."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

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
    from themis.runs.diff.markdown import code, escape, table
    from themis.runs.diff.result import describe_fault, replay_command

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
