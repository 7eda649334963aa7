"""The robustness curve: how many seeds the search could not break, by strength, beside random disturbances."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.judge.estimate import Estimate, show_interval
from themis.measure.tests import Floats, Ints
from themis.runs.analysis.bench import OnProgress, TestBench, ignore_progress, open_bench
from themis.runs.analysis.shrink import ShrunkFault, shrink_tests
from themis.runs.display.text import RANDOM, UNBROKEN
from themis.runs.estimates import stored_by_strength
from themis.runs.replay import Replayer, RunSource
from themis.runs.run import Run, StrengthPart
from themis.runs.store.reader import Reader
from themis.runs.store.schema import theta_column
from themis.search.policy import Space

SHOWN = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Strengths that the summary names, the ends of the parts that random disturbances are counted in."""
CAVEAT = (
    "A search is not exhaustive: weaker disturbances than those found may break a seed, so the curve is an upper bound "
    "on the model's robustness."
)
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Robustness:
    """The Kaplan-Meier curve over the smallest strength that broke each seed, with its 95% log-log interval.

    Strength is the share of theta's range, from its identity, that the furthest dimension goes. Seeds that never broke
    are right-censored at the last strength tested: all that is known is that they withstood it.
    """

    strengths: Curve
    """Strengths at which the curve steps or seeds were censored, ascending."""
    share: Curve
    """Share of the seeds that the search could not break with strengths up to each of these."""
    low: Curve
    high: Curve
    n_seeds: int
    n_failed: int
    full_strength: str = ""
    """What strength 1 means if theta has one dimension, such as "sigma 0.1"."""
    passes: int = 0
    shrunk: tuple[ShrunkFault, ...] = field(default=(), repr=False)
    """The smallest disturbance found for each seed that broke."""
    random: tuple[StrengthPart, ...] = ()
    """What random disturbances do, from the uniform stream of the campaign; empty if that is not known."""

    @staticmethod
    def of(failed: Any, censored: Any, **rest: Any) -> Robustness:
        """The curve from the strengths that broke seeds, and those up to which the other seeds withstood."""
        from scipy import stats

        failed, censored = (np.asarray(strengths, dtype=np.float64) for strengths in (failed, censored))
        n = len(failed) + len(censored)
        if not n:
            raise UsageError("a robustness curve needs at least one seed that is answered correctly, got none")
        estimated = stats.ecdf(stats.CensoredData(uncensored=failed, right=censored)).sf
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # the formula has no interval if all or no seeds are left
            interval = estimated.confidence_interval(method="log-log")
        share = estimated.probabilities
        low, high = (np.array(limit.probabilities) for limit in (interval.low, interval.high))
        # There, use the Clopper-Pearson limits of 0 among n.
        is_whole, is_empty = share >= 1, share <= 0
        rare = 0.025 ** (1 / n)
        low, high = np.where(is_whole, rare, low), np.where(is_whole, 1.0, high)
        low, high = np.where(is_empty, 0.0, low), np.where(is_empty, 1 - rare, high)
        return Robustness(estimated.quantiles, share, low, high, n, len(failed), **rest)

    def at(self, strength: float) -> Estimate:
        """The share of seeds that no disturbance up to a strength is known to break, with its interval."""
        if not 0 <= strength <= max(1.0, self.strengths[-1]):
            raise UsageError(f"strength must lie in 0..1, the range that was tested, got {strength:g}")
        k = int(np.searchsorted(self.strengths, strength, side="right")) - 1
        if k < 0:
            return Estimate(1.0, 0.025 ** (1 / self.n_seeds), 1.0)
        return Estimate(float(self.share[k]), float(self.low[k]), float(self.high[k]))

    @property
    def median(self) -> float | None:
        """The strength at which half of the seeds have broken; None if more than half withstand all strengths."""
        return self._first_under_half(self.share)

    @property
    def median_interval(self) -> tuple[float | None, float | None]:
        """Its 95% interval, where the curve's limits cross one half; None is beyond the strengths tested."""
        return self._first_under_half(self.low), self._first_under_half(self.high)

    def _first_under_half(self, curve: Curve) -> float | None:
        under = np.flatnonzero(curve <= 0.5)
        return float(self.strengths[under[0]]) if len(under) else None

    @property
    def n_further(self) -> int:
        """Seeds that did not fail in the campaign, but when they were run at full strength for the curve."""
        return sum(fault.id < 0 for fault in self.shrunk)

    def sentences(self) -> list[str]:
        """A summary in sentences."""
        lines = [f"{self.n_failed:,} of {self.n_seeds:,} seeds broke."]
        if self.n_further:
            lines.append(
                f"{self.n_further:,} of them did not fail in the run: for the curve, every seed that did not fail is "
                "run once more at full strength."
            )
        if self.median is None:
            lines.append("The search could not break more than half of the seeds at any strength.")
        else:
            low, high = ("beyond" if limit is None else f"{limit:.3g}" for limit in self.median_interval)
            lines.append(f"Half of the seeds have broken at strength {self.median:.3g} (95% interval {low} to {high}).")
        return [*lines, CAVEAT]

    def rows(self) -> list[tuple[str, str, str]]:
        """By strength, as text: random disturbances of it, and the search up to it."""
        random = {part.high: part.correct for part in self.random}
        return [
            (
                f"{strength - SHOWN[0]:.2g} to {strength:g}",
                show_interval(random[strength]) if strength in random else "unknown",
                show_interval(self.at(strength)),
            )
            for strength in SHOWN
        ]

    def lines(self) -> list[str]:
        """The rows as a table with their names, and the summary."""
        unit = f" (1 is {self.full_strength})" if self.full_strength else ""
        rows = [(f"strength{unit}", RANDOM, f"{UNBROKEN} up to it"), *self.rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(2)]
        table = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        return [*table, *self.sentences()]

    def as_dict(self) -> dict[str, Any]:
        """The curve as plain data."""
        return {
            "seeds": self.n_seeds,
            "failed": self.n_failed,
            "failed_here_only": self.n_further,
            "median": self.median,
            "median_interval": list(self.median_interval),
            "strength_1": self.full_strength,
            "passes": self.passes,
            "strengths": self.strengths.tolist(),
            "share": self.share.tolist(),
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "random": [asdict(part) for part in self.random],
            "caveat": CAVEAT,
        }


