"""Techniques whose inputs are trained on: each runs a campaign, and one rule chooses among the tests of each.

`themis` then does with its choice what `themis retrain` does: every other input is the seed of a fault disturbed anew.
Its search under the bare rule is the technique `scheduled`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from themis.campaign.api import run
from themis.compute import rng
from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import choose_criterion
from themis.data.seeds import Seeds
from themis.errors import UsageError
from themis.experiments.comparison.plan import Technique, choose_technique
from themis.experiments.retraining.material import rank, spread_out
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.perturb import Perturbation
from themis.search import Policy, Space, choose_policy
from themis.search.policy import State
from themis.target.ledger import allow_trained_seeds
from themis.target.target import Target

THEMIS = "themis"
OWN_POLICY = "scheduled"
"""What `themis` searches with."""
FOR_FRESH = 1 << 33
"""Names the random numbers that are drawn here: no policy counts so far."""


@dataclass(frozen=True)
class Gathered:
    """All tests of a technique's campaign and what came of them, in the order they were run."""

    tests: Tests
    is_fault: Bools
    outcome: Ints
    margin: Floats
    passes: int
    distinct_faults: int
    failing_seeds: int


class Recorder:
    """A policy as it is, with a memory of all tests that it was shown."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.needs_gradient = policy, policy.needs_gradient
        self.is_guided = bool(getattr(policy, "is_guided", False))
        self.seen: list[tuple[Tests, Results]] = []

    @property
    def state(self) -> State:
        return self.policy.state

    @state.setter
    def state(self, state: State) -> None:
        self.policy.state = state

    def init(self, space: Space) -> None:
        self.policy.init(space)

    def propose(self, number: Ints) -> Tests:
        return self.policy.propose(number)

    def observe(self, tests: Tests, results: Results) -> None:
        self.seen.append((tests, results))
        self.policy.observe(tests, results)


def named(name: str) -> Technique:
    """A technique by name; criteria guide the fuzzer."""
    if name.strip().lower() == THEMIS:
        return Technique(THEMIS)
    technique = choose_technique(name)
    if technique.name == "deepxplore":
        raise UsageError("techniques to retrain from must need one model alone, got 'deepxplore': leave it out")
    return technique


def fit(technique: Technique, target: Target, train: Seeds) -> Criterion | None:
    """The technique's criterion, which has learnt from training data; None where it has none."""
    return None if technique.criterion is None else fit_to(choose_criterion(technique.criterion), target, train)


def gather(
    technique: Technique,
    target: Target,
    seeds: Seeds,
    perturbation: Perturbation,
    *,
    passes: int,
    random_seed: int,
    criterion: Criterion | None = None,
    **options: Any,
) -> Gathered:
    """Run the technique's campaign on the search seeds; passes are those over the clean seeds included."""
    policy = OWN_POLICY if technique.name == THEMIS else technique.name
    recorder = Recorder(choose_policy("fuzz" if criterion is not None else policy))
    options = {"max_tests": None, "plateau": None, "coverage": None, **options}
    how: dict[str, Any] = {"policy": recorder, "criterion": criterion, "max_passes": passes, "random_seed": random_seed}
    with allow_trained_seeds():
        result = run(target, seeds, perturbation, **how, **options)
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    tests = Tests(
        *(np.concatenate([getattr(each, field.name) for each, _ in recorder.seen]) for field in fields(Tests))
    )
    results, last = Results.join([each for _, each in recorder.seen]), result.rounds[-1]
    was_run, order = results.was_run, np.argsort(tests.number, kind="stable")
    order = order[was_run[order]]
    return Gathered(
        tests[order],
        results.is_fault[order],
        results.outcome[order],
        results.margin[order],
        last.passes,
        last.distinct_faults,
        last.failing_seeds,
    )


def choose(found: Gathered, n: int) -> Ints:
    """Which `n` tests of a campaign are trained on: one rule for every technique, so that their searches compete alone.

    Its faults as `spread_out` takes them. Then tests that broke nothing, nearest to breaking, each seed once before any
    twice.
    """
    faults, others = np.flatnonzero(found.is_fault), np.flatnonzero(~found.is_fault)
    seed, number = found.tests.seed, found.tests.number
    faults = faults[spread_out(seed[faults], found.outcome[faults], number[faults], n)]
    near = found.margin[others]
    turn = rank(near, seed[others])
    return np.concatenate([faults, others[np.lexsort((near, turn))]])[:n]


def refreshed(tests: Tests, perturbation: Perturbation, random_seed: int) -> Tests:
    """The tests with every other one at a theta drawn uniformly, with noise of its own.

    Faults of a search lie at the edge of the box: a model that learns them alone may miss what lies inside.
    """
    rows = np.arange(len(tests))
    low, high = (np.array([getattr(each, end) for each in perturbation.theta]) for end in ("low", "high"))
    draws = np.stack([rng.uniform(random_seed, FOR_FRESH, k, rows) for k in range(len(low))], 1)
    theta = (low + draws * (high - low)).astype(np.float32)
    is_fresh = rows % 2 == 1
    return replace(
        tests,
        theta=np.where(is_fresh[:, None], theta, tests.theta),
        noise_seed=np.where(is_fresh, rng.mix(random_seed, FOR_FRESH, rows), tests.noise_seed),
    )
