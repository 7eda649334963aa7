"""The results of gates of a run or a suite: as text, as plain data, for CI systems, and recorded in the folder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import node
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from themis.errors import StoreError
from themis.reading import flag, items, read_json, record, text, whole
from themis.runs.analysis.diff import Diff, code, escape, replay_command, table
from themis.runs.display.fault import describe_fault
from themis.runs.fault import Fault
from themis.runs.store.files import TEXT_MARK, explained, made_by, write_fresh
from themis.settings import UNDECIDED
from themis.suites.result import COLUMNS, SuiteRun, table_rows


@dataclass(frozen=True)
class GateResult:
    """The result of one gate."""

    gate: str
    has_passed: bool
    value: float | None
    limit: float | None
    text: str
    """The value and the limit, in words."""
    remedy: str = ""
    is_judged: bool = True
    """False if there are too few tests to judge; the gate is then skipped rather than failed."""

    @property
    def word(self) -> str:
        """The result in a word."""
        return "FAILED" if not self.has_passed else "passed" if self.is_judged else "skipped"

    @property
    def line(self) -> str:
        """The result as it is printed."""
        remedy = f"; {self.remedy}" if self.remedy and not self.has_passed else ""
        return f"{self.word:<7} {self.gate}: {self.text}{remedy}"


@dataclass(frozen=True)
class GateResults:
    """The results of all gates of a run, or of the gates on a whole suite with the results of its members."""

    run: str
    results: tuple[GateResult, ...]
    summary: dict[str, Any] = field(repr=False)
    telling: tuple[Fault, ...] = field(default=(), repr=False)
    """The most telling faults; with a baseline, new faults come first."""
    diff: Diff | None = field(default=None, repr=False)
    folder: Path | None = None
    figures: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The key figures of a run as (name, text)."""
    members: tuple[tuple[str, GateResults], ...] | None = None
    """The results of each member of a suite, by its name; None for a run."""

    def __bool__(self) -> bool:
        return not self.has_failed

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    @property
    def parts(self) -> list[tuple[str, GateResults]]:
        """The results by member, preceded by those on the whole suite if there are any; for a run, only its own."""
        if self.members is None:
            return [("", self)]
        return [*([("all", replace(self, members=None))] if self.results else []), *self.members]

    @property
    def rows(self) -> list[tuple[str, GateResult]]:
        """All gates with their member, failed ones first; for a suite, without the gates on completed campaigns."""
        rows = [(name, result) for name, part in self.parts for result in part.results]
        if self.members is not None:
            rows = [(name, result) for name, result in rows if result.gate != "campaign" or not result.has_passed]
        return sorted(rows, key=lambda row: row[1].has_passed)

    @property
    def failed(self) -> list[GateResult]:
        """The failed gates of the run, or on the suite as a whole."""
        return [result for result in self.results if not result.has_passed]

    @property
    def has_failed(self) -> bool:
        return any(part.failed for _, part in self.parts)

    @property
    def is_undecided(self) -> bool:
        """Whether the only gate that has not passed is an undecided claim."""
        failed = [result.gate for _, part in self.parts for result in part.failed]
        return failed == ["decide"] and self.summary["decision"]["verdict"] == UNDECIDED

    @property
    def has_limits(self) -> bool:
        """Whether there is a gate besides the one that the campaign was completed."""
        return self.members is not None or any(result.gate != "campaign" for result in self.results)

    @property
    def lines(self) -> list[str]:
        """One line per gate; for a suite, with the name of the member and failed gates first."""
        if self.members is None:
            return [result.line for result in self.results]
        return [f"{result.line[:8]}{name} {result.line[8:]}" for name, result in self.rows]

    @property
    def failed_lines(self) -> list[str]:
        """One line per failed gate."""
        return [line for line in self.lines if line.startswith("FAILED")]

    @property
    def sentence(self) -> str:
        """All results in one sentence."""
        if self.members is not None:
            return self._sentence_of_suite(self.members)
        failed, skipped = ([each.gate for each in self.results if each.word == word] for word in ("FAILED", "skipped"))
        n, unjudged = len(self.results), f"; {len(skipped)} could not be judged" if skipped else ""
        if failed:
            return f"{len(failed)} of {n} gate{'s' * (n != 1)} failed: {', '.join(failed)}{unjudged}."
        if not self.has_limits:
            return "The campaign was completed, but no limit was set, so no gate decides whether the model may ship."
        if skipped:
            return f"{n - len(skipped)} gates passed{unjudged}: {', '.join(skipped)}."
        return "The gate passed." if n == 1 else f"All {n} gates passed."

    def _sentence_of_suite(self, members: tuple[tuple[str, GateResults], ...]) -> str:
        failed = [name for name, results in members if results.has_failed]
        overall = replace(self, members=None).sentence if self.failed else ""
        if not members:  # none has a campaign
            return replace(self, members=None).sentence
        if not failed:
            return overall or f"All gates passed under all {len(members)} perturbations."
        text = f"Gates failed under {len(failed)} of {len(members)} perturbations: {', '.join(failed)}."
        return f"{overall} {text}".strip()

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        if self.members is not None:
            overall = replace(self, members=None).as_dict() if self.results else None
            members = {name: results.as_dict() for name, results in self.members}
            return {"has_failed": self.has_failed, "overall": overall, "members": members}
        names = ("gate", "has_passed", "is_judged", "value", "limit", "text")
        gates = [{name: getattr(result, name) for name in names} for result in self.results]
        diff = None if self.diff is None else self.diff.as_dict()
        return {"has_failed": self.has_failed, "gates": gates, "diff": diff}


