"""Comparing two suites, member by member, on the same tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from themis.errors import UsageError
from themis.judge.estimate import Estimate
from themis.runs.analysis.compare import MODEL_REMEDY, N_NEW_TESTS, VERSION_SIGNIFICANCE, DiffOptions, Side, diff_runs
from themis.runs.analysis.diff import Diff, escape, show_difference, table
from themis.runs.replay import AnyRun, as_run
from themis.runs.trust import Trusted
from themis.suites.grades import SeedValues, joined
from themis.suites.result import Rebuild, SuiteRun, as_suite, has_same_seeds, open_members
from themis.text import percent

DIFF_COLUMNS = (
    *("perturbation", "fault rate before", "after", "error before", "after", "difference (95%)"),
    *("fixed", "new", "still", "result"),
)


@dataclass(frozen=True)
class SuiteDiff:
    """The differences of the members that both suites have, by name."""

    before: SuiteRun
    after: SuiteRun
    members: dict[str, Diff]
    missing: tuple[str, ...]
    """Members that only one of the suites has run."""

    def rows(self) -> list[tuple[str, ...]]:
        """One row of text per member, with the columns `DIFF_COLUMNS`."""
        rows = []
        rates = [{row.name: row.fault_rate for row in suite.rows} for suite in (self.before, self.after)]
        for name, difference in self.members.items():
            shown = []
            for rate in (side.get(name) for side in rates):
                shown.append("-" if rate is None else percent(rate.value))
            for suite in (self.before, self.after):
                errors = suite.errors.get(name)
                shown.append("-" if errors is None else percent(float(np.mean(errors))))
            shown.append(_points(self.error_differences[name]) if name in self.error_differences else "-")
            counts = ("-",) * 3
            if difference.kind == "versions":
                counts = tuple(f"{len(group):,}" for group in (difference.fixed, difference.new, difference.still))  # type: ignore[assignment]
            rows.append((name, *shown, *counts, difference.sentence))
        return rows

    @cached_property
    def error_differences(self) -> dict[str, Estimate]:
        """The errors at levels after minus those before, by member; the intervals hold jointly with 95% confidence."""
        names = self._graded()
        return {
            name: _difference(self.before, self.after, [name], VERSION_SIGNIFICANCE / 2 / len(names)) for name in names
        }

    def _graded(self) -> list[str]:
        """The members that both suites have graded, at the same number of levels."""
        before, after = self.before.grades.levels, self.after.grades.levels
        return [n for n in self.members if n in before and n in after and len(before[n]) == len(after[n])]

    @cached_property
    def mean_errors(self) -> tuple[float, float, Estimate] | None:
        """The mean error over levels and common members, before and after, and the difference; None without levels."""
        names = self._graded()
        if not names:
            return None
        before, after = (float(suite.grades.shares(names).mean()) for suite in (self.before, self.after))
        return before, after, _difference(self.before, self.after, names, VERSION_SIGNIFICANCE / 2)

    def lines(self) -> list[str]:
        """The result of the whole comparison in sentences."""
        lines = []
        if self.mean_errors is not None:
            before, after, gap = self.mean_errors
            shares = f"{percent(before)} before, {percent(after)} after"
            lines.append(f"Mean error under corruption: {shares} ({show_difference(gap)}).")
        first = next(iter(self.members.values()))
        if first.clean is not None:
            lines.append(f"Clean: {first.clean.sentence()}.")
        if first.kind == "versions" and len(self.members) > 1:
            lines.append(
                f"The intervals of the differences of fault rates under the {len(self.members)} perturbations hold "
                "together with 95%, and so do those of their errors; there is a difference if its interval excludes 0."
            )
        notes: dict[str, list[str]] = {}
        for name, difference in self.members.items():
            for note in difference.notes if difference.kind == "techniques" else ():
                notes.setdefault(note, []).append(name)
        lines += [f"{', '.join(names)}: {note}." for note, names in notes.items()]
        if self.missing:
            lines.append(f"Only in one of the suites, and not compared: {', '.join(self.missing)}.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        before, after, gap = self.mean_errors or (None, None, None)
        return {
            "before": str(self.before.path),
            "after": str(self.after.path),
            "mean_errors": None if gap is None else [before, after],
            "mean_error_difference": None if gap is None else asdict(gap),
            "error_differences": {name: asdict(difference) for name, difference in self.error_differences.items()},
            "members": {name: difference.as_dict() for name, difference in self.members.items()},
            "missing": list(self.missing),
        }

    def markdown(self) -> str:
        """A table with one row per member, and the lines below it."""
        head = f"## Themis: {escape(str(self.before.path))} and {escape(str(self.after.path))}"
        text = [*table(DIFF_COLUMNS, self.rows()), "", *map(escape, self.lines()), ""]
        return "\n".join([head, "", *text])


def _difference(before: SuiteRun, after: SuiteRun, names: list[str], tail: float) -> Estimate:
    """The mean error over the levels of members, after minus before; each limit fails with probability `tail`."""
    first, second = (side.grades.shares(names) for side in (before, after))
    if has_same_seeds(before, after):
        return SeedValues(second - first, -1.0, 1.0).mean(tail)
    return joined(SeedValues(second, 0.0, 1.0).mean(tail), SeedValues(-first, -1.0, 0.0).mean(tail))


def _points(difference: Estimate) -> str:
    value, low, high = (f"{100 * share:+.1f}" for share in (difference.value, difference.low, difference.high))
    return f"{value} ({low} to {high})"


def diff(
    before: AnyRun | SuiteRun,
    after: AnyRun | SuiteRun,
    *,
    kind: str = "auto",
    tests: int = N_NEW_TESTS,
    random_seed: int = 0,
    trust: Trusted = False,
) -> Diff | SuiteDiff:
    """Compare two runs, or two suites member by member.

    Args:
        before: The first run, as `themis.run` or `themis.open_run` returned it, or its folder; or the first suite, as
            `themis.run_suite` returned it, or its folder.
        after: The second run or suite.
        kind: `versions` replays the faults of both runs, and new tests, on both models; `techniques` compares what two
            runs found on one model; `auto` is `techniques` if both tested the same model.
        tests: Number of new tests, per member of a suite.
        random_seed: The same seed gives the same new tests.
        trust: Folders whose code may run although they were not made on this machine by this user; True for both.
    """
    options = DiffOptions(kind, tests, random_seed)
    suites = [as_suite(side) for side in (before, after)]
    if suites[0] is not None and suites[1] is not None:
        return diff_suites(SuiteSide(suites[0]), SuiteSide(suites[1]), options, trust)
    if suites != [None, None]:
        raise UsageError("a suite must be compared with a suite, got one suite and one run: compare one of its members")
    first, second = (
        Side(as_run(side, trust), name)  # type: ignore[arg-type]
        for side, name in ((before, "the first run"), (after, "the second run"))
    )
    return diff_runs(first, second, options)


@dataclass(frozen=True)
class SuiteSide:
    """One of two suites that are compared."""

    suite: SuiteRun
    rebuild: Rebuild | None = None
    """How to open the first member if the model has moved."""
    remedy: str = MODEL_REMEDY
    """What to advise if the model is not the one that was tested."""


def diff_suites(before: SuiteSide, after: SuiteSide, options: DiffOptions, trust: Trusted = False) -> SuiteDiff:
    """Compare the members that two suites have in common, as `themis.diff` compares runs."""
    first, second = before.suite, after.suite
    with open_members(first, before.rebuild, trust) as old, open_members(second, after.rebuild, trust) as new:
        names = [name for name in old if name in new]
        if not names:
            raise UsageError(
                f"two suites must have a member in common to be compared, but {first.path} and {second.path} have "
                "none: run the same suite on both models"
            )
        options = replace(options, comparisons=len(names))
        members = {
            name: diff_runs(Side(old[name], remedy=before.remedy), Side(new[name], remedy=after.remedy), options)
            for name in names
        }
    return SuiteDiff(first, second, members, tuple(sorted(old.keys() ^ new.keys())))
