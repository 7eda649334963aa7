"""The result of comparing two runs: figures, a verdict, and their text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from themis.judge.estimate import Estimate, show_interval
from themis.runs.display.fault import describe_fault
from themis.runs.fault import Fault
from themis.runs.store.files import json_safe
from themis.text import one_line, percent, printable

N_LISTED_IDS = 20


@dataclass(frozen=True)
class PairedRates:
    """Two rates over the same seeds, and their difference; its interval and the p value come from the same test."""

    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before; the interval is that of a mean over seeds, because tests of one seed may be dependent."""
    p_value: float
    """Multiplied by the number of comparisons."""


@dataclass(frozen=True)
class PairedTests(PairedRates):
    """Fault rates of new tests that were run on both models, and counts of these tests and their seeds."""

    seeds: int
    tests: int
    dropped: int
    """Tests that were drawn but not run, because they are too dissimilar from their seed."""
    both: int
    """Tests that break both models."""
    only_before: int
    """Tests that break the model before, but not the model after."""
    only_after: int
    neither: int
    seeds_better: int
    """Seeds with fewer faults after than before."""
    seeds_worse: int
    comparisons: int = 1
    """How many differences are tested together, such as those of a suite's members; the intervals hold jointly."""


@dataclass(frozen=True)
class PairedClean(PairedRates):
    """The share of the common seeds that each model answers correctly without a disturbance."""

    seeds: int

    def sentence(self) -> str:
        """Both shares and their difference."""
        return (
            f"accuracy {percent(self.after.value, 2)} after, {percent(self.before.value, 2)} before on the same "
            f"{self.seeds:,} seeds ({show_difference(self.difference)})"
        )


@dataclass(frozen=True)
class ReplayedFaults:
    """The ids of a run's distinct faults, by what the other run's model made of the same tests."""

    gone: tuple[int, ...] = ()
    """The other model passes the test, even with new noise, and has no weaker fault of the same seed."""
    moved: tuple[int, ...] = ()
    """The other model passes the test, but fails near it: with new noise, or at a weaker fault of the same seed."""
    still: tuple[int, ...] = ()
    """The other model fails the test as well."""
    lost: tuple[int, ...] = ()
    """The fault was not reproduced on its own model."""
    apart: tuple[int, ...] = ()
    """The runs do not share the fault's seed or theta, or one model answers the clean seed wrongly."""
    left_out: int = 0
    """The number of faults that were not replayed, to save time."""
    shown: tuple[Fault, ...] = field(default=(), repr=False)
    """The faults that are gone, the most telling first."""

    @property
    def n(self) -> int:
        """The number of faults that could be compared."""
        return len(self.gone) + len(self.moved) + len(self.still)


@dataclass(frozen=True)
class Overlap:
    """How many distinct faults and failing seeds were found by both runs, and by only one of them."""

    faults_both: int
    faults_first: int
    faults_second: int
    seeds_both: int
    seeds_first: int
    seeds_second: int
    p_value: float
    """McNemar's exact test over the seeds that only one run broke; it says nothing about other campaigns."""

    def lines(self) -> list[str]:
        """The overlap in lines of text."""
        return [
            f"distinct faults: {self.faults_both:,} found by both, {self.faults_first:,} only by the first, "
            f"{self.faults_second:,} only by the second",
            f"failing seeds: {self.seeds_both:,} broken by both, {self.seeds_first:,} only by the first, "
            f"{self.seeds_second:,} only by the second (McNemar p = {self.p_value:.2g})",
            "one campaign each, so the difference includes the luck of a search: themis compare repeats campaigns at "
            "equal cost",
        ]


