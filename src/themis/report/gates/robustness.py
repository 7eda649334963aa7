"""The fixture: a campaign with gates as a test, and the replay of a single fault."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from themis.errors import ThemisError, UsageError, nearest
from themis.reading import parse_json, read_regular
from themis.report.gates.limits import Gates
from themis.report.gates.messages import describe_error, describe_failure, describe_replay, properties_of
from themis.runs.store.files import NOTE, holds_only_run
from themis.settings import Settings
from themis.text import counted

if TYPE_CHECKING:
    from themis.report.gates.gates import GateResult, GateResults
    from themis.report.gates.suite import SuiteGateResults
    from themis.runs.run import Run
    from themis.suites.result import SuiteRun
if TYPE_CHECKING:
    from collections.abc import Callable

N_TESTS = 2_000
"""The default budget of a campaign: it takes seconds on a small model."""
GATES = ("max_fault_rate", "fail_under", "max_new_faults", "baseline", "trust", "allow_constant")
"""Options that are gates; the others are options of the campaign."""
ARGUMENTS = ("out", "callbacks", "origin", "features", "classes", "train", "rivals", "executor")
"""Arguments of `themis.run` besides the settings."""


class RobustnessTest:
    """Runs campaigns for one test.

    Options on the command line take precedence over those of the call, the markers and the ini file, in this order.
    """

    def __init__(
        self,
        item: pytest.Item,
        overrides: dict[str, Any],
        defaults: dict[str, Any],
        folder: Path | None,
        temporary: Callable[[str], Path],
        replay: str | None = None,
    ) -> None:
        """overrides, defaults: options from the command line and the ini file. folder: where run folders are kept.

        temporary: makes a temporary folder. replay: a fault to replay instead of the campaign, as RUN:FAULT.
        """
        self._item, self._overrides, self._defaults, self._folder = item, overrides, defaults, folder
        self._temporary, self._replay, self._calls = temporary, replay, 0

    def __call__(self, target: Any, data: Any, perturbation: Any = None, **options: Any) -> Run:
        """Test `target` on `data` under `perturbation`, as `themis.run` does; fail the test if a gate fails.

        max_fault_rate: the largest allowed upper end of the interval of the fault rate. fail_under: the smallest
        allowed values of metrics, for example {"coverage": 0.9}. max_new_faults, baseline: how many faults are allowed
        that do not break the model of the run folder `baseline`. trust: True if the code that a baseline from another
        machine names may run. Without a gate, any fault fails the test. allow_constant: True if a limit on faults may
        pass although the clean answers are no better than a constant. Other options are passed on to `themis.run`.
        """
        __tracebackhide__ = True
        try:
            return self._test(target, data, perturbation, options)
        except ThemisError as error:
            message = describe_error(error)
        pytest.fail(message, pytrace=False)

    def suite(self, target: Any, data: Any, suite: Any = "corruptions", **options: Any) -> SuiteRun:
        """Test `target` on `data` under every perturbation of a suite, as `themis.run_suite` does.

        The gates are those of a call of the fixture, and hold under every perturbation; a baseline is the folder of a
        suite. Other options are passed on to `themis.run_suite`.
        """
        __tracebackhide__ = True
        try:
            return self._test_suite(target, data, suite, options)
        except ThemisError as error:
            message = describe_error(error)
        pytest.fail(message, pytrace=False)

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

    def _test(self, target: Any, data: Any, perturbation: Any, options: dict[str, Any]) -> Run:
        __tracebackhide__ = True
        self._calls += 1
        perturbation, options = self._merge(perturbation, options)
        gates = Gates.of(**{name: options.pop(name) for name in GATES if name in options})
        settings = Settings.of(**{name: value for name, value in options.items() if name not in ARGUMENTS})
        gates.check_ahead(settings.uniform_share)
        gates.check_target(target, settings.preset)
        is_earlier = self._replay is not None and self._is_earlier(self._replay)
        if self._replay is not None and not is_earlier:
            replay_fault(self._replay, target, data, perturbation)
        run, folder = self._run(target, data, perturbation, options)
        if run.stop_reason == "user":
            raise KeyboardInterrupt  # the campaign has saved its results; now stop the session too
        if is_earlier:
            return run  # the test may need it to get to the fault
        results = check_run(run, gates, folder)
        report, reason = _write_report(folder) if results.has_failed or self._folder is not None else (None, "")
        self._item.user_properties.extend(properties_of(run, folder, report, self._calls))
        if results.has_failed:
            test = None if options.get("origin") is not None else _name_on_command_line(self._item)
            pytest.fail(describe_failure(run, results, folder, str(report or reason), test), pytrace=False)
        return run

    def _test_suite(self, target: Any, data: Any, suite: Any, options: dict[str, Any]) -> SuiteRun:
        __tracebackhide__ = True
        from themis.report.gates.suite import check_suite_ahead
        from themis.suites.api import run_suite
        from themis.suites.options import OF_THE_SUITE, read_options

        if self._replay is not None:
            pytest.skip("a suite is not run to replay a fault: replay it with themis replay RUN FAULT")
        self._calls += 1
        marked = {name: value for name, value in self._marked().items() if name not in ("perturbation", *OF_THE_SUITE)}
        merged = {**self._defaults, **marked, **options, **self._overrides}
        if "max_seconds" not in options:
            merged.pop("max_seconds", None)  # the limit of a session is for single campaigns
        gates = Gates.of(**{name: merged.pop(name) for name in GATES if name in merged})
        out = merged.pop("out", None)
        arguments = ("callbacks", "origin", "features", "classes", "metadata", "listener")
        _, settings = read_options({name: value for name, value in merged.items() if name not in arguments})
        check_suite_ahead(gates, settings.uniform_share)
        folder = out or claim(self._item, self._folder, self._temporary, self._calls) / "suite"
        found = run_suite(target, data, suite, out=folder, **merged)
        if found.state == "interrupted":
            raise KeyboardInterrupt  # the suite has saved its results; now stop the session too
        results = check_suite(found, gates, target, data)
        if results.has_failed:
            report, reason = _write_suite_report(found)
            lines = [*results.failed_lines, results.sentence, "", f"report: {report or reason}", f"run: {found.path}"]
            pytest.fail("\n".join(lines), pytrace=False)
        return found

    def _is_earlier(self, fault: str) -> bool:
        """Whether this call precedes the one that found the fault to replay; skips tests that did not find it."""
        note = read_note(_split(fault)[0])
        if note is None:
            return False
        if note.get("test") != node_id(self._item):
            pytest.skip("not the test that found the fault of --themis-replay")
        return self._calls < int(note.get("call", 1))

    def _marked(self) -> dict[str, Any]:
        """The options of all markers of the test; the closest marker wins."""
        marked: dict[str, Any] = {}
        for marker in reversed(list(self._item.iter_markers("robustness"))):  # the closest one last
            if len(marker.args) > 1:
                raise UsageError(
                    f"the robustness marker must have one positional argument, the perturbation, got {marker.args}: "
                    "pass the others by name"
                )
            marked |= {**marker.kwargs, **({"perturbation": marker.args[0]} if marker.args else {})}
        return marked

    def _merge(self, perturbation: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The perturbation and all options, by precedence."""
        merged: dict[str, Any] = {"max_tests": N_TESTS, **self._defaults, **self._marked()}
        merged |= {**options, **({} if perturbation is None else {"perturbation": perturbation}), **self._overrides}
        chosen = merged.pop("perturbation", None)
        if chosen is None:
            raise UsageError(
                "a robustness test must name its perturbation, got none: pass it to the fixture, for example "
                "robustness(target, data, 'gaussian'), or to the marker"
            )
        from themis.target.target import refuse_target_options

        refuse_target_options(merged)
        known = {*(field.name for field in fields(Settings)), *ARGUMENTS, *GATES}
        for name in merged:
            if name not in known:
                raise UsageError(f"unknown option {name!r}: {nearest(name, known)}")
        return chosen, merged

    def _run(self, target: Any, data: Any, perturbation: Any, options: dict[str, Any]) -> tuple[Run, Path]:
        from themis.campaign.api import run

        out = options.pop("out", None)
        folder = claim(self._item, self._folder, self._temporary, self._calls) if out is None else Path(out)
        try:
            return run(target, data, perturbation, out=folder, **options), folder
        except ThemisError as error:
            if (folder / "summary.json").exists():
                report, _ = _write_report(folder)
                error.add_note(f"results up to this error: {report or folder}")
            elif out is None and not (folder / "run.sqlite").exists():
                with suppress(OSError):
                    (folder / NOTE).unlink()
                    folder.rmdir()
            raise


