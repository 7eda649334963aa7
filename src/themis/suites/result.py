"""The result of a suite: one row per member, grades at levels, slices, and mCE relative to a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.seeds import Seeds
from themis.errors import UsageError, nearest
from themis.judge.estimate import Estimate, describe_share, show_interval
from themis.reading import check_form, either, items, number, read_yaml, record
from themis.runs.estimates import known_figures, strengths
from themis.runs.replay import Replayer, open_run, read_run
from themis.runs.run import Run, SliceRate, worst_slices
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE, theta_column
from themis.runs.trust import Trusted
from themis.settings import FAILS, HOLDS, UNDECIDED, read_claim
from themis.suites.folder import is_running, is_suite, read_record
from themis.suites.grades import Interval, SuiteGrades, ends, mean_corruption_error
from themis.target.target import AnyTarget
from themis.text import counted, percent

ALEXNET = "alexnet"
"""The name of the baseline of published mean corruption errors."""
PUBLISHED_ERRORS = Path(__file__).with_name("alexnet.json")
"""The errors of AlexNet on ImageNet-C by severity, as published by Hendrycks and Dietterich (2019)."""
Baseline = Any
"""A suite, its folder, `alexnet`, or errors by member in a dict, a JSON file or a YAML file."""


@dataclass(frozen=True)
class MemberRow:
    """The result of a suite under one perturbation; estimates are None until its campaign has run."""

    name: str
    perturbation: str
    range: str
    """The range of theta, in words."""
    note: str
    state: str = "waiting"
    """waiting, running, ended, interrupted, failed or killed."""
    tests: int = 0
    passes: int = 0
    faults: int = 0
    distinct_faults: int = 0
    failing_seeds: int = 0
    seeds: int = 0
    fault_rate: Estimate | None = None
    residual_risk: Estimate | None = None
    slices: tuple[SliceRate, ...] = ()
    """The fault rate by class, or by the columns of `slice_by`."""
    weakest: float | None = None
    """The smallest strength at which a fault was found, as a share of theta's range."""
    weakest_theta: str = ""
    """The theta of that fault, in words."""
    error: float | None = None
    """The share of wrong answers, averaged over the levels; None without levels."""
    error_interval: Interval | None = None
    seconds: float = 0.0
    stop: str = "It has not run yet."


@dataclass(frozen=True)
class SliceRow:
    """A slice of the seeds under one perturbation, with the fault rate of all seeds under it."""

    member: str
    rate: SliceRate
    overall: Estimate


@dataclass(frozen=True)
class CorruptionErrors:
    """Errors relative to a baseline: 1 means as many errors as the baseline makes."""

    mce: float | None
    """The mean corruption error over the members under which the baseline makes errors; None without such members."""
    mce_interval: Interval | None
    """Computed from the graded seeds of both models; a baseline given as numbers is taken as exact."""
    by_member: dict[str, float | None]
    baseline: str


