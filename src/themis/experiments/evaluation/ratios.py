"""The faults of Themis relative to those of its rivals, over cells."""

from __future__ import annotations

from statistics import median

from scipy.stats import binom

from themis.experiments.comparison.plan import PAPER
from themis.experiments.evaluation.summary import THEMIS, Record
from themis.experiments.table import plural

WHEN_DONE = "when done"
LEAST_CELLS = 6
"""The cells that a 95% interval of a median needs."""


def fault_ratios(content: Record) -> dict[str, list[Record]]:
    """The ratios of faults of every cell when done and at equal budgets."""
    ratios = {WHEN_DONE: [pair["ratios"] for pair in content["done"]]}
    for budget in ("passes", "tests"):
        found = [choose_grid(pair["budgets"].get(budget, [])) for pair in content["pairs"]]
        ratios[f"at equal {budget}"] = [grid["ratios"] for grid in found if grid]
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


def describe_ratios(ratios: list[float]) -> str:
    """The median of ratios over cells, with its interval if it has one."""
    interval, spread = median_interval(ratios), plural(len(ratios), "cell")
    if len(ratios) > 1:
        spread += f" from {min(ratios):.2f} to {max(ratios):.2f}"
    if interval is not None:
        spread = f"95% interval {interval[0]:.2f} to {interval[1]:.2f}, {spread}"
    return f"{median(ratios):.2f} times ({spread})"


def ratio_notes(ratios: list[Record]) -> list[str]:
    """How the faults of Themis compare with those of its rivals, over cells in which these found some."""
    rivals = {"over_best": "the best rival", "over_four": "the mean of the four baselines", "over_random": "random"}
    notes = []
    for technique in THEMIS:
        found = {rival: list_ratios(ratios, technique, over) for over, rival in rivals.items()}
        texts = [f"{rival} {describe_ratios(values)}" for rival, values in found.items() if values]
        if texts:
            notes.append(f"{technique} relative to rivals, medians over cells: {'; '.join(texts)}.")
    return notes


def median_interval(values: list[float]) -> tuple[float, float] | None:
    """A 95% interval of the median by the sign test, whatever the distribution; None for fewer than LEAST_CELLS."""
    ordered, n_below = sorted(values), int(binom.ppf(0.025, len(values), 0.5)) if values else 0
    return (ordered[n_below - 1], ordered[-n_below]) if n_below else None
