"""Comparing two suites: every member with the member of the same name, on the same tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from themis.errors import UsageError
from themis.judge.estimate import Estimate
from themis.runs.diff.api import TESTS, diff_runs
from themis.runs.diff.result import Diff, escape, show_difference, table
from themis.runs.diff.versions import LEVEL
from themis.runs.replay import RunSource
from themis.runs.trust import Trusted
from themis.suites.folder import is_suite
from themis.suites.grades import SeedValues, joined
from themis.suites.members import Rebuild, open_members
from themis.suites.result import SuiteRun, has_same_seeds
from themis.text import percent

HEAD = (
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
        """One row per member, as text: see `HEAD`."""
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
        """After minus before of the errors at levels, by member; the intervals hold together with 95%."""
        names = self._graded()
        return {name: _difference(self.before, self.after, [name], LEVEL / 2 / len(names)) for name in names}

    def _graded(self) -> list[str]:
        """The members that both suites have graded at as many levels, if they recorded it by seed."""
        sides = (self.before, self.after)
        return [
            name
            for name in self.members
            if all(name in side.wrong for side in sides) and len({len(side.errors[name]) for side in sides}) == 1
        ]

    @property
    def mean_error_difference(self) -> Estimate | None:
        """After minus before of the mean error over levels and common members."""
        names = self._graded()
        return _difference(self.before, self.after, names, LEVEL / 2) if names else None

    @property
    def mean_errors(self) -> tuple[float, float] | None:
        """The mean error over levels and common members, before and after; None without levels."""
        names = [name for name in self.members if name in self.before.errors and name in self.after.errors]
        if not names:
            return None
        before, after = (
            float(np.mean([np.mean(suite.errors[name]) for name in names])) for suite in (self.before, self.after)
        )
        return before, after

    def lines(self) -> list[str]:
        """What the comparison says as a whole."""
        lines = []
        if self.mean_errors is not None:
            before, after = self.mean_errors
            gap = self.mean_error_difference
            shown = "" if gap is None else f" ({show_difference(gap)})"
            lines.append(f"Mean error under corruption: {percent(before)} before, {percent(after)} after{shown}.")
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
        mean = self.mean_error_difference
        return {
            "before": str(self.before.path),
            "after": str(self.after.path),
            "mean_errors": None if self.mean_errors is None else list(self.mean_errors),
            "mean_error_difference": None if mean is None else asdict(mean),
            "error_differences": {name: asdict(difference) for name, difference in self.error_differences.items()},
            "members": {name: difference.as_dict() for name, difference in self.members.items()},
            "missing": list(self.missing),
        }

    def markdown(self) -> str:
        """A table with one row per member, and the lines below it."""
        head = f"## Themis: {escape(str(self.before.path))} and {escape(str(self.after.path))}"
        return "\n".join([head, "", *table(HEAD, self.rows()), "", *(escape(line) for line in self.lines()), ""])


def _difference(before: SuiteRun, after: SuiteRun, names: list[str], tail: float) -> Estimate:
    """After minus before of the mean error over the levels of members; each limit fails at most `tail`."""
    first, second = (
        np.mean([side.wrong[name] / len(side.errors[name]) for name in names], axis=0) for side in (before, after)
    )
    if has_same_seeds(before, after):
        return SeedValues(second - first, -1.0, 1.0).mean(tail)
    return joined(SeedValues(second, 0.0, 1.0).mean(tail), SeedValues(-first, -1.0, 0.0).mean(tail))


def _points(difference: Estimate) -> str:
    value, low, high = (f"{100 * share:+.1f}" for share in (difference.value, difference.low, difference.high))
    return f"{value} ({low} to {high})"


def diff(
    before: RunSource | SuiteRun,
    after: RunSource | SuiteRun,
    *,
    kind: str = "auto",
    tests: int = TESTS,
    curves: bool = False,
    random_seed: int = 0,
    trust: Trusted = False,
) -> Diff | SuiteDiff:
    """Compare two runs, or two suites member by member.

    Args:
        before: The first run, as `themis.run` returned it, as a run folder, or as a `Replayer` with target and data; or
            the first suite, as `themis.run_suite` returned it, or its folder.
        after: The second run or suite.
        kind: `versions` replays the faults of both runs, and new tests, on both models; `techniques` compares what two
            runs found on one model; `auto` is `techniques` if both tested the same model.
        tests: Number of new tests, per member of a suite.
        curves: Whether to add robustness curves; not for suites.
        random_seed: The same seed gives the same new tests.
        trust: Folders whose code may run although they were not made on this machine by this user; True for both.
    """
    n_suites = sum(map(_is_suite, (before, after)))
    options: dict[str, Any] = {"kind": kind, "tests": tests, "random_seed": random_seed, "trust": trust}
    if not n_suites:
        return diff_runs(before, after, curves=curves, **options)  # type: ignore[arg-type]
    if n_suites == 1:
        raise UsageError("a suite must be compared with a suite, got one suite and one run: compare one of its members")
    if curves:
        raise UsageError("curves must be left out for suites: compare two of their members for them")
    return diff_suites(SuiteSide.of(before), SuiteSide.of(after), **options)  # type: ignore[arg-type]


def _is_suite(side: Any) -> bool:
    return isinstance(side, SuiteRun) or (isinstance(side, str | Path) and is_suite(side))


@dataclass(frozen=True)
class SuiteSide:
    """One of two suites that are compared."""

    suite: SuiteRun
    rebuild: Rebuild | None = None
    """How its first member is opened, for a model that is elsewhere now."""
    remedy: str = ""
    """What to recommend if its model is not the one that was tested."""

    @staticmethod
    def of(suite: SuiteRun | str | Path) -> SuiteSide:
        return SuiteSide(suite if isinstance(suite, SuiteRun) else SuiteRun(suite))


def diff_suites(
    before: SuiteSide, after: SuiteSide, *, kind: str, tests: int, random_seed: int, trust: Trusted
) -> SuiteDiff:
    """Compare the members that two suites have in common, as `themis.diff` compares runs."""
    first, second = before.suite, after.suite
    with open_members(first, before.rebuild, trust) as old, open_members(second, after.rebuild, trust) as new:
        names = [name for name in old if name in new]
        if not names:
            raise UsageError(
                f"two suites must have a member in common to be compared, but {first.path} and {second.path} have "
                "none: run the same suite on both models"
            )
        members = {
            name: diff_runs(
                *(old[name], new[name]),
                kind=kind,
                tests=tests,
                random_seed=random_seed,
                comparisons=len(names),
                remedies=(before.remedy, after.remedy),
            )
            for name in names
        }
    return SuiteDiff(first, second, members, tuple(sorted(old.keys() ^ new.keys())))
