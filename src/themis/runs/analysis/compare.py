"""Comparing two runs: versions of a model by the same tests on both, or techniques by the faults that each found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from themis.compute import rng
from themis.data.seeds import Seeds
from themis.errors import DataError, ModelError, UsageError
from themis.judge.estimate import Estimate
from themis.judge.risk import mean_estimate, mean_p_value
from themis.measure.tests import Bools, Floats, Ints
from themis.runs.analysis import diff
from themis.runs.analysis.bench import Outcomes, TestBench, open_bench
from themis.runs.fault import Fault
from themis.runs.faults import telling_score
from themis.runs.run import Run
from themis.search.policy import Space
from themis.settings import policy_name
from themis.text import counted, percent

N_NEW_TESTS = 2000
"""New tests that are drawn and run on both models, by default."""
DIFF_KINDS = ("auto", "versions", "techniques")
MODEL_REMEDY = "pass themis.open_run(folder, target, data) instead of the folder"


@dataclass(frozen=True)
class DiffOptions:
    """How two runs are compared, see `themis.diff`."""

    kind: str = "auto"
    tests: int = N_NEW_TESTS
    random_seed: int = 0
    comparisons: int = 1
    """How many pairs of runs are compared together; verdicts and intervals are corrected for it."""

    def __post_init__(self) -> None:
        if self.kind not in DIFF_KINDS:
            raise UsageError(f"kind must be one of {', '.join(DIFF_KINDS)}, got {self.kind!r}")
        if self.tests < 1:
            raise UsageError(f"tests must be 1 or more, got {self.tests}: it is the number of new tests")


class Side:
    """One of two runs that are compared.

    name: what to call a run without a folder. remedy: what errors advise if its model is not the one that was tested.
    """

    def __init__(self, run: Run, name: str = "the run", remedy: str = MODEL_REMEDY) -> None:
        self.run, self.name, self.remedy = run, str(run.folder or name), remedy
        self.tested, self.perturbation = run.handle.tested, run.start.perturbation
        self.theta = [(theta.name, theta.low, theta.high) for theta in run.start.theta]

    def facts(self) -> dict[str, Any]:
        """What the campaign achieved."""
        last = self.run.rounds[-1]
        counts = ("tests", "passes", "seconds", "faults", "distinct_faults", "failing_seeds")
        return {
            "run": self.name,
            "policy": policy_name(self.run.start.settings.policy),
            "perturbation": self.perturbation,
            "model_sha256": self.tested.model,
            **{name: getattr(last, name) for name in counts},
            "coverage": last.coverage.sampled,
        }

    def has_same_model(self, other: Side) -> bool:
        """Whether both runs tested one model: with the same hash and, if both record it, created in the same way."""
        recipes = (self._recipe(), other._recipe())
        return self.tested.model == other.tested.model and (None in recipes or recipes[0] == recipes[1])

    def _recipe(self) -> dict[str, Any] | None:
        """How the model is created, except for its weights, which have a hash; None if the run does not record it."""
        origin = self.run.handle.origin
        if origin is None:
            return None
        names = ("model", "zoo", "bounds", "mean", "std", "oracle")
        folder = os.path.realpath(origin.folder) if origin.folder and ":" in origin.model else None
        return {**{name: getattr(origin, name) for name in names}, "folder": folder}

    def check_model(self) -> None:
        """Create target, data and perturbation of a stored run; refuse a model that is not the one that was tested."""
        handle = self.run.handle
        with nullcontext() if handle.origin is None else handle.origin.imported_anew():
            fingerprint = handle.target.fingerprint()
            _ = handle.seeds, handle.perturbation
        if fingerprint != self.tested.model:
            raise ModelError(
                f"the model of {self.name} must be the same as in the run, but its hash is {fingerprint[:12]}... and "
                f"was {self.tested.model[:12]}...: {self.remedy}"
            )


def diff_runs(first: Side, second: Side, options: DiffOptions) -> diff.Diff:
    """Compare two runs, as `themis.diff` does."""
    check_perturbations(first, second)
    if options.kind == "techniques" and first.tested.model != second.tested.model:
        raise UsageError("two techniques must have tested the same model, but the hashes differ: compare versions")
    if options.kind == "techniques" or (options.kind == "auto" and first.has_same_model(second)):
        return compare_techniques(first, second, options.comparisons)
    return compare_versions(first, second, options.tests, options.random_seed, options.comparisons)


def check_perturbations(first: Side, second: Side) -> None:
    """Refuse runs with different perturbations, or whose ranges of theta do not overlap."""
    names = [[name for name, _, _ in side.theta] for side in (first, second)]
    if names[0] != names[1] or first.tested.perturbation != second.tested.perturbation:
        raise UsageError(
            f"both runs must have the same perturbation, but {first.name} has {first.perturbation!r} and {second.name} "
            f"has {second.perturbation!r}: run one of them again with the other's perturbation"
        )
    low, high = common_box(first, second)
    disjoint = [name for name, a, b in zip(names[0], low, high, strict=True) if a > b]
    if disjoint:
        raise UsageError(
            f"both runs must have theta in common, but their ranges of {disjoint[0]} do not overlap: run one of them "
            "again with the other's magnitude"
        )


def common_box(first: Side, second: Side) -> tuple[Floats, Floats]:
    """The bounds of the theta that both campaigns could have drawn."""
    low, high = (
        np.array([[theta[k] for theta in side.theta] for side in (first, second)], dtype=np.float32) for k in (1, 2)
    )
    return low.max(0), high.min(0)


TECHNIQUE_SIGNIFICANCE = 0.02
"""The p value below which techniques differ. A search that is lucky on one seed moves on to similar seeds, so at 0.05
one in twelve pairs of runs of the same policy would differ; at this level it is one in twenty."""
BUDGET_TOLERANCE = 0.05
"""Relative difference up to which two budgets count as equal."""
TECHNIQUE_VERDICTS = {
    "even": "no difference that the seeds can show",
    "more": "the second broke more",
    "fewer": "the first broke more",
}


def compare_techniques(first: Side, second: Side, comparisons: int = 1) -> diff.Diff:
    """Compare the distinct faults and the failing seeds of two runs; corrects for `comparisons` made together."""
    if first.tested.data != second.tested.data:
        raise DataError(
            f"two techniques need the same data, but {first.name} and {second.name} differ: run one of them again"
        )
    faults_first, faults_second = (
        {(fault.seed_id, fault.answer) for fault in side.run.faults} for side in (first, second)
    )
    seeds_first, seeds_second = ({seed for seed, _ in faults} for faults in (faults_first, faults_second))
    only_first, only_second = len(seeds_first - seeds_second), len(seeds_second - seeds_first)
    overlap = diff.Overlap(
        len(faults_first & faults_second),
        len(faults_first - faults_second),
        len(faults_second - faults_first),
        len(seeds_first & seeds_second),
        only_first,
        only_second,
        mcnemar(only_first, only_second),
    )
    level = TECHNIQUE_SIGNIFICANCE / comparisons
    has_difference = overlap.p_value < level
    verdict = "even" if not has_difference else "more" if only_second > only_first else "fewer"
    limit = "" if has_difference else f", and a difference takes less than {level:.2g}"
    a, b = first.facts(), second.facts()
    sentence = (
        f"{first.name} ({a['policy']}) broke {len(seeds_first):,} seeds with {a['passes']:,} passes, {second.name} "
        f"({b['policy']}) {len(seeds_second):,} with {b['passes']:,}: {TECHNIQUE_VERDICTS[verdict]} "
        f"(McNemar p = {overlap.p_value:.2g}{limit})."
    )
    notes = []
    if abs(a["passes"] - b["passes"]) > BUDGET_TOLERANCE * max(a["passes"], b["passes"]):
        notes.append("the budgets differ: more passes find more faults")
    if first.theta != second.theta:
        notes.append("the ranges of theta differ: the wider range breaks more seeds")
    return diff.Diff("techniques", verdict, sentence, a, b, overlap=overlap, notes=tuple(notes))


def mcnemar(n_first: int, n_second: int) -> float:
    """McNemar's exact test, two-sided: the probability of splitting the discordant pairs at least as unevenly."""
    from scipy.stats import binomtest  # slow to import, and few commands need it

    n = n_first + n_second
    return float(binomtest(n_first, n).pvalue) if n else 1.0


