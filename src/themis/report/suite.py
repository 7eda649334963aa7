"""The report of a suite: everything that its page shows, as typed data, and the page as a single HTML file."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import ThemisError
from themis.judge.estimate import Estimate
from themis.report.gates.record import RecordedGates, read_gates
from themis.report.inputs import read_inputs
from themis.report.names import answer_names, as_text, class_names, feature_names, outcome_names, task_of
from themis.report.page import REPORT, render_page, write_report
from themis.report.view import ShellCommand, plain_view
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.suites.definition import suite_title
from themis.suites.result import (
    CorruptionErrors,
    Interval,
    MemberRow,
    SuiteRun,
    breaks_at_levels,
    independent_of,
    most_fragile,
    slice_sentences,
)
from themis.suites.slices import CLASS, share
from themis.text import counted, percent

if TYPE_CHECKING:
    from themis.runs.fault import Fault

SECTIONS = (
    ("verdict", "Verdict"),
    ("numbers", "Key figures"),
    ("gates", "Gates"),
    ("members", "Perturbations"),
    ("levels", "Severity"),
    ("classes", "Classes"),
    ("slices", "Slices"),
    ("pictures", "Pictures"),
    ("budget", "Budget"),
    ("reproduce", "Reproduce"),
)
SCRIPTS = ("elements.js", "charts.js", "suite.js", "boot.js")
MEMBER_PICTURES = 60
"""Faults with pictures in the report of a member, by default."""
N_SLICES = 12
FRAGILE = 0.05
"""A fault rate from which the verdict says that the model breaks."""


@dataclass(frozen=True)
class LevelRow:
    """The share of wrong answers of a member at each of its levels, their mean, and the levels in words."""

    member: str
    levels: list[str]
    errors: list[Estimate]
    mean: Estimate | None
    """None in records of earlier versions."""


@dataclass(frozen=True)
class ClassRow:
    """The share of wrong answers of a member by class; None where there are no tests."""

    member: str
    rates: list[Estimate | None]
    tests: list[int]


@dataclass(frozen=True)
class ShownFault:
    """The most telling fault of a member, with its picture if it is one."""

    member: str
    text: str
    before: str
    after: str
    clean: str | None
    """The clean and the disturbed picture as data URIs."""
    disturbed: str | None


@dataclass(frozen=True)
class SuiteView:
    """All contents of the report of a suite."""

    run: str
    state: str
    name: str
    title: str
    subject: str
    fault: str
    tone: str
    verdict: str
    gates: RecordedGates | None
    sentences: list[str]
    notes: list[str]
    members: list[MemberRow]
    reports: dict[str, str]
    """Where the reports of members are, relative to the page."""
    clean_error: float | None
    mean_error: float | None
    mean_error_interval: Interval | None
    mean_score: float | None
    mean_score_interval: Interval | None
    score_name: str
    relative_score: float | None
    relative_score_interval: Interval | None
    corruption_errors: CorruptionErrors | None
    tests: int
    passes: int
    clean_passes: int
    distinct_faults: int
    seeds: int
    level_seeds: int | None
    seconds: float
    levels: list[LevelRow]
    class_names: list[str]
    classes: list[ClassRow]
    slices: list[dict[str, Any]]
    pictures: list[ShownFault]
    schedule: list[dict[str, Any]]
    share: float
    config: list[tuple[str, str]]
    next: ShellCommand | None
    """What to run next."""
    reproduce: list[ShellCommand]
    version: str

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`, as the script of the page reads it."""
        plain: dict[str, Any] = plain_view(self)
        return plain


