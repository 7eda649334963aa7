"""The same tests on both models: those that one of them failed, and a sample drawn anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from themis.compute import rng
from themis.errors import DataError
from themis.judge.estimate import Estimate
from themis.measure.tests import Bools, Floats, Ints
from themis.runs.analysis.bench import TestBench, TestOutcomes
from themis.runs.diff.sides import Common
from themis.runs.diff.statistics import mcnemar, rates
from themis.runs.faults import Fault
from themis.search.policy import Space

STREAM = 2
"""Of the drawn tests: they are none of a campaign's own, whatever the random seed."""
FOR_AGAIN = 101
"""What the random numbers of further noise are for."""
AGAIN = 8
"""Draws of other noise at a fault's seed and theta before it counts as one that the other model does not have."""
MOST = 5000
"""Distinct faults of a run that are replayed; of more, as many spread evenly over the campaign."""


@dataclass(frozen=True)
class Paired:
    """Tests drawn uniformly from what both runs share, run on both models. Counts are tests unless they say seeds."""

    seeds: int
    tests: int
    dropped: int
    """Drawn, but no longer the same picture."""
    both: int
    only_before: int
    """Faults of the model before that the one after does not have."""
    only_after: int
    neither: int
    seeds_better: int
    """Seeds with fewer faults after than before."""
    seeds_worse: int
    p_value: float
    """McNemar's, exact, over seeds: tests of one seed are alike and count together."""
    before: Estimate
    """Fault rate."""
    after: Estimate
    difference: Estimate
    """After less before, with Newcombe's interval."""


@dataclass(frozen=True)
class Replayed:
    """What became of a run's distinct faults when the other run's model was given the same tests; ids by kind."""

    gone: tuple[int, ...] = ()
    """The other model stands: on this test, with other noise too, and no weaker fault of the seed is known of it."""
    moved: tuple[int, ...] = ()
    """It stands on this very test, but breaks near it: other noise, or a weaker fault of the same seed."""
    still: tuple[int, ...] = ()
    """It breaks as well."""
    lost: tuple[int, ...] = ()
    """Broke not even their own model when they were run again."""
    apart: tuple[int, ...] = ()
    """Of a seed, or a theta, that the runs do not share; or of a seed that one model answers wrongly as it is."""
    left_out: int = 0
    """More than can be replayed in reasonable time."""
    shown: tuple[Fault, ...] = field(default=(), repr=False)
    """Those that are gone, the most telling first."""

    @property
    def n(self) -> int:
        """Faults that could be compared."""
        return len(self.gone) + len(self.moved) + len(self.still)


@contextmanager
def judged_alike(benches: tuple[TestBench, TestBench]) -> Iterator[None]:
    """Both models judged by the first one's oracle, and by the stricter rule of what is still the same picture."""
    first, second = (bench.calculator for bench in benches)
    kept = (second.oracle, second.clean_outputs, second.reference)
    ssims = (first.min_ssim, second.min_ssim)
    strict = max((each for each in ssims if each is not None), default=None)
    second.oracle = replace(first.oracle, is_probability=second.oracle.is_probability)
    first.min_ssim = second.min_ssim = strict
    try:
        second.take_clean(second.clean_outputs)
        yield
    finally:
        second.oracle, second.clean_outputs, second.reference = kept
        first.min_ssim, second.min_ssim = ssims


def right_on_both(common: Common, benches: tuple[TestBench, TestBench]) -> tuple[Common, int, int]:
    """Of the common seeds those that both models answer rightly; and how many only the first, and only the second."""
    one, other = (
        np.isin(rows, bench.usable()) for rows, bench in zip((common.one, common.other), benches, strict=True)
    )
    if not (one & other).any():
        raise DataError(
            "both models must answer some seed rightly, they share none that they do: check preprocessing and labels"
        )
    return common[one & other], int((one & ~other).sum()), int((other & ~one).sum())


def run_paired(
    common: Common, benches: tuple[TestBench, TestBench], box: tuple[Floats, Floats], n: int, random_seed: int
) -> Paired:
    """Draw n tests, every seed once before any twice, and run them on both models."""
    perturbation = benches[0].calculator.perturbation
    rows = np.arange(len(common.seed_id))
    space = Space.of(perturbation, rows, common.seed_id, np.zeros(len(rows), np.float32), random_seed)
    space = replace(space, low=box[0], high=box[1])
    number, position = np.arange(n), space.cycle(0, n)
    tests = space.tests(number, position, space.uniform_theta(STREAM, number), "uniform")
    ran = [
        run_tests(bench, at[position], tests.theta, tests.noise_seed, benches)
        for bench, at in zip(benches, (common.one, common.other), strict=True)
    ]
    was_run = ~(_is_dropped(ran[0], benches[0]) | _is_dropped(ran[1], benches[1]))
    if not was_run.any():
        raise DataError("some drawn test must still be the same picture, none is: lower min_ssim or the magnitude")
    before, after = (each.is_fault & was_run for each in ran)
    tested, failed, fails = (_by_seed(position, each, len(rows)) for each in (was_run, before, after))
    is_tested = tested > 0
    worse, better = int((fails > failed).sum()), int((fails < failed).sum())
    return Paired(
        int(is_tested.sum()),
        int(was_run.sum()),
        int((~was_run).sum()),
        int((before & after).sum()),
        int((before & ~after).sum()),
        int((after & ~before).sum()),
        int((was_run & ~before & ~after).sum()),
        better,
        worse,
        mcnemar(worse, better),
        *rates(tested[is_tested], failed[is_tested], fails[is_tested]),
    )


