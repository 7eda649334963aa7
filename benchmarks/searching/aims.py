"""The aims of policy `scheduled` compared with its rivals, and the tables that show them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, variance
from typing import Any

from rich.console import Console
from rich.table import Table

JUDGED = "scheduled"
EARLY = {"passes": (5_000, 1.25), "tests": (100, 1.5)}
"""At so many passes, or tests, it should find so many times as much as the best rival, where most seeds withstand."""
OWN_TIME = 0.05
"""Upper limit of the policy's own time, relative to that of its passes."""

Campaigns = dict[str, list[dict[str, Any]]]
"""Records of campaigns by technique, one per random seed."""


@dataclass(frozen=True)
class Spread:
    """A result of campaigns that differ in their random seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def half(self) -> float:
        """Half the range."""
        return (max(self.values) - min(self.values)) / 2

    @property
    def squared_error(self) -> float:
        """The squared standard error of the mean."""
        return variance(self.values) / len(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:,.0f} ({min(self.values):,.0f}-{max(self.values):,.0f})"


def spread(campaigns: Campaigns, technique: str, key: str, k: int) -> Spread:
    """A result of a technique at the k-th count."""
    return Spread(tuple(record[key][k] for record in campaigns[technique]))


def is_level(judged: Spread, best: Spread) -> bool:
    """Whether a mean is at least the best one minus the spread.

    The spread is the maximum of half the range of either and two standard errors of the difference of the means.
    """
    error = 2 * sqrt(judged.squared_error + best.squared_error)
    return judged.mean >= best.mean - max(judged.half, best.half, error)


def judge(campaigns: Campaigns, unit: str, at: list[int], n_ever: int) -> dict[str, Any]:
    """The aims of a row, as plain data; None if an aim does not apply.

    The early aim applies if the best other policy has found less than half of the failing seeds that any campaign of
    the row has ever found; counted in tests, if fewer than half as many seeds as it has run tests.
    """
    others = [technique for technique in campaigns if technique != JUDGED]
    if JUDGED not in campaigns or not others:
        return {}
    levels: list[bool] = []
    best_by_count: list[str] = []
    ratios: list[float | None] = []
    for k in range(len(at)):
        judged = spread(campaigns, JUDGED, "distinct_faults", k)
        rivals = {name: spread(campaigns, name, "distinct_faults", k) for name in others}
        best = max(rivals, key=lambda name: rivals[name].mean)
        levels.append(is_level(judged, rivals[best]))
        best_by_count.append(best)
        ratios.append(judged.mean / rivals[best].mean if rivals[best].mean else None)
    verdict: dict[str, Any] = {"best_other": best_by_count, "ratio": ratios, "is_level": levels, "is_ahead": None}
    early, factor = EARLY[unit]
    if early in at:
        k = at.index(early)
        few = (n_ever if unit == "passes" else early) / 2
        if spread(campaigns, best_by_count[k], "failing_seeds", k).mean < few:
            ratio = ratios[k]
            verdict["is_ahead"] = ratio is None or ratio >= factor
    seeds = [max(others, key=lambda name: spread(campaigns, name, "failing_seeds", k).mean) for k in range(len(at))]
    pairs = [[spread(campaigns, name, "failing_seeds", k) for name in (JUDGED, seeds[k])] for k in range(len(at))]
    verdict["seeds"] = {
        "best_other": seeds,
        "ratio": [judged.mean / best.mean if best.mean else None for judged, best in pairs],
        "is_level": [is_level(judged, best) for judged, best in pairs],
    }
    verdict["own_time"] = own_time(campaigns[JUDGED])
    return verdict


def own_time(records: list[dict[str, Any]]) -> float:
    """The policy's own time relative to that of the passes; the median, since the first campaign also imports."""
    return float(median(record["policy_seconds"] / record["seconds"]["measure"] for record in records))


def show_row(name: str, campaigns: Campaigns, unit: str, at: list[int], n_ever: int, console: Console) -> None:
    """Show one row: the results of every technique."""
    console.print(f"\n{name}: distinct faults, mean (min-max), and failing seeds out of {n_ever:,} that ever failed")
    table = Table()
    table.add_column("policy")
    for count in at:
        table.add_column(f"{count:,} {unit}", justify="right")
        table.add_column("seeds", justify="right")
    table.add_column("own time", justify="right")
    best = [max(campaigns, key=lambda name: spread(campaigns, name, "distinct_faults", k).mean) for k in range(len(at))]
    for technique, records in campaigns.items():
        cells = []
        for k in range(len(at)):
            mark = "* " if best[k] == technique else ""
            cells += [mark + str(spread(campaigns, technique, "distinct_faults", k))]
            cells += [f"{spread(campaigns, technique, 'failing_seeds', k).mean:,.0f}"]
        table.add_row(technique, *cells, f"{own_time(records):.1%}")
    console.print(table)


def show_aims(verdicts: dict[str, dict[str, Any]], unit: str, at: list[int], console: Console) -> None:
    """Show for all rows whether each aim is met."""
    early, factor = EARLY[unit]
    for measure in ("Distinct faults", "Failing seeds"):
        console.print(f"\n{measure} of {JUDGED} relative to the best other policy, by number of {unit}")
        heads = ["row", *(f"{count:,}" for count in at)]
        if measure == "Distinct faults":
            heads += [f"{factor} times at {early:,}", f"own time < {OWN_TIME:.0%}"]
        table = Table()
        for head in heads:
            table.add_column(head)
        for name, verdict in verdicts.items():
            if verdict:
                table.add_row(name, *_aims(verdict, measure))
        console.print(table)
    console.print(
        "met: its mean is at least that of the best other policy minus the spread, which is the maximum of half the "
        "range\n"
        f"of either and two standard errors of the difference. {factor} times applies where most seeds withstand: the "
        "best\n"
        "other policy has found less than half of the failing seeds that any campaign of the row has ever found, or, "
        "if\n"
        "tests are counted, fewer than half as many seeds as it has run tests."
    )


def _aims(verdict: dict[str, Any], measure: str) -> list[str]:
    is_faults = measure == "Distinct faults"
    compared = verdict if is_faults else verdict["seeds"]
    cells = [
        f"{'-' if ratio is None else format(ratio, '.2f')} {best}: {'met' if is_level else 'missed'}"
        for ratio, best, is_level in zip(
            compared["ratio"], compared["best_other"], compared["is_level"], strict=True
        )
    ]  # fmt: skip
    if is_faults:
        cells.append({None: "does not apply", True: "met", False: "missed"}[verdict["is_ahead"]])
        own = verdict["own_time"]
        cells.append(f"{own:.1%}: {'met' if own < OWN_TIME else 'missed'}")
    return cells
