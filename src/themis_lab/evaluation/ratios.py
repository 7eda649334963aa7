"""The faults of Themis relative to those of its rivals, over cells."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from scipy.stats import binom

from themis.report.table import NONE, Table, format_estimate
from themis.text import counted
from themis_lab.comparison.plan import PAPER
from themis_lab.evaluation.summary import THEMIS, Evaluation, Record

WHEN_DONE, AT_EQUAL_PASSES, AT_EQUAL_TESTS = "when done", "at equal passes", "at equal tests"
"""When faults are compared."""
RIVALS = {"over_best": "best rival", "over_four": "mean of the four baselines", "over_random": "random"}
"""What faults are compared with, by the key of the ratio."""
LEAST_CELLS = 6
"""The cells that a 95% interval of a median needs."""


def fault_ratios(content: Record) -> dict[str, list[Record]]:
    """The ratios of faults of every cell when done and at equal budgets."""
    ratios = {WHEN_DONE: [pair["ratios"] for pair in content["done"]]}
    for budget, when in (("passes", AT_EQUAL_PASSES), ("tests", AT_EQUAL_TESTS)):
        found = [choose_grid(pair["budgets"].get(budget, [])) for pair in content["pairs"]]
        ratios[when] = [grid["ratios"] for grid in found if grid]
    return ratios


def choose_grid(grids: list[Record]) -> Record | None:
    """The results of a cell on magnitudes that were chosen in advance, or else on the paper's; None without any.

    Where the error rate hardly changes with the paper's magnitudes, they say little: under CW, every test is a fault.
    """
    telling = [grid for grid in grids if grid["name"] != PAPER or grid["degenerate"] is None]
    return min(telling, key=lambda grid: grid["name"] == PAPER, default=None)


def list_ratios(ratios: list[Record], technique: str, over: str) -> list[float]:
    """The ratios of a technique in all cells in which its rivals found something."""
    found = [own[technique][over] for own in ratios if technique in own]
    return [ratio for ratio in found if ratio is not None]


def ratio_tables(evaluation: Evaluation) -> Iterable[Table]:
    """How the faults of Themis compare with those of its rivals, over cells."""
    rows = []
    for technique in THEMIS:
        for when, ratios in fault_ratios(evaluation.content).items():
            found = [list_ratios(ratios, technique, over) for over in RIVALS]
            if any(found):
                rows.append((technique, when, *map(describe_ratios, found)))
    notes = [
        "Medians over cells, with 95% intervals, and the number of cells: those in which the rivals found faults. At "
        "equal budgets, faults are summed over magnitudes chosen in advance, or else over the paper's, unless these "
        f"are degenerate. Best rival: the best technique other than {' and '.join(THEMIS)}, where all have run."
    ]
    if rows:
        yield Table("Distinct faults relative to those of rivals", ("technique", "when", *RIVALS.values()), rows, notes)


def describe_ratios(ratios: list[float]) -> str:
    """The median with its 95% interval, if it has one, and the number of cells."""
    if not ratios:
        return NONE
    low, high = median_interval(ratios) or (None, None)
    return f"{format_estimate([median(ratios), low, high], 2)} in {counted(len(ratios), 'cell')}"


def median_interval(values: list[float]) -> tuple[float, float] | None:
    """A 95% interval of the median by the sign test, whatever the distribution; None for fewer than LEAST_CELLS."""
    ordered, n_below = sorted(values), int(binom.ppf(0.025, len(values), 0.5)) if values else 0
    return (ordered[n_below - 1], ordered[-n_below]) if n_below else None
