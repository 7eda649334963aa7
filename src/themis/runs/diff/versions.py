"""Comparing two versions of a model: the same tests on both, those that one of them failed and a new sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.compute import rng
from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError
from themis.judge.estimate import Estimate
from themis.judge.risk import fault_rate, mean_estimate, mean_p_value
from themis.measure.tests import Bools, Floats, Ints
from themis.runs.analysis.bench import Outcomes, TestBench, open_bench
from themis.runs.diff.result import (
    Diff,
    PairedClean,
    PairedStrength,
    PairedTests,
    ReplayedFaults,
    show_difference,
    show_p_value,
)
from themis.runs.diff.sides import Side, common_box
from themis.runs.estimates import N_PARTS
from themis.runs.fault import Fault
from themis.runs.faults import telling_score
from themis.search.policy import Numbers, Space
from themis.text import counted, percent

STREAM = 2
"""Random stream of the new tests: no campaign uses it, whatever its random seed."""
FOR_AGAIN = 101
"""Purpose of the random numbers for further noise."""
AGAIN = 8
"""Draws of other noise at a fault's seed and theta before the other model counts as free of this fault."""
MOST = 5000
"""Distinct faults per run that are replayed; of more, this many spread evenly over the campaign."""
STEP = 1000
"""Seeds whose inputs are compared at a time."""

Benches = tuple[TestBench, TestBench]
Box = tuple[Floats, Floats]


@dataclass(frozen=True)
class SharedSeeds:
    """Seeds that both runs tested: their ids, and their rows in each run."""

    seed_id: Ints
    first: Ints
    second: Ints

    def __getitem__(self, rows: Bools) -> SharedSeeds:
        return SharedSeeds(self.seed_id[rows], self.first[rows], self.second[rows])


def compare_versions(first: Side, second: Side, n_tests: int, random_seed: int, comparisons: int = 1) -> Diff:
    """Run the faults of both runs, and `n_tests` new tests, on both models.

    comparisons: how many pairs of runs are compared together, whose intervals shall hold together.
    """
    facts = (first.facts(), second.facts())
    for side in (first, second):
        side.check_model()
    box = common_box(first, second)
    with open_bench(first.source) as first_bench, open_bench(second.source) as second_bench:
        benches = (first_bench, second_bench)
        _check_oracles(first, second, benches)
        with _judged_alike(benches):
            shared = _shared_seeds(first, second, benches)
            is_correct = _are_correct(shared, benches)
            usable, clean = _usable_by_both(shared, is_correct), _compare_clean(is_correct, benches)
            paired = _run_paired(usable, benches, box, n_tests, random_seed, comparisons)
            if first.theta != second.theta:
                paired = replace(paired, by_strength=())  # it would be a share of the common range, not of theirs
            faults = (first.faults(), second.faults())
            gone = _replay_on_other(faults[0], faults[1], usable, benches, box)
            new = _replay_on_other(faults[1], faults[0], usable, benches, box, is_swapped=True)
        notes = [*_notes_of_benches(benches), *_notes_of_seeds(benches, shared, is_correct)]
    if first.theta != second.theta:
        ranges = ", ".join(
            f"{name} {low:g} to {high:g}" for (name, _, _), low, high in zip(first.theta, *box, strict=True)
        )
        notes.append(f"the ranges of theta differ: only their intersection was compared, {ranges}")
    notes += [*_notes_of_faults(first.name, gone), *_notes_of_faults(second.name, new)]
    if first.model == second.model and not (paired.only_before or paired.only_after or gone.gone or new.gone):
        notes.append("both models have the same weights and behave alike: compare the techniques instead")
    verdict, sentence = _judge(paired, clean)
    return Diff("versions", verdict, sentence, *facts, paired, gone, new, clean=clean, notes=tuple(notes))


