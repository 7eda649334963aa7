"""Gates of a suite: the limits hold for every member, and the results are one per member."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from themis.errors import UsageError
from themis.report.gates.gates import GateResult, GateResults, check_gates, distinguishable
from themis.report.gates.limits import Gates
from themis.runs.replay import Replayer
from themis.suites.folder import is_suite, name_suites
from themis.suites.members import Rebuild, open_members
from themis.suites.result import CorruptionErrors, SuiteRun


@dataclass(frozen=True)
class SuiteGateResults:
    """The results of the gates of every member."""

    suite: str
    members: tuple[tuple[str, GateResults], ...]
    folder: Path | None = None
    overall: GateResults | None = None
    """Of the gates on the suite as a whole, if there are any."""

    @property
    def parts(self) -> list[tuple[str, GateResults]]:
        """The results of the suite as a whole, if there are any, and of every member, by name."""
        return [*([] if self.overall is None else [("all", self.overall)]), *self.members]

    @property
    def has_failed(self) -> bool:
        return any(results.has_failed for _, results in self.parts)

    @property
    def lines(self) -> list[str]:
        """One line per member and gate, without the campaigns that were completed; those that failed come first."""
        return [f"{result.line[:8]}{name} {result.line[8:]}" for name, result in self.results]

    @property
    def results(self) -> list[tuple[str, GateResult]]:
        """The members' gates, without the campaigns that were completed; those that failed come first."""
        results = [
            (name, result)
            for name, results in self.parts
            for result in results.results
            if result.gate != "campaign" or not result.has_passed
        ]
        return sorted(results, key=lambda of: of[1].has_passed)

    @property
    def failed_lines(self) -> list[str]:
        """The lines of the gates that have failed."""
        return [line for line in self.lines if line.startswith("FAILED")]

    @property
    def sentence(self) -> str:
        """All results in one sentence."""
        failed = [name for name, results in self.members if results.has_failed]
        overall = "" if self.overall is None or not self.overall.has_failed else self.overall.sentence
        if not failed:
            return overall or f"All gates passed under all {len(self.members)} perturbations."
        text = f"Gates failed under {len(failed)} of {len(self.members)} perturbations: {', '.join(failed)}."
        return f"{overall} {text}".strip()

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "has_failed": self.has_failed,
            "overall": None if self.overall is None else self.overall.as_dict(),
            "members": {name: results.as_dict() for name, results in self.members},
        }

    def markdown(self, report: Path | None = None) -> str:
        """The overall result, one row per member and gate, and the key figures of the suite."""
        from themis.runs.diff.result import code, escape, table
        from themis.suites.result import COLUMNS, table_rows

        mark = "❌" if self.has_failed else "✅"
        rows = [
            (
                "✅ passed" if result.has_passed else "❌ failed",
                name,
                result.gate,
                result.text,
                "" if result.has_passed else result.remedy,
            )
            for name, result in self.results
        ]
        lines = [f"## {mark} Themis: {escape(self.sentence)}", ""]
        if rows:
            lines += [*table(("", "perturbation", "gate", "result", "remedy"), rows), ""]
        if self.folder is not None:
            lines += [*table(COLUMNS, table_rows(SuiteRun(self.folder))), ""]
        if report is not None:
            lines += [f"Report: {code(str(report))}", ""]
        return "\n".join(lines)


def check_suite_gates(
    suite: SuiteRun,
    gates: Gates,
    *,
    rebuild: Rebuild | None = None,
    rebuild_baseline: Rebuild | None = None,
    remedy: str = "",
) -> SuiteGateResults:
    """Check every member of a suite against gates; a baseline is a suite too.

    rebuild, rebuild_baseline: how the first member of each suite is opened, for models that are elsewhere now.
    """
    with ExitStack() as stack:
        members = stack.enter_context(open_members(suite, rebuild, gates.trust))
        baseline = _open_baseline(stack, gates, rebuild_baseline)
        results = []
        for name in suite.members:
            if name not in members:
                missing = GateResult("campaign", False, None, None, "it has not run", f"themis resume {suite.path}")
                results.append((name, GateResults(str(suite.path / name), (missing,), {})))
                continue
            own = gates
            if baseline is not None:
                if name not in baseline:
                    raise UsageError(
                        f"the baseline must have a member {name!r}, but {gates.baseline} has none: run the same suite "
                        "on the earlier model"
                    )
                own = replace(gates, baseline=baseline[name])
            results.append((name, check_gates(members[name], own, remedy=remedy)))
    return SuiteGateResults(str(suite.path), tuple(results), suite.path)


def check_mce(suite: SuiteRun, most: float, errors: CorruptionErrors) -> GateResults:
    """Check the mean corruption error of a suite against a limit, as a share of the baseline's errors."""
    from themis.text import percent

    if errors.mce is None:
        raise UsageError(
            f"the gate on max_mce needs a baseline that makes errors, but {errors.baseline} makes none: choose another"
        )
    has_passed = errors.mce <= most
    value, limit = distinguishable(errors.mce, most)
    worst = max(errors.by_member, key=lambda name: errors.by_member[name] or 0.0)
    text = (
        f"{value} of the errors of {errors.baseline}, {'within' if has_passed else 'over'} the limit of {limit}; the "
        f"largest share is that of {worst}, {percent(errors.by_member[worst] or 0.0)}"
    )
    remedy = "train the model better, or raise the limit"
    gate = GateResult("max_mce", has_passed, errors.mce, most, text, remedy)
    return GateResults(str(suite.path), (gate,), {}, folder=suite.path)


def check_suite_ahead(gates: Gates, uniform_share: float) -> None:
    """Refuse gates that could not be checked after a suite, before it runs."""
    replace(gates, baseline=None, max_new_faults=None).check_ahead(uniform_share)
    if gates.baseline is not None:
        _check_baseline(gates)


def _check_baseline(gates: Gates) -> None:
    baseline = gates.baseline
    if not isinstance(baseline, str | Path) or not is_suite(baseline):
        named = name_suites(baseline) if isinstance(baseline, str | Path) else ""
        problem = named or "is not: create it with themis suite on the earlier model"
        raise UsageError(f"the baseline of a suite must be the folder of a suite, but {baseline} {problem}")


def _open_baseline(stack: ExitStack, gates: Gates, rebuild: Rebuild | None) -> dict[str, Replayer] | None:
    if gates.baseline is None:
        return None
    _check_baseline(gates)
    assert isinstance(gates.baseline, str | Path)
    return stack.enter_context(open_members(SuiteRun(gates.baseline), rebuild, gates.trust))