class SuiteRun:
    """A suite in its folder, as far as it has run; `suite["fog"]` opens the run of a member."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.record = read_record(self.path)

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def members(self) -> list[str]:
        """The names of the members."""
        return [member["name"] for member in self.record["members"]]

    @property
    def state(self) -> str:
        """running, ended, interrupted, out of time, failed or killed."""
        state = str(self.record["state"])
        return "killed" if state == "running" and not is_running(self.path) else state

    @property
    def is_only_graded(self) -> bool:
        """Whether the suite has no campaigns, because it grades published files or decides a claim."""
        return not self.record["schedule"] and self.state == "ended"

    @property
    def decision(self) -> SuiteDecision | None:
        """The verdict on the claim of the option `decide`; None without a claim."""
        plain = self.record.get("decision")
        if plain is None:
            return None
        figure = plain["figure"]
        return SuiteDecision(**{**plain, "figure": None if figure is None else Estimate(**figure)})

    @property
    def passes(self) -> int:
        """The passes of the clean sweep, the tests and the grades at levels together."""
        graded = sum(grade["passes"] for grades in self.record["grades"].values() for grade in grades)
        graded = graded if self.decision is None else self.decision.passes
        return int(self.record["passes"] + graded + sum(row.passes for row in self.rows))

    @property
    def tests(self) -> int:
        return sum(row.tests for row in self.rows)

    def folder(self, member: str) -> Path:
        """The run folder of a member."""
        if member not in self.members:
            raise UsageError(f"member must be one of the suite's, got {member!r}: {nearest(member, self.members)}")
        return self.path / member

    @property
    def run_folders(self) -> dict[str, Path]:
        """The run folders of the members that have begun, by name; links are ignored."""
        folders = {name: self.path / name for name in self.members}
        return {name: path for name, path in folders.items() if not path.is_symlink() and (path / DATABASE).is_file()}

    def __getitem__(self, member: str) -> Run:
        return open_run(self.folder(member))

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def rows(self) -> list[MemberRow]:
        """One row per member, in the order of the suite."""
        folders = self.run_folders
        return [self._row(member, folders.get(member["name"])) for member in self.record["members"]]

    def _row(self, member: dict[str, Any], folder: Path | None) -> MemberRow:
        name = member["name"]
        row = MemberRow(name, member["perturb"], member["range"], member["note"])
        if (error := self.grades.member_errors.get(name)) is not None:
            row = replace(row, error=float(np.mean(self.errors[name])), error_interval=ends(error))
        if folder is None:
            return row
        with closing(Reader(folder, is_brief=True)) as run:
            summary = run.summary()
            state, rounds = run.state(summary), run.rounds()
            if not rounds:
                return row
            last = rounds[-1]
            counts = ("tests", "passes", "faults", "distinct_faults", "failing_seeds", "seconds")
            known = known_figures(run.record, summary, None, rounds)
            weakest, theta = _weakest(run)
            return replace(
                row,
                state=state,
                seeds=run.record.get("start", {}).get("n_usable", 0),
                weakest=weakest,
                weakest_theta=theta,
                stop=run.stop_sentence(summary, state),
                **{name: known[name] for name in ("fault_rate", "residual_risk", "slices")},
                **{name: getattr(last, name) for name in counts},
            )

    @cached_property
    def grades(self) -> SuiteGrades:
        """The answers of the graded seeds."""
        return SuiteGrades.of(self.record)

    @property
    def errors(self) -> dict[str, list[float]]:
        """The share of wrong answers by member and level, for graded members."""
        return self.grades.errors

    @property
    def mean_error(self) -> Estimate | None:
        """The mean error over the levels of all members, with its interval; None without levels."""
        return self.grades.mean_error

    @property
    def clean_error(self) -> float | None:
        """The share of wrong answers to the graded seeds without a disturbance; None without levels."""
        return None if self.grades.clean is None else self.grades.clean.error

    @property
    def mean_score(self) -> float | None:
        """The mean score over levels and members (mPC): accuracy, IoU or average precision; None without labels."""
        return self.grades.mean_score

    def corruption_errors(self, baseline: Baseline) -> CorruptionErrors:
        """Corruption errors of every member with levels, and their mean (mCE), relative to a baseline.

        baseline: a `SuiteRun` of another model with the same levels, or its folder; or a dict, a JSON file or a YAML
        file with the error of each member, or a list of its errors by level. `alexnet` is the baseline of published
        mCE.
        """
        if not self.errors:
            raise UsageError(
                f"mCE needs members that are graded at levels, but {self.path} has none: use suite corruptions, or add "
                "levels to the suite"
            )
        is_folder = isinstance(baseline, str | Path) and Path(baseline).is_dir()
        suite = SuiteRun(baseline) if is_folder else as_suite(baseline)
        others, text = _read_baseline(baseline, self) if suite is None else _read_suite(suite, self)
        is_paired = suite is not None and has_same_seeds(self, suite)
        by_member, mean, interval = mean_corruption_error(self.grades, others, is_paired=is_paired)
        return CorruptionErrors(mean, interval, by_member, text)

    def worst_slices(self, n: int = 10) -> list[SliceRow]:
        """The slices that fail clearly more often than all seeds under the same perturbation, the worst first."""
        worst = [
            SliceRow(row.name, rate, row.fault_rate)
            for row in self.rows
            if row.fault_rate is not None
            for rate in worst_slices(row.slices, row.fault_rate)
        ]
        return sorted(worst, key=lambda row: row.overall.value - row.rate.at_least)[:n]

    def summary(self) -> dict[str, Any]:
        """The suite as plain data."""
        record, grades = self.record, self.grades
        return {
            "suite": self.name,
            "state": self.state,
            "members": [asdict(row) for row in self.rows],
            "tests": self.tests,
            "passes": self.passes,
            "clean_passes": record["passes"],
            "distinct_faults": sum(row.distinct_faults for row in self.rows),
            "seconds": record["seconds"],
            "clean_error": self.clean_error,
            "errors": self.errors,
            "level_errors": {name: [asdict(error) for error in levels] for name, levels in grades.level_errors.items()},
            "mean_error": None if self.mean_error is None else asdict(self.mean_error),
            "mean_score": self.mean_score,
            "relative_score": grades.relative_score,
            "worst_slices": [asdict(row) for row in self.worst_slices()],
            "decision": record.get("decision"),
            "schedule": record["schedule"],
            "notes": record["notes"],
            "version": record.get("made_by", "").split(" ")[1:2],
        }

    def __repr__(self) -> str:
        faults = sum(row.distinct_faults for row in self.rows)
        return (
            f"<SuiteRun {self.name!r}: {counted(len(self), 'member')}, {counted(faults, 'distinct fault')} in "
            f"{counted(self.tests, 'test')}, {self.state}>"
        )

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        from html import escape

        from themis.runs.display.fault import html_table

        return f"<div><p>{escape(repr(self))}</p>{html_table(COLUMNS, table_rows(self))}</div>"


def open_suite(path: str | Path) -> SuiteRun:
    """Open the folder of a suite."""
    return SuiteRun(path)


def table_rows(suite: SuiteRun) -> list[tuple[str, ...]]:
    """The table of a suite as text, without its header."""
    rows: list[tuple[str, ...]] = []
    for row in suite.rows:
        rate = row.fault_rate
        shown = "-" if rate is None else f"{percent(rate.value)} ({percent(rate.low)}..{percent(rate.high)})"
        weakest = "-" if row.weakest is None else row.weakest_theta or f"{row.weakest:.2f}"
        error = "-" if row.error is None else percent(row.error)
        if row.error_interval is not None:
            error += f" ({percent(row.error_interval[0])}..{percent(row.error_interval[1])})"
        counts = (f"{row.distinct_faults:,}", f"{row.tests:,}", f"{row.seconds:.1f} s")
        rows.append((row.name, row.range, shown, error, weakest, *counts))
    return rows


COLUMNS = (
    "perturbation",
    "magnitude",
    "fault rate (95%)",
    "error (95%)",
    "weakest fault",
    "distinct faults",
    "tests",
    "time",
)


def sentences(suite: SuiteRun, errors: CorruptionErrors | None = None) -> list[str]:
    """The result of a suite in sentences."""
    lines = [] if suite.decision is None else [f"{suite.decision.clause}."]
    lines += [] if (worst := most_fragile(suite)) is None else [worst]
    if suite.clean_error is not None and suite.errors:
        mean = float(np.mean([np.mean(levels) for levels in suite.errors.values()]))
        lines.append(
            f"Error {percent(mean)}{show_ends(ends(suite.mean_error))} on average over the levels of "
            f"{counted(len(suite.errors), 'perturbation')}, "
            f"{percent(suite.clean_error)} on clean inputs."
        )
    grades = suite.grades
    if suite.mean_score is not None and grades.relative_score is not None:
        lines.append(
            f"Mean {grades.score_name.removeprefix('mean ')} under corruption (mPC) {suite.mean_score:.4f}, "
            f"{percent(grades.relative_score)} of the clean one (rPC)."
        )
    if errors is not None:
        mce = "unknown, as the baseline makes no errors"
        if errors.mce is not None:
            mce = f"{percent(errors.mce)}{show_ends(errors.mce_interval)}"
        lines.append(f"mCE {mce}, against {errors.baseline}.")
    return lines


def show_ends(ends: Interval | None) -> str:
    """An interval in brackets, to follow its value; empty if it is not known."""
    return "" if ends is None else f" (95%: {percent(ends[0])} to {percent(ends[1])})"


def has_same_seeds(first: SuiteRun, second: SuiteRun) -> bool:
    """Whether two suites have graded the same seeds of the same data."""
    data = [suite.record["environment"]["data_sha256"] for suite in (first, second)]
    graded = [suite.record.get("graded") for suite in (first, second)]
    return data[0] == data[1] and graded[0] is not None and graded[0] == graded[1]


def as_suite(source: Any) -> SuiteRun | None:
    """The suite that is given as such or by its folder; None if it is something else."""
    if isinstance(source, str | Path) and is_suite(source):
        return SuiteRun(source)
    return source if isinstance(source, SuiteRun) else None


def most_fragile(suite: SuiteRun) -> str | None:
    """The perturbation that breaks the model most, in a sentence or two; None if nothing is known yet.

    Random disturbances decide if the interval of one perturbation lies above those of all others. Otherwise, the errors
    at levels decide if all perturbations have them.
    """
    rates = [(row.name, row.fault_rate) for row in suite.rows if row.fault_rate is not None]
    rates.sort(key=lambda pair: -pair[1].value)
    worst, rate = rates[0] if rates else ("", Estimate(0.0, 0.0, 1.0))
    n_close = sum(other.high >= rate.low for _, other in rates[1:])
    shown = f"{percent(rate.value)} of random disturbances fail (95%: {percent(rate.low)} to {percent(rate.high)})"
    if rate.value > 0 and not n_close:
        return f"Most fragile under {worst}: {shown}."
    errors = {row.name: row.error for row in suite.rows if row.error is not None}
    if len(errors) == len(suite) and breaks_at_levels(suite):
        worst = max(errors, key=lambda name: errors[name])
        return (
            f"Most fragile under {worst}: {percent(errors[worst])} of answers are wrong on average over its levels."
            f"{' The random disturbances do not single out a perturbation.' if rates else ''}"
        )
    if rate.value > 0:
        return f"Highest fault rate under {worst}: {shown}; {counted(n_close, 'other')} may be as high."
    if not rates:
        return None
    n_found = sum(row.faults > 0 for row in suite.rows)
    found = f"; the search found faults under {n_found} of {counted(len(suite), 'perturbation')}" if n_found else ""
    return f"No random disturbance failed{found}."


def breaks_at_levels(suite: SuiteRun) -> bool:
    """Whether the model makes more errors at the levels of a perturbation than on clean inputs."""
    clean = suite.clean_error
    return clean is not None and any(row.error is not None and row.error > clean for row in suite.rows)


def slice_sentences(suite: SuiteRun, n: int = 3) -> list[str]:
    """The worst slices, one sentence each."""
    return [
        f"Worst slice: {row.rate.name} under {row.member}, where at least {percent(row.rate.at_least)} of random "
        f"disturbances fail, against {show_interval(row.overall)} overall."
        for row in suite.worst_slices(n)
    ]


def _weakest(run: Reader) -> tuple[float | None, str]:
    """The smallest strength of a fault, and the theta of that fault in words."""
    columns = ", ".join(theta_column(name) for name in run.theta)
    best: tuple[float, list[float]] | None = None
    for rows in run.batches(f"{columns} FROM faults ORDER BY id"):
        theta = np.array(rows, dtype=np.float64)
        strength, _ = strengths(theta, run.record["theta"])
        k = int(strength.argmin())
        if best is None or strength[k] < best[0]:
            best = float(strength[k]), theta[k].tolist()
    if best is None:
        return None, ""
    named = [f"{name} {value:.3g}" for name, value in zip(run.theta, best[1], strict=True)]
    return best[0], named[0] if len(named) == 1 else f"{percent(best[0], 0)} of the range"


def _read_suite(baseline: SuiteRun, suite: SuiteRun) -> tuple[SuiteGrades, str]:
    """The grades of a baseline that is a suite, and its name."""
    for name, grades in suite.grades.levels.items():
        theirs = [grade.level for grade in baseline.grades.levels.get(name, ())]
        if [grade.level for grade in grades] != theirs:
            reason = f"has the levels {'; '.join(theirs)}" if theirs else "has not graded it"
            raise UsageError(
                f"the baseline must have the same levels of {name!r}, but {baseline.path} {reason}: run the same "
                "suite on the baseline model"
            )
    return baseline.grades, str(baseline.path)


def _read_baseline(baseline: Baseline, suite: SuiteRun) -> tuple[dict[str, list[float]], str]:
    """The errors of a baseline that is given as numbers, by member and level, and its name."""
    text = "the given numbers"
    if isinstance(baseline, str | Path):
        text = str(baseline)
        if text == ALEXNET:
            text, baseline = "the published errors of AlexNet", PUBLISHED_ERRORS
        baseline = read_yaml(Path(baseline), "a baseline that is no suite")  # JSON is YAML too
    share = number(0, 1)
    of_members = {name: either(items(share, len(levels)), share) for name, levels in suite.errors.items()}
    try:
        check_form(baseline, record(of_members), "the baseline")
    except ValueError as error:
        example = f"{{'{suite.members[0]}': 0.4}}"
        raise UsageError(f"{error}; name a suite, or give errors by member, one or one per level: {example}") from None
    errors = {}
    for name, levels in suite.errors.items():
        value = baseline[name]
        errors[name] = value if isinstance(value, list) else [value] * len(levels)
    return errors, text


Rebuild = Callable[[Reader], Replayer]
"""Makes a handle for a run folder, such as one with a model that the user named."""


class MemberReplayer(Replayer):
    """The handle of a member's run folder, with the model and the data of another member."""

    def __init__(self, run: Reader, first: Replayer, trust: Trusted = False) -> None:
        super().__init__(run, origin=first.origin, trust=trust)
        self._first = first

    @cached_property
    def target(self) -> AnyTarget:
        return self._first.target

    @cached_property
    def all_seeds(self) -> Seeds:
        return self._first.all_seeds


