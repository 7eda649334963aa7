"""What is asked of `scheduled` beside its rivals, and the tables that show it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, variance
from typing import Any

from rich.console import Console
from rich.table import Table

JUDGED = "scheduled"
EARLY, FACTOR = 5_000, 1.25
"""At EARLY passes FACTOR times the best other one is asked for, where that has found under half of what there is."""
OWN_TIME = 0.05
"""The policy's own time over that of the passes it schedules: less than this."""

Found = dict[str, list[dict[str, Any]]]
"""Campaigns by technique, one a random seed."""


@dataclass(frozen=True)
class Spread:
    """What campaigns that differ in their random seed found."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def half(self) -> float:
        """Half the way from the least to the most."""
        return (max(self.values) - min(self.values)) / 2

    @property
    def squared_error(self) -> float:
        """The squared standard error of the mean."""
        return variance(self.values) / len(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:,.0f} ({min(self.values):,.0f}-{max(self.values):,.0f})"


def spread(found: Found, technique: str, what: str, k: int) -> Spread:
    """Of a technique at the k-th count of passes."""
    return Spread(tuple(each[what][k] for each in found[technique]))


def is_level(judged: Spread, best: Spread) -> bool:
    """Whether a mean is at least the best one less the spread.

    The spread is the largest of: half the range of either, and two standard errors of the difference of the means.
    """
    error = 2 * sqrt(judged.squared_error + best.squared_error)
    return judged.mean >= best.mean - max(judged.half, best.half, error)


def judge(found: Found, at: list[int], n_ever: int) -> dict[str, Any]:
    """Each aim of a row, as plain data; None is an aim that does not apply."""
    others = [each for each in found if each != JUDGED]
    if JUDGED not in found or not others:
        return {}
    levels: list[bool] = []
    best_by_count: list[str] = []
    ratios: list[float | None] = []
    for k in range(len(at)):
        mine = spread(found, JUDGED, "distinct_faults", k)
        rivals = {each: spread(found, each, "distinct_faults", k) for each in others}
        best = max(rivals, key=lambda each: rivals[each].mean)
        levels.append(is_level(mine, rivals[best]))
        best_by_count.append(best)
        ratios.append(mine.mean / rivals[best].mean if rivals[best].mean else None)
    verdict: dict[str, Any] = {"best_other": best_by_count, "ratio": ratios, "is_level": levels, "is_ahead": None}
    if EARLY in at:
        k = at.index(EARLY)
        if spread(found, best_by_count[k], "failing_seeds", k).mean < n_ever / 2:
            ratio = ratios[k]
            verdict["is_ahead"] = ratio is None or ratio >= FACTOR
    verdict["own_time"] = own_time(found[JUDGED])
    return verdict


def own_time(campaigns: list[dict[str, Any]]) -> float:
    """The policy's own seconds over those of the passes: the median campaign, since the first one also imports."""
    return float(median(each["policy_seconds"] / each["seconds"]["measure"] for each in campaigns))


def show_row(name: str, found: Found, at: list[int], n_ever: int, console: Console) -> None:
    """One row: what every technique found, and how `scheduled` stands."""
    console.print(
        f"\n{name}: distinct faults, mean (least-most), and failing seeds of {n_ever:,} that were ever broken"
    )
    table = Table()
    table.add_column("policy")
    for passes in at:
        table.add_column(f"{passes:,} passes", justify="right")
        table.add_column("seeds", justify="right")
    table.add_column("own time", justify="right")
    best = [max(found, key=lambda each: spread(found, each, "distinct_faults", k).mean) for k in range(len(at))]
    for technique, campaigns in found.items():
        cells = []
        for k in range(len(at)):
            mark = "* " if best[k] == technique else ""
            cells += [mark + str(spread(found, technique, "distinct_faults", k))]
            cells += [f"{spread(found, technique, 'failing_seeds', k).mean:,.0f}"]
        table.add_row(technique, *cells, f"{own_time(campaigns):.1%}")
    console.print(table)


def show_aims(verdicts: dict[str, dict[str, Any]], at: list[int], console: Console) -> None:
    """All rows: whether each aim is met."""
    console.print(f"\n{JUDGED} over the best other one, distinct faults")
    table = Table()
    for head in ("row", *(f"{each:,}" for each in at), f"{FACTOR} times at {EARLY:,}", f"own time < {OWN_TIME:.0%}"):
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
        "met: its mean is at least the best other's less the spread, which is the largest of half the range of either\n"
        f"and two standard errors of the difference. {FACTOR} times applies where the best other policy has found\n"
        "under half of the failing seeds that any campaign of the row ever found."
    )
