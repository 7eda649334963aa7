"""The robustness curve: how many seeds are still answered right at each strength of a disturbance."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.judge.estimate import Estimate

if TYPE_CHECKING:
    from themis.measure.tests import Floats, Ints
    from themis.runs.analysis.bench import TestBench
    from themis.runs.analysis.shrink import Shrunk
    from themis.runs.replay import RunSource

SHOWN = (0.05, 0.1, 0.25, 0.5, 1.0)
"""Strengths that a summary names."""
CAVEAT = (
    "A search is not exhaustive: weaker disturbances than those found may break a seed, so the curve is an upper bound "
    "on the model's robustness."
)
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Robustness:
    """Kaplan and Meier's curve over the smallest strengths that broke each seed, with its 95% log-log interval.

    Strength is the share of theta's range, from its identity, that the furthest dimension goes. Seeds that never broke
    are right-censored where they were tested last: it is known only that they stood up to that.
    """

    strengths: Curve
    """Where the curve steps, ascending, and where seeds were censored."""
    share: Curve
    """Of the seeds still right from each of these on."""
    low: Curve
    high: Curve
    n_seeds: int
    n_failed: int
    whole: str = ""
    """What strength 1 is, where theta is one number: as "sigma 0.1"."""
    passes: int = 0
    shrunk: tuple[Shrunk, ...] = field(default=(), repr=False)
    """The smallest disturbance found of each seed that broke."""

    @staticmethod
    def of(failed: Any, censored: Any, **rest: Any) -> Robustness:
        """From the strengths at which seeds broke, and those up to which the other seeds are known to stand."""
        from scipy import stats

        failed, censored = (np.asarray(each, dtype=np.float64) for each in (failed, censored))
        n = len(failed) + len(censored)
        if not n:
            raise UsageError("a robustness curve needs at least one seed that is answered right, got none")
        estimated = stats.ecdf(stats.CensoredData(uncensored=failed, right=censored)).sf
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # the interval has no formula where all or none are left
            interval = estimated.confidence_interval(method="log-log")
        share = estimated.probabilities
        low, high = (np.array(each.probabilities) for each in (interval.low, interval.high))
        # There, Clopper and Pearson's limits of none among n.
        is_whole, is_empty = share >= 1, share <= 0
        rare = 0.025 ** (1 / n)
        low, high = np.where(is_whole, rare, low), np.where(is_whole, 1.0, high)
        low, high = np.where(is_empty, 0.0, low), np.where(is_empty, 1 - rare, high)
        return Robustness(estimated.quantiles, share, low, high, n, len(failed), **rest)

    def at(self, strength: float) -> Estimate:
        """The share of seeds still right at a strength, with its interval."""
        if not 0 <= strength <= max(1.0, self.strengths[-1]):
            raise UsageError(f"strength must lie in 0..1, the range that was tested, got {strength:g}")
        k = int(np.searchsorted(self.strengths, strength, side="right")) - 1
        if k < 0:
            return Estimate(1.0, 0.025 ** (1 / self.n_seeds), 1.0)
        return Estimate(float(self.share[k]), float(self.low[k]), float(self.high[k]))

    @property
    def median(self) -> float | None:
        """The strength at which half of the seeds have broken; None where more than half still stand."""
        return self._first_under_half(self.share)

    @property
    def median_interval(self) -> tuple[float | None, float | None]:
        """Its 95% interval, where the curve's limits cross one half; None is beyond what was tested."""
        return self._first_under_half(self.low), self._first_under_half(self.high)

    def _first_under_half(self, curve: Curve) -> float | None:
        under = np.flatnonzero(curve <= 0.5)
        return float(self.strengths[under[0]]) if len(under) else None

    @property
    def n_further(self) -> int:
        """Seeds that the campaign had not broken: they broke when they were run at full strength for the curve."""
        return sum(each.id < 0 for each in self.shrunk)

    def sentences(self) -> list[str]:
        """What it says, in words."""
        some = [f"{self.at(s).value:.1%} at {s:g}" for s in SHOWN]
        unit = f" (1 is {self.whole})" if self.whole else ""
        lines = [
            f"{self.n_failed:,} of {self.n_seeds:,} seeds broke; still right by strength{unit}: {', '.join(some)}."
        ]
        if self.n_further:
            lines.append(
                f"{self.n_further:,} of them did not fail in the run: the curve runs every seed that stood at full "
                "strength once more."
            )
        if self.median is None:
            lines.append("More than half of the seeds stand at every strength that was tested.")
        else:
            low, high = ("beyond" if each is None else f"{each:.3g}" for each in self.median_interval)
            lines.append(f"Half of the seeds have broken at strength {self.median:.3g} (95% interval {low} to {high}).")
        return [*lines, CAVEAT]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "seeds": self.n_seeds,
            "failed": self.n_failed,
            "failed_here_only": self.n_further,
            "median": self.median,
            "median_interval": list(self.median_interval),
            "strength_1": self.whole,
            "passes": self.passes,
            "strengths": self.strengths.tolist(),
            "share": self.share.tolist(),
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "caveat": CAVEAT,
        }


