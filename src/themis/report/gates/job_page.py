"""A Markdown summary for the page of a CI job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.report.gates.gates import Verdicts


def write_markdown(path: str | Path, verdicts: Verdicts, *, report: str | Path | None = None) -> None:
    """Append a summary to a file: CI systems gather the summaries of all steps in one."""
    from themis.runs.store.files import explained

    with explained(Path(path)), Path(path).open("a", encoding="utf-8", errors="replace") as file:
        file.write(markdown(verdicts, report))


def markdown(verdicts: Verdicts, report: str | Path | None = None) -> str:
    """The verdict, the gates, the numbers that matter with their intervals, faults, and how to replay them."""
    from themis.runs.diff.markup import code, escape, table
    from themis.runs.diff.result import replay, say_fault

    mark = "❌" if verdicts.has_failed else "✅" if verdicts.has_limits else "▫️"
    gates = [
        ("✅ passed" if each.has_passed else "❌ failed", each.gate, each.text, "" if each.has_passed else each.remedy)
        for each in verdicts.verdicts
    ]
    lines = [f"## {mark} Themis: {escape(verdicts.sentence)}", "", *table(("", "gate", "what", "remedy"), gates), ""]
    lines += [*table(("figure", "value", "95% interval"), _figures(verdicts.summary)), ""]
    if verdicts.telling:
        lines += ["The most telling faults:", "", *(f"- {escape(say_fault(each))}" for each in verdicts.telling), ""]
        if verdicts.folder is not None:
            command = replay(str(verdicts.folder), *(each.id for each in verdicts.telling))
            lines += [f"Replay them: {code(command)}", ""]
    if verdicts.diff is not None:
        lines += [verdicts.diff.markdown(), ""]
    if report is not None:
        lines += [f"Report: {code(str(report))}", ""]
    return "\n".join(lines)


def _figures(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    from themis.runs.run import percent

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
        found = summary.get(key)
        if found is not None:
            low, high = percent(found["low"], 2), percent(found["high"], 2)
            rows.append((name, percent(found["value"], 2), f"{low} to {high}"))
        elif key != "coverage_interval":
            rows.append((name, "unknown: no uniform tests", ""))
    rows.append(("coverage of the sampled neurons", percent(summary["coverage"]), ""))
    return rows
