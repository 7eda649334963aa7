"""The fixture: a campaign with gates as a test, the message if it fails, and the replay of a single fault."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shlex import quote
from traceback import extract_tb
from typing import Any
from uuid import uuid4

import pytest

from themis.campaign.api import run
from themis.errors import ThemisError, UsageError, nearest
from themis.perturb import Perturbation
from themis.reading import parse_json, read_regular
from themis.report.gates.gates import Gates, check_gates, check_suite_ahead, check_suite_gates, refuse_constant
from themis.report.gates.results import GateResult, GateResults
from themis.report.page import write_report
from themis.report.suite import write_suite_report
from themis.runs.analysis.diff import replay_command
from themis.runs.display.fault import answered, answers, describe_change, describe_fault
from themis.runs.display.text import summary_rows
from themis.runs.fault import Fault, Replay
from themis.runs.replay import Replayer
from themis.runs.run import Run
from themis.runs.store.files import PYTEST_NOTE, RUN_FILES, list_folder, tensors_in
from themis.runs.store.reader import Reader
from themis.settings import Settings
from themis.suites.api import run_suite
from themis.suites.options import UNSUPPORTED_OPTIONS, read_options
from themis.suites.result import SuiteRun
from themis.target.blackbox import as_target
from themis.target.target import refuse_target_options
from themis.text import counted

DEFAULT_TESTS = 2_000
"""The default budget of a campaign: it takes seconds on a small model."""
GATE_OPTIONS = tuple(field.name for field in fields(Gates))
"""Options that are gates; the others are options of the campaign."""
ARGUMENTS = ("out", "callbacks", "origin", "features", "classes", "train", "rivals", "executor")
"""Arguments of `themis.run` besides the settings."""
SITE = f"{os.sep}site-packages{os.sep}"


@dataclass
class RobustnessTest:
    """Runs campaigns for one test; options of the command line win over the call, the markers and the ini file."""

    item: pytest.Item
    overrides: dict[str, Any]
    """Options from the command line."""
    defaults: dict[str, Any]
    """Options from the ini file."""
    folder: Path | None
    """Where run folders are kept."""
    temporary: Callable[[str], Path]
    replay: str | None = None
    """A fault to replay instead of the campaign, as RUN:FAULT."""
    calls: int = 0

    def __call__(self, target: Any, data: Any, perturbation: Any = None, **options: Any) -> Run:
        """Test `target` on `data` under `perturbation`, as `themis.run` does; fail the test if a gate fails.

        max_fault_rate: the largest allowed upper end of the interval of the fault rate. fail_under: the smallest
        allowed values of metrics, for example {"coverage": 0.9}. max_new_faults, baseline: how many faults are allowed
        that do not break the model of the run folder `baseline`. trust: True if the code that a baseline from another
        machine names may run. Without a gate, any fault fails the test. allow_constant: True if a limit on faults may
        pass although the clean answers are no better than a constant. Other options are passed on to `themis.run`.
        """
        __tracebackhide__ = True
        with _errors_as_failures():
            self.calls += 1
            perturbation, options = self._merge(perturbation, options)
            gates = _take_gates(options)
            settings = Settings.of(**{name: value for name, value in options.items() if name not in ARGUMENTS})
            gates.check_ahead(settings.uniform_share)
            is_earlier = self.replay is not None and self._is_earlier(self.replay)
            if self.replay is not None and not is_earlier:
                replay_fault(self.replay, target, data, perturbation)
            run, folder = self._run(target, data, perturbation, options)
            if run.stop_reason == "user":
                raise KeyboardInterrupt  # the campaign has saved its results; now stop the session too
            if is_earlier:
                return run  # the test may need it to get to the fault
            results = check_gates(run, gates, folder=folder)
            if not gates and run.decision is None:
                results = _allow_no_fault(results, gates)
            report, reason = _write_report(folder) if results.has_failed or self.folder is not None else (None, "")
            self.item.user_properties.extend(properties_of(run, folder, report, self.calls))
            if results.has_failed:
                test = None
                if options.get("origin") is None:  # the name as it is typed where the session was started
                    path = os.path.relpath(self.item.path, self.item.config.invocation_params.dir)
                    test = "::".join([path, *node_id(self.item).split("::")[1:]])
                pytest.fail(describe_failure(run, results, folder, str(report or reason), test), pytrace=False)
            return run

    def suite(self, target: Any, data: Any, suite: Any = "corruptions", **options: Any) -> SuiteRun:
        """Test `target` on `data` under every perturbation of a suite, as `themis.run_suite` does.

        The gates are those of a call of the fixture, and hold under every perturbation; a baseline is the folder of a
        suite. Other options are passed on to `themis.run_suite`.
        """
        __tracebackhide__ = True
        if self.replay is not None:
            pytest.skip("a suite is not run to replay a fault: replay it with themis replay RUN FAULT")
        with _errors_as_failures():
            self.calls += 1
            not_of_suites = ("perturbation", *UNSUPPORTED_OPTIONS)
            marked = {name: value for name, value in self._marked().items() if name not in not_of_suites}
            merged = {**self.defaults, **marked, **options, **self.overrides}
            if "max_seconds" not in options:
                merged.pop("max_seconds", None)  # the limit of a session is for single campaigns
            gates = _take_gates(merged)
            out = merged.pop("out", None)
            arguments = ("callbacks", "origin", "features", "classes", "listener")
            _, settings = read_options({name: value for name, value in merged.items() if name not in arguments})
            check_suite_ahead(gates, settings.uniform_share)
            folder = out or claim(self.item, self.folder, self.temporary, self.calls) / "suite"
            found = run_suite(target, data, suite, out=folder, **merged)
            if found.state == "interrupted":
                raise KeyboardInterrupt  # the suite has saved its results; now stop the session too
            results = check_suite_gates(found, gates, rebuild=lambda run: Replayer(run, as_target(target), data))
            if not gates:
                members = tuple((name, _allow_no_fault(member, gates)) for name, member in results.members or ())
                results = replace(results, members=members)
            if results.has_failed:
                report, reason = _write_report(found.path, is_suite=True)
                places = ["", f"report: {report or reason}", f"run: {found.path}"]
                pytest.fail("\n".join([*results.failed_lines, results.sentence, *places]), pytrace=False)
            return found

    def check_returned(self, returned: Any) -> None:
        """Test the target and the data that a marked test has returned."""
        __tracebackhide__ = True
        if not isinstance(returned, tuple) or len(returned) != 2:
            kind = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
            pytest.fail(
                f"themis: a test marked robustness must return (target, data), got {kind}: return both, or use the "
                "robustness fixture",
                pytrace=False,
            )
        self(*returned)

    def _is_earlier(self, fault: str) -> bool:
        """Whether this call precedes the one that found the fault to replay; skips tests that did not find it."""
        note = read_note(_split(fault)[0])
        if note is None:
            return False
        if note.get("test") != node_id(self.item):
            pytest.skip("not the test that found the fault of --themis-replay")
        return self.calls < int(note.get("call", 1))

    def _marked(self) -> dict[str, Any]:
        """The options of all markers of the test; the closest marker wins."""
        marked: dict[str, Any] = {}
        for marker in reversed(list(self.item.iter_markers("robustness"))):  # the closest one last
            if len(marker.args) > 1:
                raise UsageError(
                    f"the marker takes only the perturbation by position, got {marker.args}: name the others"
                )
            marked |= {**marker.kwargs, **dict(zip(["perturbation"], marker.args, strict=False))}
        return marked

    def _merge(self, perturbation: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The perturbation and all options, by precedence."""
        merged: dict[str, Any] = {"max_tests": DEFAULT_TESTS, **self.defaults, **self._marked()}
        merged |= {**options, **({} if perturbation is None else {"perturbation": perturbation}), **self.overrides}
        chosen = merged.pop("perturbation", None)
        if chosen is None:
            raise UsageError(
                "a robustness test must name its perturbation, got none: pass it to the fixture, for example "
                "robustness(target, data, 'gaussian'), or to the marker"
            )
        refuse_target_options(merged)
        known = {*(field.name for field in fields(Settings)), *ARGUMENTS, *GATE_OPTIONS}
        for name in merged:
            if name not in known:
                raise UsageError(f"unknown option {name!r}: {nearest(name, known)}")
        return chosen, merged

    def _run(self, target: Any, data: Any, perturbation: Any, options: dict[str, Any]) -> tuple[Run, Path]:
        out = options.pop("out", None)
        folder = claim(self.item, self.folder, self.temporary, self.calls) if out is None else Path(out)
        try:
            return run(target, data, perturbation, out=folder, **options), folder
        except ThemisError as error:
            if (folder / "summary.json").exists():
                report, _ = _write_report(folder)
                error.add_note(f"results up to this error: {report or folder}")
            elif out is None and not (folder / "run.sqlite").exists():
                with suppress(OSError):
                    (folder / PYTEST_NOTE).unlink()
                    folder.rmdir()
            raise