def _notes_of_benches(benches: Benches) -> list[str]:
    first, second = (bench.calculator for bench in benches)
    notes = []
    if first.perturbation.passes:
        notes.append("an attack is computed separately for each model, from its own gradient")
    if first.clean.oracle.spec() != second.clean.oracle.spec():
        notes.append(f"both models were judged by the first run's oracle, {first.clean.oracle.spec()}")
    return notes


def _notes_of_seeds(benches: Benches, shared: SharedSeeds, is_correct: tuple[Bools, Bools]) -> list[str]:
    notes, (first, second) = [], is_correct
    n_only_first, n_only_second = int((first & ~second).sum()), int((second & ~first).sum())
    if n_only_first or n_only_second:
        notes.append(
            f"left out of the tests: {counted(n_only_first, 'seed')} answered correctly only by the model before, "
            f"{n_only_second:,} only by the model after"
        )
    n, n_shared = [len(bench.seeds) for bench in benches], len(shared.seed_id)
    if max(n) > n_shared:
        notes.append(f"of {n[0]:,} and {n[1]:,} seeds, the {n_shared:,} that both runs have were compared")
    return notes


def _notes_of_faults(name: str, replayed: ReplayedFaults) -> list[str]:
    counts = {
        "not reproduced by the model of that run": len(replayed.lost),
        "outside of what was compared": len(replayed.apart),
        "not replayed, because there are too many": replayed.left_out,
    }
    return [
        f"{counted(n, 'fault')} of {name} {'was' if n == 1 else 'were'} {reason}" for reason, n in counts.items() if n
    ]


def _check_oracles(first: Side, second: Side, benches: Benches) -> None:
    specs = [bench.calculator.clean.oracle.spec() for bench in benches]
    if specs[0].partition(":")[0] != specs[1].partition(":")[0]:
        raise UsageError(
            f"both runs must have the same kind of fault, but {first.name} has oracle {specs[0]!r} and {second.name} "
            f"has {specs[1]!r}: run one of them again with the other's oracle"
        )


def _judge(paired: PairedTests, clean: PairedClean | None) -> tuple[str, str]:
    """There is a difference if its interval excludes 0; a suite mentions its clean accuracy once, not per member."""
    verdict = {1: "worse", -1: "better", 0: "even"}[paired.difference.sign]
    text = "No difference that these tests can show" if verdict == "even" else f"The model after is {verdict}"
    together = "" if paired.comparisons == 1 else f" for all {paired.comparisons} comparisons together"
    sentence = (
        f"{text}: fault rate {percent(paired.after.value, 2)} after, {percent(paired.before.value, 2)} before on the "
        f"same {paired.tests:,} tests of {paired.seeds:,} seeds ({show_difference(paired.difference, together)}; "
        f"{show_p_value(paired.p_value)}, {paired.seeds_worse:,} seeds worse, {paired.seeds_better:,} better)."
    )
    if clean is not None and clean.difference.sign and paired.comparisons == 1:
        word = "better" if clean.difference.sign > 0 else "worse"
        sentence += f" On clean inputs, the model after is {word}: {clean.sentence()}."
    return verdict, sentence


@contextmanager
def _judged_alike(benches: Benches) -> Iterator[None]:
    """Judge both models by the first one's oracle, and by the stricter of the two similarity limits."""
    first, second = (bench.calculator for bench in benches)
    clean, limits = second.clean, (first.limits, second.limits)
    strictest = max((each.min_ssim for each in limits if each.min_ssim is not None), default=None)
    first.limits, second.limits = (replace(each, min_ssim=strictest) for each in limits)
    try:
        second.take_clean(clean.outputs, replace(first.clean.oracle, is_probability=clean.oracle.is_probability))
        yield
    finally:
        second.clean, (first.limits, second.limits) = clean, limits


