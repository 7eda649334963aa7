"""The report of a suite: its contents, and the page as a single HTML file."""

from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Any

from themis.errors import ThemisError
from themis.report.gates.results import read_gates
from themis.report.names import describe_settings, feature_names, subject_of
from themis.report.page import REPORT_FILE, ShellCommand, read_inputs, render_page, write_report
from themis.runs.fault import name_answer, name_outcome
from themis.runs.store.files import REPLACE_REMEDY, check_free, json_safe, write_fresh
from themis.runs.store.reader import Reader
from themis.settings import FAILS
from themis.suites import result
from themis.suites.definition import suite_title
from themis.text import counted, percent

SUITE_SCRIPTS = ("elements.js", "charts.js", "suite.js", "boot.js")
MAX_MEMBER_PICTURES = 60
"""Faults with pictures in the report of a member."""
MAX_SLICES = 12
FRAGILE_RATE = 0.05
"""Above this fault rate, the verdict counts a perturbation among those that break the model."""


def read_suite_view(suite: result.SuiteRun, errors: result.CorruptionErrors | None = None) -> dict[str, Any]:
    """The contents of a suite's page, as plain data for `json.dumps`. errors: errors relative to a baseline."""
    record, rows, grades = suite.record, suite.rows, suite.grades
    commands = _commands(suite)
    gates = read_gates(suite.path, suite.tests)
    tone, verdict = _verdict(suite, gates)
    plain: dict[str, Any] = json_safe(
        {
            **suite.summary(),
            "run": str(suite.path),
            "title": f"{suite_title(suite.name)} on {subject_of(record)}",
            "fault": record["fault"],
            "tone": tone,
            "verdict": verdict,
            "gates": gates,
            "sentences": result.slice_sentences(suite, 1),
            "members": sorted(rows, key=_order),
            # Where the reports of members are, relative to the page.
            "reports": {
                name: f"{name}/{REPORT_FILE}" for name in suite.members if (suite.path / name / REPORT_FILE).is_file()
            },
            "score_name": grades.score_name,
            "corruption_errors": errors,
            "seeds": max((row.seeds for row in rows), default=0),
            "is_only_graded": suite.is_only_graded,
            "level_seeds": None if grades.clean is None else grades.clean.seeds,
            "levels": [
                {
                    "member": name,
                    "levels": [grade.level for grade in levels],
                    "errors": grades.level_errors[name],
                    "mean": grades.member_errors[name],
                }
                for name, levels in grades.levels.items()
            ],
            "slices": suite.worst_slices(MAX_SLICES),
            "pictures": [shown for folder in suite.run_folders.values() if (shown := _telling(folder)) is not None],
            "share": record["options"]["share"],
            "config": describe_settings(record["origin"], {**record["settings"], **record["options"]}),
            "next": next(iter(commands), None),
            "reproduce": commands,
            "version": str(record.get("made_by", "")).partition("themis ")[2].partition(" ")[0],
        }
    )
    return plain


def write_suite_report(
    suite: result.SuiteRun,
    out: Path | None = None,
    *,
    errors: result.CorruptionErrors | None = None,
    most_pictures: int = MAX_MEMBER_PICTURES,
    replaces: bool = False,
) -> Path:
    """Write the reports of a suite and its members; return the path of the suite's. replaces: see `check_free`."""
    path = suite.path / REPORT_FILE if out is None else Path(out)
    check_free(path, replaces=replaces)
    for folder in suite.run_folders.values():
        write_report(folder, most_pictures=most_pictures, replaces=replaces)
    content = render_suite(read_suite_view(suite, errors)).encode("utf-8", "replace")
    write_fresh(path, content, replaces=replaces, remedy=REPLACE_REMEDY)
    return path


def render_suite(view: dict[str, Any], *, live: str | None = None) -> str:
    """The HTML page of a suite."""
    return render_page(view["title"], view, SUITE_SCRIPTS, live=live)


def _order(row: result.MemberRow) -> tuple[float, float]:
    """Sort by fault rate, highest first, then by errors at levels."""
    return -(row.fault_rate.value if row.fault_rate else -1.0), -(row.error or 0.0)


def _verdict(suite: result.SuiteRun, gates: dict[str, Any] | None) -> tuple[str, str]:
    """The tone of the verdict, and the verdict in a sentence or two; the page adds the sentence of the gates."""
    rates = [row.fault_rate for row in suite.rows if row.fault_rate is not None]
    most, n = result.most_fragile(suite), counted(len(rates), "perturbation")
    if suite.is_only_graded:
        claim, tone = "", ""
        if suite.decision is not None:
            claim, tone = f"{suite.decision.clause}. ", "broken" * (suite.decision.verdict == FAILS)
        return tone, f"{claim}{most}"
    if most is None:
        return "", "No fault rate of this suite is known yet."
    if gates is not None:
        return "broken" * any(not row["has_passed"] for row in gates["rows"]), most
    if not any(row.faults for row in suite.rows) and not result.breaks_at_levels(suite):
        return "", f"The model withstood all {n} of this suite."
    n_broken = sum(rate.low > FRAGILE_RATE for rate in rates)
    return "broken", f"{most} The fault rate is clearly above {percent(FRAGILE_RATE, 0)} under {n_broken} of {n}."


def _telling(folder: Path) -> dict[str, Any] | None:
    """The most telling fault of a member whose inputs are stored; None without one, or if it cannot be read."""
    try:
        with closing(Reader(folder, is_brief=True)) as run:
            for fault in run.faults("tensors IS NOT NULL").most_telling(1):
                inputs = read_inputs(run, [fault.id], [fault.seed_id], 1, feature_names(run))
                task, names = run.task, run.classes
                theta = ", ".join(f"{name} {value:.3g}" for name, value in fault.theta.items())
                clean = fault.clean_answer
                return {
                    "member": folder.name,
                    "text": f"seed {fault.seed_id}: {theta}",
                    "before": name_answer(task, clean, names) if clean is not None and clean >= 0 else "",
                    "after": name_outcome(task, fault.answer, names),
                    "clean": inputs.clean.get(fault.seed_id),
                    "disturbed": inputs.disturbed.get(fault.id),
                }
    except ThemisError:  # writing the report of the member has raised the same error or will
        pass
    return None


def _commands(suite: result.SuiteRun) -> list[ShellCommand]:
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