def read_suite_view(suite: SuiteRun, errors: CorruptionErrors | None = None) -> SuiteView:
    """Read everything that the report of a suite shows. errors: relative to a baseline."""
    record, rows = suite.record, suite.rows
    origin = record["origin"] or {}
    subject = str(origin.get("zoo") or origin.get("model") or "a model built in Python")
    graded = [float(np.mean(levels)) for levels in suite.errors.values()]
    score_interval, relative_interval = suite.score_intervals
    names, classes = _classes(suite)
    commands = _commands(suite)
    gates = read_gates(suite.path, suite.tests)
    tone, verdict = _verdict(suite, None if gates is None else gates.max_fault_rate)
    return SuiteView(
        run=str(suite.path),
        state=suite.state,
        name=suite.name,
        title=f"{suite_title(suite.name)} on {subject}",
        subject=subject,
        fault=record.get("fault", ""),
        tone=tone,
        verdict=verdict,
        gates=gates,
        sentences=slice_sentences(suite, 1),
        notes=list(record.get("notes", ())),
        members=sorted(rows, key=_order),
        reports={name: f"{name}/{REPORT}" for name in suite.members if (suite.path / name / REPORT).is_file()},
        clean_error=suite.clean_error,
        mean_error=float(np.mean(graded)) if graded else None,
        mean_error_interval=None if suite.mean_error is None else (suite.mean_error.low, suite.mean_error.high),
        mean_score=suite.mean_score,
        mean_score_interval=score_interval,
        score_name=suite.score_name,
        relative_score=suite.relative_score,
        relative_score_interval=relative_interval,
        corruption_errors=errors,
        tests=suite.tests,
        passes=suite.passes,
        clean_passes=record["passes"],
        distinct_faults=sum(row.distinct_faults for row in rows),
        seeds=max((row.seeds for row in rows), default=0),
        level_seeds=None if record.get("clean") is None else record["clean"]["seeds"],
        seconds=record["seconds"],
        levels=[
            LevelRow(
                name, [grade["level"] for grade in grades], suite.level_errors[name], suite.member_errors.get(name)
            )
            for name, grades in record["grades"].items()
            if grades
        ],
        class_names=names,
        classes=classes,
        slices=[asdict(row) for row in suite.worst_slices(N_SLICES)],
        pictures=[shown for name in suite.members if (shown := _telling(suite.path / name, name)) is not None],
        schedule=record["schedule"],
        share=record["options"]["share"],
        config=_config(record),
        next=next(iter(commands), None),
        reproduce=commands,
        version=str(record.get("made_by", "")).partition("themis ")[2].partition(" ")[0],
    )


def write_suite_report(
    suite: SuiteRun,
    out: Path | None = None,
    *,
    errors: CorruptionErrors | None = None,
    most_pictures: int = MEMBER_PICTURES,
    replaces: bool = False,
) -> Path:
    """Write the report of a suite, by default into its folder, and those of its members; returns its path.

    Earlier reports are replaced, other files only if `replaces` is set.
    """
    from themis.runs.store.files import REMEDY, check_free, write_fresh

    path = suite.path / REPORT if out is None else Path(out)
    check_free(path, replaces=replaces)
    for name in suite.members:
        folder = suite.path / name
        if not folder.is_symlink() and (folder / DATABASE).is_file():
            write_report(folder, most_pictures=most_pictures, replaces=replaces)
    content = render_suite(read_suite_view(suite, errors)).encode("utf-8", "replace")
    write_fresh(path, content, replaces=replaces, remedy=REMEDY)
    return path


def render_suite(view: SuiteView, *, live: str | None = None) -> str:
    """The HTML page of a suite."""
    return render_page(view.title, view.as_json(), SECTIONS, SCRIPTS, live=live)


def _order(row: MemberRow) -> tuple[float, float]:
    """The highest fault rates first, equal ones by their errors at levels."""
    return -(row.fault_rate.value if row.fault_rate else -1.0), -(row.error or 0.0)


