"""Shrinking: the smallest theta that still breaks the model, with the same seed and the same noise."""

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
from themis.perturb.perturbation import Theta
from themis.runs.analysis.bench import OnProgress, Outcomes, TestBench, ignore_progress, open_bench
from themis.runs.fault import Fault
from themis.runs.faults import Faults
from themis.runs.replay import Replayer, RunSource
from themis.runs.run import Run
from themis.runs.store.reader import Reader, Selection

STEPS = 10
"""Steps of a bisection: to a thousandth of the way, where float32 and kernels still tell neighbours apart."""
GIVE = 2.0**-5
"""A dimension is dropped if the others need only this share more without it: at the boundary itself all are needed."""
NUDGE = 2.0**-7
"""A dimension that cannot give up this share of its way is left as it is: one test instead of a bisection."""
MOST_SWEEPS = 12
"""Sweeps over the dimensions; moving one lets others move, by less in every sweep."""
MOST = 20
"""Faults that are shrunk by default: as many as `themis faults` lists."""
NAMED = 3
"""Dimensions that a sentence names, those that go furthest; the others are counted."""


@dataclass(frozen=True)
class ShrunkFault:
    """A fault at the smallest theta found that still breaks the model. This theta was run, and the model failed it.

    Bisection finds a boundary, which may not be the only one: a smaller theta may break the model too.
    """

    id: int
    """The fault that was shrunk; -1 for a test that was not a fault of the campaign."""
    seed_id: int
    noise_seed: int
    before: dict[str, float]
    after: dict[str, float]
    strength_before: float
    """The share of its range, from the identity, that the furthest dimension of theta went."""
    strength: float
    """The same after shrinking."""
    weakest: float
    """The smallest strength that broke the model on the way: normally at most `GIVE` below `strength`."""
    not_needed: tuple[str, ...]
    """Dimensions that went all the way back to their identity."""
    answer_before: int
    answer: int
    """The model's answer now, possibly a different wrong outcome; -1 if the output is not finite."""
    margin: float
    distance: float
    """L2 distance from the seed."""
    linf: float
    ssim: float | None
    passes: int
    """Passes spent on shrinking."""
    sentence: str

    @property
    def is_same(self) -> bool:
        """Whether the wrong outcome is still that of the fault."""
        return self.answer == self.answer_before

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain data; numbers that JSON cannot represent become None."""
        plain = {**asdict(self), "is_same": self.is_same, "not_needed": list(self.not_needed)}
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in plain.items()
        }


def shrink(
    run: RunSource,
    faults: Sequence[Fault] | None = None,
    *,
    most: int = MOST,
    is_simplest: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> list[ShrunkFault]:
    """Shrink faults of a campaign, all at once: one step of every bisection is one batched pass.

    run: as `themis.run` returned it, or a run folder. faults: by default the `most` most telling ones. A fault that
    does not break the model when it is run again, for example on another machine, is left out. is_simplest: drop
    entire dimensions first, so that few remain, possibly at a larger strength than all of them together would need.
    on_progress: called with what is done now, the tests of it that are done, and how many these are at most.
    """
    if most < 1:
        raise UsageError(f"most must be 1 or more, got {most}: it is the number of faults to shrink")
    with ExitStack() as stack:
        if isinstance(run, str | Path):
            run = stack.enter_context(closing(Reader(run)))
        chosen = list(_most_telling(run, most) if faults is None else faults)
        if not chosen:
            return []
        seed_id = np.array([fault.seed_id for fault in chosen])
        bench = stack.enter_context(open_bench(run, seed_id, min(fault.chunk for fault in chosen), on_progress))
        theta = np.array([list(fault.theta.values()) for fault in chosen], dtype=np.float32)
        if [*chosen[0].theta] != [theta.name for theta in bench.theta]:
            raise UsageError(f"the faults must be of this run, got theta {', '.join(chosen[0].theta)}: pass its own")
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
) -> list[ShrunkFault]:
    """Shrink the tests that break the model. answer, id: if the tests are faults, their wrong outcomes and numbers."""
    if not len(rows):
        return []
    shrinker = _Shrinker(bench, rows, theta, noise_seed)
    first_answer = shrinker.best["answer"].copy() if answer is None else answer
    remaining = shrinker.try_identity()
    if is_simplest:
        shrinker.drop_dimensions(remaining, give=0.0)
        shrinker.weaken(remaining)
    else:
        shrinker.weaken(remaining)
        shrinker.weaken(shrinker.drop_dimensions(remaining, GIVE))
    shrinker.lower_dimensions(remaining)
    return [
        shrinker.result(k, theta[k], int(first_answer[k]), -1 if id is None else int(id[k]))
        for k in np.flatnonzero(shrinker.is_fault).tolist()
    ]


class _Shrinker:
    """Faults being shrunk: the smallest theta of each so far, and its outcome."""

    def __init__(self, bench: TestBench, rows: Ints, theta: Floats, noise_seed: Ints) -> None:
        self.bench, self.rows, self.noise_seed = bench, rows, noise_seed
        self.size = min(len(rows), bench.calculator.chunk)
        self.start = bench.settled(theta)
        self.theta = self.start.copy()
        self.weakest = bench.strength(self.theta)
        self.n_run = np.zeros(len(rows), dtype=np.int64)
        bench.begin("running tests", len(rows))
        self.best = self._run(np.arange(len(rows)), self.theta)
        self.is_fault = self.best["is_fault"].copy()

    def _run(self, at: Ints, theta: Floats) -> Outcomes:
        self.n_run[at] += 1
        return self.bench.run(self.rows[at], theta, self.noise_seed[at], self.size)

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
        self.bench.begin("trying the identity of theta", len(at))
        needs_more: Ints = at[~self.attempt(at, np.tile(self.bench.identity, (len(at), 1)))]
        return needs_more

    def weaken(self, at: Ints) -> None:
        """Bisect the overall strength: theta on the line from the identity."""
        self.bench.begin("bisecting the strength", STEPS * len(at))
        held, identity = self.theta.astype(np.float64), self.bench.identity.astype(np.float64)

        def theta_at(at: Ints, share: NDArray[np.float64]) -> Floats:
            return self.bench.settled(identity + share[:, None] * (held[at] - identity))

        self._bisect(at, theta_at)

    def drop_dimensions(self, at: Ints, give: float) -> Ints:
        """Reset each dimension to its identity if the others suffice, `give` stronger; return the faults that moved."""
        identity = self.bench.identity
        if len(identity) == 1:
            return at[:0]
        self.bench.begin("dropping dimensions of theta", len(identity) * len(at))
        most, grown = self.start - identity, (self.theta - identity) * (1 + give)
        base = self.bench.settled(identity + np.where(np.abs(grown) < np.abs(most), grown, most))
        has_moved = np.zeros(len(base), dtype=bool)
        for k in range(len(identity)):
            now = at[base[at, k] != identity[k]]
            without = base[now]
            without[:, k] = identity[k]
            is_enough = self.attempt(now, without)
            base[now[is_enough]] = without[is_enough]
            has_moved[now[is_enough]] = True
        moved: Ints = np.flatnonzero(has_moved)
        return moved

    def lower_dimensions(self, at: Ints) -> None:
        """Move each dimension towards its identity, the others held, until none moves."""
        if self.theta.shape[1] == 1:
            return
        n_dimensions = self.theta.shape[1]
        for sweep in range(MOST_SWEEPS):
            n_tests = (1 + STEPS) * n_dimensions * len(at)
            self.bench.begin(f"bisecting single dimensions, sweep {sweep + 1} of at most {MOST_SWEEPS}", n_tests)
            before = self.theta[at].copy()
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

        nudged = theta_at(at, np.full(len(at), 1 - NUDGE))
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
        for _ in range(STEPS):
            middle = (low + high) / 2
            theta = theta_at(at, middle)
            breaks = (theta == self.theta[at]).all(1)  # known, as are rounded values that were run before
            is_new = ~(breaks | (theta == passing).all(1))
            breaks[is_new] = self.attempt(at[is_new], theta[is_new])
            low, high = np.where(breaks, low, middle), np.where(breaks, middle, high)
            passing = np.where(breaks[:, None], passing, theta)

    def result(self, k: int, before: Floats, answer: int, id: int) -> ShrunkFault:
        bench, best = self.bench, self.best
        names = [theta.name for theta in bench.theta]
        is_back = (self.theta[k] == bench.identity) & (self.start[k] != bench.identity)
        ssim = float(best["ssim"][k])
        return ShrunkFault(
            id=id,
            seed_id=int(bench.seeds.seed_id[self.rows[k]]),
            noise_seed=int(self.noise_seed[k]),
            before=dict(zip(names, map(float, before), strict=True)),
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
    """Such as "12 of 200 drops are enough" or "sigma 0.031 instead of 0.2 is enough; angle is not needed"."""
    is_back = (after == bench.identity) if len(bench.theta) > 1 else np.array([False])
    idle = [theta.name for theta, back in zip(bench.theta, is_back, strict=True) if back]
    order = [k for k in np.argsort(-bench.shares(after), kind="stable").tolist() if not is_back[k]]
    needed = [
        _describe_change(bench.theta[k], float(before[k]), float(after[k]), bool(bench.is_whole[k])) for k in order
    ]
    if not needed:
        return "the identity of theta is enough: none of its dimensions is needed"
    is_count = needed[0][0].isdigit() or needed[0].startswith("all ")
    is_one = len(needed) == 1 and (not is_count or needed[0].startswith("1 of "))
    if len(needed) > NAMED:
        needed[NAMED:] = [f"{len(needed) - NAMED} more"]
    verb, extent = "is" if is_one else "are", "the smallest found" if (before == after).all() else "enough"
    text = f"{_join(needed)} {verb} {extent}"
    return f"{text}; {_join(idle)} {'is' if len(idle) == 1 else 'are'} not needed" if idle else text


def _describe_change(theta: Theta, before: float, after: float, is_whole: bool) -> str:
    was, now = (f"{before:.0f}", f"{after:.0f}") if is_whole else _format_apart(before, after)
    if theta.name == "count" or theta.name.endswith("_count"):
        return f"all {was} {theta.unit}" if now == was != "1" else f"{now} of {was} {theta.unit}"
    return f"{theta.name} {now}" if now == was else f"{theta.name} {now} instead of {was}"


def _format_apart(*values: float) -> list[str]:
    """Numbers with as many digits as are needed to tell them apart."""
    for digits in (3, 5, 9):
        words = [f"{value:.{digits}g}" for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _most_telling(run: Run | Reader | Replayer, n: int) -> list[Fault]:
    faults = run.faults if isinstance(run, Run) else read_faults(run)
    return faults.most_telling(n)


def read_faults(run: Reader | Replayer) -> Faults:
    """The distinct faults of a run folder."""
    return Selection(is_distinct=True).faults(run.run if isinstance(run, Replayer) else run)