def _shared_seeds(first: Side, second: Side, benches: Benches) -> SharedSeeds:
    """Seeds with the same number, input and label in both runs."""
    seeds = (benches[0].seeds, benches[1].seeds)
    seed_id, a, b = np.intersect1d(seeds[0].seed_id.numpy(), seeds[1].seed_id.numpy(), return_indices=True)
    shared = SharedSeeds(seed_id, a, b)
    if first.data != second.data:
        shared = shared[_are_equal(*seeds, a, b)]
    if not len(shared.seed_id):
        raise DataError(
            f"both runs must have tested some of the same inputs, but {first.name} and {second.name} share none of "
            f"{len(seeds[0]):,} and {len(seeds[1]):,}: run one of them again on the other's data"
        )
    return shared


def _are_equal(first: Seeds, second: Seeds, a: Ints, b: Ints) -> Bools:
    """Whether the rows `a` of the first seeds and `b` of the second have equal inputs and labels."""
    is_equal = np.zeros(len(a), dtype=bool)
    if first.shape[1:] != second.shape[1:]:
        return is_equal
    for start in range(0, len(a), STEP):
        at = slice(start, start + STEP)
        left, right = torch.from_numpy(a[at]), torch.from_numpy(b[at])
        same = (first.take(left) == second.take(right)).flatten(1).all(1)
        if first.labels is not None and second.labels is not None:
            same &= (first.labels[left] == second.labels[right]).reshape(len(left), -1).all(1)
        is_equal[at] = same.numpy()
    return is_equal


def _are_correct(shared: SharedSeeds, benches: Benches) -> tuple[Bools, Bools]:
    """Which of the seeds each model answers correctly without a disturbance."""
    return np.isin(shared.first, benches[0].usable()), np.isin(shared.second, benches[1].usable())


def _compare_clean(is_correct: tuple[Bools, Bools], benches: Benches) -> PairedClean | None:
    """The clean accuracy of both models; None without labels, when every answer counts as correct."""
    if any(bench.calculator.clean.labels is None for bench in benches):
        return None
    before, after = (each.astype(np.int64) for each in is_correct)
    rates = paired_rates(np.ones_like(before), before, after)
    return PairedClean(len(before), rates.before, rates.after, rates.difference, rates.p_value)


def _usable_by_both(shared: SharedSeeds, is_correct: tuple[Bools, Bools]) -> SharedSeeds:
    """The seeds that both models answer correctly."""
    first, second = is_correct
    if not (first & second).any():
        raise DataError(
            "both models must answer at least one seed correctly, but they have none in common: check the "
            "preprocessing and the labels"
        )
    return shared[first & second]


def _run_paired(
    shared: SharedSeeds, benches: Benches, box: Box, n: int, random_seed: int, comparisons: int
) -> PairedTests:
    """Draw n tests, every seed once before any twice, and run them on both models."""
    perturbation = benches[0].calculator.perturbation
    rows = np.arange(len(shared.seed_id))
    space = Space.of(perturbation, rows, shared.seed_id, np.zeros(len(rows), np.float32), random_seed)
    space = replace(space, low=box[0], high=box[1])
    number, position = np.arange(n), space.cycle(0, n)
    tests = space.tests(number, position, space.uniform_theta(STREAM, number), "uniform")
    outcomes = [
        _run_tests(bench, seed_rows[position], tests.theta, tests.noise_seed, benches)
        for bench, seed_rows in zip(benches, (shared.first, shared.second), strict=True)
    ]
    was_run = ~(_is_dropped(outcomes[0], benches[0]) | _is_dropped(outcomes[1], benches[1]))
    if not was_run.any():
        raise DataError(
            "at least one test must be similar enough to its seed, but none is: lower min_ssim or the magnitude"
        )
    before, after = (model["is_fault"] & was_run for model in outcomes)
    tested, failed_before, failed_after = (_by_seed(position, mask, len(rows)) for mask in (was_run, before, after))
    is_tested = tested > 0
    worse, better = int((failed_after > failed_before).sum()), int((failed_after < failed_before).sum())
    rates = paired_rates(tested[is_tested], failed_before[is_tested], failed_after[is_tested], comparisons)
    return PairedTests(
        int(is_tested.sum()),
        int(was_run.sum()),
        int((~was_run).sum()),
        int((before & after).sum()),
        int((before & ~after).sum()),
        int((after & ~before).sum()),
        int((was_run & ~before & ~after).sum()),
        better,
        worse,
        rates.p_value,
        rates.before,
        rates.after,
        rates.difference,
        comparisons,
        _by_strength(benches[0].strength(tests.theta), position, was_run, before, after),
    )