def run_tests(
    bench: TestBench, rows: Ints, theta: Floats, noise_seed: Ints, benches: tuple[TestBench, TestBench] | None = None
) -> TestOutcomes:
    """Run tests at a shape that both benches can take."""
    size = None if benches is None else min(each.calculator.chunk for each in benches)
    with torch.no_grad():
        return bench.run(rows, theta, noise_seed, size)


def replay_on_other(
    own: Sequence[Fault],
    others: Sequence[Fault],
    common: Common,
    benches: tuple[TestBench, TestBench],
    box: tuple[Floats, Floats],
    *,
    is_swapped: bool = False,
) -> Replayed:
    """What becomes of a run's faults on the other model; `is_swapped`: they are the second run's."""
    left_out = max(0, len(own) - MOST)
    if left_out:
        own = [own[k] for k in np.linspace(0, len(own) - 1, MOST).round().astype(int).tolist()]
    theta = _theta(own, benches[0])
    seed_id, noise_seed, id = (_column(own, name) for name in ("seed_id", "noise_seed", "id"))
    is_shared = np.isin(seed_id, common.seed_id) & ((theta >= box[0]) & (theta <= box[1])).all(1)
    apart = id[~is_shared]
    at = np.flatnonzero(is_shared)
    if not len(at):
        return Replayed(apart=_ids(apart), left_out=left_out)
    place = np.searchsorted(common.seed_id, seed_id)
    rows = (common.other, common.one) if is_swapped else (common.one, common.other)
    mine, theirs = (benches[1], benches[0]) if is_swapped else benches
    shows = run_tests(mine, rows[0][place[at]], theta[at], noise_seed[at], benches).is_fault
    lost, at = at[~shows], at[shows]
    if not len(at):
        return Replayed(lost=_ids(id[lost]), apart=_ids(apart), left_out=left_out)
    breaks = run_tests(theirs, rows[1][place[at]], theta[at], noise_seed[at], benches).is_fault
    still, at = at[breaks], at[~breaks]
    near = _breaks_near(theirs, rows[1][place[at]], theta[at], noise_seed[at], benches)
    near |= _has_weaker(seed_id[at], theta[at], others, benches[0])
    gone = at[~near]
    telling = sorted((own[k] for k in gone.tolist()), key=_how_telling)
    gone_ids, moved, found, missing = (_ids(id[each]) for each in (gone, at[near], still, lost))
    return Replayed(gone_ids, moved, found, missing, _ids(apart), left_out, tuple(telling))


def _breaks_near(
    bench: TestBench, rows: Ints, theta: Floats, noise_seed: Ints, benches: tuple[TestBench, TestBench]
) -> Bools:
    """Which tests break the model with other noise."""
    broke = np.zeros(len(rows), dtype=bool)
    if not bench.calculator.perturbation.is_random:
        return broke
    for turn in range(AGAIN):
        at = np.flatnonzero(~broke)
        if len(at):
            noise = rng.mix(FOR_AGAIN, turn, noise_seed[at])
            broke[at] = run_tests(bench, rows[at], theta[at], noise, benches).is_fault
    return broke


def _has_weaker(seed_id: Ints, theta: Floats, others: Sequence[Fault], bench: TestBench) -> Bools:
    """Which tests the other run has a fault to, of the same seed and no stronger."""
    weakest: dict[int, float] = {}
    known = _theta(others, bench)
    for fault, strength in zip(others, bench.strength(known).tolist() if others else (), strict=True):
        weakest[fault.seed_id] = min(strength, weakest.get(fault.seed_id, np.inf))
    strengths = bench.strength(theta) if len(theta) else np.zeros(0)
    return np.array(
        [weakest.get(each, np.inf) <= own for each, own in zip(seed_id.tolist(), strengths.tolist(), strict=True)],
        dtype=bool,
    )


def _theta(faults: Sequence[Fault], bench: TestBench) -> Floats:
    rows = [list(fault.theta.values()) for fault in faults]
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(bench.theta))


def _column(faults: Sequence[Fault], name: str) -> Ints:
    return np.array([getattr(fault, name) for fault in faults], dtype=np.int64)


def _is_dropped(ran: TestOutcomes, bench: TestBench) -> Bools:
    least = bench.calculator.min_ssim
    return np.zeros(len(ran.ssim), dtype=bool) if least is None else ran.ssim < least


def _by_seed(position: Ints, which: Bools, n: int) -> Ints:
    return np.bincount(position[which], minlength=n).astype(np.int64)


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(sorted(map(int, values)))


def _how_telling(fault: Fault) -> float:
    from themis.runs.faults import telling

    return float(telling(np.array(fault.distance), np.array(fault.confidence)))
