"""Running a suite, and resuming one: the clean inputs are run once, and the budget goes where faults and doubt are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import numpy as np
from torch import nn

from themis.campaign.callback import Callback
from themis.campaign.series import CampaignSeries, open_series
from themis.campaign.setup import class_numbers
from themis.data.features import Features
from themis.data.seeds import read_seeds
from themis.errors import UsageError
from themis.keywords import SuiteKeywords
from themis.runs.environment import as_plain_data, threads
from themis.runs.estimates import read_progress
from themis.runs.run import Round, Run
from themis.runs.source import Origin, recorded_origin
from themis.runs.store.files import is_database
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.runs.trust import Trusted, permit
from themis.settings import Settings
from themis.suites.budget import BudgetStep, MemberProgress, fixed_steps, next_step
from themis.suites.definition import SuiteDefinition, SuiteMember, read_suite
from themis.suites.folder import RESERVED, SuiteFolder, read_record, signed
from themis.suites.grades import LevelGrade, grade_clean, grade_member, graded_rows, plain_grade
from themis.suites.named import choose_suite
from themis.suites.options import TESTS_PER_MEMBER, SuiteOptions, read_options
from themis.suites.result import SuiteRun
from themis.suites.slices import SliceColumn, class_column, metadata_columns
from themis.target.alignment import align_seeds
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget, refuse_target_options


class SuiteListener:
    """Is notified of the progress of a suite; the methods do nothing unless they are overridden."""

    def on_start(self, suite: SuiteDefinition, n_seeds: int, max_tests: int) -> None:
        """The clean inputs were run; tests are about to run."""

    def callbacks_of(self, folder: Path) -> Iterable[Callback]:
        """Return callbacks for the next step of the campaign in a run folder."""
        return ()

    def on_step(self, step: BudgetStep, run: Run, n_tests: int, max_tests: int) -> None:
        """A member has run a part of its tests; `n_tests` were run by all members."""

    def on_grades(self, member: str, grades: Sequence[LevelGrade]) -> None:
        """A member was graded at its levels."""


def run_suite(
    target: AnyTarget | nn.Module,
    data: Any,
    suite: Any = "corruptions",
    *,
    out: str | Path,
    metadata: Any = None,
    origin: Origin | None = None,
    features: Features | str | Path | None = None,
    classes: Sequence[str] | None = None,
    callbacks: Iterable[Callback] = (),
    listener: SuiteListener | None = None,
    **options: Unpack[SuiteKeywords],
) -> SuiteRun:
    """Test `target` on `data` under every perturbation of a suite; all results are in one folder.

    The same call with the same `out` resumes a suite that was stopped. Options are `max_tests`, `max_seconds`,
    `share` and `level_seeds` of the suite, and the fields of `Settings` for its campaigns.

    Args:
        target: The model under test, as for `themis.run`.
        data: The seeds, as for `themis.run`.
        suite: A name (corruptions, weather, camera, noise, geometry, signals, tables, attacks), a YAML file, a dict
            with `members` as in such a file, or a list of perturbations.
        out: Folder for the results; every member gets an ordinary run folder in it.
        metadata: Columns to slice by, with one row per input of the data: a CSV file, or a dict of columns.
        origin: How another process can build the target and the data again.
        features: What the columns of a table may hold, as for `themis.run`.
        classes: Class names by number; by default those that the data has.
        callbacks: Called as each campaign proceeds, see `Callback`.
        listener: Notified as the suite proceeds.
    """
    refuse_target_options(options)
    suite_options, settings = read_options(dict(options))
    seeds = read_seeds(data, settings.max_seeds)
    definition = choose_suite(suite, align_seeds(as_target(target), seeds).shape[1:])
    return _run(
        target,
        seeds,
        definition,
        suite_options,
        settings,
        out,
        metadata,
        origin,
        features,
        classes,
        callbacks,
        listener,
    )


def resume_suite(
    out: str | Path,
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    *,
    suite: Any = None,
    metadata: Any = None,
    origin: Origin | None = None,
    max_tests: int | None = None,
    max_seconds: float | None = None,
    callbacks: Iterable[Callback] = (),
    listener: SuiteListener | None = None,
    trust: Trusted = False,
) -> SuiteRun:
    """Resume the suite in the folder `out`; it ends as if it had never been stopped.

    The model, the data and perturbations of your own are needed only if the suite cannot create them again. A larger
    `max_tests` continues a suite that has spent its budget; `max_seconds` is the time of this call.
    """
    record = read_record(out)
    permission = permit(out, record, trust)
    origin = origin or recorded_origin(record, permission)
    if origin is None and (target is None or data is None):
        raise UsageError(
            f"the suite in {out} does not record how to create its model and data, because it was started from Python: "
            "pass target and data"
        )
    if suite is None:
        from themis.runs.trust import perturbation_code

        permission.require(perturbation_code(record["perturbation"]))
        with nullcontext() if origin is None else origin.in_folder():
            definition = _recorded_definition(record, imports=permission.is_granted)
    settings = Settings.recorded(record["settings"])
    options = SuiteOptions(**record["options"])
    options = replace(options, max_tests=options.max_tests if max_tests is None else max_tests, max_seconds=max_seconds)
    if target is None:
        assert origin is not None
        target = origin.target()
    if data is None:
        assert origin is not None
        data = origin.read()
    seeds = read_seeds(data, settings.max_seeds)
    if suite is not None:
        definition = choose_suite(suite, align_seeds(as_target(target), seeds).shape[1:])
    if metadata is None:
        metadata = record.get("metadata")
    with threads(record["environment"]["threads"]):
        return _run(
            target,
            seeds,
            definition,
            options,
            settings,
            out,
            metadata,
            origin,
            None,
            record.get("classes"),
            callbacks,
            listener,
            is_trusted=permission.is_granted,
        )


def _recorded_definition(record: dict[str, Any], *, imports: bool) -> SuiteDefinition:
    keys = ("name", "perturb", "magnitude", "weight", "max_tests", "levels", "note")
    members = [{key: member[key] for key in keys if key in member} for member in record["members"]]
    suite = read_suite({"name": record["name"], "members": members}, imports=imports)
    return replace(suite, notes=tuple(record.get("notes", ())))


def _run(
    target: AnyTarget | nn.Module,
    data: Any,
    suite: SuiteDefinition,
    options: SuiteOptions,
    settings: Settings,
    out: str | Path,
    metadata: Any,
    origin: Origin | None,
    features: Features | str | Path | None,
    classes: Sequence[str] | None,
    callbacks: Iterable[Callback],
    listener: SuiteListener | None,
    is_trusted: bool = True,
) -> SuiteRun:
    began, listener = perf_counter(), listener or SuiteListener()
    for member in suite.members:
        if member.name in RESERVED:
            raise UsageError(f"a member must not be named {member.name!r}, which is a file of the suite: rename it")
    options = replace(options, max_tests=options.max_tests or TESTS_PER_MEMBER * len(suite.members))
    perturbations = [member.perturbation for member in suite.members]
    with closing(SuiteFolder(out)) as folder:
        stored = folder.read()
        with open_series(
            target, data, perturbations, settings, origin=origin, features=features, classes=classes
        ) as series:
            suite = suite.fitted(tuple(series.seeds.shape[1:]))
            if stored is not None:
                _check_same(stored, suite, options, settings, folder.path)
            columns = _slice_columns(series, metadata)
            series = replace(series, is_trusted=is_trusted)
            record = stored or _new_record(suite, options, settings, series, classes)
            if isinstance(metadata, str | Path):
                record["metadata"] = str(Path(metadata).absolute())
            _check_environment(record, series, folder.path)
            seconds_before = record["seconds"]
            record = signed({**record, "state": "running", "options": _recorded_options(options)})
            limit = TimeLimit(None if options.max_seconds is None else began + options.max_seconds)
            work = _SuiteWork(suite, options, series, folder, record, (*callbacks, limit), listener, columns, limit)
            assert options.max_tests is not None
            listener.on_start(suite, len(series.seeds), options.max_tests)
            state = "failed"
            try:
                state = "ended" if work.run() else "out of time" if limit.is_over else "interrupted"
            except KeyboardInterrupt:
                state = "interrupted"
            finally:
                work.record["seconds"] = seconds_before + perf_counter() - began
                work.record["state"] = state
                work.record["slices"] = work.slices()
                folder.write(work.record)
    return SuiteRun(out)


@dataclass
class _SuiteWork:
    """A suite being run. `record` is the content of `suite.json`, which is written before every step."""

    suite: SuiteDefinition
    options: SuiteOptions
    series: CampaignSeries
    folder: SuiteFolder
    record: dict[str, Any]
    callbacks: tuple[Callback, ...]
    listener: SuiteListener
    columns: list[SliceColumn]
    limit: TimeLimit
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the members that have run, by name."""

    def run(self) -> bool:
        """Run what is left to do; returns whether the suite has ended, rather than being interrupted."""
        assert self.options.max_tests is not None
        members = {member.name: member for member in self.suite.members}
        for name in members:
            if (summary := _summary(self.folder.member(name))) is not None:
                self.summaries[name] = summary
        fixed = fixed_steps(self.suite.members, self.options.max_tests, self.options.share)
        begun = {step["member"]: BudgetStep(**step) for step in self.record["schedule"]}  # the last step of each member
        for step in begun.values():  # one of them may have been interrupted
            if not self._take(step, members[step.member]):
                return False
        for step in fixed:
            if step.member not in begun and not self._plan(step, members[step.member]):
                return False
        rows = graded_rows(len(self.series.seeds), self.options.level_seeds, self.series.settings.random_seed)
        for member in self.suite.members:
            if self.limit.is_over:
                return False
            self._grade(member, rows)
        n_steps = sum(step["reason"] != "share" for step in self.record["schedule"])
        while True:
            following = next_step(
                self.suite.members, self._progress(), n_steps, self.options.max_tests, self.options.share
            )
            if following is None:
                return True
            if not self._plan(following, members[following.member]):
                return False
            n_steps += 1

    def _plan(self, step: BudgetStep, member: SuiteMember) -> bool:
        """Take a new step, which is recorded before it begins; returns whether it was not interrupted."""
        if self.limit.is_over:
            return False
        self.record["schedule"].append(asdict(step))
        self.folder.write(self.record)
        return self._take(step, member)

    def _take(self, step: BudgetStep, member: SuiteMember) -> bool:
        """Let a member continue up to the tests of a step; returns whether it was not interrupted."""
        out = self.folder.member(member.name)
        summary = self.summaries.get(member.name)
        if summary is not None and _has_reached(summary, step.max_tests):
            return True
        callbacks = (*self.listener.callbacks_of(out), *self.callbacks)
        if is_database(out / DATABASE) and _has_started(out):
            run = self.series.resume(member.perturbation, out, callbacks, max_tests=step.max_tests)
        else:
            run = self.series.run(
                member.perturbation, out, callbacks, magnitude=member.magnitude, max_tests=step.max_tests
            )
        assert self.options.max_tests is not None
        self.summaries[member.name] = run.summary()
        n_tests = sum(progress.tests for progress in self._progress().values())
        self.listener.on_step(step, run, n_tests, self.options.max_tests)
        return run.stop_reason != "user"

    def _progress(self) -> dict[str, MemberProgress]:
        none = MemberProgress(0, True, 1.0, 1.0)
        known = {name: MemberProgress.of(summary) for name, summary in self.summaries.items()}
        return {member.name: known.get(member.name, none) for member in self.suite.members}

    def _grade(self, member: SuiteMember, rows: Any) -> None:
        """Grade a member at its levels, unless that was done before."""
        if not member.levels or member.name in self.record["grades"]:
            return
        calculator, random_seed = self.series.clean.calculator, self.series.settings.random_seed
        if self.record["clean"] is None:
            clean = grade_clean(calculator, rows)
            self.record["clean"] = plain_grade(clean)
            self.record["graded"] = hashlib.sha256(self.series.seeds.seed_id.numpy()[rows].tobytes()).hexdigest()
            self._count("clean", rows, np.ones(len(rows), dtype=np.int64), clean.wrong)
        graded = grade_member(calculator, member, rows, random_seed)
        self.record["grades"][member.name] = [plain_grade(grade) for grade in graded]
        tests = np.full(len(rows), len(member.levels), dtype=np.int64)
        self._count(member.name, rows, tests, np.sum([grade.wrong for grade in graded], axis=0))
        self.folder.write(self.record)
        self.listener.on_grades(member.name, graded)

    def _count(self, name: str, rows: Any, tests: Any, faults: Any) -> None:
        """Add the tests and faults of some seeds to the slices."""
        counts = np.zeros((2, len(self.series.seeds)), dtype=np.int64)
        counts[:, rows] = tests, faults
        kept = {column["name"]: column for column in self.record["slices"]}
        for column in self.columns:
            entry = kept.setdefault(column.name, {"name": column.name, "values": list(column.values), "counts": {}})
            entry["counts"][name] = column.counts(*counts)
            entry.setdefault("independent", {})[name] = column.independent_tests(*counts)
        self.record["slices"] = list(kept.values())

    def slices(self) -> list[dict[str, Any]]:
        """Tests and faults by slice: at the levels of members that have them, else of the uniform stream."""
        for member in self.suite.members:
            if member.name in self.record["grades"]:
                continue
            out = self.folder.member(member.name)
            if not is_database(out / DATABASE):
                continue
            with closing(Reader(out, is_brief=True)) as run:
                progress = read_progress(run)
            if progress is not None and len(progress.uniform_tests_by_seed) == len(self.series.seeds):
                rows = np.arange(len(self.series.seeds))
                self._count(member.name, rows, progress.uniform_tests_by_seed, progress.uniform_faults_by_seed)
        return list(self.record["slices"])


