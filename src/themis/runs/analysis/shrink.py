"""Shrinking: the smallest theta that still breaks the model, with the same seed and the same noise.

Shrinking one fault of every seed gives the robustness curve: how many seeds the search could not break, by strength.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.judge.estimate import Estimate, show_interval
from themis.judge.risk import mean_estimate
from themis.measure.tests import Bools, Floats, Ints, Tests
from themis.runs.analysis.bench import Outcomes, TestBench, open_bench, tests_of
from themis.runs.display.text import RANDOM_LABEL, UNBROKEN_LABEL
from themis.runs.fault import Fault
from themis.runs.replay import AnyRun, as_run
from themis.runs.run import StrengthPart
from themis.runs.store.files import json_safe
from themis.search.policy import Space

BISECTIONS = 10
"""Steps of a bisection, which finds the boundary to a thousandth; float32 and kernels can still resolve this."""
DROP_SLACK = 2.0**-5
"""A dimension is dropped if the others suffice when this share larger; exactly at the boundary, all are needed."""
PROBE_SHARE = 2.0**-7
"""A dimension is bisected only if the model still breaks when it is reduced by this share, which takes one test."""
MAX_SWEEPS = 12
"""Sweeps over the dimensions; lowering one lets others be lowered too, by less in every sweep."""
DEFAULT_FAULTS = 20
"""Faults that are shrunk by default, as many as `themis faults` lists."""
MAX_NAMED_DIMENSIONS = 3
"""Dimensions that a sentence names, the strongest first; the others are counted."""


@dataclass(frozen=True)
class ShrunkFault:
    """A fault at the smallest theta found that still breaks the model; the model was run with this theta and failed.

    Bisection finds one boundary, but there may be others: a smaller theta may break the model too.
    """

    id: int
    """The fault that was shrunk; -1 for a test that was not a fault of the campaign."""
    seed_id: int
    noise_seed: int
    before: dict[str, float]
    after: dict[str, float]
    strength_before: float
    """The strength before shrinking: the largest distance of a dimension from its identity, as a share of its range."""
    strength: float
    """The strength after shrinking."""
    weakest: float
    """The smallest strength that broke the model while shrinking, normally at most `DROP_SLACK` below `strength`."""
    not_needed: tuple[str, ...]
    """Dimensions that returned to their identity."""
    answer_before: int
    answer: int
    """The model's answer after shrinking, possibly a different wrong outcome; -1 if the output is not finite."""
    margin: float
    distance: float
    """L2 distance from the seed."""
    linf: float
    ssim: float | None
    passes: int
    sentence: str

    @property
    def is_same(self) -> bool:
        """Whether the wrong outcome is the same as before shrinking."""
        return self.answer == self.answer_before

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain data; numbers that JSON cannot represent become None."""
        return {**json_safe(self), "is_same": self.is_same}


def shrink(
    run: AnyRun, faults: Sequence[Fault] | None = None, *, most: int = DEFAULT_FAULTS, is_simplest: bool = False
) -> list[ShrunkFault]:
    """Shrink faults of a campaign together: one batched pass runs one step of every bisection.

    run: as `themis.run` returned it, or a run folder. faults: by default the `most` most telling ones. A fault that
    does not break the model when it is run again, for example on another machine, is left out. is_simplest: drop
    entire dimensions first, so that few remain, possibly stronger than all of them together would have to be.
    """
    if most < 1:
        raise UsageError(f"most must be 1 or more, got {most}: it is the number of faults to shrink")
    run = as_run(run)
    chosen = list(run.faults.most_telling(most) if faults is None else faults)
    if not chosen:
        return []
    seed_id = np.array([fault.seed_id for fault in chosen])
    with open_bench(run, seed_id, min(fault.chunk for fault in chosen)) as bench:
        if [*chosen[0].theta] != [theta.name for theta in bench.theta]:
            raise UsageError(f"the faults must be of this run, got theta {', '.join(chosen[0].theta)}: pass its own")
        answer = np.array([fault.answer for fault in chosen])
        return shrink_tests(bench, tests_of(chosen, bench.seeds), answer, is_simplest=is_simplest)


def shrink_tests(
    bench: TestBench, tests: Tests, answer: Ints | None = None, *, is_simplest: bool = False
) -> list[ShrunkFault]:
    """Shrink the tests that break the model. answer: the recorded outcomes, if the tests are faults of the campaign."""
    if not len(tests):
        return []
    shrinker = _Shrinker(bench, tests)
    id = np.full(len(tests), -1) if answer is None else tests.number
    first_answer = shrinker.best["answer"].copy() if answer is None else answer
    remaining = shrinker.try_identity()
    if is_simplest:
        shrinker.drop_dimensions(remaining, give=0.0)
        shrinker.weaken(remaining)
    else:
        shrinker.weaken(remaining)
        shrinker.weaken(shrinker.drop_dimensions(remaining, DROP_SLACK))
    shrinker.lower_dimensions(remaining)
    return [shrinker.result(k, int(first_answer[k]), int(id[k])) for k in np.flatnonzero(shrinker.is_fault).tolist()]


class _Shrinker:
    """Faults being shrunk: the smallest theta of each so far, and its outcome."""

    def __init__(self, bench: TestBench, tests: Tests) -> None:
        self.bench, self.tests = bench, tests
        self.size = min(len(tests), bench.calculator.chunk)
        self.start = bench.settled(tests.theta)
        self.theta = self.start.copy()
        self.weakest = bench.strength(self.theta)
        self.n_run = np.zeros(len(tests), dtype=np.int64)
        with bench.step("running tests", len(tests)):
            self.best = self._run(np.arange(len(tests)), self.theta)
        self.is_fault = self.best["is_fault"].copy()

    def _run(self, at: Ints, theta: Floats) -> Outcomes:
        self.n_run[at] += 1
        return self.bench.run(self.tests.seed[at], theta, self.tests.noise_seed[at], self.size)

    def attempt(self, at: Ints, theta: Floats) -> Bools:
        """Run the faults `at` with another theta, and adopt it where it breaks the model too."""
        if not len(at):
            return np.zeros(0, dtype=bool)
        outcomes = self._run(at, theta)
        is_fault: Bools = outcomes["is_fault"]
        better = at[is_fault]
        self.theta[better] = theta[is_fault]
        self.weakest[better] = np.minimum(self.weakest[better], self.bench.strength(self.theta[better]))
        for name, column in outcomes.items():
            self.best[name][better] = column[is_fault]
        return is_fault

    def try_identity(self) -> Ints:
        """Try theta at its identity; return the faults that need more than that."""
        at = np.flatnonzero(self.is_fault & (self.theta != self.bench.identity).any(1))
        with self.bench.step("trying the identity of theta", len(at)):
            return np.asarray(at[~self.attempt(at, np.tile(self.bench.identity, (len(at), 1)))])

    def weaken(self, at: Ints) -> None:
        """Bisect the overall strength, moving theta along the line from its identity."""
        held, identity = self.theta.astype(np.float64), self.bench.identity.astype(np.float64)

        def theta_at(at: Ints, share: NDArray[np.float64]) -> Floats:
            return self.bench.settled(identity + share[:, None] * (held[at] - identity))

        with self.bench.step("bisecting the strength", BISECTIONS * len(at)):
            self._bisect(at, theta_at)

    def drop_dimensions(self, at: Ints, give: float) -> Ints:
        """Reset dimensions to their identity if the others suffice, made `give` stronger; return the faults changed."""
        identity = self.bench.identity
        if len(identity) == 1:
            return at[:0]
        most, grown = self.start - identity, (self.theta - identity) * (1 + give)
        base = self.bench.settled(identity + np.where(np.abs(grown) < np.abs(most), grown, most))
        has_moved = np.zeros(len(base), dtype=bool)
        with self.bench.step("dropping dimensions of theta", len(identity) * len(at)):
            for k in range(len(identity)):
                now = at[base[at, k] != identity[k]]
                without = base[now]
                without[:, k] = identity[k]
                is_enough = self.attempt(now, without)
                base[now[is_enough]] = without[is_enough]
                has_moved[now[is_enough]] = True
        return np.flatnonzero(has_moved)

    def lower_dimensions(self, at: Ints) -> None:
        """Move each dimension towards its identity while the others are fixed, until none of them moves."""
        if self.theta.shape[1] == 1:
            return
        n_dimensions = self.theta.shape[1]
        for sweep in range(MAX_SWEEPS):
            n_tests = (1 + BISECTIONS) * n_dimensions * len(at)
            before = self.theta[at].copy()
            with self.bench.step(f"bisecting single dimensions, sweep {sweep + 1} of at most {MAX_SWEEPS}", n_tests):
                for k in range(n_dimensions):
                    self._lower(k, at)
            at = at[(self.theta[at] != before).any(1)]
            if not len(at):
                break

    def _lower(self, k: int, at: Ints) -> None:
        identity = float(self.bench.identity[k])
        at = at[self.theta[at, k] != identity]
        held = self.theta.astype(np.float64)

        def theta_at(at: Ints, share: NDArray[np.float64]) -> Floats:
            moved = held[at].copy()
            moved[:, k] = identity + share * (moved[:, k] - identity)
            return self.bench.settled(moved)

        nudged = theta_at(at, np.full(len(at), 1 - PROBE_SHARE))
        if self.bench.is_whole[k]:
            away = held[at, k] - identity
            nudged[:, k] = identity + np.sign(away) * (np.ceil(np.abs(away)) - 1)
        at = at[self.attempt(at, nudged)]
        held = self.theta.astype(np.float64)
        self._bisect(at, theta_at)

    def _bisect(self, at: Ints, theta_at: Callable[[Ints, NDArray[np.float64]], Floats]) -> None:
        """Bisect the share of the way between 0, which does not break the model, and 1, which does."""
        low, high = np.zeros(len(at)), np.ones(len(at))
        passing = theta_at(at, low)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            theta = theta_at(at, middle)
            breaks = (theta == self.theta[at]).all(1)  # already run, because theta was rounded
            is_new = ~(breaks | (theta == passing).all(1))
            breaks[is_new] = self.attempt(at[is_new], theta[is_new])
            low, high = np.where(breaks, low, middle), np.where(breaks, middle, high)
            passing = np.where(breaks[:, None], passing, theta)

    def result(self, k: int, answer: int, id: int) -> ShrunkFault:
        bench, best = self.bench, self.best
        names = [theta.name for theta in bench.theta]
        is_back = (self.theta[k] == bench.identity) & (self.start[k] != bench.identity)
        ssim = float(best["ssim"][k])
        return ShrunkFault(
            id=id,
            seed_id=int(bench.seeds.seed_id[self.tests.seed[k]]),
            noise_seed=int(self.tests.noise_seed[k]),
            before=dict(zip(names, map(float, self.tests.theta[k]), strict=True)),
            after=dict(zip(names, map(float, self.theta[k]), strict=True)),
            strength_before=float(bench.strength(self.start[k])),
            strength=float(bench.strength(self.theta[k])),
            weakest=float(self.weakest[k]),
            not_needed=tuple(name for name, back in zip(names, is_back, strict=True) if back),
            answer_before=answer,
            answer=int(best["answer"][k]),
            margin=float(best["margin"][k]),
            distance=float(best["distance"][k]),
            linf=float(best["linf"][k]),
            ssim=None if np.isnan(ssim) else ssim,
            passes=int(self.n_run[k]) * bench.cost,
            sentence=_describe_needed(bench, self.start[k], self.theta[k]),
        )


def _describe_needed(bench: TestBench, before: Floats, after: Floats) -> str:
    """A sentence such as "sigma 0.031 instead of 0.2 is enough; angle is not needed"."""
    names = [theta.name for theta in bench.theta]
    is_idle = after == bench.identity
    if is_idle.all():
        return "the identity of theta is enough: none of its dimensions is needed"
    needed = []
    for k in np.argsort(-bench.shares(after), kind="stable").tolist():
        was, now = f"{before[k]:.4g}", f"{after[k]:.4g}"
        if not is_idle[k]:
            needed.append(f"{names[k]} {now}" + (f" instead of {was}" if was != now else ""))
    if len(needed) > MAX_NAMED_DIMENSIONS:
        needed[MAX_NAMED_DIMENSIONS:] = [f"{len(needed) - MAX_NAMED_DIMENSIONS} more"]
    idle = [name for name, has_gone in zip(names, is_idle, strict=True) if has_gone]
    extent = "the smallest found" if (before == after).all() else "enough"
    text = f"{_join(needed)} {'is' if len(needed) == 1 else 'are'} {extent}"
    return f"{text}; {_join(idle)} {'is' if len(idle) == 1 else 'are'} not needed" if idle else text


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


LISTED_STRENGTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Strengths in the summary: the upper ends of the ranges in which random disturbances are counted."""
CAVEAT = (
    "A search is not exhaustive: weaker disturbances than those found may break a seed, so the curve is an upper bound "
    "on the model's robustness."
)
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Robustness:
    """The robustness curve: the share of the seeds that no disturbance up to a given strength is known to break.

    Strength is the distance of theta from its identity as a share of its range, in the furthest dimension.
    """

    least: Curve
    """The smallest strength that broke each seed `[seeds]`; infinite if none did."""
    full_strength: str = ""
    """What strength 1 means if theta has one dimension, such as "sigma 0.1"."""
    passes: int = 0
    shrunk: tuple[ShrunkFault, ...] = field(default=(), repr=False)
    """The smallest disturbance found for each seed that broke."""
    random: tuple[StrengthPart, ...] = ()
    """Answers under random disturbances in the campaign's uniform stream, by strength; empty if not known."""

    @property
    def n_seeds(self) -> int:
        return len(self.least)

    @property
    def n_failed(self) -> int:
        """The number of seeds that broke."""
        return int(np.isfinite(self.least).sum())

    def at(self, strength: float) -> Estimate:
        """The share of seeds that no disturbance up to a strength is known to break, with Clopper-Pearson limits."""
        if not 0 <= strength <= 1:
            raise UsageError(f"strength must lie in 0..1, the range that was tested, got {strength:g}")
        return mean_estimate((self.least > strength).astype(np.float64))

    @cached_property
    def steps(self) -> dict[float, Estimate]:
        """The curve at each strength where it drops, ascending, and at 1."""
        return {strength: self.at(strength) for strength in np.unique([*self.least.clip(max=1.0), 1.0]).tolist()}

    @property
    def median(self) -> float | None:
        """The strength at which half of the seeds have broken; None if more than half withstand every strength."""
        return self._first_under_half("value")

    @property
    def median_interval(self) -> tuple[float | None, float | None]:
        """The 95% interval of the median, where the curve's limits cross one half; None lies beyond full strength."""
        return self._first_under_half("low"), self._first_under_half("high")

    def _first_under_half(self, end: str) -> float | None:
        return next((strength for strength, share in self.steps.items() if getattr(share, end) <= 0.5), None)

    @property
    def n_further(self) -> int:
        """Seeds that failed only when they were run at full strength for the curve, not in the campaign."""
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
        """Rows of text: a range of strengths, correct answers under random disturbances, and unbroken seeds."""
        random = {part.high: part.correct for part in self.random}
        return [
            (
                f"{strength - LISTED_STRENGTHS[0]:.2g} to {strength:g}",
                show_interval(random[strength]) if strength in random else "unknown",
                show_interval(self.at(strength)),
            )
            for strength in LISTED_STRENGTHS
        ]

    def lines(self) -> list[str]:
        """The rows as a table with a header, and the summary."""
        unit = f" (1 is {self.full_strength})" if self.full_strength else ""
        rows = [(f"strength{unit}", RANDOM_LABEL, f"{UNBROKEN_LABEL} up to it"), *self.rows()]
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
            "strengths": list(self.steps),
            "share": [share.value for share in self.steps.values()],
            "low": [share.low for share in self.steps.values()],
            "high": [share.high for share in self.steps.values()],
            "random": [asdict(part) for part in self.random],
            "caveat": CAVEAT,
        }


