"""The result of a suite: one row per member, the grades at levels, slices, and mCE relative to a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError, nearest
from themis.judge.estimate import Estimate
from themis.judge.risk import mean_estimate
from themis.reading import read_yaml
from themis.runs.estimates import strengths
from themis.runs.open import open_run
from themis.runs.run import Run
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE, theta_column
from themis.suites.folder import SUITE, is_running, is_suite, read_record, unpack
from themis.suites.grades import (
    SeedValues,
    corruption_errors,
    mean_ratio,
    mean_score,
    relative_corruption_errors,
)
from themis.suites.slices import LEAST_TESTS, share
from themis.text import counted, percent

Interval = tuple[float, float]
"""The ends of a 95% interval."""
Baseline = Any
"""A suite, the folder of one, or numbers: a dict (or a JSON or YAML file) of errors by member, and `clean`."""


@dataclass(frozen=True)
class MemberRow:
    """What a suite found under one perturbation. Figures are None if its campaign has not run yet."""

    name: str
    perturbation: str
    range: str
    """The range of theta, in words."""
    note: str
    state: str
    """waiting, running, ended, interrupted, failed or killed."""
    tests: int
    passes: int
    faults: int
    distinct_faults: int
    failing_seeds: int
    seeds: int
    fault_rate: Estimate | None
    residual_risk: Estimate | None
    weakest: float | None
    """The smallest strength at which a fault was found, as a share of theta's range."""
    weakest_theta: str
    """The theta of that fault, in words."""
    error: float | None
    """The mean share of wrong answers over its levels; None without levels."""
    error_interval: Interval | None
    """None too in records of earlier versions."""
    seconds: float
    stop: str


@dataclass(frozen=True)
class SliceRow:
    """A slice of the seeds under one perturbation, with its fault rate and that of all seeds."""

    member: str
    column: str
    value: str
    tests: int
    faults: int
    rate: Estimate
    overall: float


@dataclass(frozen=True)
class CorruptionErrors:
    """Errors relative to a baseline: 1 is as many as the baseline makes."""

    mce: float | None
    """The mean corruption error, over the members that the baseline makes errors under; None if there are none."""
    mce_interval: Interval | None
    """From the graded seeds of both models; numbers without seeds are taken as exact. None in earlier records."""
    relative_mce: float | None
    """The same for what corruptions add to the clean error; None too if the clean errors are not known."""
    relative_mce_interval: Interval | None
    by_member: dict[str, float | None]
    relative_by_member: dict[str, float | None]
    baseline: str


