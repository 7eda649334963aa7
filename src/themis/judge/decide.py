"""Deciding whether a fault rate or a recall keeps a limit, as early as possible, with 95% confidence at all times.

Each input is tested once, and the inputs are a sample of a population, so faults are independent events with one
probability: the fault rate over inputs like these. A bet against "the rate is above the limit" multiplies its stake by
the likelihood of each result under a smaller rate, relative to the likelihood at the limit. If the rate is in fact
above the limit, the stake does not grow on average, and by Ville's inequality it ever reaches 20 times its start in at
most 5% of campaigns. The stake is divided among several smaller rates. A second bet, on larger rates, is against "the
rate is within the limit". For any true rate, only one of the two answers is wrong, so each may use the whole 5%.

The recall is the share of the faults of random tests that the campaign knows already; each fault counts as often as it
occurs. A random test is independent of earlier tests, so if it is a fault, the probability that this fault is known is
the recall at that time. Known faults stay known, so the recall never falls, and a bet against "the recall is below the
limit" gains nothing on average while that is true. That the recall will stay below a limit is never certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.judge.estimate import Estimate
from themis.settings import FAILS, HOLDS, UNDECIDED
from themis.text import counted

ERROR_PROBABILITY = 0.05
"""The probability of a wrong verdict, at most."""
SMALLER_RATES = ((0.0, 4), (0.125, 3), (0.25, 4), (0.5, 4), (0.75, 2), (0.875, 1), (0.9375, 1), (0.96875, 1))
"""Rates below the limit to bet on, as shares of the limit, and their parts of the stake."""
LARGER_RATES = tuple(1 + 2.0**k for k in range(-5, 12))
"""Rates above the limit to bet on, as multiples of it, with equal parts of the stake; those above 1 are not used."""
MAX_FORECAST_TESTS = 10**8
"""Tests beyond which no verdict is forecast."""


@dataclass(frozen=True)
class Decision:
    """The verdict on a claim about the fault rate or the recall; it is wrong with a probability of at most 5%."""

    claim: str
    verdict: str
    """holds, does not hold, or undecided."""
    tests: int
    """The random tests behind the verdict; for a fault rate, each of a different seed."""
    faults: int
    more_tests: int | None
    """Tests still needed if faults stay as frequent; None if decided, or if the figure is too close to the limit."""
    more_seeds: int | None
    """Seeds that these tests need in addition to those of the data."""
    known: int | None = None
    """How many of the later half of the faults were known before; None in a claim about the fault rate."""

    @property
    def clause(self) -> str:
        """The verdict, its basis and, if it is undecided, what would probably decide it."""
        found = f"{counted(self.faults, 'fault')} on {counted(self.tests, 'seed')}, each tested once"
        never, kind = "the rate is too close to the limit for any number of tests", "tests"
        if self.known is not None:
            recent = counted(self.faults - self.faults // 2, "random fault")
            found = f"of the last {recent}, {self.known:,} had been found before"
            never, kind = "more of the faults must be found first", "random tests"
            if not self.faults:
                found, never = "no random test was a fault", "decide the fault rate instead"
        if self.verdict != UNDECIDED:
            return f"{self.claim} {self.verdict} (certain at {1 - ERROR_PROBABILITY:.0%}): {found}"
        if self.more_tests is None:
            return f"{self.claim} is undecided: {found}; {never}"
        tests, seeds = (f"{float(f'{n:.2g}'):,.0f}" for n in (self.more_tests, self.more_seeds or 0))
        needed = f"and {seeds} more seeds" if self.more_seeds else "for which the data has the seeds"
        needed = f", {needed}" if self.known is None else ""
        return f"{self.claim} is undecided: {found}; it would probably take {tests} more {kind}{needed}"


def decide(claim: str, limit: float, tests: int, faults: int, n_seeds: int) -> Decision:
    """The verdict on a limit of the fault rate after tests of different seeds, of which there are `n_seeds`."""
    smaller, larger = stakes(limit, tests, faults)
    verdict = HOLDS if smaller >= 1 / ERROR_PROBABILITY else FAILS if larger >= 1 / ERROR_PROBABILITY else UNDECIDED
    more = _more_tests(limit, tests, faults) if verdict == UNDECIDED else None
    return Decision(claim, verdict, tests, faults, more, None if more is None else max(0, tests + more - n_seeds))


def decide_recall(claim: str, limit: float, tests: int, is_known: Sequence[bool]) -> Decision:
    """The verdict on a limit of the recall; `is_known`: whether each fault of the random tests, in order, was known."""
    n, logs = len(is_known), recall_stakes(limit, is_known)
    known, more = sum(is_known[n // 2 :]), None
    holds = bool(logs.max(initial=0.0) >= -math.log(ERROR_PROBABILITY))
    share = (known + 0.5) / (n - n // 2 + 1)
    gain = share * math.log(share / limit) + (1 - share) * math.log((1 - share) / (1 - limit))
    if not holds and n and share > limit:
        more = math.ceil((-math.log(ERROR_PROBABILITY) - logs[-1]) / gain * tests / n)
    return Decision(claim, HOLDS if holds else UNDECIDED, tests, n, more, None, known)


def recall_stakes(limit: float, is_known: Sequence[bool] | NDArray[np.bool_]) -> NDArray[np.float64]:
    """The logarithm of the stake in the bet against "the recall is below the limit" after each random fault.

    The bet assumes that the next fault is known as often as those in the later half so far, or as the limit if higher.
    """
    known, number = np.asarray(is_known, dtype=bool), np.arange(len(is_known))
    before = np.append(0, np.cumsum(known))
    share = (before[number] - before[number // 2] + 0.5) / (number - number // 2 + 1)
    share = np.maximum(share, limit)
    return np.cumsum(np.where(known, np.log(share / limit), np.log((1 - share) / (1 - limit))))


def stakes(limit: float, tests: Any, faults: Any) -> tuple[Any, Any]:
    """The stakes in the bets against a rate above the limit and against one within it, which both start at 1.

    `tests` and `faults` may be arrays of one shape.
    """
    bets = ((limit * share, part) for share, part in SMALLER_RATES)
    others = ((limit * times, 1) for times in LARGER_RATES if limit * times < 1)
    return _stake(limit, [*bets], tests, faults), _stake(limit, [*others] or [((1 + limit) / 2, 1)], tests, faults)


def _stake(limit: float, bets: list[tuple[float, int]], tests: Any, faults: Any) -> Any:
    faults, passes = np.asarray(faults, float), np.asarray(tests, float) - faults
    total = np.zeros(np.broadcast(faults, passes).shape)
    with np.errstate(over="ignore"):
        for rate, part in bets:
            of_faults = faults * math.log(rate / limit) if rate else np.where(faults > 0, -np.inf, 0.0)
            total += part * np.exp(of_faults + passes * (math.log1p(-rate) - math.log1p(-limit)))
    return total / sum(part for _, part in bets)


def _more_tests(limit: float, tests: int, faults: int) -> int | None:
    """Further tests that would decide the claim if faults stay as frequent."""
    totals: NDArray[np.int64] = np.unique(np.geomspace(max(tests, 1), MAX_FORECAST_TESTS, 2000).astype(np.int64))
    smaller, larger = stakes(limit, totals, totals * (faults / max(tests, 1)))
    decided = totals[(np.maximum(smaller, larger) >= 1 / ERROR_PROBABILITY) & (totals > tests)]
    return int(decided[0]) - tests if len(decided) else None


def rate_at_any_time(tests: int, faults: int) -> Estimate:
    """The fault rate of tests of different seeds, with a 95% interval that is valid at all times jointly.

    The interval contains the rates against which a bet, spread over all rates as Beta(1/2, 1/2), has not reached 20
    times its stake.
    """
    passes, value = tests - faults, faults / tests
    gain = math.lgamma(faults + 0.5) + math.lgamma(passes + 0.5) - math.lgamma(tests + 1) - math.log(math.pi)

    def is_likely(rate: float) -> bool:
        log_chance = (faults and faults * math.log(rate)) + (passes and passes * math.log1p(-rate))
        return gain - log_chance < math.log(1 / ERROR_PROBABILITY)

    return Estimate(value, 0.0 if not faults else _end(is_likely, value, 0.0), _end(is_likely, value, 1.0))


def _end(is_likely: Callable[[float], bool], inside: float, outside: float) -> float:
    """The end of the likely rates, between a likely rate and an end of the range."""
    if inside == outside:
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if is_likely(middle) else (inside, middle)
    return outside
