"""Shrink: the smallest theta that still breaks the model, with the same seed and the same noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.measure.tests import Bools, Floats, Ints
from themis.runs.analysis.bench import TestBench, TestOutcomes, open_bench
from themis.runs.analysis.enough import what_is_enough
from themis.runs.faults import Fault, Faults
from themis.runs.replay import Replayer, RunSource
from themis.runs.run import Run
from themis.runs.store.reader import Reader
from themis.runs.store.selection import Selection

STEPS = 10
"""Of a bisection: to a thousandth of the way, where float32 and kernels still tell neighbours apart."""
GIVE = 2.0**-5
"""A dimension is left out where the others need only this share more for it: at the very boundary each one matters."""
NUDGE = 2.0**-7
"""A dimension that cannot give up this share of its way is where it must be: one test instead of a bisection."""
MOST_SWEEPS = 12
"""Over the dimensions; one that moves lets others move, by less each time."""
MOST = 20
"""Faults that are shrunk unless others are named: as many as `themis faults` lists."""


@dataclass(frozen=True)
class Shrunk:
    """A fault at the smallest theta found that still breaks the model. That theta was run, and broke it.

    Bisection finds a boundary, which need not be the only one: a smaller theta may break the model too.
    """

    id: int
    """Of the fault it was made from; -1: of a test that was no fault of the campaign."""
    seed_id: int
    noise_seed: int
    before: dict[str, float]
    after: dict[str, float]
    strength_before: float
    """The share of the range, from its identity, that the furthest dimension of theta went."""
    strength: float
    """The same after."""
    weakest: float
    """The smallest strength of all that broke the model on the way: `GIVE` under `strength` at the most, as a rule."""
    not_needed: tuple[str, ...]
    """Dimensions that went all the way back to their identity."""
    answer_before: int
    answer: int
    """What the model says now: another wrong outcome perhaps; -1 where the output is not finite."""
    margin: float
    distance: float
    """L2, from the seed."""
    linf: float
    ssim: float | None
    passes: int
    """What it cost."""
    sentence: str

    @property
    def is_same(self) -> bool:
        """Whether the wrong outcome is the fault's own."""
        return self.answer == self.answer_before

    def as_dict(self) -> dict[str, Any]:
        """Plain data; a number that JSON cannot hold is None."""
        plain = {**asdict(self), "is_same": self.is_same, "not_needed": list(self.not_needed)}
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in plain.items()
        }


def shrink(
    run: RunSource, faults: Sequence[Fault] | None = None, *, most: int = MOST, is_simplest: bool = False
) -> list[Shrunk]:
    """Shrink faults of a campaign, all of them at once: a step of every bisection is one batched pass.

    run: as `themis.run` gave it, or a run folder. faults: by default the `most` most telling. One that does not break
    the model when it is run again, on another machine perhaps, is left out. is_simplest: leave out whole dimensions
    first, so that few are left, if at a larger strength than all of them together need.
    """
    if most < 1:
        raise UsageError(f"most must be 1 or more, got {most}: it is how many faults are shrunk")
    with ExitStack() as stack:
        if isinstance(run, str | Path):
            run = stack.enter_context(closing(Reader(run)))
        chosen = list(_telling(run, most) if faults is None else faults)
        if not chosen:
            return []
        seed_id = np.array([fault.seed_id for fault in chosen])
        bench = stack.enter_context(open_bench(run, seed_id, min(fault.chunk for fault in chosen)))
        theta = np.array([list(fault.theta.values()) for fault in chosen], dtype=np.float32)
        if [*chosen[0].theta] != [each.name for each in bench.theta]:
            raise UsageError(f"the faults must be of this run, got theta {', '.join(chosen[0].theta)}: take its own")
        noise_seed = np.array([fault.noise_seed for fault in chosen])
        answer, id = (np.array([getattr(fault, name) for fault in chosen]) for name in ("answer", "id"))
        return shrink_tests(bench, bench.rows(seed_id), theta, noise_seed, answer, id, is_simplest=is_simplest)


def shrink_tests(
    bench: TestBench,
    rows: Ints,
    theta: Floats,
    noise_seed: Ints,
    answer: Ints | None = None,
    id: Ints | None = None,
    *,
    is_simplest: bool = False,
) -> list[Shrunk]:
    """Shrink those of some tests that break the model. answer, id: of the faults they are, where they are such."""
    if not len(rows):
        return []
    work = _Work(bench, rows, theta, noise_seed)
    first = work.best.answer.copy() if answer is None else answer
    at = work.to_identity()
    if is_simplest:
        work.leave_out(at, give=0.0)
        work.weaken(at)
    else:
        work.weaken(at)
        work.weaken(work.leave_out(at, GIVE))
    work.lower(at)
    return [
        work.shrunk(k, theta[k], int(first[k]), -1 if id is None else int(id[k]))
        for k in np.flatnonzero(work.broke).tolist()
    ]


