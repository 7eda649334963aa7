"""Techniques that choose what is trained on: each runs a campaign, and gives the inputs that it would pick."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.begin import run
from themis.comparison.plan import Technique, choose_technique
from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import choose_criterion
from themis.data.seeds import Seeds
from themis.errors import UsageError
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.perturb import Perturbation
from themis.search import Policy, Space, choose_policy
from themis.search.policy import State
from themis.target import Target

THEMIS = "themis"
OWN_POLICY = "scheduled"
"""What `themis` searches with."""
STRENGTHS = 6
"""Parts of theta's range by which `themis` spreads its choice."""


@dataclass(frozen=True)
class Gathered:
    """All tests of a technique's campaign and what came of them, in the order they were run."""

    tests: Tests
    is_fault: Bools
    outcome: Ints
    margin: Floats
    raised: Bools
    strength: NDArray[np.float64]  # share of its range that theta's furthest dimension goes
    passes: int
    distinct_faults: int
    failing_seeds: int


class Recorder:
    """A policy as it is, with a memory of all tests that it was shown."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.climbs = policy, policy.climbs
        self.is_guided = bool(getattr(policy, "is_guided", False))
        self.seen: list[tuple[Tests, Results]] = []

    @property
    def state(self) -> State:
        return self.policy.state

    @state.setter
    def state(self, state: State) -> None:
        self.policy.state = state

    def init(self, space: Space) -> None:
        self.space = space
        self.policy.init(space)

    def propose(self, number: Ints) -> Tests:
        return self.policy.propose(number)

    def observe(self, tests: Tests, results: Results) -> None:
        self.seen.append((tests, results))
        self.policy.observe(tests, results)


def named(name: str) -> Technique:
    """A technique by name; `themis` is its own policy, criteria guide the fuzzer."""
    if name.strip().lower() in (THEMIS, OWN_POLICY):
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
    tests = Tests(
        *(np.concatenate([getattr(each, field.name) for each, _ in recorder.seen]) for field in fields(Tests))
    )
    results, last = Results.join([each for _, each in recorder.seen]), result.rounds[-1]
    raised = np.zeros(len(tests), dtype=bool) if results.raised is None else results.raised
    was_run, order = results.was_run, np.argsort(tests.number, kind="stable")
    order = order[was_run[order]]
    return Gathered(
        tests[order],
        results.is_fault[order],
        results.outcome[order],
        results.margin[order],
        raised[order],
        strength(recorder.space, tests.theta[order]),
        last.passes,
        last.distinct_faults,
        last.failing_seeds,
    )


def strength(space: Space, theta: Floats) -> NDArray[np.float64]:
    """The share of the range that theta's furthest dimension goes from its identity, 0 to 1."""
    away = theta.astype(np.float64) - space.identity
    reach = np.where(away >= 0, space.high - space.identity, space.identity - space.low)
    shares = np.divide(np.abs(away), reach, out=np.zeros_like(away), where=reach > 0)
    furthest: NDArray[np.float64] = shares.max(-1)
    return furthest


def choose(found: Gathered, n: int, technique: Technique) -> Ints:
    """Which `n` tests of a campaign are trained on, as the technique would choose: its faults first.

    Every distinct fault comes before a second one of the same seed and outcome. Then, of tests that broke nothing,
    those that raised the criterion, and those nearest to breaking; each seed once before any twice.
    """
    if technique.name == THEMIS:
        return _choose_alike(found, n)
    faults, seed = np.flatnonzero(found.is_fault), found.tests.seed
    faults = in_turns(faults, seed[faults], found.outcome[faults])
    others = _others(found)
    others = others[np.argsort(~found.raised[others], kind="stable")]
    return np.concatenate([faults, others])[:n]


def _choose_alike(found: Gathered, n: int) -> Ints:
    """Themis's own choice: as strong as the faults of its uniform stream are, which a search that pays leaves behind.

    Search finds faults where they are dense, at the far end of theta; a model that learns from these alone forgets the
    middle. The uniform stream says how many of what strength there are. Of each strength come first the faults nearest
    to the boundary, a seed once before any twice, then what came nearest to breaking.
    """
    seed, part = found.tests.seed, np.minimum((found.strength * STRENGTHS).astype(np.int64), STRENGTHS - 1)
    is_typical = found.is_fault & (found.tests.kind == "uniform")
    share = np.bincount(part[is_typical], minlength=STRENGTHS) + 0.5  # a strength that none was seen of may have some
    faults = np.flatnonzero(found.is_fault)
    faults = faults[np.argsort(-found.margin[faults], kind="stable")]
    order = np.concatenate([faults, _others(found)])
    order = in_turns(order, seed[order])
    wanted = np.rint(share / share.sum() * n).astype(np.int64)
    first = np.concatenate([order[part[order] == k][: wanted[k]] for k in range(STRENGTHS)])
    rest = np.concatenate([in_turns(faults, seed[faults]), order])
    taken = np.concatenate([first, rest])
    return taken[np.sort(np.unique(taken, return_index=True)[1])][:n]


def _others(found: Gathered) -> Ints:
    """Tests that broke nothing, nearest to breaking first, each seed once before any twice."""
    others = np.flatnonzero(~found.is_fault)
    others = others[np.argsort(found.margin[others], kind="stable")]
    return in_turns(others, found.tests.seed[others])


def in_turns(rows: Ints, *keys: Ints) -> Ints:
    """Rows in their order, the first of each key before the second of any."""
    if not len(rows):
        return rows
    same = np.lexsort((np.arange(len(rows)), *keys))
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = np.any([np.diff(each[same]) != 0 for each in keys], axis=0)
    starts = np.flatnonzero(is_first)
    turn = np.empty(len(rows), dtype=np.int64)
    turn[same] = np.arange(len(rows)) - starts[np.cumsum(is_first) - 1]
    return rows[np.argsort(turn, kind="stable")]