@contextmanager
def open_members(suite: SuiteRun, rebuild: Rebuild | None = None, trust: Trusted = False) -> Iterator[dict[str, Run]]:
    """Open the runs of the members that have run, by name. rebuild: makes the handle of the first one."""
    with ExitStack() as stack:
        members: dict[str, Run] = {}
        first: Replayer | None = None
        for name, folder in suite.run_folders.items():
            run = stack.enter_context(closing(Reader(folder)))
            if first is None:
                handle = first = Replayer(run, trust=trust) if rebuild is None else rebuild(run)
            else:
                handle = MemberReplayer(run, first, trust)
            members[name] = read_run(handle)
        if not members and not suite.is_only_graded:
            raise UsageError(f"a suite must have run a member, but {suite.path} has run none: resume it")
        yield members


MIN_FIRST_LOOK = 50
"""Seeds that are graded before the first look, at least, if there are as many."""


@dataclass(frozen=True)
class SuiteDecision:
    """The verdict on a claim about a mean error; it is wrong with a probability of at most 5%."""

    claim: str
    looks: int
    """The largest number of looks at the figure, which share the 5% equally."""
    verdict: str = UNDECIDED
    """holds, does not hold, or undecided."""
    seeds: int = 0
    passes: int = 0
    """The passes of all looks together."""
    figure: Estimate | None = None
    """The mean error that the claim is about; its intervals at all looks hold jointly."""

    @property
    def clause(self) -> str:
        """The verdict and its basis."""
        found = "nothing was graded" if self.figure is None else describe_share(self.figure)
        verdict = f"{self.verdict} (certain at 95%)" if self.verdict != UNDECIDED else f"is {self.verdict}"
        return f"{self.claim} {verdict}: {found} on {counted(self.seeds, 'seed')}"


