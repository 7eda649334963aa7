"""The protocol of a search policy, the space that it searches, and the simple policies: random and corners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from themis.compute import rng
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.perturb.distribution import Distribution
from themis.perturb.perturbation import Perturbation, Theta
from themis.target.target import AnyTarget

if TYPE_CHECKING:
    from themis.criteria import Criterion
    from themis.data.seeds import Seeds
    from themis.measure.calculator import Calculator
    from themis.measure.fold import Objective

Numbers = NDArray[np.float64]
State = dict[str, NDArray[Any]]
"""All that a policy remembers, as arrays that a store can save and restore."""

# The purposes of random numbers. Purpose, random seed and counter identify a number, so that no two uses share one.
FOR_SEED, FOR_THETA, FOR_NOISE, FOR_ORDER, FOR_KIND, FOR_PICK = range(1, 7)
UNIFORM_STREAM, SEARCH_STREAM = 0, 1


@dataclass(frozen=True)
class Space:
    """Where a campaign may search: the usable seeds (rows of the data), and the box of theta."""

    seeds: Ints  # ascending
    seed_id: Ints  # of each usable seed
    margin: Floats  # of each usable seed's clean answer
    low: Floats
    high: Floats
    identity: Floats
    is_random: bool
    random_seed: int
    answers: Ints | None = None  # each usable seed's clean outcome
    gradient_cost: float | None = None  # relative cost of a test with its gradient; None if there is no gradient
    theta: tuple[Theta, ...] = ()
    seed_weight: Numbers | None = None  # how often each seed occurs; None if all are equally frequent
    tests_each_seed_once: bool = False  # before any seed twice, in the uniform stream

    @staticmethod
    def of(
        perturbation: Perturbation,
        seeds: Ints,
        seed_id: Ints,
        margin: Floats,
        random_seed: int,
        answers: Ints | None = None,
        gradient_cost: float | None = None,
    ) -> Space:
        low, high, identity = (
            np.array([getattr(theta, end) for theta in perturbation.theta], dtype=np.float32)
            for end in ("low", "high", "identity")
        )
        known = (perturbation.is_random, random_seed, answers, gradient_cost, perturbation.theta)
        return Space(seeds, seed_id, margin, low, high, identity, *known)

    @cached_property
    def answer(self) -> Ints:
        """Each usable seed's clean outcome; all zero if none is known."""
        return np.zeros(len(self.seeds), dtype=np.int64) if self.answers is None else self.answers

    @cached_property
    def width(self) -> Floats:
        """Width of the box in each dimension."""
        return self.high - self.low

    @cached_property
    def free_dimensions(self) -> Ints:
        """The dimensions of theta that can move in both directions; one bit for each of them identifies a corner."""
        return np.flatnonzero((self.low != self.identity) & (self.high != self.identity))[:62]

    def uniform(self, purpose: int, *words: int | Ints) -> Numbers:
        """Uniform numbers in [0, 1), identified by a purpose and counters."""
        return rng.uniform(self.random_seed, purpose, *words)

    def uniforms(self, purpose: int, columns: range, *words: int | Ints) -> Numbers:
        """`uniform(purpose, column, *words)` for several columns at once, `[tests, columns]`."""
        across = np.arange(columns.start, columns.stop, columns.step)
        return self.uniform(
            purpose, across, *(word[:, None] if isinstance(word, np.ndarray) else word for word in words)
        )

    def uniform_theta(self, *words: int | Ints) -> Floats:
        """Theta drawn uniformly from the box, `[tests, dimensions]`."""
        draws = self.uniforms(FOR_THETA, range(len(self.low)), *words)
        theta: Floats = (self.low + draws * self.width).astype(np.float32)
        return np.minimum(np.maximum(theta, self.low), self.high)

    def occurring_theta(self, *words: int | Ints) -> Floats:
        """Theta drawn as often as its values occur, `[tests, dimensions]`: uniformly, unless it is distributed."""
        theta = self.uniform_theta(*words)
        for k, dimension in enumerate(self.theta):
            if isinstance(dimension.distribution, Distribution):
                draws = self.uniform(FOR_THETA, k, *words)
                theta[:, k] = dimension.distribution.value_at(draws, float(self.low[k]), float(self.high[k]))
        return theta

    def tests(self, number: Ints, position: Ints, theta: Floats, kind: str | NDArray[np.str_]) -> Tests:
        """Tests of the seeds at `position` in `seeds`, each with noise of its own."""
        noise_seed = rng.mix(self.random_seed, FOR_NOISE, self.seed_id[position], number)
        kinds = np.broadcast_to(np.asarray(kind), number.shape) if isinstance(kind, str) else kind
        return Tests(number, self.seeds[position], theta, noise_seed, kinds)

    def uniform_tests(self, number: Ints, stream: int, counter: Ints) -> Tests:
        """Tests whose seed and theta are drawn uniformly; the same for every policy at the same `counter`.

        The uniform stream draws seeds as often as they occur where the model is used, if that is known. If it tests
        each seed once, their order is drawn uniformly.
        """
        draw, weight = self.uniform(FOR_SEED, stream, counter), self.seed_weight
        if self.tests_each_seed_once and stream == UNIFORM_STREAM:
            position = self._turns[counter % len(self.seeds)]
        elif weight is None or stream != UNIFORM_STREAM:
            position = np.minimum((draw * len(self.seeds)).astype(np.int64), len(self.seeds) - 1)
        else:
            below = np.cumsum(weight) / weight.sum()
            position = np.minimum(below.searchsorted(draw, "right"), len(self.seeds) - 1)
        is_occurring = stream == UNIFORM_STREAM
        theta = self.occurring_theta(stream, counter) if is_occurring else self.uniform_theta(stream, counter)
        return self.tests(number, position, theta, "uniform")

    @cached_property
    def _turns(self) -> Ints:
        return self.order(-1)

    def order(self, epoch: int) -> Ints:
        """All positions, in a new random order for each epoch."""
        return np.argsort(self.uniform(FOR_ORDER, epoch, np.arange(len(self.seeds))), kind="stable")

    def cycle(self, start: int, n: int) -> Ints:
        """`n` positions from an endless walk over all seeds, which are shuffled for each epoch."""
        steps = np.arange(start, start + n)
        epoch, within = np.divmod(steps, len(self.seeds))
        orders = np.stack([self.order(number) for number in range(epoch[0], epoch[-1] + 1)])
        positions: Ints = orders[epoch - epoch[0], within]
        return positions

    def position(self, rows: Ints) -> Ints:
        """The positions of the seeds `rows` in `seeds`."""
        return self._places[rows]

    @cached_property
    def _places(self) -> Ints:
        """The position of each usable row of the data; undefined for other rows."""
        places = np.zeros(int(self.seeds.max(initial=-1)) + 1, dtype=np.int64)
        places[self.seeds] = np.arange(len(self.seeds))
        return places

    def corners(self, number: Ints) -> Floats:
        """Theta with each dimension at a bound other than the identity."""
        up = self.uniforms(FOR_PICK, range(len(self.low)), number) < 0.5
        if len(self.free_dimensions) < len(self.low):
            up = np.where(self.low == self.identity, True, np.where(self.high == self.identity, False, up))
        return np.where(up, self.high, self.low)