# The record in the folder, which its page shows

GATES_FILE = "gates.json"
_ROW = record({**dict.fromkeys(("member", "gate", "text", "remedy"), text()), "has_passed": flag}, {"is_judged": flag})
_FORM = record({"tests": whole(), "sentence": text(), "rows": items(_ROW)}, {"made_by": text()})


def record_gates(results: GateResults) -> None:
    """Write the results into their folder, and those of members into the members' folders."""
    if results.folder is None:
        return
    rows = [
        {
            "member": member,
            **{name: getattr(result, name) for name in ("gate", "has_passed", "is_judged", "text")},
            "remedy": "" if result.has_passed else result.remedy,
        }
        for member, result in results.rows
    ]
    plain = {"tests": results.summary["tests"], "sentence": results.sentence}
    content = json.dumps({**made_by("gate"), **plain, "rows": rows}, indent=2, allow_nan=False)
    write_fresh(results.folder / GATES_FILE, content.encode(), remedy="remove it")
    for _, of_member in results.members or ():
        record_gates(of_member)


def read_gates(folder: Path, tests: int) -> dict[str, Any] | None:
    """The recorded results, failed ones first; None if there are none, or if more tests have run since."""
    problem = "is damaged ({}): remove it, and write it again with themis gate"
    plain: dict[str, Any] | None = read_json(folder / GATES_FILE, _FORM, problem)
    return plain if plain is not None and plain["tests"] == tests else None


# The files for CI systems


def write_markdown(path: str | Path, results: GateResults, *, report: str | Path | None = None) -> None:
    """Append a summary to a file, in which CI systems collect the summaries of all steps.

    It has the overall result, the gates, the key figures, and the most telling faults of a run with the command that
    replays them.
    """
    mark = "❌" if results.has_failed else "✅" if results.has_limits else "▫️"
    if results.members is None:
        lines = _describe_run(results)
    else:
        cells = [(name, _cells(result)) for name, result in results.rows]
        rows = [(mark_of, name, *others) for name, (mark_of, *others) in cells]
        gates = [*table(("", "perturbation", "gate", "result", "remedy"), rows), ""] if rows else []
        lines = [*gates, *table(COLUMNS, table_rows(SuiteRun(results.run))), ""]
    if report is not None:
        lines += [f"Report: {code(str(report))}", ""]
    text = "\n".join([f"## {mark} Themis: {escape(results.sentence)}", "", *lines])
    file = Path(path)
    size = file.stat().st_size if file.is_file() else None  # it may also be new, a pipe or a terminal
    try:
        with explained(file), file.open("ab") as end:
            end.write(text.encode("utf-8", "replace"))
    except StoreError:
        if size is not None:  # remove what was written in part
            os.truncate(file, size)
        raise