def _verdict(suite: SuiteRun, limit: float | None) -> tuple[str, str]:
    """The tone of the verdict, and the verdict in a sentence or two; `limit`: the fault rate that the user allows."""
    rated, most = [row for row in suite.rows if row.fault_rate is not None], most_fragile(suite)
    if most is None:
        return "", "No fault rate of this suite is known yet."
    n = counted(len(rated), "perturbation")
    if limit is not None:
        over = [row.name for row in rated if row.fault_rate is not None and row.fault_rate.high > limit]
        allowed = f"the limit of {percent(limit)} on the fault rate"
        if not over:
            return "", f"{most} The model is within {allowed} under all {n}."
        return "broken", f"{most} The model may exceed {allowed} under {len(over)} of {n}: {', '.join(over)}."
    if not any(row.faults for row in suite.rows) and not breaks_at_levels(suite):
        return "", f"The model withstood all {n} of this suite."
    broken = [row.name for row in rated if row.fault_rate is not None and row.fault_rate.low > FRAGILE]
    limit_text = f"is the fault rate clearly above {percent(FRAGILE, 0)}"
    if not broken:
        return "broken", f"{most} Under no perturbation {limit_text}."
    if len(broken) == 1:
        return "broken", f"{most} Only under {broken[0]} {limit_text}."
    return "broken", f"{most} The fault rate is clearly above {percent(FRAGILE, 0)} under {len(broken)} of {n}."


def _classes(suite: SuiteRun) -> tuple[list[str], list[ClassRow]]:
    """The classes, and the rows of the heat map; the first row is that of clean inputs if it is known."""
    column = next((column for column in suite.record["slices"] if column["name"] == CLASS), None)
    if column is None:
        return [], []
    order = ["clean", *suite.members]
    rows = []
    for name in sorted(column["counts"], key=lambda name: order.index(name) if name in order else len(order)):
        counts = column["counts"][name][: len(column["values"])]
        rates = [
            share(min(faults, tests), tests, independent) if tests else None
            for (tests, faults), independent in zip(counts, independent_of(column, name), strict=False)
        ]
        rows.append(ClassRow(name, rates, [tests for tests, _ in counts]))
    return column["values"], rows


def _telling(folder: Path, member: str) -> ShownFault | None:
    """The most telling stored fault of a member; None without one, or if it cannot be read."""
    if folder.is_symlink() or not (folder / DATABASE).is_file():
        return None
    try:
        with closing(Reader(folder, is_brief=True)) as run:
            faults = run.faults("tensors IS NOT NULL").most_telling(1)
            return _shown(run, faults[0], member) if faults else None
    except ThemisError:  # the report of the member says what is wrong
        return None


def _shown(run: Reader, fault: Fault, member: str) -> ShownFault:
    inputs = read_inputs(run, [fault.id], [fault.seed_id], 1, feature_names(run))
    task, names = task_of(run), class_names(run)
    theta = ", ".join(f"{name} {value:.3g}" for name, value in fault.theta.items())
    clean = fault.clean_answer if fault.clean_answer is not None else -2
    return ShownFault(
        member,
        f"seed {fault.seed_id}: {theta}",
        answer_names(task, [clean], names)[clean] if clean >= 0 else "",
        outcome_names(task, [fault.answer], names)[fault.answer],
        inputs.clean.get(fault.seed_id),
        inputs.disturbed.get(fault.id),
    )


def _config(record: dict[str, Any]) -> list[tuple[str, str]]:
    origin = {name: value for name, value in (record["origin"] or {}).items() if value not in (None, "", [])}
    values = {**origin, **record["settings"], **record["options"]}
    return [(name, as_text(value)) for name, value in values.items()]


def _commands(suite: SuiteRun) -> list[ShellCommand]:
    folder = quote(str(suite.path))
    commands = []
    if suite.state != "ended" and suite.record["origin"] is not None:
        commands.append(ShellCommand(f"themis resume {folder}", "Resume the suite where it stopped"))
    found = [row for row in suite.rows if row.faults]
    if found:
        worst = max(found, key=lambda row: row.distinct_faults)
        member = quote(str(suite.path / worst.name))
        commands.append(ShellCommand(f"themis faults {member}", "List, sort and export the faults of a member"))
        commands.append(ShellCommand(f"themis shrink {member} --curve", "Find the smallest disturbances that break it"))
    return commands