NEW_TESTS_STREAM = 2
"""The random stream of the new tests, which no campaign uses."""
FOR_NEW_NOISE = 101
"""The purpose of the random numbers that give a fault new noise."""
NOISE_DRAWS = 8
"""Draws of new noise at a fault's seed and theta before the other model counts as free of this fault."""
MAX_REPLAYED = 5000
"""Distinct faults per run that are replayed; of more faults, this many spread evenly over the campaign."""
SEEDS_AT_ONCE = 1000

Box = tuple[Floats, Floats]


@dataclass(frozen=True)
class Model:
    """One of the two models; the seeds that are compared have the same order in both."""

    bench: TestBench
    rows: Ints
    """The rows of the compared seeds in the bench."""
    is_correct: Bools
    """Which of these seeds the model answers correctly without a disturbance."""
    size: int
    """Tests per forward pass that both benches support."""

    def __getitem__(self, is_chosen: Bools) -> Model:
        return replace(self, rows=self.rows[is_chosen], is_correct=self.is_correct[is_chosen])

    @property
    def seed_id(self) -> Ints:
        return np.asarray(self.bench.seeds.seed_id.numpy()[self.rows])

    def run(self, place: Ints, theta: Floats, noise_seed: Ints) -> Outcomes:
        """Run tests of the seeds at these positions in `rows`."""
        with torch.no_grad():
            return self.bench.run(self.rows[place], theta, noise_seed, self.size)