def robustness(
    run: RunSource, known: Sequence[ShrunkFault] = (), *, on_progress: OnProgress = ignore_progress
) -> Robustness:
    """The robustness curve of a campaign's model over its seeds.

    The weakest fault of every failing seed is shrunk. Every other seed is run once more at full strength, at a corner
    of theta and at the opposite one: those that break are shrunk too, the rest are censored at 1.
    known: faults that were shrunk before; one that is weaker than the one found here replaces it. on_progress: as for
    `shrink`.
    """
    with ExitStack() as stack:
        if isinstance(run, str | Path):
            run = stack.enter_context(closing(Reader(run)))
        recorded = _recorded(run)
        bench = stack.enter_context(open_bench(run, on_progress=on_progress))
        usable = bench.usable()
        shrunk: list[ShrunkFault] = []
        if len(recorded["id"]):
            weakest = _weakest(bench, recorded)
            id, seed_id, theta, noise_seed, answer = (
                recorded[name][weakest] for name in ("id", "seed_id", "theta", "noise_seed", "answer")
            )
            shrunk += shrink_tests(bench, bench.rows(seed_id), theta, noise_seed, answer, id)
        by_seed = {fault.seed_id: fault for fault in sorted([*shrunk, *known], key=lambda fault: -fault.weakest)}
        shrunk = list(by_seed.values())
        broken = bench.rows(np.array([fault.seed_id for fault in shrunk], dtype=np.int64)) if shrunk else usable[:0]
        for turn in range(2):
            left = np.setdiff1d(usable, broken)
            more = shrink_tests(bench, *_corner_tests(bench, left, turn))
            shrunk += more
            if more:
                broken = np.concatenate([broken, bench.rows(np.array([fault.seed_id for fault in more]))])
        n_left = len(np.setdiff1d(usable, broken))
        return Robustness.of(
            [fault.weakest for fault in shrunk],
            np.ones(n_left),
            full_strength=_full_strength(bench),
            passes=bench.passes,
            shrunk=tuple(sorted(shrunk, key=lambda fault: fault.seed_id)),
            random=correct_by_strength_of(run),
        )


def correct_by_strength_of(run: Run | Replayer | Reader) -> tuple[StrengthPart, ...]:
    """What random disturbances of each strength did in a campaign; empty before it has ended."""
    if isinstance(run, Run):
        return run.correct_by_strength
    return stored_by_strength((run.run if isinstance(run, Replayer) else run).summary())


def _recorded(run: Run | Replayer | Reader) -> dict[str, NDArray[Any]]:
    """The columns of all faults that shrinking needs."""
    names = ("id", "seed_id", "noise_seed", "answer")
    if isinstance(run, Run):
        columns = run.faults.columns
        return {name: columns[name] for name in (*names, "theta")} if columns else {"id": np.zeros(0)}
    reader = run.run if isinstance(run, Replayer) else run
    theta = [theta_column(name) for name in reader.theta]
    rows = reader.select(", ".join([*names, *theta]))
    if not rows:
        return {"id": np.zeros(0)}
    values = list(zip(*rows, strict=True))
    columns = {name: np.array(column, dtype=np.int64) for name, column in zip(names, values, strict=False)}
    return {**columns, "theta": np.array(values[len(names) :], dtype=np.float32).T}


def _weakest(bench: TestBench, recorded: dict[str, NDArray[Any]]) -> Ints:
    """The weakest fault of each seed."""
    order = np.lexsort((recorded["id"], bench.strength(recorded["theta"])))
    first: Ints = np.sort(order[np.unique(recorded["seed_id"][order], return_index=True)[1]])
    return first


def _corner_tests(bench: TestBench, rows: Ints, turn: int) -> tuple[Ints, Floats, Ints]:
    """Rows, theta and noise of one test per seed at full strength: at a corner, in turn 1 at the opposite one."""
    seed_id = bench.seeds.seed_id.numpy()[rows]
    margin = np.zeros(len(rows), dtype=np.float32)
    space = Space.of(bench.calculator.perturbation, rows, seed_id, margin, bench.random_seed)
    theta = space.corners(seed_id)
    if turn:
        opposite = (space.low + space.high) - theta
        has_two_sides = (space.low != space.identity) & (space.high != space.identity)
        theta = np.where(has_two_sides, opposite, theta).astype(np.float32).clip(space.low, space.high)
        if not (has_two_sides.any() or space.is_random):
            rows, theta, seed_id = rows[:0], theta[:0], seed_id[:0]  # the same tests again
    position = np.arange(len(rows))
    tests = space.tests(seed_id * 2 + turn, position, theta, "corner")
    return rows, tests.theta, tests.noise_seed


def _full_strength(bench: TestBench) -> str:
    """What strength 1 means, if theta has one dimension."""
    if len(bench.theta) > 1:
        return ""
    theta = bench.theta[0]
    ends = [f"{end:.3g}" for end in (theta.low, theta.high) if end != theta.identity]
    return f"{theta.name} {' or '.join(ends)}"
