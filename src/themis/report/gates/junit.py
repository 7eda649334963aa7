"""JUnit XML: a test case a gate, for whatever shows test results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from themis.report.gates.gates import Verdicts

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def legal(text: str) -> str:
    """Text with a mark in place of each character that XML cannot hold."""
    return _ILLEGAL.sub("\ufffd", text)


def write_junit(
    path: str | Path, verdicts: Verdicts | Sequence[Verdicts], *, report: str | Path | None = None, suite: str = ""
) -> None:
    """Write a suite a run. report: its page, named in the output; suite: the suite's name, by default the run's."""
    from themis.runs.store.files import explained, write_file

    some = [verdicts] if not isinstance(verdicts, Sequence) else list(verdicts)
    root = ElementTree.Element("testsuites")
    for number, each in enumerate(some):
        root.append(_suite(each, number, suite or f"themis {each.run}", report))
    ElementTree.indent(root)
    content = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    with explained(Path(path)):
        write_file(Path(path), content + b"\n")


def _suite(verdicts: Verdicts, number: int, name: str, report: str | Path | None) -> ElementTree.Element:
    from datetime import UTC, datetime
    from platform import node

    failed = sum(not each.has_passed for each in verdicts.verdicts)
    seconds = (verdicts.summary.get("seconds") or {}).get("total") or 0.0
    suite = _element(
        None,
        "testsuite",
        name=name,
        package="themis",
        id=str(number),
        tests=str(len(verdicts.verdicts)),
        failures=str(failed),
        errors="0",
        skipped="0",
        time=f"{seconds:.3f}",
        timestamp=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        hostname=node() or "localhost",
    )
    properties = _element(suite, "properties")
    for key in ("version", "perturbation", "random_seed", "tests", "passes", "distinct_faults", "coverage"):
        _element(properties, "property", name=key, value=str(verdicts.summary.get(key)))
    for k, each in enumerate(verdicts.verdicts):
        time = seconds if k == 0 else 0.0  # the campaign's own case took it all
        case = _element(suite, "testcase", classname=f"themis.{verdicts.run}", name=each.gate, time=f"{time:.3f}")
        if not each.has_passed:
            failure = _element(case, "failure", message=each.text, type="GateFailed")
            failure.text = legal("\n".join([each.line, *faults_in_words(verdicts)]))
    out = _element(suite, "system-out")
    out.text = legal("\n".join([*verdicts.lines, *faults_in_words(verdicts), *_report(report)]))
    _element(suite, "system-err")
    return suite


def faults_in_words(verdicts: Verdicts) -> list[str]:
    """The most telling faults, a line each, and how to run them again."""
    from themis.runs.diff.result import replay, say_fault

    if not verdicts.telling:
        return []
    lines = [say_fault(each) for each in verdicts.telling]
    if verdicts.folder is None:
        return lines
    return [*lines, replay(str(verdicts.folder), *(each.id for each in verdicts.telling))]


def _report(report: str | Path | None) -> list[str]:
    return [] if report is None else [f"report: {report}"]


def _element(parent: ElementTree.Element | None, tag: str, **attributes: str) -> ElementTree.Element:
    plain = {name: legal(value) for name, value in attributes.items()}
    return ElementTree.Element(tag, plain) if parent is None else ElementTree.SubElement(parent, tag, plain)
