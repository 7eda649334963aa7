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

from themis.campaign.callback import Callback, Callbacks
from themis.campaign.series import CampaignSeries, open_series, open_stored, refuse_changes
from themis.campaign.setup import CampaignPlan, TestedModel, class_numbers, read_tested
from themis.data.features import Features
from themis.data.seeds import read_seeds
from themis.errors import UsageError
from themis.judge import choose_judge
from themis.keywords import SuiteKeywords
from themis.measure.calculator import Calculator
from themis.perturb import Perturbation
from themis.perturb.perturbation import is_same_code
from themis.runs.environment import as_plain_data
from themis.runs.estimates import read_progress
from themis.runs.run import Round, Run
from themis.runs.source import Origin, recorded_origin
from themis.runs.store.files import is_database
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.runs.store.writer import Writer
from themis.runs.trust import Trusted, permit
from themis.search import choose_policy
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


@dataclass(frozen=True)
class SuitePlan:
    """What a suite does: its members, how its budget is divided, and what its campaigns have in common."""

    suite: SuiteDefinition
    options: SuiteOptions
    settings: Settings

    def __post_init__(self) -> None:
        for member in self.suite.members:
            if member.name in RESERVED:
                raise UsageError(f"a member must not be named {member.name!r}, which is a file of the suite: rename it")
        if self.settings.criterion is not None or choose_policy(self.settings.policy).takes_rivals:
            raise UsageError(
                "several perturbations share one clean sweep, so they must have neither a criterion nor a policy with "
                "rivals: leave them out, or test one perturbation with themis run"
            )
        choose_judge(self.settings.judge)  # refuses an unknown name before anything runs

    @property
    def perturbations(self) -> list[Perturbation]:
        return [member.perturbation for member in self.suite.members]

    @property
    def max_tests(self) -> int:
        """The tests of all members together."""
        return self.options.max_tests or TESTS_PER_MEMBER * len(self.suite.members)

    def campaign(self, member: SuiteMember, max_tests: int | None = None) -> CampaignPlan:
        """The campaign of a member, up to this many tests."""
        settings = replace(self.settings, magnitude=member.magnitude, max_tests=max_tests)
        return CampaignPlan(member.perturbation, choose_policy(settings.policy), settings)


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
    plan = SuitePlan(choose_suite(suite, align_seeds(as_target(target), seeds).shape[1:]), suite_options, settings)
    tested = read_tested(target, seeds, plan.perturbations, settings, origin, features, classes)
    return _run(out, plan, tested, metadata, listener, callbacks)


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
    plan = SuitePlan(definition, options, settings)
    tested = read_tested(target, seeds, plan.perturbations, settings, origin, None, record.get("classes"))
    return _run(out, plan, tested, metadata, listener, callbacks, signs=permission.is_granted)


def _recorded_definition(record: dict[str, Any], *, imports: bool) -> SuiteDefinition:
    keys = ("name", "perturb", "magnitude", "weight", "max_tests", "levels", "note")
    members = [{key: member[key] for key in keys if key in member} for member in record["members"]]
    suite = read_suite({"name": record["name"], "members": members}, imports=imports)
    return replace(suite, notes=tuple(record.get("notes", ())))