Models = tuple[Model, Model]


def compare_versions(first: Side, second: Side, n_tests: int, random_seed: int, comparisons: int = 1) -> diff.Diff:
    """Run the faults of both runs and `n_tests` new tests on both models; corrects for `comparisons` made together."""
    facts = (first.facts(), second.facts())
    for side in (first, second):
        side.check_model()
    box = common_box(first, second)
    with open_bench(first.run) as first_bench, open_bench(second.run) as second_bench:
        benches = (first_bench, second_bench)
        specs = [bench.calculator.clean.oracle.spec() for bench in benches]
        if specs[0].partition(":")[0] != specs[1].partition(":")[0]:
            raise UsageError(
                f"both runs must have the same kind of fault, but {first.name} has oracle {specs[0]!r} and "
                f"{second.name} has {specs[1]!r}: run one of them again with the other's oracle"
            )
        with _judged_alike(benches):
            shared = _share_seeds(first, second, benches)
            usable = _usable_by_both(shared)
            paired = _run_paired(usable, box, n_tests, random_seed, comparisons)
            faults = (first.run.faults.distinct(), second.run.faults.distinct())
            gone = _replay_on_other(faults[0], faults[1], *usable, box)
            new = _replay_on_other(faults[1], faults[0], usable[1], usable[0], box)
        clean = _compare_clean(shared)
        notes = _notes_of_models(shared)
    if first.theta != second.theta:
        ranges = ", ".join(
            f"{name} {low:g} to {high:g}" for (name, _, _), low, high in zip(first.theta, *box, strict=True)
        )
        notes.append(f"the ranges of theta differ: only their intersection was compared, {ranges}")
    notes += [*_notes_of_faults(first.name, gone), *_notes_of_faults(second.name, new)]
    if first.tested.model == second.tested.model and not (
        paired.only_before or paired.only_after or gone.gone or new.gone
    ):
        notes.append("both models have the same weights and behave alike: compare the techniques instead")
    verdict, sentence = _judge(paired, clean)
    return diff.Diff("versions", verdict, sentence, *facts, paired, gone, new, clean=clean, notes=tuple(notes))