def check_run(run: Run, gates: Gates, folder: Path) -> GateResults:
    """Check a run against its gates; without a gate, no fault is allowed."""
    from themis.report.gates.gates import check_gates

    results = check_gates(run, gates, folder=folder)
    if gates:
        return results
    n, distinct = len(run.faults), run.rounds[-1].distinct_faults
    no_faults = _check_no_faults(n, f"{counted(n, 'fault')} ({distinct:,} distinct)", results, gates)
    return replace(results, results=(*results.results, no_faults))


def check_suite(suite: SuiteRun, gates: Gates, target: Any, data: Any) -> SuiteGateResults:
    """Check a suite against its gates; without a gate, no fault is allowed."""
    from themis.report.gates.suite import check_suite_gates
    from themis.runs.replay import Replayer
    from themis.target.blackbox import as_target

    results = check_suite_gates(suite, gates, rebuild=lambda run: Replayer(run, as_target(target), data))
    if gates:
        return results
    faults = {row.name: row.faults for row in suite.rows}
    members = []
    for name, member in results.members:
        n = faults[name]
        no_faults = _check_no_faults(n, counted(n, "fault"), member, gates)
        members.append((name, replace(member, results=(*member.results, no_faults))))
    return replace(results, members=tuple(members))


def _check_no_faults(n: int, found: str, results: GateResults, gates: Gates) -> GateResult:
    """The gate of a test without limits: no fault is allowed."""
    from themis.report.gates.gates import GateResult, refuse_constant

    remedy = "fix the model, or allow some faults: max_fault_rate=0.05"
    result = GateResult("faults", not n, float(n), 0.0, f"{found}, none allowed", remedy)
    return result if gates.allow_constant else refuse_constant(result, results.summary)