def _take_gates(options: dict[str, Any]) -> Gates:
    return Gates.of(**{name: options.pop(name) for name in GATE_OPTIONS if name in options})


@contextmanager
def _errors_as_failures() -> Iterator[None]:
    """Let the test fail with the message of an error instead of its traceback."""
    __tracebackhide__ = True
    try:
        yield
    except ThemisError as error:
        raise pytest.fail.Exception(describe_error(error), pytrace=False) from None


def _allow_no_fault(results: GateResults, gates: Gates) -> GateResults:
    """The results of a test without limits, which fails if there is a fault."""
    summary = results.summary
    if not summary:  # it has not run
        return results
    found = f"{counted(summary['faults'], 'fault')} ({summary['distinct_faults']:,} distinct), none allowed"
    remedy = "fix the model, or allow some faults: max_fault_rate=0.05"
    result = GateResult("faults", not summary["faults"], float(summary["faults"]), 0.0, found, remedy)
    result = result if gates.allow_constant else refuse_constant(result, summary)
    return replace(results, results=(*results.results, result))


def replay_fault(fault: str, target: Any, data: Any, perturbation: Any) -> None:
    """Replay a fault, written as RUN:FAULT: the test fails if it is still a fault, and is skipped otherwise."""
    __tracebackhide__ = True
    folder, id = _split(fault)
    custom = perturbation if isinstance(perturbation, Perturbation) else None
    with closing(Reader(folder)) as run:
        faults = run.faults("id = ?", (id,))
        if not len(faults):
            raise UsageError(f"--themis-replay must name a fault of the run, got {id}: see themis faults {folder}")
        replay = Replayer(run, as_target(target), data, custom).replay(faults[0])
    text = describe_replay(faults[0], replay)
    if replay.is_fault:
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _split(fault: str) -> tuple[Path, int]:
    folder, _, id = fault.rpartition(":")
    if not folder or not id.isdecimal():
        raise UsageError(f"--themis-replay must have the form RUN:FAULT, got {fault!r}: write it like runs/first:1204")
    return Path(folder), int(id)