def _run(
    out: str | Path,
    plan: SuitePlan,
    tested: TestedModel,
    metadata: Any,
    listener: SuiteListener | None,
    callbacks: Iterable[Callback],
    *,
    signs: bool = True,
) -> SuiteRun:
    """Run what is left to do of the suite in the folder `out`. signs: see `CampaignSeries.resume`."""
    began, listener = perf_counter(), listener or SuiteListener()
    plan = replace(plan, suite=plan.suite.fitted(tuple(tested.seeds.shape[1:])))
    first = plan.campaign(plan.suite.members[0])
    with closing(SuiteFolder(out)) as folder:
        stored = folder.read()
        if stored is not None:
            _check_same(stored, plan, folder.path)
        n_threads = None if stored is None else stored["environment"]["threads"]
        with open_series(tested, first, n_threads=n_threads) as series:
            if stored is not None:
                refuse_changes(series.hashes, stored["environment"], "suite")
            series = series.with_sweep(first)
            record = stored or _new_record(plan, series)
            if isinstance(metadata, str | Path):
                record["metadata"] = str(Path(metadata).absolute())
            seconds_before = record["seconds"]
            record = signed({**record, "state": "running", "options": _recorded_options(plan)})
            limit = TimeLimit(None if plan.options.max_seconds is None else began + plan.options.max_seconds)
            columns = _slice_columns(series, metadata)
            work = _SuiteWork(plan, series, folder, record, (*callbacks, limit), listener, columns, limit, signs)
            listener.on_start(plan.suite, len(tested.seeds), plan.max_tests)
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

    plan: SuitePlan
    series: CampaignSeries
    folder: SuiteFolder
    record: dict[str, Any]
    callbacks: tuple[Callback, ...]
    listener: SuiteListener
    columns: list[SliceColumn]
    limit: TimeLimit
    signs: bool
    """See `CampaignSeries.resume`."""
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the members that have run, by name."""
    checked: set[str] = field(default_factory=set)
    """Members whose campaigns are known to be of this model."""

    def run(self) -> bool:
        """Run what is left to do; returns whether the suite has ended, rather than being interrupted."""
        suite, options, max_tests = self.plan.suite, self.plan.options, self.plan.max_tests
        members = {member.name: member for member in suite.members}
        for name in members:
            if (summary := _summary(self.folder.member(name))) is not None:
                self.summaries[name] = summary
        fixed = fixed_steps(suite.members, max_tests, options.share)
        begun = {step["member"]: BudgetStep(**step) for step in self.record["schedule"]}  # the last step of each member
        for step in begun.values():  # one of them may have been interrupted
            if not self._take(step, members[step.member]):
                return False
        for step in fixed:
            if step.member not in begun and not self._plan(step, members[step.member]):
                return False
        rows = graded_rows(len(self.series.tested.seeds), options.level_seeds, self.plan.settings.random_seed)
        for member in suite.members:
            if self.limit.is_over:
                return False
            self._grade(member, rows)
        n_steps = sum(step["reason"] != "share" for step in self.record["schedule"])
        while True:
            following = next_step(suite.members, self._progress(), n_steps, max_tests, options.share)
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
        callbacks = Callbacks((*self.listener.callbacks_of(out), *self.callbacks))
        campaign = self.plan.campaign(member, step.max_tests)
        if is_database(out / DATABASE) and _has_started(out):
            with open_stored(out) as stored:
                campaign = _recorded_campaign(campaign, stored.run)
                if member.name not in self.checked:
                    self.series.check_same(campaign, stored.run, _calculator(self.series).clean.oracle)
                run = self.series.resume(campaign, stored, callbacks, signs=self.signs)
        else:
            with closing(Writer(out)) as store:
                run = self.series.run(campaign, store, callbacks)
        self.checked.add(member.name)
        self.summaries[member.name] = run.summary()
        n_tests = sum(progress.tests for progress in self._progress().values())
        self.listener.on_step(step, run, n_tests, self.plan.max_tests)
        return run.stop_reason != "user"

    def _progress(self) -> dict[str, MemberProgress]:
        none = MemberProgress(0, True, 1.0, 1.0)
        known = {name: MemberProgress.of(summary) for name, summary in self.summaries.items()}
        return {member.name: known.get(member.name, none) for member in self.plan.suite.members}

    def _grade(self, member: SuiteMember, rows: Any) -> None:
        """Grade a member at its levels, unless that was done before."""
        if not member.levels or member.name in self.record["grades"]:
            return
        calculator, random_seed = _calculator(self.series), self.plan.settings.random_seed
        if self.record["clean"] is None:
            clean = grade_clean(calculator, rows)
            self.record["clean"] = plain_grade(clean)
            self.record["graded"] = hashlib.sha256(self.series.tested.seeds.seed_id.numpy()[rows].tobytes()).hexdigest()
            self._count("clean", rows, np.ones(len(rows), dtype=np.int64), clean.wrong)
        graded = grade_member(calculator, member, rows, random_seed)
        self.record["grades"][member.name] = [plain_grade(grade) for grade in graded]
        tests = np.full(len(rows), len(member.levels), dtype=np.int64)
        self._count(member.name, rows, tests, np.sum([grade.wrong for grade in graded], axis=0))
        self.folder.write(self.record)
        self.listener.on_grades(member.name, graded)

    def _count(self, name: str, rows: Any, tests: Any, faults: Any) -> None:
        """Add the tests and faults of some seeds to the slices."""
        counts = np.zeros((2, len(self.series.tested.seeds)), dtype=np.int64)
        counts[:, rows] = tests, faults
        kept = {column["name"]: column for column in self.record["slices"]}
        for column in self.columns:
            entry = kept.setdefault(column.name, {"name": column.name, "values": list(column.values), "counts": {}})
            entry["counts"][name] = column.counts(*counts)
            entry.setdefault("independent", {})[name] = column.independent_tests(*counts)
        self.record["slices"] = list(kept.values())

    def slices(self) -> list[dict[str, Any]]:
        """Tests and faults by slice: at the levels of members that have them, else of the uniform stream."""
        for member in self.plan.suite.members:
            if member.name in self.record["grades"]:
                continue
            out = self.folder.member(member.name)
            if not is_database(out / DATABASE):
                continue
            with closing(Reader(out, is_brief=True)) as run:
                progress = read_progress(run)
            if progress is not None and len(progress.uniform_tests_by_seed) == len(self.series.tested.seeds):
                rows = np.arange(len(self.series.tested.seeds))
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


def _recorded_options(plan: SuitePlan) -> dict[str, Any]:
    """The options that a suite keeps when it is resumed: all but the time of this call."""
    options = {**asdict(plan.options), "max_tests": plan.max_tests}
    return {name: value for name, value in options.items() if name != "max_seconds"}


def _new_record(plan: SuitePlan, series: CampaignSeries) -> dict[str, Any]:
    """The content of `suite.json` before the first test."""
    calculator, suite, tested = _calculator(series), plan.suite, series.tested
    return {
        "name": suite.name,
        "members": [{**member.plain(), "range": member.range} for member in suite.members],
        "notes": list(suite.notes),
        "options": _recorded_options(plan),
        "settings": {name: as_plain_data(value) for name, value in asdict(plan.settings).items()},
        "origin": None if tested.origin is None else tested.origin.as_dict(),
        "perturbation": " + ".join(member.perturbation.name for member in suite.members),
        "perturbation_code": None,
        "environment": series.environment | series.hashes,
        "classes": None if tested.class_names is None else list(tested.class_names),
        "fault": calculator.clean.oracle.describe(),
        "schedule": [],
        "state": "running",
        "passes": calculator.passes,
        "seconds": 0.0,
        "clean": None,
        "grades": {},
        "slices": [],
    }


def _check_same(stored: dict[str, Any], plan: SuitePlan, path: Path) -> None:
    """Refuse to resume another suite, or one whose finished steps would have been others."""
    suite, options = plan.suite, plan.options
    now = [{**member.plain(), "range": member.range} for member in suite.members]
    changes = []
    if stored["name"] != suite.name or stored["members"] != _as_json(now):
        changes.append("its list of members")
    plain = {name: as_plain_data(value) for name, value in asdict(plan.settings).items()}
    changes += [name for name, value in plain.items() if stored["settings"].get(name) != value and name != "max_tests"]
    before = stored["options"]
    changes += [name for name in ("share", "level_seeds") if before.get(name) != getattr(options, name)]
    if changes:
        raise UsageError(
            f"{path} holds another suite ({', '.join(changes)} differ{'s' * (len(changes) == 1)}): pass the same "
            "options, or choose another folder"
        )
    if plan.max_tests < before["max_tests"]:
        raise UsageError(
            f"max_tests must be at least {before['max_tests']:,}, as the suite in {path} has, got "
            f"{plan.max_tests:,}: leave it out, or choose another folder"
        )


def _recorded_campaign(campaign: CampaignPlan, run: Reader) -> CampaignPlan:
    """The campaign of a member as its run folder has it, which must be one under the same perturbation."""
    perturbation = campaign.perturbation.within(run.ranges)
    is_same = perturbation.name == run.record["perturbation"]
    if not is_same or not is_same_code(perturbation.code, run.record["perturbation_code"]):
        raise UsageError(
            f"the perturbation must be the same as in {run.path}, {run.record['perturbation']!r}, got "
            f"{perturbation.name!r}: pass the same one, or choose another folder"
        )
    settings = Settings.recorded({**run.record["settings"], "max_tests": campaign.settings.max_tests})
    return replace(campaign, perturbation=perturbation, settings=settings)


def _calculator(series: CampaignSeries) -> Calculator:
    """The calculator of the clean sweep, which all members share."""
    assert series.sweep is not None
    return series.sweep.calculator


def _as_json(value: Any) -> Any:
    """Plain data as JSON reads it back: tuples are lists."""
    import json

    return json.loads(json.dumps(value))


def _slice_columns(series: CampaignSeries, metadata: Any) -> list[SliceColumn]:
    clean, seeds = _calculator(series).clean, series.tested.seeds
    numbers = class_numbers(clean.labels.cpu() if clean.labels is not None else None, len(seeds))
    if clean.labels is None and clean.outputs.ndim == 2 and clean.outputs.shape[1] > 1:
        numbers = clean.outputs.argmax(1).cpu().numpy()
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
