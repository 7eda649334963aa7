"""Running and resuming suites: clean inputs are run once, and the budget goes to members with faults or uncertainty."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

from torch import nn

from themis.campaign.callback import Callback
from themis.campaign.recorder import Callbacks
from themis.campaign.series import CampaignSeries, open_series, refuse_changes
from themis.campaign.setup import CampaignPlan, CleanSweep, Executor, TestedModel, choose_executor, read_tested
from themis.data.features import Features
from themis.data.seeds import Seeds, read_seeds
from themis.data.slices import read_seed_weights
from themis.errors import UsageError
from themis.judge import choose_judge
from themis.keywords import SuiteKeywords
from themis.perturb import Perturbation
from themis.runs.environment import as_plain_data
from themis.runs.run import Round, Run
from themis.runs.source import Origin, recorded_origin
from themis.runs.store.files import is_database
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.runs.trust import Trusted, permit
from themis.search import choose_policy
from themis.search.boundary import Boundary
from themis.settings import UNDECIDED, Settings
from themis.suites.budget import OPEN_REASONS, BudgetStep, MemberProgress, fixed_steps, next_step
from themis.suites.definition import (
    MEMBER_KEYS,
    SuiteDefinition,
    SuiteMember,
    choose_suite,
    grader,
    is_graded_only,
    read_suite,
)
from themis.suites.folder import RESERVED, SuiteFolder, new_record, read_record, signed
from themis.suites.grades import LevelGrade, grade_clean, grade_member, graded_rows, plain_grade
from themis.suites.options import TESTS_PER_MEMBER, SuiteOptions, read_options
from themis.suites.result import Baseline, SuiteDecision, SuiteRun, decide_suite, looks
from themis.target.against import Against
from themis.target.alignment import align_seeds
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget, refuse_target_options

SAVE_SECONDS = 1.0
"""Seconds between saves of `suite.json` while grading, so that no more is lost if the process is killed."""


class SuiteListener:
    """Receives the progress of a suite; the methods do nothing unless they are overridden."""

    def on_start(self, suite: SuiteDefinition, n_seeds: int, max_tests: int) -> None:
        """Called after the clean inputs were run, before the tests."""

    def callbacks_of(self, folder: Path) -> Iterable[Callback]:
        """Return callbacks for the next step of the campaign in a run folder."""
        return ()

    def on_step(self, step: BudgetStep, run: Run, n_tests: int, max_tests: int) -> None:
        """Called after a member has run a part of its tests; all members together have run `n_tests`."""

    def on_grades(self, member: str, grades: Sequence[LevelGrade]) -> None:
        """Called after a member was graded at its levels."""


@dataclass(frozen=True)
class SuitePlan:
    """A suite to run: its members, the division of its budget, and the common settings of its campaigns."""

    suite: SuiteDefinition
    options: SuiteOptions
    settings: Settings
    baseline: Baseline | None = None
    executor: Executor | None = None
    """Where tests run; by default in this process."""

    def __post_init__(self) -> None:
        for member in self.suite.members:
            if member.name in RESERVED:
                raise UsageError(f"a member must not be named {member.name!r}, which is a file of the suite: rename it")
        policy = choose_policy(self.settings.policy)
        if self.settings.criterion is not None or policy.takes_rivals or isinstance(policy, Boundary):
            raise UsageError(
                "several perturbations share one clean sweep, so they must have neither a criterion nor a policy with "
                "rivals or a reference: leave them out, or test one perturbation with themis run"
            )
        if self.options.decide is not None and not any(member.levels for member in self.suite.members):
            raise UsageError(
                f"{self.options.decide} needs members that are graded at levels, but the suite has none: use suite "
                "corruptions, or add levels"
            )
        choose_judge(self.settings.judge)  # refuses an unknown name before anything runs

    @property
    def perturbations(self) -> list[Perturbation]:
        return [member.perturbation for member in self.suite.members]

    @property
    def recorded_options(self) -> dict[str, Any]:
        """The options that are recorded for a resumed suite: all except the time limit."""
        named = {name: getattr(self.options, name) for name in ("share", "level_seeds", "decide")}
        return {"max_tests": self.max_tests, **named}

    @property
    def recorded_settings(self) -> dict[str, Any]:
        return {name: as_plain_data(value) for name, value in asdict(self.settings).items()}

    @property
    def max_tests(self) -> int:
        """The budget of tests for all members together."""
        return self.options.max_tests or TESTS_PER_MEMBER * len(self.suite.members)

    def campaign(self, member: SuiteMember, max_tests: int | None = None) -> CampaignPlan:
        """The campaign of a member with at most this many tests."""
        settings = replace(self.settings, magnitude=member.magnitude, max_tests=max_tests)
        return CampaignPlan(member.perturbation, choose_policy(settings.policy), settings)


def run_suite(
    target: AnyTarget | nn.Module,
    data: Any,
    suite: Any = "corruptions",
    *,
    out: str | Path,
    baseline: Baseline | None = None,
    origin: Origin | None = None,
    features: Features | str | Path | None = None,
    classes: Sequence[str] | None = None,
    callbacks: Iterable[Callback] = (),
    listener: SuiteListener | None = None,
    executor: Executor | str | None = None,
    **options: Unpack[SuiteKeywords],
) -> SuiteRun:
    """Test `target` on `data` under every perturbation of a suite; all results are in one folder.

    The same call with the same `out` resumes a suite that was stopped. Options are `max_tests`, `max_seconds`,
    `share` and `level_seeds` of the suite, and the fields of `Settings` for its campaigns.

    Args:
        target: The model under test, as for `themis.run`.
        data: The seeds, as for `themis.run`.
        suite: A name (corruptions, weather, camera, noise, geometry, signals, tables, attacks), a YAML file, a dict
            with `members` as in such a file, a list of perturbations, or published files, such as `cifar10c:FOLDER`,
            on which the model is graded without a campaign.
        out: Folder for the results; every member gets an ordinary run folder in it.
        baseline: The baseline of mCE if `decide` is a claim about mCE, as for `SuiteRun.corruption_errors`.
        origin: How another process can build the target and the data again.
        features: What the columns of a table may hold, as for `themis.run`.
        classes: Class names by number; by default those that the data has.
        callbacks: Called as each campaign proceeds, see `Callback`.
        listener: Notified as the suite proceeds.
        executor: Where tests run, as for `themis.run`; members run one after the other, each in all workers.
    """
    refuse_target_options(options)
    workers = choose_executor(executor)
    if isinstance(target, Against):
        raise UsageError("a suite must test a model without a reference: test one perturbation with themis.run")
    suite_options, settings = read_options(dict(options))
    decide = suite_options.decide or ""
    if decide.startswith("mce") != (baseline is not None):
        raise UsageError(
            f"a baseline is for a claim about mce, which needs one, got decide {decide or None!r} and baseline "
            f"{baseline!r}: pass baseline (--mce-baseline) with a claim about mce, and with no other"
        )
    if isinstance(baseline, str | Path) and Path(baseline).is_dir():
        SuiteRun(baseline)  # refuses another folder before anything runs
    seeds = read_seeds(data, settings.max_seeds)
    if is_graded_only(suite):
        if workers is not None:
            raise UsageError(f"{suite} is graded in this process: leave executor (--executor) out")
        tested = read_tested(target, seeds, [], settings, origin, features, classes)
        graded: SuiteRun = grader(suite)(
            tested, suite, suite_options, settings, out, (listener or SuiteListener()).on_grades
        )
        return graded
    plan = SuitePlan(_choose_fitting(suite, as_target(target), seeds), suite_options, settings)
    tested = read_tested(target, seeds, plan.perturbations, settings, origin, features, classes)
    return _run(out, replace(plan, baseline=baseline, executor=workers), tested, listener, callbacks)


def resume_suite(
    out: str | Path,
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    *,
    suite: Any = None,
    origin: Origin | None = None,
    max_tests: int | None = None,
    max_seconds: float | None = None,
    callbacks: Iterable[Callback] = (),
    listener: SuiteListener | None = None,
    executor: Executor | str | None = None,
    trust: Trusted = False,
) -> SuiteRun:
    """Resume the suite in the folder `out`; it ends as if it had never been stopped.

    The model, the data and your own perturbations are needed only if the suite cannot create them again. A larger
    `max_tests` continues a suite that has spent its budget. `max_seconds` limits this call, and `executor` may differ
    from that of the first call.
    """
    record = read_record(out)
    permission = permit(out, record, trust)
    origin = origin or recorded_origin(record, permission)
    if origin is None and (target is None or data is None):
        raise UsageError(
            f"the suite in {out} does not record how to create its model and data, because it was started from Python: "
            "pass target and data"
        )
    published = record["perturbation"] if suite is None else suite
    if suite is None and not is_graded_only(published):
        from themis.runs.trust import perturbation_code

        permission.require(perturbation_code(record["perturbation"]))
        with nullcontext() if origin is None else origin.in_folder():
            members = [{key: member[key] for key in MEMBER_KEYS if key in member} for member in record["members"]]
            definition = read_suite({"name": record["name"], "members": members}, imports=permission.is_granted)
            definition = replace(definition, notes=tuple(record["notes"]))
    settings = Settings(**record["settings"])
    options = SuiteOptions(**record["options"])
    if options.decide is not None:
        raise UsageError(f"a suite that decides {options.decide} must be started again with the command that began it")
    options = replace(options, max_tests=options.max_tests if max_tests is None else max_tests, max_seconds=max_seconds)
    if target is None:
        assert origin is not None
        target = origin.target()
    if data is None:
        assert origin is not None
        data = origin.read()
    seeds = read_seeds(data, settings.max_seeds)
    if is_graded_only(published):
        tested = read_tested(target, seeds, [], settings, origin, None, record.get("classes"))
        graded: SuiteRun = grader(published)(
            tested, published, options, settings, out, (listener or SuiteListener()).on_grades
        )
        return graded
    if suite is not None:
        definition = _choose_fitting(suite, as_target(target), seeds)
    plan = SuitePlan(definition, options, settings)
    tested = read_tested(target, seeds, plan.perturbations, settings, origin, None, record.get("classes"))
    workers = choose_executor(executor, record["environment"]["threads"])
    return _run(out, replace(plan, executor=workers), tested, listener, callbacks, signs=permission.is_granted)


def _choose_fitting(suite: Any, target: AnyTarget, seeds: Seeds) -> SuiteDefinition:
    return choose_suite(suite, align_seeds(target, seeds).shape[1:], target)


def _run(
    out: str | Path,
    plan: SuitePlan,
    tested: TestedModel,
    listener: SuiteListener | None,
    callbacks: Iterable[Callback],
    *,
    signs: bool = True,
) -> SuiteRun:
    """Run the rest of the suite in the folder `out`. signs: see `CampaignSeries.resume`."""
    began, listener = perf_counter(), listener or SuiteListener()
    plan = replace(plan, suite=plan.suite.fitted(tuple(tested.seeds.shape[1:])))
    first = plan.campaign(plan.suite.members[0])
    if plan.settings.seed_weights is not None:
        read_seed_weights(plan.settings.seed_weights, tested.seeds)  # refuses invalid weights before a folder exists
    with closing(SuiteFolder(out)) as folder:
        stored = folder.read()
        if stored is not None:
            _check_same(stored, plan, folder.path)
        n_threads = None if stored is None else stored["environment"]["threads"]
        with open_series(tested, first, executor=plan.executor, n_threads=n_threads) as series:
            if stored is not None:
                refuse_changes(series.hashes, stored["environment"], "suite")
            series = series.with_sweep(first)
            record = stored or _new_record(plan, series)
            seconds_before = record["seconds"]
            record = signed({**record, "state": "running", "options": plan.recorded_options})
            limit = TimeLimit(began + (plan.options.max_seconds or inf))
            work = _SuiteWork(plan, series, folder, record, (*callbacks, limit), listener, limit, signs)
            listener.on_start(plan.suite, len(tested.seeds), 0 if plan.options.decide else plan.max_tests)
            state = "failed"
            try:
                state = "ended" if work.run() else "out of time" if limit.is_over else "interrupted"
            except KeyboardInterrupt:
                state = "interrupted"
            finally:
                work.record["seconds"] = seconds_before + perf_counter() - began
                work.record["state"] = state
                folder.write(work.record)
    return SuiteRun(out)


@dataclass
class _SuiteWork:
    """A running suite. `record` is the content of `suite.json`, in which every step is recorded before it begins."""

    plan: SuitePlan
    series: CampaignSeries
    folder: SuiteFolder
    record: dict[str, Any]
    callbacks: tuple[Callback, ...]
    listener: SuiteListener
    limit: TimeLimit
    signs: bool
    """See `CampaignSeries.resume`."""
    summaries: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """The summaries of the members that have run, by name."""
    saved_at: float = -inf

    def run(self) -> bool:
        """Run the rest of the suite; return whether it has ended rather than been interrupted."""
        if self.plan.options.decide is not None:
            return self._decide(self.plan.options.decide)
        suite, options, max_tests = self.plan.suite, self.plan.options, self.plan.max_tests
        for member in suite.members:
            out = self.folder.member(member.name)
            if is_database(out / DATABASE):
                with closing(Reader(out, is_brief=True)) as run:
                    self.summaries[member.name] = run.summary()
        schedule = self.record["schedule"]
        begun = {step["member"] for step in schedule}
        schedule += [
            asdict(step) for step in fixed_steps(suite.members, max_tests, options.share) if step.member not in begun
        ]
        self._save()
        last = {step["member"]: BudgetStep(**step) for step in schedule}  # one of these may have been interrupted
        if not all(map(self._run_step, last.values())):
            return False
        rows = graded_rows(len(self.series.tested.seeds), options.level_seeds, self.plan.settings.random_seed)
        for member in suite.members:
            if self.limit.is_over:
                return False
            self._grade(member, rows)
        while True:
            n_steps = sum(step["reason"] != "share" for step in schedule)
            following = next_step(suite.members, self._progress(), n_steps, max_tests, options.share)
            if following is None:
                return True
            if self.limit.is_over:
                return False
            schedule.append(asdict(following))
            self._save()
            if not self._run_step(following):
                return False

    def _save(self, least_seconds: float = 0.0) -> None:
        """Write `suite.json`, unless it was written less than `least_seconds` ago."""
        if perf_counter() - self.saved_at >= least_seconds:
            self.folder.write(self.record)
            self.saved_at = perf_counter()

    def _run_step(self, step: BudgetStep) -> bool:
        """Continue a member up to the tests of a recorded step; return False if it was interrupted."""
        known = self.summaries.get(step.member)
        if known is not None and (
            known["stop_reason"] not in OPEN_REASONS
            or (known["stop_reason"] == "tests" and known["tests"] >= step.max_tests)
        ):
            return True
        if self.limit.is_over:
            return False
        member = next(member for member in self.plan.suite.members if member.name == step.member)
        out = self.folder.member(member.name)
        callbacks = Callbacks((*self.listener.callbacks_of(out), *self.callbacks))
        run = self.series.proceed(self.plan.campaign(member, step.max_tests), out, callbacks, signs=self.signs)
        self.summaries[member.name] = run.summary()
        n_tests = sum(progress.tests for progress in self._progress().values())
        self.listener.on_step(step, run, n_tests, self.plan.max_tests)
        return run.stop_reason != "user"

    def _decide(self, claim: str) -> bool:
        """Grade more and more seeds until a claim is decided; return False if time has run out."""
        n_seeds, most = len(self.series.tested.seeds), self.plan.options.level_seeds
        counts = looks(n_seeds if most is None else min(n_seeds, most))
        decision = SuiteDecision(claim, len(counts))
        for n in counts:
            self.record |= {"grades": {}, "clean": None, "decision": asdict(decision)}
            rows = graded_rows(n_seeds, n, self.plan.settings.random_seed)
            for member in self.plan.suite.members:
                if self.limit.is_over:
                    return False
                self._grade(member, rows)
            self._save()
            decision = decide_suite(SuiteRun(self.folder.path), decision, self.plan.baseline)
            self.record["decision"] = asdict(decision)
            self._save()
            if decision.verdict != UNDECIDED:
                break
        return True

    def _progress(self) -> dict[str, MemberProgress]:
        return {member.name: MemberProgress.of(self.summaries.get(member.name)) for member in self.plan.suite.members}

    def _grade(self, member: SuiteMember, rows: Any) -> None:
        """Grade a member at its levels, unless it has been graded."""
        if not member.levels or member.name in self.record["grades"]:
            return
        sweep, random_seed = _sweep(self.series), self.plan.settings.random_seed
        if self.record["clean"] is None:
            self.record["clean"] = plain_grade(grade_clean(sweep.calculator, rows))
            self.record["graded"] = hashlib.sha256(self.series.tested.seeds.seed_id.numpy()[rows].tobytes()).hexdigest()
        graded = grade_member(sweep.calculator, member, rows, random_seed, sweep.measurer)
        self.record["grades"][member.name] = [plain_grade(grade) for grade in graded]
        self._save(SAVE_SECONDS)
        self.listener.on_grades(member.name, graded)


class TimeLimit(Callback):
    """Stops the running campaign when the time of its suite is over; the suite can be resumed."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    @property
    def is_over(self) -> bool:
        return perf_counter() >= self.deadline

    def on_round(self, round: Round) -> None:
        if self.is_over:
            raise KeyboardInterrupt


def _new_record(plan: SuitePlan, series: CampaignSeries) -> dict[str, Any]:
    """The content of `suite.json` before the first test."""
    suite = plan.suite
    stated = {
        "name": suite.name,
        "members": suite.recorded(),
        "notes": list(suite.notes),
        "options": plan.recorded_options,
        "settings": plan.recorded_settings,
        "perturbation": " + ".join(member.perturbation.name for member in suite.members),
    }
    return new_record(series.tested, series.environment | series.hashes, _sweep(series).calculator, stated)


def _check_same(stored: dict[str, Any], plan: SuitePlan, path: Path) -> None:
    """Refuse to resume a different suite, or one with other settings or a smaller budget."""
    suite, options = plan.suite, plan.options
    changes = []
    if stored["name"] != suite.name or stored["members"] != suite.recorded():
        changes.append("its list of members")
    settings = plan.recorded_settings.items()
    changes += [name for name, value in settings if stored["settings"].get(name) != value and name != "max_tests"]
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


def _sweep(series: CampaignSeries) -> CleanSweep:
    """The clean sweep, which all members share."""
    assert series.sweep is not None
    return series.sweep
