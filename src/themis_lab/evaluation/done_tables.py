"""Tables of campaigns until each technique was done: faults, and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from themis.report.table import NONE, Table, format_count, format_estimate, format_number
from themis.text import counted, percent
from themis_lab.evaluation.claims import PAPER_FAULTS, PAPER_TIME
from themis_lab.evaluation.summary import THEMIS, Evaluation, Record, name_pair, themis_first, with_times


def done_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Every technique when it was done."""
    done = evaluation.content["done"]
    names, whole = _comparable(done)
    if not whole:
        return
    rows: list[tuple[str, ...]] = []
    for name in names:
        own = [pair["techniques"][name] for pair in whole]
        stops: dict[str, int] = {}
        for row in own:
            for reason, count in row["stops"].items():
                stops[reason] = stops.get(reason, 0) + count
        texts = [f"{count} {WHY.get(reason, reason)}" for reason, count in sorted(stops.items())]
        rows.append(
            (
                name,
                format_count(_mean(own, "tests")),
                format_count(_mean(own, "distinct_faults")),
                format_count(_mean(own, "faults")),
                percent(_mean(own, "scc")),
                ", ".join(texts),
            )
        )
    columns = ("technique", "tests", "distinct faults", "raw", "coverage", "how campaigns ended")
    notes = [
        f"Means over {counted(len(whole), 'cell')} with all of these techniques. Coverage is that of Themis, the share "
        "of all neurons that have converged; a criterion ends a campaign by its own. The paper: 21,399 tests for "
        "Themis, 3,774 for NC, 18,501 for KMNC, 20,052 for IDC and 26,757 for LSA, and "
        f"{PAPER_FAULTS} times the faults of the four.",
    ]
    yield Table("Faults when each technique was done", columns, rows, notes)


def done_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Every technique when it was done, cell by cell."""
    done = evaluation.content["done"]
    names = themis_first({name for pair in done for name in pair["techniques"]})
    rows = [
        (
            _name(pair),
            *(_found(pair["techniques"].get(name)) for name in names),
            *(format_estimate([pair["ratios"].get(name, {}).get("over_four"), None, None], 2) for name in THEMIS),
        )
        for pair in done
    ]
    notes = [
        "Distinct faults and tests when each technique was done, means over campaigns, and faults relative to the mean "
        "of the four baselines; +: no campaign was done by then."
    ]
    columns = ("cell", *names, *(f"{name} / four" for name in THEMIS))
    if rows:
        yield Table("Faults and tests when each technique was done", columns, rows, notes)


def _found(row: Record | None) -> str:
    """Such as 247 in 5,348, or 181 in 8,000+ if no campaign was done."""
    if row is None:
        return NONE
    mark = "+" if set(row["stops"]) == {"tests"} else ""
    return f"{format_count(row['distinct_faults'])} in {format_count(row['tests'])}{mark}"


def _comparable(done: list[Record]) -> tuple[list[str], list[Record]]:
    """The techniques that more than half of the cells have, Themis first, and the cells that have all of them."""
    counts = Counter(name for pair in done for name in pair["techniques"])
    names = [name for name in counts if 2 * counts[name] > len(done)]
    return themis_first(names), [pair for pair in done if set(names) <= set(pair["techniques"])]


WHY = {"coverage": "by coverage", "plateau": "on a plateau", "tests": "not done", "found": "by what was found"}
"""How campaigns end, in words."""


def _mean(records: list[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


def time_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Seconds by phase, of every technique when it was done."""
    names, whole = _comparable(with_times(evaluation.content["done"]))
    if whole:
        rows = []
        for name in names:
            own = [pair["techniques"][name] for pair in whole]
            rows.append(
                (
                    name,
                    *(
                        format_number(_mean(own, f"seconds_{phase}"), 2)
                        for phase in ("measure", "judge", "search", "total")
                    ),
                    format_number(_mean(own, "fit_seconds"), 2),
                    format_number(1000 * _mean(own, "seconds_per_test"), 2),
                )
            )
        notes = [
            f"Means over {counted(len(whole), 'cell')}, in seconds, until each technique was done, in campaigns that "
            "all techniques had on one machine; fit: fitting the criterion, which is done before. The paper: "
            f"{PAPER_TIME - 1:.0%} more time than the baselines."
        ]
        columns = ("technique", "measure", "judge", "search", "total", "fit", "ms per test")
        yield Table("Time until done", columns, rows, notes)


def time_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Seconds by phase of every technique until it was done, cell by cell."""
    timed = with_times(evaluation.content["done"])
    names = themis_first({name for pair in timed for name in pair["techniques"]})
    rows = [(_name(pair), *(_describe_phases(pair["techniques"].get(name)) for name in names)) for pair in timed]
    notes = [
        "Seconds to measure / judge / search until each technique was done, means over campaigns that all techniques "
        "of a cell had on one machine. Machines differ between cells."
    ]
    if rows:
        yield Table("Time until done by phase", ("cell", *names), rows, notes)


def _describe_phases(row: Record | None) -> str:
    """Such as 1.25 / 1.30 / 0.06."""
    phases = ("measure", "judge", "search")
    return NONE if row is None else " / ".join(format_number(row[f"seconds_{phase}"], 2) for phase in phases)


def _name(pair: Record) -> str:
    """The cell with its magnitudes."""
    return f"{name_pair(pair)} {', '.join(f'{magnitude:.3g}' for magnitude in pair['magnitudes'])}"