def _write_report(folder: Path, *, is_suite: bool = False) -> tuple[Path | None, str]:
    """The path of the report; None and the reason if it cannot be written, which must not hide the test's failure."""
    try:
        return write_suite_report(SuiteRun(folder)) if is_suite else write_report(folder), ""
    except Exception as error:
        return None, f"could not be written: {type(error).__name__}: {error}"


MAX_NAME, MAX_NOTE = 100, 1 << 20
SESSION = pytest.StashKey[str]()


def claim(item: pytest.Item, folder: Path | None, temporary: Callable[[str], Path], call: int) -> Path:
    """Create a folder for a campaign: in `folder`, named after the test, or a temporary one.

    It replaces the folder of the same test from an earlier session, unless somebody has put other files into it.
    Further campaigns of this session (another call, a test that is run again, another worker) get folders of their own.
    """
    shared = getattr(item.config, "workerinput", {}).get("testrunuid")  # the same in all workers of a session
    session = str(shared or item.config.stash.setdefault(SESSION, uuid4().hex))
    note = {"test": node_id(item), "call": call, "session": session}
    if folder is None:
        path = temporary(folder_name(item.name))
        write_note(path, note)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    name, number = folder_name(node_id(item)), call
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        if is_stale(path, session):
            old = path.with_name(f".{path.name}.{uuid4().hex}")
            try:
                os.rename(path, old)  # atomic: another process may be about to do the same
            except FileNotFoundError:
                continue
            shutil.rmtree(old, ignore_errors=True)
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        write_note(path, note)
        return path


def node_id(item: pytest.Item) -> str:
    """The node id of a test without the `@group` that xdist appends, so that it is the same in other sessions."""
    name, _, group = item.nodeid.rpartition("@")
    return name if name and "]" not in group and item.get_closest_marker("xdist_group") else item.nodeid


def folder_name(nodeid: str) -> str:
    """The node id of a test as the name of a folder; only the end of a long one."""
    return re.sub(r"[^\w.]+", "-", nodeid, flags=re.ASCII).strip("-.")[-MAX_NAME:].lstrip("-.") or "test"