def _by_strength(
    strength: Numbers, position: Ints, was_run: Bools, before: Bools, after: Bools
) -> tuple[PairedStrength, ...]:
    """The share of correct answers of both models in equal parts of the strength."""
    parts, part = [], np.minimum((strength * N_PARTS).astype(np.int64), N_PARTS - 1)
    for k in range(N_PARTS):
        is_inside, n = was_run & (part == k), int(position.max()) + 1
        tests, *failed = (_by_seed(position, is_inside & mask, n) for mask in (was_run, before, after))
        rates = [fault_rate(tests, tests - faults) for faults in failed]
        if rates[0] is not None and rates[1] is not None:
            parts.append(PairedStrength(k / N_PARTS, (k + 1) / N_PARTS, int(is_inside.sum()), rates[0], rates[1]))
    return tuple(parts)


def _run_tests(bench: TestBench, rows: Ints, theta: Floats, noise_seed: Ints, benches: Benches) -> Outcomes:
    """Run tests in chunks of a shape that both benches support."""
    with torch.no_grad():
        return bench.run(rows, theta, noise_seed, min(bench.calculator.chunk for bench in benches))


def _replay_on_other(
    own: Sequence[Fault],
    others: Sequence[Fault],
    shared: SharedSeeds,
    benches: Benches,
    box: Box,
    *,
    is_swapped: bool = False,
) -> ReplayedFaults:
    """How a run's faults fare on the other model; `is_swapped`: they are the second run's."""
    left_out = max(0, len(own) - MOST)
    if left_out:
        own = [own[k] for k in np.linspace(0, len(own) - 1, MOST).round().astype(int).tolist()]
    theta = _theta(own, benches[0])
    seed_id, noise_seed, id = (_column(own, name) for name in ("seed_id", "noise_seed", "id"))
    is_shared = np.isin(seed_id, shared.seed_id) & ((theta >= box[0]) & (theta <= box[1])).all(1)
    apart = id[~is_shared]
    at = np.flatnonzero(is_shared)
    if not len(at):
        return ReplayedFaults(apart=_ids(apart), left_out=left_out)
    place = np.searchsorted(shared.seed_id, seed_id)
    rows = (shared.second, shared.first) if is_swapped else (shared.first, shared.second)
    own_bench, other_bench = (benches[1], benches[0]) if is_swapped else benches
    is_reproduced = _run_tests(own_bench, rows[0][place[at]], theta[at], noise_seed[at], benches)["is_fault"]
    lost, at = at[~is_reproduced], at[is_reproduced]
    if not len(at):
        return ReplayedFaults(lost=_ids(id[lost]), apart=_ids(apart), left_out=left_out)
    breaks = _run_tests(other_bench, rows[1][place[at]], theta[at], noise_seed[at], benches)["is_fault"]
    still, at = at[breaks], at[~breaks]
    is_near = _breaks_with_other_noise(other_bench, rows[1][place[at]], theta[at], noise_seed[at], benches)
    is_near |= _has_weaker(seed_id[at], theta[at], others, benches[0])
    gone = at[~is_near]
    shown = sorted((own[k] for k in gone.tolist()), key=telling_score)
    return ReplayedFaults(
        gone=_ids(id[gone]),
        moved=_ids(id[at[is_near]]),
        still=_ids(id[still]),
        lost=_ids(id[lost]),
        apart=_ids(apart),
        left_out=left_out,
        shown=tuple(shown),
    )