class _Work:
    """Faults being shrunk: the smallest theta so far of each, and what came of it."""

    def __init__(self, bench: TestBench, rows: Ints, theta: Floats, noise_seed: Ints) -> None:
        self.bench, self.rows, self.noise_seed = bench, rows, noise_seed
        self.size = min(len(rows), bench.calculator.chunk)
        self.start = bench.settled(theta)
        self.theta = self.start.copy()
        self.weakest = bench.strength(self.theta)
        self.n_run = np.zeros(len(rows), dtype=np.int64)
        self.best = self._run(np.arange(len(rows)), self.theta)
        self.broke = self.best.is_fault.copy()

    def _run(self, at: Ints, theta: Floats) -> TestOutcomes:
        self.n_run[at] += 1
        return self.bench.run(self.rows[at], theta, self.noise_seed[at], self.size)

    def attempt(self, at: Ints, theta: Floats) -> Bools:
        """Run the faults `at` with another theta; where that breaks the model too it is the better one."""
        if not len(at):
            return np.zeros(0, dtype=bool)
        ran = self._run(at, theta)
        better = at[ran.is_fault]
        self.theta[better] = theta[ran.is_fault]
        self.weakest[better] = np.minimum(self.weakest[better], self.bench.strength(self.theta[better]))
        self.best.put(better, ran, ran.is_fault)
        return ran.is_fault

    def to_identity(self) -> Ints:
        """Try all of theta at its identity; which faults need more than that."""
        at = np.flatnonzero(self.broke & (self.theta != self.bench.identity).any(1))
        needs_more: Ints = at[~self.attempt(at, np.tile(self.bench.identity, (len(at), 1)))]
        return needs_more

    def weaken(self, at: Ints) -> None:
        """The overall strength: theta on the way from the identity."""
        held, identity = self.theta.astype(np.float64), self.bench.identity.astype(np.float64)

        def on_the_way(at: Ints, share: NDArray[np.float64]) -> Floats:
            return self.bench.settled(identity + share[:, None] * (held[at] - identity))

        self._bisect(at, on_the_way)

    def leave_out(self, at: Ints, give: float) -> Ints:
        """Put each dimension back to its identity where the others are enough, `give` stronger; which faults moved."""
        identity = self.bench.identity
        if len(identity) == 1:
            return at[:0]
        most, grown = self.start - identity, (self.theta - identity) * (1 + give)
        base = self.bench.settled(identity + np.where(np.abs(grown) < np.abs(most), grown, most))
        moved = np.zeros(len(base), dtype=bool)
        for k in range(len(identity)):
            now = at[base[at, k] != identity[k]]
            without = base[now]
            without[:, k] = identity[k]
            is_enough = self.attempt(now, without)
            base[now[is_enough]] = without[is_enough]
            moved[now[is_enough]] = True
        left: Ints = np.flatnonzero(moved)
        return left

    def lower(self, at: Ints) -> None:
        """Each dimension towards its identity, the others held, again and again until nothing moves."""
        if self.theta.shape[1] == 1:
            return
        for _ in range(MOST_SWEEPS):
            before = self.theta[at].copy()
            for k in range(self.theta.shape[1]):
                self._lower(k, at)
            at = at[(self.theta[at] != before).any(1)]
            if not len(at):
                break

    def _lower(self, k: int, at: Ints) -> None:
        identity = float(self.bench.identity[k])
        at = at[self.theta[at, k] != identity]
        held = self.theta.astype(np.float64)

        def on_the_way(at: Ints, share: NDArray[np.float64]) -> Floats:
            moved = held[at].copy()
            moved[:, k] = identity + share * (moved[:, k] - identity)
            return self.bench.settled(moved)

        nudged = on_the_way(at, np.full(len(at), 1 - NUDGE))
        if self.bench.is_whole[k]:
            away = held[at, k] - identity
            nudged[:, k] = identity + np.sign(away) * (np.ceil(np.abs(away)) - 1)
        at = at[self.attempt(at, nudged)]
        held = self.theta.astype(np.float64)
        self._bisect(at, on_the_way)

    def _bisect(self, at: Ints, on_the_way: Callable[[Ints, NDArray[np.float64]], Floats]) -> None:
        """Shares of the way, between 0, which does not break the model, and 1, which does."""
        low, high = np.zeros(len(at)), np.ones(len(at))
        holds = on_the_way(at, low)
        for _ in range(STEPS):
            middle = (low + high) / 2
            theta = on_the_way(at, middle)
            broke = (theta == self.theta[at]).all(1)  # known, as are whole numbers that came before
            is_new = ~(broke | (theta == holds).all(1))
            broke[is_new] = self.attempt(at[is_new], theta[is_new])
            low, high = np.where(broke, low, middle), np.where(broke, middle, high)
            holds = np.where(broke[:, None], holds, theta)

    def shrunk(self, k: int, given: Floats, answer: int, id: int) -> Shrunk:
        bench, best = self.bench, self.best
        names = [each.name for each in bench.theta]
        is_back = (self.theta[k] == bench.identity) & (self.start[k] != bench.identity)
        alike = float(best.ssim[k])
        return Shrunk(
            id=id,
            seed_id=int(bench.seeds.seed_id[self.rows[k]]),
            noise_seed=int(self.noise_seed[k]),
            before=dict(zip(names, map(float, given), strict=True)),
            after=dict(zip(names, map(float, self.theta[k]), strict=True)),
            strength_before=float(bench.strength(self.start[k])),
            strength=float(bench.strength(self.theta[k])),
            weakest=float(self.weakest[k]),
            not_needed=tuple(name for name, back in zip(names, is_back, strict=True) if back),
            answer_before=answer,
            answer=int(best.answer[k]),
            margin=float(best.margin[k]),
            distance=float(best.distance[k]),
            linf=float(best.linf[k]),
            ssim=None if np.isnan(alike) else alike,
            passes=int(self.n_run[k]) * bench.cost,
            sentence=what_is_enough(bench, self.start[k], self.theta[k]),
        )


def _telling(run: Run | Reader | Replayer, n: int) -> list[Fault]:
    faults = run.faults if isinstance(run, Run) else read_faults(run)
    return faults.most_telling(n)


def read_faults(run: Reader | Replayer) -> Faults:
    """A folder's distinct faults."""
    return Selection(is_distinct=True).faults(run.run if isinstance(run, Replayer) else run)