class TimeLimit(Callback):
    """Stops the campaign that is running when the time of its suite is over; the suite can be resumed."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline

    @property
    def is_over(self) -> bool:
        return self.deadline is not None and perf_counter() >= self.deadline

    def on_round(self, round: Round) -> None:
        if self.is_over:
            raise KeyboardInterrupt


def _recorded_options(options: SuiteOptions) -> dict[str, Any]:
    """The options that a suite keeps when it is resumed: all but the time of this call."""
    return {name: value for name, value in asdict(options).items() if name != "max_seconds"}


def _new_record(
    suite: SuiteDefinition,
    options: SuiteOptions,
    settings: Settings,
    series: CampaignSeries,
    classes: Sequence[str] | None,
) -> dict[str, Any]:
    """The content of `suite.json` before the first test."""
    calculator = series.clean.calculator
    return {
        "name": suite.name,
        "members": [{**member.plain(), "range": member.range} for member in suite.members],
        "notes": list(suite.notes),
        "options": _recorded_options(options),
        "settings": {name: as_plain_data(value) for name, value in asdict(settings).items()},
        "origin": None if series.origin is None else series.origin.as_dict(),
        "perturbation": " + ".join(member.perturbation.name for member in suite.members),
        "perturbation_code": None,
        "environment": series.environment,
        "classes": None if classes is None else list(classes),
        "fault": calculator.oracle.describe(),
        "schedule": [],
        "state": "running",
        "passes": calculator.passes,
        "seconds": 0.0,
        "clean": None,
        "grades": {},
        "slices": [],
    }


def _check_same(
    stored: dict[str, Any], suite: SuiteDefinition, options: SuiteOptions, settings: Settings, path: Path
) -> None:
    """Refuse to resume another suite, or one whose finished steps would have been others."""
    now = [{**member.plain(), "range": member.range} for member in suite.members]
    changes = []
    if stored["name"] != suite.name or stored["members"] != _as_json(now):
        changes.append("its list of members")
    plain = {name: as_plain_data(value) for name, value in asdict(settings).items()}
    changes += [name for name, value in plain.items() if stored["settings"].get(name) != value and name != "max_tests"]
    before = stored["options"]
    changes += [name for name in ("share", "level_seeds") if before.get(name) != getattr(options, name)]
    if changes:
        raise UsageError(
            f"{path} holds another suite ({', '.join(changes)} differ{'s' * (len(changes) == 1)}): pass the same "
            "options, or choose another folder"
        )
    if options.max_tests is not None and options.max_tests < before["max_tests"]:
        raise UsageError(
            f"max_tests must be at least {before['max_tests']:,}, as the suite in {path} has, got "
            f"{options.max_tests:,}: leave it out, or choose another folder"
        )


def _check_environment(record: dict[str, Any], series: CampaignSeries, path: Path) -> None:
    for name, subject in (("model_sha256", "model"), ("data_sha256", "data")):
        if record["environment"][name] != series.environment[name]:
            raise UsageError(
                f"the {subject} must be the same as in the suite in {path}, but its hash differs: pass the same "
                f"{subject}, or choose another folder"
            )


def _as_json(value: Any) -> Any:
    """Plain data as JSON reads it back: tuples are lists."""
    import json

    return json.loads(json.dumps(value))


def _slice_columns(series: CampaignSeries, metadata: Any) -> list[SliceColumn]:
    calculator, seeds = series.clean.calculator, series.seeds
    numbers = class_numbers(calculator.labels.cpu() if calculator.labels is not None else None, len(seeds))
    if calculator.labels is None and calculator.clean_outputs.ndim == 2 and calculator.clean_outputs.shape[1] > 1:
        numbers = calculator.clean_outputs.argmax(1).cpu().numpy()
    classes = class_column(numbers, seeds.classes)
    return [*([] if classes is None else [classes]), *metadata_columns(metadata, seeds.seed_id.numpy())]


def _summary(out: Path) -> dict[str, Any] | None:
    if not is_database(out / DATABASE):
        return None
    with closing(Reader(out, is_brief=True)) as run:
        return run.summary()


def _has_reached(summary: dict[str, Any], max_tests: int) -> bool:
    """Whether a campaign has no test left to run, up to this many."""
    if summary["stop_reason"] in ("user", "error"):
        return False
    return bool(summary["tests"] >= max_tests or summary["stop_reason"] != "tests")


def _has_started(out: Path) -> bool:
    with closing(Reader(out, is_brief=True)) as run:
        return "start" in run.record