@runtime_checkable
class Policy(Protocol):
    """Chooses the tests of the search stream and learns from the results of both streams.

    Your own policy can subclass this protocol, which has defaults for all but `init`, `propose` and `observe`.
    """

    needs_gradient: bool = False
    """Whether all tests need the gradient in theta: one backward pass per test, or finite differences."""
    uses_gradient: bool = False
    """Whether the policy may propose tests of the kinds in `ASCENTS` if there is a gradient."""
    can_be_ahead: bool = False
    """Whether the policy can propose tests while those that it proposed before are still running."""
    is_guided: bool = False
    """Whether the policy follows a criterion."""
    takes_rivals: bool = False
    """Whether tests are also run on other models, its rivals."""
    rivals: tuple[AnyTarget, ...] = ()
    state: State

    def init(self, space: Space) -> None:
        """Prepare to search `space`; called once, before the first test."""

    def propose(self, number: Ints) -> Tests:
        """Return the tests to run next, with the numbers `number`."""

    def observe(self, tests: Tests, results: Results) -> None:
        """Learn from the results of tests of the uniform or the search stream."""

    def own_criterion(self, target: AnyTarget, seeds: Seeds, chosen: Criterion | None) -> Criterion | None:
        """Return the policy's own criterion; None if it follows `chosen`, the user's criterion, or none.

        The policy may refuse `chosen`.
        """
        return None

    def objective(self, criterion: Criterion, calculator: Calculator, number: int) -> Objective | None:
        """Return what ascents of tests from `number` on maximise; None for the sensitivities and the margin."""
        return None

    def report(self) -> dict[str, Any]:
        """Return counts of the policy's own for the summary."""
        return {}