class SuiteRun:
    """The folder of a suite, as far as it has run. `suite["fog"]` opens the run of a member."""

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
    def passes(self) -> int:
        """All passes: the clean sweep, the tests and the grades at levels."""
        graded = sum(grade["passes"] for grades in self.record["grades"].values() for grade in grades)
        return int(self.record["passes"] + graded + sum(row.passes for row in self.rows))

    @property
    def tests(self) -> int:
        return sum(row.tests for row in self.rows)

    def folder(self, member: str) -> Path:
        """The run folder of a member."""
        if member not in self.members:
            raise UsageError(f"member must be one of the suite's, got {member!r}: {nearest(member, self.members)}")
        return self.path / member

    def __getitem__(self, member: str) -> Run:
        return open_run(self.folder(member))

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def rows(self) -> list[MemberRow]:
        """One row per member, in the order of the suite."""
        return [self._row(member) for member in self.record["members"]]

    def _row(self, member: dict[str, Any]) -> MemberRow:
        name, folder = member["name"], self.path / member["name"]
        errors = self.errors.get(name)
        empty = MemberRow(
            name,
            member["perturb"],
            member.get("range", ""),
            member.get("note", ""),
            *("waiting", 0, 0, 0, 0, 0, 0, None, None, None, ""),
            None if not errors else float(np.mean(errors)),
            _ends(self.member_errors.get(name)),
            *(0.0, "It has not run yet."),
        )
        if folder.is_symlink() or not (folder / DATABASE).is_file():
            return empty
        with closing(Reader(folder, is_brief=True)) as run:
            summary = run.summary()
            state, rounds = run.state(summary), run.rounds()
            if not rounds:
                return empty
            last, start = rounds[-1], run.record.get("start", {})
            known = summary or {}
            rate, risk = known.get("fault_rate"), known.get("residual_risk")
            weakest, theta = _weakest(run)
            return MemberRow(
                *(name, member["perturb"], empty.range, empty.note, state),
                *(last.tests, last.passes, last.faults, last.distinct_faults, last.failing_seeds),
                start.get("n_usable", 0),
                None if rate is None else Estimate(**rate),
                None if risk is None else Estimate(**risk),
                *(weakest, theta, empty.error, empty.error_interval, last.seconds),
                run.stop_sentence(summary, state),
            )

    @cached_property
    def errors(self) -> dict[str, list[float]]:
        """The share of wrong answers by member and level, for members with levels that have been graded."""
        return {name: [grade["error"] for grade in grades] for name, grades in self.record["grades"].items() if grades}

    @cached_property
    def level_errors(self) -> dict[str, list[Estimate]]:
        """The same with their intervals: at a level, each seed is tested once."""
        return {name: [_error(grade) for grade in grades] for name, grades in self.record["grades"].items() if grades}

    @cached_property
    def wrong(self) -> dict[str, NDArray[np.int64]]:
        """At how many levels of a member each graded seed is answered wrongly `[seeds]`, by member with levels.

        Empty in records of earlier versions, which do not tell.
        """
        graded = {name: grades for name, grades in self.record["grades"].items() if grades}
        if any("wrong" not in grade for grades in graded.values() for grade in grades):
            return {}
        return {
            name: np.sum([unpack(grade["wrong"], grade["seeds"]) for grade in grades], axis=0)
            for name, grades in graded.items()
        }

    @cached_property
    def clean_wrong(self) -> NDArray[np.int64] | None:
        """Which graded seeds are answered wrongly without a disturbance; None if that is not recorded."""
        clean = self.record.get("clean") or {}
        return unpack(clean["wrong"], clean["seeds"]) if "wrong" in clean else None

    @cached_property
    def member_errors(self) -> dict[str, Estimate]:
        """The mean error over the levels of each member, with its interval."""
        return {name: mean_estimate(wrong / len(self.errors[name])) for name, wrong in self.wrong.items()}

    @property
    def mean_error(self) -> Estimate | None:
        """The mean error over the levels of all members, with its interval; None if it is not known."""
        shares = [wrong / len(self.errors[name]) for name, wrong in self.wrong.items()]
        return mean_estimate(np.mean(shares, axis=0)) if shares else None

    @property
    def clean_error(self) -> float | None:
        """The share of wrong answers of the graded seeds without a disturbance; None without levels."""
        clean = self.record.get("clean")
        return None if clean is None else float(clean["error"])

    @property
    def mean_score(self) -> float | None:
        """The mean score over levels and members (mPC): accuracy, IoU or average precision; None without labels."""
        scores = self._scores()
        return None if scores is None else scores[0]

    @property
    def score_name(self) -> str:
        """What the score is, in words."""
        name = (self.record.get("clean") or {}).get("score_name", "")
        return {"map": "mean average precision", "iou": "mean IoU"}.get(name, name or "score")

    @property
    def relative_score(self) -> float | None:
        """The mean score as a share of the clean score (rPC)."""
        scores = self._scores()
        return None if scores is None else scores[1]

    @property
    def score_intervals(self) -> tuple[Interval | None, Interval | None]:
        """The intervals of mPC and rPC; None unless the score is the share of answers that are not wrong."""
        clean, of = self.record.get("clean"), self.mean_error
        grades = [grade for grades in self.record["grades"].values() for grade in grades]
        if self._scores() is None or of is None or self.clean_wrong is None:
            return None, None
        if any(abs(grade["score"] - (1 - grade["error"])) > 1e-6 for grade in [clean, *grades]):
            return None, None
        right = np.mean([1 - wrong / len(self.errors[name]) for name, wrong in self.wrong.items()], axis=0)
        relative = None
        if self.relative_score is not None:
            sides = [SeedValues(values.astype(float), 0.0, 1.0) for values in (right, 1 - self.clean_wrong)]
            relative = mean_ratio(sides[:1], sides[1:], is_paired=True)
        return (1 - of.high, 1 - of.low), _ends(relative)

    def _scores(self) -> tuple[float, float | None] | None:
        clean = self.record.get("clean")
        scores = [[grade.get("score") for grade in grades] for grades in self.record["grades"].values() if grades]
        if clean is None or clean.get("score") is None or not scores or any(None in levels for levels in scores):
            return None
        return mean_score(scores, clean["score"])

    def corruption_errors(self, baseline: Baseline) -> CorruptionErrors:
        """Corruption errors of every member with levels, and their mean (mCE), relative to a baseline.

        baseline: a `SuiteRun` or the folder of one on another model with the same levels, or numbers: a dict, or a JSON
        or YAML file, with the error of each member or a list of them by level, and `clean`.
        """
        errors, clean = self.errors, self.clean_error
        if not errors or clean is None:
            raise UsageError(
                f"mCE needs members that are graded at levels, but {self.path} has none: use suite corruptions, or add "
                "levels to the suite"
            )
        others, other_clean, text = _read_baseline(baseline, self)
        relative = {} if other_clean is None else relative_corruption_errors(errors, clean, others, other_clean)
        by_member = corruption_errors(errors, others)
        suite = _as_suite(baseline)
        return CorruptionErrors(
            _mean(by_member),
            self._ratio_interval([name for name, ratio in by_member.items() if ratio is not None], others, None, suite),
            _mean(relative),
            self._ratio_interval(
                [name for name, ratio in relative.items() if ratio is not None], others, other_clean, suite
            ),
            by_member,
            relative,
            text,
        )

    def _ratio_interval(
        self, names: list[str], others: dict[str, list[float]], other_clean: float | None, suite: SuiteRun | None
    ) -> Interval | None:
        """The interval of mCE over these members, or of relative mCE, if the clean error of the baseline is given."""
        is_relative = other_clean is not None
        ours = self._sums(names, is_relative=is_relative)
        below: list[SeedValues | float] | None = (
            [sum(others[name]) - (other_clean or 0.0) * len(others[name]) for name in names]
            if suite is None
            else suite._sums(names, is_relative=is_relative)  # type: ignore[assignment]
        )
        if not ours or not below:
            return None
        return _ends(mean_ratio(ours, below, is_paired=suite is not None and has_same_seeds(self, suite)))

    def _sums(self, names: list[str], *, is_relative: bool) -> list[SeedValues] | None:
        """The errors of each seed, summed over the levels of each member; relative to the clean ones if wanted."""
        clean = self.clean_wrong
        if any(name not in self.wrong for name in names) or (is_relative and clean is None):
            return None
        counts = [len(self.errors[name]) for name in names]
        if not is_relative or clean is None:
            return [SeedValues(self.wrong[name].astype(float), 0.0, n) for name, n in zip(names, counts, strict=True)]
        return [
            SeedValues((self.wrong[name] - n * clean).astype(float), -n, n)
            for name, n in zip(names, counts, strict=True)
        ]

    def slices(self) -> list[SliceRow]:
        """All slices with enough tests, the highest fault rates first, by the lower end of their intervals."""
        rows = []
        for column in self.record["slices"]:
            for member, counts in column["counts"].items():
                if member not in self.members or not (total := sum(tests for tests, _ in counts)):
                    continue
                overall = sum(faults for _, faults in counts) / total
                rows_of = zip(column["values"], counts, independent_of(column, member), strict=False)
                for value, (tests, faults), independent in rows_of:
                    if tests >= LEAST_TESTS and faults <= tests:
                        rate = share(faults, tests, independent)
                        rows.append(SliceRow(member, column["name"], value, tests, faults, rate, overall))
        return sorted(rows, key=lambda row: (-row.rate.low, -row.tests, row.member, row.value))

    def worst_slices(self, n: int = 10) -> list[SliceRow]:
        """The slices that fail most clearly more often than the seeds as a whole under the same perturbation."""
        rows = [row for row in self.slices() if row.rate.low > row.overall]
        return sorted(rows, key=lambda row: -(row.rate.low - row.overall))[:n]

    def summary(self) -> dict[str, Any]:
        """The suite as plain data."""
        record, (mean_interval, relative_interval) = self.record, self.score_intervals
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
            "level_errors": {name: [asdict(error) for error in levels] for name, levels in self.level_errors.items()},
            "mean_error": None if self.mean_error is None else asdict(self.mean_error),
            "mean_score": self.mean_score,
            "mean_score_interval": mean_interval,
            "relative_score": self.relative_score,
            "relative_score_interval": relative_interval,
            "worst_slices": [asdict(row) for row in self.worst_slices()],
            "schedule": record["schedule"],
            "notes": record.get("notes", []),
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

        def line(cells: Iterable[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

        rows = "".join(line(row, "td") for row in table_rows(self))
        return f"<div><p>{escape(repr(self))}</p><table>{line(COLUMNS, 'th')}{rows}</table></div>"


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
        error = "-" if row.error is None else f"{percent(row.error)}{_bracketed(row.error_interval)}"
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
    """What the suite says about the model."""
    lines = [] if (worst := most_fragile(suite)) is None else [worst]
    if suite.clean_error is not None and suite.errors:
        mean = float(np.mean([np.mean(levels) for levels in suite.errors.values()]))
        lines.append(
            f"Error {percent(mean)}{show_ends(_ends(suite.mean_error))} on average over the levels of "
            f"{counted(len(suite.errors), 'perturbation')}, "
            f"{percent(suite.clean_error)} on clean inputs."
        )
    if suite.mean_score is not None and suite.relative_score is not None:
        of_mean, of_relative = suite.score_intervals
        score = show_ends(of_mean, lambda value: f"{value:.4f}")
        lines.append(
            f"Mean {suite.score_name.removeprefix('mean ')} under corruption (mPC) {suite.mean_score:.4f}{score}, "
            f"{percent(suite.relative_score)}{show_ends(of_relative)} of the clean one (rPC)."
        )
    if errors is not None:
        relative = (
            ""
            if errors.relative_mce is None
            else f", relative mCE {percent(errors.relative_mce)}{show_ends(errors.relative_mce_interval)}"
        )
        mce = (
            "unknown, as the baseline makes no errors"
            if errors.mce is None
            else f"{percent(errors.mce)}{show_ends(errors.mce_interval)}"
        )
        lines.append(f"mCE {mce}{relative}, against {errors.baseline}.")
    return lines


def show_ends(ends: Interval | None, show: Callable[[float], str] = percent) -> str:
    """An interval in words, in brackets after its value; empty if it is not known."""
    return "" if ends is None else f" (95%: {show(ends[0])} to {show(ends[1])})"


def has_same_seeds(first: SuiteRun, second: SuiteRun) -> bool:
    """Whether two suites have graded the same seeds of the same data."""
    data = [suite.record["environment"]["data_sha256"] for suite in (first, second)]
    graded = [suite.record.get("graded") for suite in (first, second)]
    return data[0] == data[1] and graded[0] is not None and graded[0] == graded[1]


def _ends(estimate: Estimate | None) -> Interval | None:
    return None if estimate is None else (estimate.low, estimate.high)


def _bracketed(ends: Interval | None) -> str:
    return "" if ends is None else f" ({percent(ends[0])}..{percent(ends[1])})"


def _error(grade: Mapping[str, Any]) -> Estimate:
    return mean_estimate(np.arange(grade["seeds"]) < grade["errors"])


def _as_suite(baseline: Baseline) -> SuiteRun | None:
    """The baseline if it is a suite, or the folder of one."""
    if isinstance(baseline, str | Path) and (Path(baseline).is_dir() or is_suite(baseline)):
        return SuiteRun(baseline)
    return baseline if isinstance(baseline, SuiteRun) else None


def most_fragile(suite: SuiteRun) -> str | None:
    """The perturbation that breaks the model most, in a sentence or two; None if nothing is known yet.

    The random disturbances decide if the interval of one perturbation lies above those of all others; otherwise the
    errors at levels do, if all perturbations have them.
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
            f"Most fragile under {worst}: {percent(errors[worst])} of answers are wrong on average over its levels. "
            "The random disturbances do not single out a perturbation."
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


def independent_of(column: Mapping[str, Any], member: str) -> list[int]:
    """As many independent tests as would say as much about each value; all tests in records of earlier versions."""
    known = column.get("independent", {}).get(member)
    return [tests for tests, _ in column["counts"][member]] if known is None else known


def slice_sentences(suite: SuiteRun, n: int = 3) -> list[str]:
    """The worst slices, one sentence each."""
    return [
        f"Worst slice: {row.column} {row.value} under {row.member}, {percent(row.rate.value)} answered wrongly "
        f"(95%: {percent(row.rate.low)} to {percent(row.rate.high)}), against {percent(row.overall)} overall."
        for row in suite.worst_slices(n)
    ]


def _mean(values: Mapping[str, float | None]) -> float | None:
    """The mean over members; those without a comparable baseline are left out."""
    known = [value for value in values.values() if value is not None]
    return float(np.mean(known)) if known else None


def _weakest(run: Reader) -> tuple[float | None, str]:
    """The smallest strength among the faults, and the theta of that fault in words."""
    columns = ", ".join(theta_column(name) for name in run.theta)
    best: tuple[float, list[float]] | None = None
    for rows in run.batches(columns):
        theta = np.array(rows, dtype=np.float64)
        strength, _ = strengths(theta, run.record["theta"])
        k = int(strength.argmin())
        if best is None or strength[k] < best[0]:
            best = float(strength[k]), theta[k].tolist()
    if best is None:
        return None, ""
    named = [f"{name} {value:.3g}" for name, value in zip(run.theta, best[1], strict=True)]
    return best[0], named[0] if len(named) == 1 else f"{percent(best[0], 0)} of the range"


def _read_baseline(baseline: Baseline, suite: SuiteRun) -> tuple[dict[str, list[float]], float | None, str]:
    """The errors of the baseline by member and level, its clean error, and its name."""
    if (other := _as_suite(baseline)) is not None:
        baseline = other
        for name in suite.errors:
            ours, theirs = ([level["level"] for level in of.record["grades"].get(name, ())] for of in (suite, baseline))
            if ours != theirs:
                reason = "has not graded it" if not theirs else f"has the levels {'; '.join(theirs)}"
                raise UsageError(
                    f"the baseline must have the same levels of {name!r}, but {baseline.path} {reason}: run the same "
                    "suite on the baseline model"
                )
        return baseline.errors, baseline.clean_error, str(baseline.path)
    text = "the given numbers"
    if isinstance(baseline, str | Path):
        baseline, text = _read_numbers(Path(baseline)), str(baseline)
    if not isinstance(baseline, Mapping):
        raise UsageError(
            f"a baseline must be the folder of a suite, or numbers by member, got {type(baseline).__name__}: write "
            f"for instance {{'{suite.members[0]}': 0.4, 'clean': 0.1}}"
        )
    errors = {}
    for name, levels in suite.errors.items():
        if name not in baseline:
            raise UsageError(f"the baseline must have an error for {name!r}, but it has none: add it as a share of 1")
        value = baseline[name]
        values = list(value) if isinstance(value, list | tuple) else [value] * len(levels)
        is_share = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 1 for v in values)
        if not is_share or len(values) != len(levels):
            raise UsageError(
                f"the baseline of {name!r} must be an error in 0..1, or {len(levels)} of them, one per level, got "
                f"{value!r}: write 0.4 for 40%"
            )
        errors[name] = [float(v) for v in values]
    clean = baseline.get("clean")
    if clean is not None and not (isinstance(clean, int | float) and 0 <= clean <= 1):
        raise UsageError(f"clean of the baseline must be an error in 0..1, got {clean!r}: write 0.1 for 10%")
    return errors, None if clean is None else float(clean), text


def _read_numbers(path: Path) -> Any:
    try:
        return read_yaml(path)  # JSON is YAML too
    except FileNotFoundError:
        raise UsageError(
            f"the baseline must be the folder of a suite with {SUITE}, or a file of numbers, but {path} does not exist"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"the baseline {path} must be numbers in YAML or JSON: {error}") from error