def _notes_of_models(shared: Models) -> list[str]:
    first, second = (model.bench.calculator for model in shared)
    notes = []
    if first.perturbation.passes:
        notes.append("an attack is computed separately for each model, from its own gradient")
    if first.clean.oracle.spec() != second.clean.oracle.spec():
        notes.append(f"both models were judged by the first run's oracle, {first.clean.oracle.spec()}")
    by_first, by_second = (model.is_correct for model in shared)
    n_only_first, n_only_second = int((by_first & ~by_second).sum()), int((by_second & ~by_first).sum())
    if n_only_first or n_only_second:
        notes.append(
            f"left out of the tests: {counted(n_only_first, 'seed')} answered correctly only by the model before, "
            f"{n_only_second:,} only by the model after"
        )
    n, n_shared = [len(model.bench.seeds) for model in shared], len(shared[0].rows)
    if max(n) > n_shared:
        notes.append(f"of {n[0]:,} and {n[1]:,} seeds, the {n_shared:,} that both runs have were compared")
    return notes


def _notes_of_faults(name: str, replayed: diff.ReplayedFaults) -> list[str]:
    counts = {
        "not reproduced by the model of that run": len(replayed.lost),
        "outside of what was compared": len(replayed.apart),
        "not replayed, because there are too many": replayed.left_out,
    }
    return [
        f"{counted(n, 'fault')} of {name} {'was' if n == 1 else 'were'} {reason}" for reason, n in counts.items() if n
    ]


def _judge(paired: diff.PairedTests, clean: diff.PairedClean | None) -> tuple[str, str]:
    """The verdict and a sentence. The models differ if the interval of the difference excludes 0.

    Clean accuracy is left to a suite, which mentions it once for all its members.
    """
    verdict = {1: "worse", -1: "better", 0: "even"}[paired.difference.sign]
    text = "No difference that these tests can show" if verdict == "even" else f"The model after is {verdict}"
    together = "" if paired.comparisons == 1 else f" for all {paired.comparisons} comparisons together"
    sentence = (
        f"{text}: fault rate {percent(paired.after.value, 2)} after, {percent(paired.before.value, 2)} before on the "
        f"same {paired.tests:,} tests of {paired.seeds:,} seeds ({diff.show_difference(paired.difference, together)}; "
        f"{diff.show_p_value(paired.p_value)}, {paired.seeds_worse:,} seeds worse, {paired.seeds_better:,} better)."
    )
    if clean is not None and clean.difference.sign and paired.comparisons == 1:
        word = "better" if clean.difference.sign > 0 else "worse"
        sentence += f" On clean inputs, the model after is {word}: {clean.sentence()}."
    return verdict, sentence


@contextmanager
def _judged_alike(benches: tuple[TestBench, TestBench]) -> Iterator[None]:
    """Judge both models by the first one's oracle, and by the stricter of the two similarity limits."""
    first, second = (bench.calculator for bench in benches)
    clean, limits = second.clean, (first.limits, second.limits)
    names = {name for each in limits for name in each.least}
    strictest = {name: max(each.least.get(name, 0) for each in limits) for name in names}
    first.limits, second.limits = (replace(each, least=strictest) for each in limits)
    try:
        second.take_clean(clean.outputs, replace(first.clean.oracle, is_probability=clean.oracle.is_probability))
        yield
    finally:
        second.clean, (first.limits, second.limits) = clean, limits


def _share_seeds(first: Side, second: Side, benches: tuple[TestBench, TestBench]) -> Models:
    """The models, restricted to the seeds with the same id, input and label in both runs."""
    seeds = (benches[0].seeds, benches[1].seeds)
    _, a, b = np.intersect1d(seeds[0].seed_id.numpy(), seeds[1].seed_id.numpy(), return_indices=True)
    if first.tested.data != second.tested.data:
        is_equal = _are_equal(*seeds, a, b)
        a, b = a[is_equal], b[is_equal]
    if not len(a):
        raise DataError(
            f"both runs must have tested some of the same inputs, but {first.name} and {second.name} share none of "
            f"{len(seeds[0]):,} and {len(seeds[1]):,}: run one of them again on the other's data"
        )
    size = min(bench.calculator.chunk for bench in benches)
    first_model, second_model = (
        Model(bench, rows, np.isin(rows, bench.usable()), size) for bench, rows in zip(benches, (a, b), strict=True)
    )
    return first_model, second_model