class Random(Policy):
    """Draws seed and theta uniformly."""

    def init(self, space: Space) -> None:
        self.space = space
        self.state: State = {}

    def propose(self, number: Ints) -> Tests:
        return self.space.uniform_tests(number, SEARCH_STREAM, number)

    def observe(self, tests: Tests, results: Results) -> None:
        pass


class Corners(Policy):
    """Tests every seed equally often with the strongest disturbances."""

    def init(self, space: Space) -> None:
        self.space = space
        self.state: State = {"walked": np.zeros((), dtype=np.int64)}

    def propose(self, number: Ints) -> Tests:
        position = self.space.cycle(int(self.state["walked"]), len(number))
        self.state["walked"] += len(number)
        return self.space.tests(number, position, self.space.corners(number), "corner")

    def observe(self, tests: Tests, results: Results) -> None:
        pass


class Novelty:
    """Prevents a test from running twice: the same seed and theta, and the same noise if the perturbation is random."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._seen: set[int] = set()
        self._added: list[Ints] = []  # the same numbers as arrays, since converting a large set is slow

    @property
    def state(self) -> Ints:
        """The tests that have been run, as hashes; some may occur twice."""
        self._added = [np.concatenate([np.zeros(0, np.int64), *self._added])]
        return self._added[0]

    @state.setter
    def state(self, numbers: Ints) -> None:
        self._seen, self._added = set(numbers.tolist()), [numbers]

    def ensure(self, tests: Tests) -> Tests:
        """Return `tests` with new noise for each repeated test; without noise, repeated tests are redrawn uniformly."""
        if not len(tests):
            return tests
        numbers = self._keys(tests)
        keys, before = numbers.tolist(), len(self._seen)
        known = self._seen.intersection(keys)
        self._seen.update(keys)
        self._added.append(numbers)
        if len(self._seen) == before + len(keys):
            return tests
        repeated = np.isin(numbers, list(known)) | _occur_earlier(numbers)
        tests = self._redrawn(tests, repeated)
        again = self._keys(tests[repeated])
        self._seen.update(again.tolist())
        self._added.append(again)
        return tests

    def _redrawn(self, tests: Tests, repeated: Bools) -> Tests:
        if self.space.is_random:
            fresh = self.space.tests(tests.number, self.space.position(tests.seed), tests.theta, tests.kind)
            return replace(tests, noise_seed=np.where(repeated, fresh.noise_seed, tests.noise_seed))
        fresh = self.space.uniform_tests(tests.number, SEARCH_STREAM, tests.number)
        return replace(
            tests,
            seed=np.where(repeated, fresh.seed, tests.seed),
            theta=np.where(repeated[:, None], fresh.theta, tests.theta),
            noise_seed=np.where(repeated, fresh.noise_seed, tests.noise_seed),
            kind=np.where(repeated, "redrawn", tests.kind),
        )

    def _keys(self, tests: Tests) -> Ints:
        bits = np.ascontiguousarray(tests.theta).view(np.int32).astype(np.int64)
        noise = (tests.noise_seed,) if self.space.is_random else ()
        return rng.mix(tests.seed, *noise, *bits.T)


def _occur_earlier(numbers: Ints) -> Bools:
    """Which numbers have occurred earlier in the array."""
    is_again = np.ones(len(numbers), dtype=bool)
    is_again[np.unique(numbers, return_index=True)[1]] = False
    return is_again
