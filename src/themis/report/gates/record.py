"""The results of the gates, recorded in the folder of a run or a suite, so that its page shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from themis.errors import StoreError
from themis.reading import check_form, flag, items, number, optional, parse_json, read_regular, record, text, whole
from themis.report.gates.gates import GateResults
from themis.report.gates.suite import SuiteGateResults
from themis.runs.store.files import made_by, write_fresh
from themis.runs.store.schema import MAX_JSON
from themis.suites.result import SuiteRun

GATES_FILE = "gates.json"
_ROW = record({"member": text(), "gate": text(), "has_passed": flag, "text": text(), "remedy": text()})
_FORM = record(
    {"tests": whole(), "sentence": text(), "max_fault_rate": optional(number()), "rows": items(_ROW)},
    {"made_by": text()},
)


@dataclass(frozen=True)
class GateRow:
    """The result of a gate; `member` is empty in the gates of a run."""

    member: str
    gate: str
    has_passed: bool
    text: str
    remedy: str


@dataclass(frozen=True)
class RecordedGates:
    """The results of all gates, those that failed first."""

    sentence: str
    max_fault_rate: float | None
    """The largest fault rate that the user allows."""
    rows: list[GateRow]


def record_gates(folder: Path, results: GateResults, max_fault_rate: float | None) -> None:
    """Write the results of the gates of a run into its folder."""
    _write(folder, [("", results)], results.summary["tests"], results.sentence, max_fault_rate)


def record_suite_gates(suite: SuiteRun, results: SuiteGateResults, max_fault_rate: float | None) -> None:
    """Write the results of the gates of a suite into its folder, and those of each member into that of the member."""
    _write(suite.path, results.parts, suite.tests, results.sentence, max_fault_rate)
    for _, of_member in results.members:
        if of_member.folder is not None:
            record_gates(of_member.folder, of_member, max_fault_rate)


def _write(
    folder: Path, parts: Sequence[tuple[str, GateResults]], tests: int, sentence: str, max_fault_rate: float | None
) -> None:
    rows = [
        GateRow(name, result.gate, result.has_passed, result.text, "" if result.has_passed else result.remedy)
        for name, results in parts
        for result in results.results
        if not name or result.gate != "campaign" or not result.has_passed
    ]
    rows.sort(key=lambda row: row.has_passed)
    gates = RecordedGates(sentence, max_fault_rate, rows)
    content = json.dumps({**made_by("gate"), "tests": tests, **asdict(gates)}, indent=2, allow_nan=False)
    write_fresh(folder / GATES_FILE, content.encode(), remedy="remove it")


def read_gates(folder: Path, tests: int) -> RecordedGates | None:
    """The recorded results; None if there are none, or if the run has run more tests since then."""
    path = folder / GATES_FILE
    try:
        plain = check_form(parse_json(read_regular(path, MAX_JSON)), _FORM)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"{path} must hold the results of gates as JSON, but it is damaged ({reason}): remove it, and write it "
            "again with themis gate"
        ) from error
    if plain["tests"] != tests:
        return None
    return RecordedGates(plain["sentence"], plain["max_fault_rate"], [GateRow(**row) for row in plain["rows"]])