def _breaks_with_other_noise(bench: TestBench, rows: Ints, theta: Floats, noise_seed: Ints, benches: Benches) -> Bools:
    """Which tests break the model with other noise."""
    breaks = np.zeros(len(rows), dtype=bool)
    if not bench.calculator.perturbation.is_random:
        return breaks
    for turn in range(AGAIN):
        at = np.flatnonzero(~breaks)
        if len(at):
            noise = rng.mix(FOR_AGAIN, turn, noise_seed[at])
            breaks[at] = _run_tests(bench, rows[at], theta[at], noise, benches)["is_fault"]
    return breaks


def _has_weaker(seed_id: Ints, theta: Floats, others: Sequence[Fault], bench: TestBench) -> Bools:
    """For which tests the other run has a fault of the same seed that is not stronger."""
    weakest: dict[int, float] = {}
    other_theta = _theta(others, bench)
    for fault, strength in zip(others, bench.strength(other_theta).tolist() if others else (), strict=True):
        weakest[fault.seed_id] = min(strength, weakest.get(fault.seed_id, np.inf))
    strengths = bench.strength(theta) if len(theta) else np.zeros(0)
    pairs = zip(seed_id.tolist(), strengths.tolist(), strict=True)
    return np.array([weakest.get(seed, np.inf) <= strength for seed, strength in pairs], dtype=bool)


def _theta(faults: Sequence[Fault], bench: TestBench) -> Floats:
    rows = [list(fault.theta.values()) for fault in faults]
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(bench.theta))


def _column(faults: Sequence[Fault], name: str) -> Ints:
    return np.array([getattr(fault, name) for fault in faults], dtype=np.int64)


def _is_dropped(outcomes: Outcomes, bench: TestBench) -> Bools:
    least = bench.calculator.limits.min_ssim
    return np.zeros(len(outcomes["ssim"]), dtype=bool) if least is None else outcomes["ssim"] < least


def _by_seed(position: Ints, is_counted: Bools, n: int) -> Ints:
    return np.bincount(position[is_counted], minlength=n).astype(np.int64)


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(sorted(map(int, values)))


Counts = NDArray[np.int64]
LEVEL = 0.05
"""A difference counts if chance alone would produce one at least as large less often than this."""


def mcnemar(n_first: int, n_second: int) -> float:
    """McNemar's exact test, two-sided: the probability of splitting the discordant pairs at least as unevenly."""
    from scipy.special import bdtr

    n = n_first + n_second
    return 1.0 if n == 0 else float(min(1.0, 2 * bdtr(min(n_first, n_second), n, 0.5)))


@dataclass(frozen=True)
class PairedRates:
    """Two rates over the same seeds, and their difference; the p value and the interval are those of one test."""

    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before."""
    p_value: float


def paired_rates(tests: Counts, before: Counts, after: Counts, comparisons: int = 1) -> PairedRates:
    """The rates before and after, and the test of their difference, from tests and faults per seed of the same tests.

    The difference is tested as the mean of the seeds' own differences, which lie in -1..1, with Gaffke's limits: tests
    of one seed may be dependent. With one test per seed, this is McNemar's exact test. If no seed differs, the interval
    is not empty: the share that differs may be as large as Clopper and Pearson's limit of 0 among n.

    comparisons: how many differences are tested together. Their intervals hold together with 95% (Bonferroni), and p
    values are multiplied by this number.
    """
    rate_before, rate_after = (mean_estimate(faults / tests) for faults in (before, after))
    shares = (tests + after - before) / (2 * tests)  # (1 + difference) / 2
    share = mean_estimate(shares, LEVEL / 2 / comparisons)
    value = rate_after.value - rate_before.value
    low, high = (2 * limit - 1 for limit in (share.low, share.high))
    p_value = min(1.0, comparisons * mean_p_value(shares, 0.5))
    return PairedRates(rate_before, rate_after, Estimate(value, min(value, low), max(value, high)), p_value)