def _are_equal(first: Seeds, second: Seeds, a: Ints, b: Ints) -> Bools:
    """Whether the rows `a` of the first seeds and `b` of the second have equal inputs and labels."""
    is_equal = np.zeros(len(a), dtype=bool)
    if first.shape[1:] != second.shape[1:]:
        return is_equal
    for start in range(0, len(a), SEEDS_AT_ONCE):
        at = slice(start, start + SEEDS_AT_ONCE)
        left, right = torch.from_numpy(a[at]), torch.from_numpy(b[at])
        same = (first.take(left) == second.take(right)).flatten(1).all(1)
        if first.labels is not None and second.labels is not None:
            same &= (first.labels[left] == second.labels[right]).reshape(len(left), -1).all(1)
        is_equal[at] = same.numpy()
    return is_equal


def _compare_clean(shared: Models) -> diff.PairedClean | None:
    """The clean accuracy of both models; None without labels, because every answer then counts as correct."""
    if any(model.bench.calculator.clean.labels is None for model in shared):
        return None
    before, after = (model.is_correct.astype(np.int64) for model in shared)
    rates = paired_rates(np.ones_like(before), before, after)
    return diff.PairedClean(**vars(rates), seeds=len(before))


def _usable_by_both(shared: Models) -> Models:
    """The models, restricted to the seeds that both answer correctly."""
    first, second = shared
    is_usable = first.is_correct & second.is_correct
    if not is_usable.any():
        raise DataError("both models must answer a seed correctly, but share none: check preprocessing and labels")
    return first[is_usable], second[is_usable]


def _run_paired(models: Models, box: Box, n: int, random_seed: int, comparisons: int) -> diff.PairedTests:
    """Draw n tests, each seed once before any seed twice, and run them on both models."""
    bench, seed_id = models[0].bench, models[0].seed_id
    rows = np.arange(len(seed_id))
    space = Space.of(bench.calculator.perturbation, rows, seed_id, np.zeros(len(rows), np.float32), random_seed)
    space = replace(space, low=box[0], high=box[1])
    number, position = np.arange(n), space.cycle(0, n)
    tests = space.tests(number, position, space.occurring_theta(NEW_TESTS_STREAM, number), "uniform")
    outcomes = [model.run(position, tests.theta, tests.noise_seed) for model in models]
    was_run = outcomes[0]["is_similar"] & outcomes[1]["is_similar"]
    if not was_run.any():
        raise DataError("a test must be similar enough to its seed, but none is: lower min_ssim, min_vif or magnitude")
    before, after = (model["is_fault"] & was_run for model in outcomes)
    tested, failed_before, failed_after = (
        np.bincount(position[mask], minlength=len(rows)) for mask in (was_run, before, after)
    )
    is_tested = tested > 0
    rates = paired_rates(tested[is_tested], failed_before[is_tested], failed_after[is_tested], comparisons)
    masks = {
        "seeds": is_tested,
        "tests": was_run,
        "dropped": ~was_run,
        "both": before & after,
        "only_before": before & ~after,
        "only_after": after & ~before,
        "neither": was_run & ~before & ~after,
        "seeds_better": failed_after < failed_before,
        "seeds_worse": failed_after > failed_before,
    }
    counts: dict[str, Any] = {name: int(mask.sum()) for name, mask in masks.items()}
    return diff.PairedTests(**vars(rates), **counts, comparisons=comparisons)


