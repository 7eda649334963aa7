"""Tables of campaigns until each technique was done: faults, and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from themis.experiments.evaluation.claims import PAPER_FAULTS, PAPER_TIME
from themis.experiments.evaluation.summary import Evaluation, Record, themis_first, with_times
from themis.experiments.table import Table, format_count, format_number, plural
from themis.runs.run import percent


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
    columns = ("technique", "tests", "distinct faults", "raw", "SCC", "how campaigns ended")
    notes = [
        f"Means over {plural(len(whole), 'cell')} with all of these techniques. The paper: 21,399 tests for Themis, "
        f"3,774 for NC, 18,501 for KMNC, 20,052 for IDC and 26,757 for LSA, and {PAPER_FAULTS} times the faults of "
        "the four.",
    ]
    yield Table("Faults when each technique was done", columns, rows, notes)


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
    """Seconds by phase: techniques when done, and the preset with and without its sampler."""
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
            f"Means over {plural(len(whole), 'cell')}, in seconds, until each technique was done, in campaigns that "
            "all techniques had on one machine; fit: fitting the criterion, which is done before. The paper: "
            f"{PAPER_TIME - 1:.0%} more time than the baselines."
        ]
        columns = ("technique", "measure", "judge", "search", "total", "fit", "ms per test")
        yield Table("Time until done", columns, rows, notes)