def write_note(path: Path, note: dict[str, Any]) -> None:
    (path / PYTEST_NOTE).write_text(json.dumps(note))


def read_note(path: Path) -> dict[str, Any] | None:
    """The note in a folder; None if there is none."""
    try:
        note = parse_json(read_regular(path / PYTEST_NOTE, MAX_NOTE))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def is_stale(path: Path, session: str) -> bool:
    """Whether a folder is from an earlier session, and contains nothing that somebody else has put into it."""
    note = read_note(path)
    return note is not None and note.get("session", session) != session and _holds_only_run(path)


def describe_failure(run: Run, results: GateResults, folder: Path, report: str, test: str | None) -> str:
    """The message of a failing test. `test` is named to replay faults if the run cannot build its model again."""
    shown = ("faults", "fault rate", "coverage", "tests")
    rows = {name: text for name, text in summary_rows(run, is_verbose=True) if name in shown}
    ranges = ", ".join(f"{theta.name} {theta.low:g} to {theta.high:g}" for theta in run.start.theta)
    lines = []
    for result in results.failed:
        lines += [f"{result.gate}: {result.text}", *([f"  {result.remedy}"] if result.remedy else [])]
    passed = [result for result in results.results if result.has_passed and result.gate != "campaign"]
    lines += [f"{result.gate} passed: {result.text}" for result in passed]
    lines += ["", f"{'perturbation':<13}  {run.start.perturbation} ({ranges})"]
    lines += [f"{name:<13}  {text}" for name, text in rows.items()]
    lines.append(run.stop)
    if results.telling:
        lines += ["", f"The most telling fault{'s' * (len(results.telling) > 1)}:"]
    for fault in results.telling:
        lines += [f"  {describe_fault(fault)}"]
        command = f"pytest {quote(test or '')} --themis-replay {quote(f'{folder}:{fault.id}')}"
        lines += [f"    replay: {replay_command(str(folder), fault.id) if test is None else command}"]
    return "\n".join([*lines, "", f"report: {report}", f"run: {folder}"])


def describe_replay(fault: Fault, replay: Replay) -> str:
    """Whether it is still a fault, its answer now, and what has changed since the run."""
    state = "still a fault" if replay.is_fault else "no longer a fault"
    answer = answers(answered(fault, replay))[1]
    same = ", as recorded" if replay.is_same else ""
    changes = "" if not replay.changes else f"\nchanged since the run: {'; '.join(replay.changes)}"
    return f"{state}: now {describe_change(None, answer)}{same}\n{describe_fault(fault)}{changes}"


def describe_error(error: Exception) -> str:
    """The error in one line, and the line of the user's code that raised it."""
    frames = [] if error.__cause__ is None else extract_tb(error.__cause__.__traceback__)
    libraries = (str(Path(__file__).parents[2]) + os.sep, "<")  # where Themis is installed, and generated code
    own = [frame for frame in frames if not frame.filename.startswith(libraries) and SITE not in frame.filename]
    places = [f"  at {frame.filename}:{frame.lineno} in {frame.name}" for frame in own[-1:]]
    notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
    return "\n".join([f"themis: {error}", *places, *notes])


def properties_of(run: Run, folder: Path, report: Path | None, call: int) -> list[tuple[str, Any]]:
    """Plain values for JUnit XML and the end of the session; the names of a second call end in _2."""
    last, rate = run.rounds[-1], run.fault_rate
    values: dict[str, Any] = {
        "perturbation": run.start.perturbation,
        **{name: getattr(last, name) for name in ("tests", "faults", "distinct_faults")},
        "fault_rate": rate and rate.value,
        "fault_rate_low": rate and rate.low,
        "fault_rate_high": rate and rate.high,
        "coverage": run.coverage if run.start.covers_neurons else None,
        "stop": run.stop,
        "run": str(folder),
        "report": None if report is None else str(report),
    }
    ending = "" if call == 1 else f"_{call}"
    return [(f"themis_{name}{ending}", value) for name, value in values.items() if value is not None]


def _holds_only_run(path: Path) -> bool:
    """Whether a folder contains only what Themis writes in a run folder, so that it can be removed as a whole."""
    if path.is_symlink():
        return False
    names = list_folder(path) or []
    return set(names) <= {*RUN_FILES, PYTEST_NOTE} and all(name.endswith(".safetensors") for name in tensors_in(path))