def _replay_on_other(
    faults: Sequence[Fault], other_faults: Sequence[Fault], own: Model, other: Model, box: Box
) -> diff.ReplayedFaults:
    """How the faults of one run fare on the model of the other."""
    left_out = max(0, len(faults) - MAX_REPLAYED)
    if left_out:
        faults = [faults[k] for k in np.linspace(0, len(faults) - 1, MAX_REPLAYED).round().astype(int).tolist()]
    theta = _theta(faults, own.bench)
    seed_id, noise_seed = (
        np.array([getattr(fault, name) for fault in faults], dtype=np.int64) for name in ("seed_id", "noise_seed")
    )
    place = np.searchsorted(own.seed_id, seed_id)
    is_shared = np.isin(seed_id, own.seed_id) & ((theta >= box[0]) & (theta <= box[1])).all(1)

    def breaks(model: Model, at: Ints, noise: Ints) -> Bools:
        """Which of the faults `at` break the model with this noise."""
        if not len(at):
            return np.zeros(0, dtype=bool)
        return model.run(place[at], theta[at], noise)["is_fault"]

    at = np.flatnonzero(is_shared)
    is_reproduced = breaks(own, at, noise_seed[at])
    lost, at = at[~is_reproduced], at[is_reproduced]
    is_still = breaks(other, at, noise_seed[at])
    still, at = at[is_still], at[~is_still]
    is_near = _has_weaker(seed_id[at], theta[at], other_faults, own.bench)
    for turn in range(NOISE_DRAWS if own.bench.calculator.perturbation.is_random else 0):
        left = np.flatnonzero(~is_near)
        is_near[left] = breaks(other, at[left], rng.mix(FOR_NEW_NOISE, turn, noise_seed[at[left]]))

    def ids(at: Ints) -> tuple[int, ...]:
        return tuple(sorted(faults[k].id for k in at.tolist()))

    return diff.ReplayedFaults(
        gone=ids(at[~is_near]),
        moved=ids(at[is_near]),
        still=ids(still),
        lost=ids(lost),
        apart=ids(np.flatnonzero(~is_shared)),
        left_out=left_out,
        shown=tuple(sorted((faults[k] for k in at[~is_near].tolist()), key=telling_score)),
    )


def _has_weaker(seed_id: Ints, theta: Floats, others: Sequence[Fault], bench: TestBench) -> Bools:
    """Which tests have a fault of the same seed in the other run that is no stronger."""
    weakest: dict[int, float] = {}
    for fault, strength in zip(others, bench.strength(_theta(others, bench)).tolist(), strict=True):
        weakest[fault.seed_id] = min(strength, weakest.get(fault.seed_id, np.inf))
    pairs = zip(seed_id.tolist(), bench.strength(theta).tolist(), strict=True)
    return np.array([weakest.get(seed, np.inf) <= strength for seed, strength in pairs], dtype=bool)


def _theta(faults: Sequence[Fault], bench: TestBench) -> Floats:
    rows = [list(fault.theta.values()) for fault in faults]
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(bench.theta))


VERSION_SIGNIFICANCE = 0.05
"""The p value below which two versions of a model differ."""


def paired_rates(tests: Ints, before: Ints, after: Ints, comparisons: int = 1) -> diff.PairedRates:
    """The rates before and after, and a test of their difference, given the tests and faults of each seed.

    Tests of one seed may be dependent, so the differences of the seeds, which lie in -1..1, are averaged, and their
    mean is tested with Gaffke's limits. With one test per seed, this is McNemar's exact test. The interval has a
    positive width even if no seed differs: it then ends at Clopper and Pearson's limit for 0 of n.

    comparisons: how many differences are tested together. Their intervals hold jointly with 95% confidence
    (Bonferroni), and p values are multiplied by this number.
    """
    rate_before, rate_after = (mean_estimate(faults / tests) for faults in (before, after))
    shares = (tests + after - before) / (2 * tests)  # (1 + difference) / 2
    share = mean_estimate(shares, VERSION_SIGNIFICANCE / 2 / comparisons)
    value = rate_after.value - rate_before.value
    low, high = (2 * limit - 1 for limit in (share.low, share.high))
    p_value = min(1.0, comparisons * mean_p_value(shares, 0.5))
    return diff.PairedRates(rate_before, rate_after, Estimate(value, min(value, low), max(value, high)), p_value)