def replay_fault(fault: str, target: Any, data: Any, perturbation: Any) -> None:
    """Replay a fault, written as RUN:FAULT: the test fails if it is still a fault, and is skipped otherwise."""
    __tracebackhide__ = True
    from themis.perturb import Perturbation
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader
    from themis.target.blackbox import as_target

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


def _name_on_command_line(item: pytest.Item) -> str:
    """The name of a test as it is typed in the folder where the session was started."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    return "::".join([path, *node_id(item).split("::")[1:]])


def _write_report(folder: Path) -> tuple[Path | None, str]:
    """The path of the report; None and the reason if it cannot be written, which must not hide the test's failure."""
    try:
        from themis.report.page import write_report

        return write_report(folder), ""
    except Exception as error:
        return None, f"could not be written: {type(error).__name__}: {error}"


def _write_suite_report(suite: SuiteRun) -> tuple[Path | None, str]:
    """The path of the report of a suite; None and the reason if it cannot be written."""
    try:
        from themis.report.suite import write_suite_report

        return write_suite_report(suite), ""
    except Exception as error:
        return None, f"could not be written: {type(error).__name__}: {error}"


MAX_NAME, MAX_NOTE = 100, 1 << 20
SESSION = pytest.StashKey[str]()


def claim(item: pytest.Item, folder: Path | None, temporary: Callable[[str], Path], call: int) -> Path:
    """Create a folder for a campaign: in `folder`, named after the test, or a temporary one.

    It replaces the folder of the same test from an earlier session, unless somebody has put other files into it.
    Further campaigns of this session (another call, a test that is run again, another worker) get folders of their own.
    """
    session = session_id(item.config)
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


def session_id(config: pytest.Config) -> str:
    """An id that is the same in all workers of a test session."""
    shared = getattr(config, "workerinput", {}).get("testrunuid")
    return str(shared) if shared else config.stash.setdefault(SESSION, uuid4().hex)


def write_note(path: Path, note: dict[str, Any]) -> None:
    (path / NOTE).write_text(json.dumps(note))


def read_note(path: Path) -> dict[str, Any] | None:
    """The note in a folder; None if there is none."""
    try:
        note = parse_json(read_regular(path / NOTE, MAX_NOTE))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def is_stale(path: Path, session: str) -> bool:
    """Whether a folder is from an earlier session, and contains nothing that somebody else has put into it."""
    note = read_note(path)
    return note is not None and note.get("session", session) != session and holds_only_run(path)