def _cells(result: GateResult) -> tuple[str, ...]:
    if result.has_passed:
        return "✅ passed" if result.is_judged else "▫️ skipped", result.gate, result.text, ""
    return "❌ failed", result.gate, result.text, result.remedy


def _describe_run(results: GateResults) -> list[str]:
    lines = [*table(("", "gate", "result", "remedy"), map(_cells, results.results)), ""]
    lines += [*table(("figure", "value"), results.figures), ""]
    if results.telling:
        lines += ["The most telling faults:", "", *(f"- {escape(describe_fault(fault))}" for fault in results.telling)]
        lines += ["", *(f"Replay them: {code(command)}\n" for command in _replay(results))]
    return [*lines, *([] if results.diff is None else [results.diff.markdown(), ""])]


def _replay(results: GateResults) -> list[str]:
    """The command that replays the most telling faults, if there are any and the run has a folder."""
    ids = [fault.id for fault in results.telling]
    return [replay_command(str(results.folder), *ids)] if ids and results.folder is not None else []


_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def legal(text: str) -> str:
    """The text with a replacement character for each character that XML does not allow."""
    return _ILLEGAL.sub("\ufffd", text)


def write_junit(path: str | Path, results: GateResults, *, report: str | Path | None = None) -> None:
    """Write JUnit XML with one test suite per run; replaces only a file that this function wrote."""
    root = Element("testsuites")
    for k, (_, part) in enumerate(results.parts):
        _add_suite(root, k, part, [] if report is None else [f"report: {report}"])
    indent(root)
    text = f"<?xml version='1.0' encoding='utf-8'?>\n{TEXT_MARK}\n{legal(tostring(root, encoding='unicode'))}\n"
    write_fresh(Path(path), text.encode(), remedy="choose another, or remove it")


def _add_suite(root: Element, place: int, results: GateResults, report: list[str]) -> None:
    seconds = (results.summary.get("seconds") or {}).get("total") or 0.0
    attributes = {
        "name": f"themis {results.run}",
        "package": "themis",
        "id": str(place),
        "tests": str(len(results.results)),
        "failures": str(len(results.failed)),
        "errors": "0",
        "skipped": str(sum(not result.is_judged for result in results.results)),
        "time": f"{seconds:.3f}",
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "hostname": node() or "localhost",
    }
    suite = SubElement(root, "testsuite", attributes)
    properties = SubElement(suite, "properties")
    what = ("version", "perturbation", "profile", "fault")
    for key in (*what, "random_seed", "tests", "passes", "distinct_faults", "coverage"):
        if results.summary.get(key) is not None:
            SubElement(properties, "property", name=key, value=str(results.summary[key]))
    telling = [*map(describe_fault, results.telling), *_replay(results)]
    for k, result in enumerate(results.results):
        time = seconds if k == 0 else 0.0  # the first case is the campaign itself
        case = SubElement(suite, "testcase", classname=f"themis.{results.run}", name=result.gate, time=f"{time:.3f}")
        if not result.is_judged:
            SubElement(case, "skipped", message=result.text)
        if not result.has_passed:
            failure = SubElement(case, "failure", message=result.text, type="GateFailed")
            failure.text = "\n".join([result.line, *telling])
    SubElement(suite, "system-out").text = "\n".join([*results.lines, *telling, *report])
    SubElement(suite, "system-err")
