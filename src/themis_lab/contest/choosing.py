"""How techniques choose inputs to train on: each runs a campaign, and one rule chooses among its tests.

`themis` then does with its choice what `themis retrain` does: it disturbs every other input again, at a random theta.
The technique `scheduled` is the same search without this step.
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
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.perturb import Perturbation
from themis.retraining.material import rank, spread_out
from themis.search import Policy, Space, choose_policy
from themis.search.policy import State
from themis.target.ledger import allow_trained_seeds
from themis.target.target import Target
from themis_lab.techniques import DIFFERENTIAL, GUIDED, Technique, choose_technique

THEMIS = "themis"
OWN_POLICY = "scheduled"
"""The policy that `themis` searches with."""
FOR_FRESH = 1 << 33
"""Identifies the random numbers that are drawn here; the counters of policies stay below it."""


@dataclass(frozen=True)
class ExecutedTests:
    """All tests of a technique's campaign with their outcomes, in the order in which they were run."""

    tests: Tests
    is_fault: Bools
    outcome: Ints
    margin: Floats
    passes: int
    distinct_faults: int
    failing_seeds: int


class RecordingPolicy(Policy):
    """A policy that behaves like another one and records all tests that it observes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs_gradient, self.uses_gradient = policy.needs_gradient, policy.uses_gradient
        self.is_guided, self.rivals = policy.is_guided, policy.rivals
        self.observed: list[tuple[Tests, Results]] = []

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
        self.observed.append((tests, results))
        self.policy.observe(tests, results)

    def report(self) -> dict[str, Any]:
        return self.policy.report()


def choose_competitor(name: str) -> Technique:
    """The technique with this name, if it can take part in a contest; criteria guide the fuzzer."""
    if name.strip().lower() == THEMIS:
        return Technique(THEMIS)
    technique = choose_technique(name)
    if technique.name == DIFFERENTIAL:
        raise UsageError(f"techniques to retrain from must need only one model, got {DIFFERENTIAL!r}: leave it out")
    if technique.preset is not None:
        raise UsageError(f"techniques to retrain from must be policies or criteria, got {name!r}: write paper instead")
    return technique


def fit_criterion(technique: Technique, target: Target, train: Seeds) -> Criterion | None:
    """The criterion of a technique, fitted to training data; None if it has no criterion."""
    return None if technique.criterion is None else fit_to(choose_criterion(technique.criterion), target, train)


def run_technique(
    technique: Technique,
    target: Target,
    seeds: Seeds,
    perturbation: Perturbation,
    *,
    passes: int,
    random_seed: int,
    criterion: Criterion | None = None,
    **options: Any,
) -> ExecutedTests:
    """Run the campaign of a technique on the search seeds; `passes` includes those over the clean seeds."""
    policy = OWN_POLICY if technique.name == THEMIS else technique.name
    recorder = RecordingPolicy(choose_policy(GUIDED if criterion is not None else policy))
    with allow_trained_seeds():
        result = run(
            target,
            seeds,
            perturbation,
            policy=recorder,
            criterion=criterion,
            max_passes=passes,
            random_seed=random_seed,
            **{"max_tests": None, "plateau": None, "coverage": None, **options},
        )
    if result.stop_reason == "user":
        raise KeyboardInterrupt
    batches = [tests for tests, _ in recorder.observed]
    tests = Tests(*(np.concatenate([getattr(batch, field.name) for batch in batches]) for field in fields(Tests)))
    results, last = Results.join([results for _, results in recorder.observed]), result.rounds[-1]
    order = np.argsort(tests.number, kind="stable")
    order = order[results.was_run[order]]
    return ExecutedTests(
        tests[order],
        results.is_fault[order],
        results.outcome[order],
        results.margin[order],
        last.passes,
        last.distinct_faults,
        last.failing_seeds,
    )


def choose_tests(executed: ExecutedTests, n: int) -> Ints:
    """The `n` tests of a campaign to train on: one rule for every technique, so that only their searches compete.

    Faults come first, in the order of `spread_out`. They are followed by passing tests that were nearest to a fault,
    every seed once before any seed twice.
    """
    faults, passing = np.flatnonzero(executed.is_fault), np.flatnonzero(~executed.is_fault)
    seed, number = executed.tests.seed, executed.tests.number
    faults = faults[spread_out(seed[faults], executed.outcome[faults], number[faults], n)]
    margin = executed.margin[passing]
    turn = rank(margin, seed[passing])
    return np.concatenate([faults, passing[np.lexsort((margin, turn))]])[:n]


def refresh_tests(tests: Tests, perturbation: Perturbation, random_seed: int) -> Tests:
    """The tests with every other one at a theta drawn uniformly, with its own noise.

    The faults of a search lie at the edges of the range of theta: a model trained on them alone may miss the inside.
    """
    rows = np.arange(len(tests))
    low, high = (np.array([getattr(theta, end) for theta in perturbation.theta]) for end in ("low", "high"))
    draws = np.stack([rng.uniform(random_seed, FOR_FRESH, k, rows) for k in range(len(low))], 1)
    theta = (low + draws * (high - low)).astype(np.float32)
    is_fresh = rows % 2 == 1
    return replace(
        tests,
        theta=np.where(is_fresh[:, None], theta, tests.theta),
        noise_seed=np.where(is_fresh, rng.mix(random_seed, FOR_FRESH, rows), tests.noise_seed),
    )
