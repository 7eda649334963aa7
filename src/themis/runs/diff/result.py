"""What a difference of two runs says: figures, a verdict, and both as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from themis.runs.run import percent
from themis.runs.store.writer import finite

if TYPE_CHECKING:
    from themis.runs.analysis.robustness import Robustness
    from themis.runs.diff.replays import Paired, Replayed
    from themis.runs.diff.techniques import Overlap
    from themis.runs.faults import Fault

SHOWN = 20
"""Ids that a line names."""


@dataclass(frozen=True)
class Diff:
    """Two runs against each other: `kind` is versions (of a model) or techniques (on one model)."""

    kind: str
    verdict: str
    """Of the second against the first: better, worse or even; of techniques more, fewer or even."""
    sentence: str
    """The verdict with its figures."""
    before: dict[str, Any]
    """What the first campaign had come to."""
    after: dict[str, Any]
    paired: Paired | None = None
    faults_before: Replayed | None = None
    """The first run's faults on the second's model."""
    faults_after: Replayed | None = None
    overlap: Overlap | None = None
    curves: tuple[Robustness, Robustness] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def fixed(self) -> tuple[int, ...]:
        """Faults of the first run that its model had and the second's has no longer; ids of the first run."""
        return self.faults_before.gone if self.faults_before else ()

    @property
    def new(self) -> tuple[int, ...]:
        """Faults of the second run that the first's model stands up to; ids of the second run."""
        return self.faults_after.gone if self.faults_after else ()

    @property
    def new_faults(self) -> tuple[Fault, ...]:
        """The same as faults, the most telling first."""
        return self.faults_after.shown if self.faults_after else ()

    @property
    def still(self) -> tuple[int, ...]:
        """Faults of the first run that both models have; ids of the first run."""
        return self.faults_before.still if self.faults_before else ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain: dict[str, Any] = {
            "kind": self.kind,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "before": self.before,
            "after": self.after,
            "paired": None if self.paired is None else asdict(self.paired),
            "fixed": list(self.fixed),
            "new": list(self.new),
            "still": list(self.still),
            "faults_before": _ids(self.faults_before),
            "faults_after": _ids(self.faults_after),
            "overlap": None if self.overlap is None else asdict(self.overlap),
            "robustness": None if self.curves is None else [each.as_dict() for each in self.curves],
            "notes": list(self.notes),
        }
        return {name: finite(value) for name, value in plain.items()}

    def rows(self) -> list[tuple[str, ...]]:
        """A table: what, before, after."""
        a, b = self.before, self.after
        rows: list[tuple[str, ...]] = [
            ("run", a["run"], b["run"]),
            ("policy", a["policy"], b["policy"]),
            ("tests", f"{a['tests']:,} ({a['passes']:,} passes)", f"{b['tests']:,} ({b['passes']:,} passes)"),
            ("distinct faults", f"{a['distinct_faults']:,}", f"{b['distinct_faults']:,}"),
            ("failing seeds", f"{a['failing_seeds']:,}", f"{b['failing_seeds']:,}"),
            ("coverage", percent(a["coverage"]), percent(b["coverage"])),
        ]
        if self.paired is not None:
            both = (self.paired.before, self.paired.after)
            rows.append(("fault rate, same tests", *(_rate(each) for each in both)))
        if self.curves is not None:
            rows += [
                (f"seeds right at strength {strength:g}", *(percent(each.at(strength).value) for each in self.curves))
                for strength in (0.25, 0.5, 1.0)
            ]
            rows.append(("half broken at strength", *(_median(each) for each in self.curves)))
        return rows

    def lines(self) -> list[str]:
        """What became of the faults, line by line."""
        if self.overlap is not None:
            return self.overlap.lines()
        lines = []
        if self.faults_before is not None and self.faults_after is not None:
            lines += [
                _line("fixed", self.fixed, self.faults_before.n, self.before["run"]),
                _line("new", self.new, self.faults_after.n, self.after["run"]),
                _line("still there", self.still, self.faults_before.n, self.before["run"]),
            ]
            moved = len(self.faults_before.moved), len(self.faults_after.moved)
            lines.append(
                f"moved: {moved[0]:,} of the first run's faults and {moved[1]:,} of the second's break the other model "
                "too, if not on the very test but near it: other noise, or a weaker fault of the same seed"
            )
        return lines

    def markdown(self) -> str:
        """A page of Markdown: the verdict, the table, the faults, the notes."""
        from themis.runs.diff.markup import code, escape, table

        head = ("", *(("before", "after") if self.kind == "versions" else ("first", "second")))
        text = [f"## {_TITLES[self.kind]}", "", f"**{escape(self.sentence)}**", "", *table(head, self.rows()), ""]
        text += [f"- {escape(line)}" for line in (*self.lines(), *self.notes)]
        if self.new_faults:
            text += ["", "New faults, the most telling first:", ""]
            run = self.after["run"]
            text += [f"- {escape(say_fault(each))} {code(replay(run, each.id))}" for each in self.new_faults[:3]]
        return "\n".join(text) + "\n"


def say_fault(fault: Fault) -> str:
    """A fault in a line."""
    theta = ", ".join(f"{name} {value:.3g}" for name, value in fault.theta.items())
    was = "" if fault.clean_answer is None else f"{fault.clean_answer} became "
    answer = "an output that is not finite" if fault.answer < 0 else str(fault.answer)
    sure = f" ({fault.confidence:.0%} sure)" if isfinite(fault.confidence) else ""
    return (
        f"fault {fault.id}: seed {fault.seed_id}, {was}{answer}{sure} under {fault.perturbation} with {theta}, "
        f"distance {fault.distance:.3g}"
    )


def replay(run: str, *ids: int) -> str:
    """The command that runs faults again."""
    from shlex import quote

    return f"themis replay {quote(run)} {' '.join(map(str, ids))}".rstrip()


_TITLES = {"versions": "Two versions of a model", "techniques": "Two techniques on one model"}


def _line(what: str, ids: Sequence[int], n: int, run: str) -> str:
    some = ", ".join(map(str, ids[:SHOWN])) + (", ..." if len(ids) > SHOWN else "")
    return f"{what}: {len(ids):,} of {n:,} distinct faults of {run}" + (f" ({some})" if ids else "")


def _rate(estimate: Any) -> str:
    return f"{percent(estimate.value, 2)} ({percent(estimate.low, 2)} to {percent(estimate.high, 2)})"


def _median(curve: Robustness) -> str:
    return "beyond the range" if curve.median is None else f"{curve.median:.3g}"


def _ids(replayed: Replayed | None) -> dict[str, Any] | None:
    if replayed is None:
        return None
    return {name: value for name, value in vars(replayed).items() if name != "shown"}