def looks(n_seeds: int) -> list[int]:
    """The ascending numbers of graded seeds at which the suite looks: all, half of them, a quarter, and so on.

    It looks until the interval of the figure lies on one side of the limit. The largest number of looks is known
    beforehand, and the looks share the 5% equally, so that all intervals hold jointly with 95% confidence.
    """
    counts = [n_seeds]
    while counts[0] >= 2 * MIN_FIRST_LOOK:
        counts.insert(0, counts[0] // 2)
    return counts


def verdict(figure: Estimate, limit: float) -> str:
    """Whether a figure is within a limit; undecided if its interval contains the limit."""
    return HOLDS if figure.high <= limit else FAILS if figure.low > limit else UNDECIDED


def decide_suite(suite: SuiteRun, before: SuiteDecision, baseline: Baseline | None) -> SuiteDecision:
    """The verdict from the grades of a suite so far. before: the decision at the previous look."""
    name, limit = read_claim(before.claim)
    if name == "mce":
        errors = suite.corruption_errors(baseline)
        if errors.mce is None or errors.mce_interval is None:
            raise UsageError(
                f"mce needs a baseline that makes errors, but {errors.baseline} makes none: choose another"
            )
        figure = Estimate(errors.mce, *errors.mce_interval)
    else:
        assert suite.mean_error is not None
        figure = suite.mean_error
    levels = [grade for grades in suite.grades.levels.values() for grade in grades]
    passes = before.passes + sum(grade.passes for grade in levels)
    return replace(before, verdict=verdict(figure, limit), seeds=levels[0].seeds, passes=passes, figure=figure)