@dataclass(frozen=True)
class Diff:
    """The comparison of two runs: `kind` is versions (of a model) or techniques (on one model)."""

    kind: str
    verdict: str
    """The second run compared with the first: better, worse or even; for techniques more, fewer or even."""
    sentence: str
    before: dict[str, Any]
    """The figures of the first campaign."""
    after: dict[str, Any]
    """The figures of the second campaign."""
    paired: PairedTests | None = None
    faults_before: ReplayedFaults | None = None
    """The first run's faults on the second run's model."""
    faults_after: ReplayedFaults | None = None
    """The second run's faults on the first run's model."""
    overlap: Overlap | None = None
    clean: PairedClean | None = None
    """None without labels, and for techniques."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    def __repr__(self) -> str:
        return f"<Diff: {self.sentence}>"

    def _repr_markdown_(self) -> str:
        return self.markdown()

    @property
    def fixed(self) -> tuple[int, ...]:
        """Faults of the first run that the second run's model no longer has; ids of the first run."""
        return self.faults_before.gone if self.faults_before else ()

    @property
    def new(self) -> tuple[int, ...]:
        """Faults of the second run that the first run's model does not have; ids of the second run."""
        return self.faults_after.gone if self.faults_after else ()

    @property
    def new_faults(self) -> tuple[Fault, ...]:
        """The new faults themselves, the most telling first."""
        return self.faults_after.shown if self.faults_after else ()

    @property
    def still(self) -> tuple[int, ...]:
        """Faults of the first run that both models have; ids of the first run."""
        return self.faults_before.still if self.faults_before else ()

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        plain = dict(vars(self))
        for name in ("faults_before", "faults_after"):
            plain[name] = plain[name] and {key: ids for key, ids in vars(plain[name]).items() if key != "shown"}
        plain |= {"fixed": self.fixed, "new": self.new, "still": self.still}
        return dict(json_safe(plain))

    def rows(self) -> list[tuple[str, ...]]:
        """The figures as rows of name, before and after."""
        a, b = self.before, self.after
        rows: list[tuple[str, ...]] = [
            ("run", a["run"], b["run"]),
            ("policy", a["policy"], b["policy"]),
            ("tests", f"{a['tests']:,} ({a['passes']:,} passes)", f"{b['tests']:,} ({b['passes']:,} passes)"),
            ("distinct faults", f"{a['distinct_faults']:,}", f"{b['distinct_faults']:,}"),
            ("failing seeds", f"{a['failing_seeds']:,}", f"{b['failing_seeds']:,}"),
            ("coverage", percent(a["coverage"]), percent(b["coverage"])),
        ]
        if self.clean is not None:
            accuracies = (self.clean.before, self.clean.after)
            rows.append(("clean accuracy, same seeds", *(show_interval(share, 2) for share in accuracies)))
        if self.paired is not None:
            rates = (self.paired.before, self.paired.after)
            rows.append(("fault rate, same tests", *(show_interval(rate, 2) for rate in rates)))
        return rows

    def lines(self) -> list[str]:
        """The comparison of the faults in lines of text."""
        if self.overlap is not None:
            return self.overlap.lines()
        lines = [] if self.clean is None else [f"clean: {self.clean.sentence()}"]
        if self.faults_before is not None and self.faults_after is not None:
            lines += [
                _line("fixed", self.fixed, self.faults_before.n, self.before["run"]),
                _line("new", self.new, self.faults_after.n, self.after["run"]),
                _line("still there", self.still, self.faults_before.n, self.before["run"]),
            ]
            moved = len(self.faults_before.moved), len(self.faults_after.moved)
            lines.append(
                f"moved: {moved[0]:,} of the first run's faults and {moved[1]:,} of the second's break the other model "
                "too, not on the same test but near it: with other noise, or at a weaker fault of the same seed"
            )
        return lines

    def markdown(self) -> str:
        """A Markdown page: the verdict, the table, the faults, the notes."""
        head = ("", *(("before", "after") if self.kind == "versions" else ("first", "second")))
        title = "Two versions of a model" if self.kind == "versions" else "Two techniques on one model"
        text = [f"## {title}", "", f"**{escape(self.sentence)}**", "", *table(head, self.rows()), ""]
        text += [f"- {escape(line)}" for line in (*self.lines(), *self.notes)]
        if self.new_faults:
            text += ["", "New faults, the most telling first:", ""]
            run = self.after["run"]
            text += [
                f"- {escape(describe_fault(fault))} {code(replay_command(run, fault.id))}"
                for fault in self.new_faults[:3]
            ]
        return "\n".join(text) + "\n"


def replay_command(run: str, *ids: int) -> str:
    """The command that runs these faults again."""
    return f"themis replay {quote(run)} {' '.join(map(str, ids))}".rstrip()


def _line(category: str, ids: Sequence[int], n: int, run: str) -> str:
    listed = ", ".join(map(str, ids[:N_LISTED_IDS])) + (", ..." if len(ids) > N_LISTED_IDS else "")
    return f"{category}: {len(ids):,} of {n:,} distinct faults of {run}" + (f" ({listed})" if ids else "")


def show_difference(difference: Estimate, together: str = "") -> str:
    """The difference of two rates in points, with its interval."""
    value, low, high = (f"{100 * share:+.2f}" for share in (difference.value, difference.low, difference.high))
    return f"difference {value} points, 95%{together}: {low} to {high}"


def show_p_value(p_value: float) -> str:
    """A p value in words; smaller ones are not shown, because they are computed to about a millionth."""
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.2g}"


_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&])")


def escape(text: str) -> str:
    """Text on one line, with the special characters of Markdown escaped."""
    return _SPECIAL.sub(r"\\\1", printable(one_line(str(text))))


def code(text: str) -> str:
    """Text in a Markdown code span. It must not be used in a table, where a bar would end the cell."""
    plain = printable(one_line(str(text)))
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{ticks}{space}{plain}{space}{ticks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        f"| {' | '.join(map(escape, head))} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(escape, row))} |" for row in rows),
    ]