def robustness(run: AnyRun, known: Sequence[ShrunkFault] = ()) -> Robustness:
    """The robustness curve of a campaign's model over its seeds.

    The weakest fault of every failing seed is shrunk. Every other seed is run at full strength, at a corner of theta
    and then at the opposite corner; tests that break the model are shrunk too.
    known: faults that were shrunk before; of each seed, the weakest fault counts.
    """
    run = as_run(run)
    columns = run.faults.columns
    with open_bench(run) as bench:
        order = np.lexsort((columns["id"], bench.strength(columns["theta"])))
        first = np.unique(columns["seed_id"][order], return_index=True)[1]
        weakest = {name: column[np.sort(order[first])] for name, column in columns.items()}
        rows, kind = bench.rows(weakest["seed_id"]), weakest["kind"]
        tests = Tests(weakest["id"], rows, weakest["theta"], weakest["noise_seed"], kind)
        found = [*shrink_tests(bench, tests, weakest["answer"]), *known]
        by_seed = {fault.seed_id: fault for fault in sorted(found, key=lambda fault: -fault.weakest)}
        shrunk, left = list(by_seed.values()), bench.usable()
        left = np.setdiff1d(left, bench.rows(np.array([*by_seed], dtype=np.int64)))
        for turn in range(2):
            more = shrink_tests(bench, _corner_tests(bench, left, turn))
            shrunk += more
            left = np.setdiff1d(left, bench.rows(np.array([fault.seed_id for fault in more], dtype=np.int64)))
        if not shrunk and not len(left):
            raise UsageError("a robustness curve needs at least one seed that is answered correctly, got none")
        return Robustness(
            np.array([*(fault.weakest for fault in shrunk), *np.full(len(left), np.inf)]),
            full_strength=_full_strength(bench),
            passes=bench.passes,
            shrunk=tuple(sorted(shrunk, key=lambda fault: fault.seed_id)),
            random=run.correct_by_strength,
        )


def _corner_tests(bench: TestBench, rows: Ints, turn: int) -> Tests:
    """One test per seed at full strength: at a corner of theta in turn 0, at the opposite corner in turn 1."""
    seed_id = bench.seeds.seed_id.numpy()[rows]
    margin = np.zeros(len(rows), dtype=np.float32)
    space = Space.of(bench.calculator.perturbation, rows, seed_id, margin, bench.random_seed)
    theta = space.corners(seed_id)
    if turn:
        opposite = (space.low + space.high) - theta
        has_two_sides = (space.low != space.identity) & (space.high != space.identity)
        theta = np.where(has_two_sides, opposite, theta).astype(np.float32).clip(space.low, space.high)
        if not (has_two_sides.any() or space.is_random):
            seed_id, theta = seed_id[:0], theta[:0]  # the same tests again
    return space.tests(seed_id * 2 + turn, np.arange(len(seed_id)), theta, "corner")


def _full_strength(bench: TestBench) -> str:
    """What strength 1 means, if theta has one dimension."""
    if len(bench.theta) > 1:
        return ""
    theta = bench.theta[0]
    ends = [f"{end:.3g}" for end in (theta.low, theta.high) if end != theta.identity]
    return f"{theta.name} {' or '.join(ends)}"
