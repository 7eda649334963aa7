"""The aims of policy `scheduled` compared with its rivals, and the tables that show them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, variance
from typing import Any

from rich.console import Console
from rich.table import Table

JUDGED = "scheduled"
EARLY, FACTOR = 5_000, 1.25
"""At `EARLY` passes it should find `FACTOR` times as much as the best rival, if that found less than half of all."""
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
    """A result of a technique at the k-th number of passes."""
    return Spread(tuple(record[key][k] for record in campaigns[technique]))


def is_level(judged: Spread, best: Spread) -> bool:
    """Whether a mean is at least the best one minus the spread.

    The spread is the maximum of half the range of either and two standard errors of the difference of the means.
    """
    error = 2 * sqrt(judged.squared_error + best.squared_error)
    return judged.mean >= best.mean - max(judged.half, best.half, error)


def judge(campaigns: Campaigns, at: list[int], n_ever: int) -> dict[str, Any]:
    """The aims of a row, as plain data; None if an aim does not apply."""
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
    if EARLY in at:
        k = at.index(EARLY)
        if spread(campaigns, best_by_count[k], "failing_seeds", k).mean < n_ever / 2:
            ratio = ratios[k]
            verdict["is_ahead"] = ratio is None or ratio >= FACTOR
    verdict["own_time"] = own_time(campaigns[JUDGED])
    return verdict


def own_time(records: list[dict[str, Any]]) -> float:
    """The policy's own time relative to that of the passes; the median, since the first campaign also imports."""
    return float(median(record["policy_seconds"] / record["seconds"]["measure"] for record in records))


def show_row(name: str, campaigns: Campaigns, at: list[int], n_ever: int, console: Console) -> None:
    """Show one row: the results of every technique."""
    console.print(f"\n{name}: distinct faults, mean (min-max), and failing seeds out of {n_ever:,} that ever failed")
    table = Table()
    table.add_column("policy")
    for passes in at:
        table.add_column(f"{passes:,} passes", justify="right")
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


def show_aims(verdicts: dict[str, dict[str, Any]], at: list[int], console: Console) -> None:
    """Show for all rows whether each aim is met."""
    console.print(f"\nDistinct faults of {JUDGED} relative to the best other policy")
    table = Table()
    for head in (
        "row",
        *(f"{passes:,}" for passes in at),
        f"{FACTOR} times at {EARLY:,}",
        f"own time < {OWN_TIME:.0%}",
    ):
        table.add_column(head)
    for name, verdict in verdicts.items():
        if not verdict:
            continue
        cells = [
            f"{'-' if ratio is None else format(ratio, '.2f')} {best}: {'met' if is_level else 'missed'}"
            for ratio, best, is_level in zip(
                verdict["ratio"], verdict["best_other"], verdict["is_level"], strict=True
            )
        ]  # fmt: skip
        ahead = {None: "does not apply", True: "met", False: "missed"}[verdict["is_ahead"]]
        own = verdict["own_time"]
        table.add_row(name, *cells, ahead, f"{own:.1%}: {'met' if own < OWN_TIME else 'missed'}")
    console.print(table)
    console.print(
        "met: its mean is at least that of the best other policy minus the spread, which is the maximum of half the "
        "range\n"
        f"of either and two standard errors of the difference. {FACTOR} times applies if the best other policy has "
        "found\n"
        "less than half of the failing seeds that any campaign of the row has ever found."
    )