def robustness(run: RunSource, known: Sequence[Shrunk] = ()) -> Robustness:
    """The robustness curve of a campaign's model over its seeds.

    Of each seed that failed, the fault of the smallest strength is shrunk. Each other seed is run once more at full
    strength, at a corner of theta and at the opposite one: what breaks there is shrunk too, the rest is censored at 1.
    known: faults of it that were shrunk already; one that is weaker than what is found here takes its place.
    """
    from themis.runs.analysis.bench import open_bench
    from themis.runs.analysis.shrink import shrink_tests
    from themis.runs.store.reader import Reader

    with ExitStack() as stack:
        if isinstance(run, str | Path):
            run = stack.enter_context(closing(Reader(run)))
        recorded = _recorded(run)
        bench = stack.enter_context(open_bench(run))
        usable = bench.usable()
        found: list[Shrunk] = []
        if len(recorded["id"]):
            weakest = _weakest(bench, recorded)
            id, seed_id, theta, noise_seed, answer = (
                recorded[name][weakest] for name in ("id", "seed_id", "theta", "noise_seed", "answer")
            )
            found += shrink_tests(bench, bench.rows(seed_id), theta, noise_seed, answer, id)
        by_seed = {each.seed_id: each for each in sorted([*found, *known], key=lambda each: -each.weakest)}
        found = list(by_seed.values())
        broken = bench.rows(np.array([each.seed_id for each in found], dtype=np.int64)) if found else usable[:0]
        for turn in range(2):
            left = np.setdiff1d(usable, broken)
            more = shrink_tests(bench, *_corner_tests(bench, left, turn))
            found += more
            if more:
                broken = np.concatenate([broken, bench.rows(np.array([each.seed_id for each in more]))])
        n_left = len(np.setdiff1d(usable, broken))
        return Robustness.of(
            [each.weakest for each in found],
            np.ones(n_left),
            whole=_whole(bench),
            passes=bench.passes,
            shrunk=tuple(sorted(found, key=lambda each: each.seed_id)),
        )


def _recorded(run: Any) -> dict[str, NDArray[Any]]:
    """Columns of all faults that shrinking needs."""
    from themis.runs.replay import Replayer
    from themis.runs.run import Run
    from themis.runs.store.schema import theta_column

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
    whole = {name: np.array(column, dtype=np.int64) for name, column in zip(names, values, strict=False)}
    return {**whole, "theta": np.array(values[len(names) :], dtype=np.float32).T}


def _weakest(bench: TestBench, recorded: dict[str, NDArray[Any]]) -> Ints:
    """Of each seed, the fault of the smallest strength."""
    order = np.lexsort((recorded["id"], bench.strength(recorded["theta"])))
    first: Ints = np.sort(order[np.unique(recorded["seed_id"][order], return_index=True)[1]])
    return first


def _corner_tests(bench: TestBench, rows: Ints, turn: int) -> tuple[Ints, Floats, Ints]:
    """Seeds, theta and noise of a test a seed at full strength: at a corner, or in turn 1 at the opposite one."""
    from themis.search.policy import Space

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


def _whole(bench: TestBench) -> str:
    """What strength 1 is, where one number says it."""
    if len(bench.theta) > 1:
        return ""
    theta = bench.theta[0]
    ends = [f"{end:.3g}" for end in (theta.low, theta.high) if end != theta.identity]
    return f"{theta.name} {' or '.join(ends)}"


def draw_robustness(curve: Robustness, file: str | Path | BinaryIO, *, title: str = "Robustness") -> None:
    """Draw the curve as steps, with its band."""
    from themis.runs.display.plots import robustness_figure

    robustness_figure(curve, title).savefig(file, dpi=130, format="png")
