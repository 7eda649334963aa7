"""The arithmetic of policy `scheduled` in NumPy: each seed's chance of a new fault, learned as the campaign proceeds.

The chance that a test breaks the seed: the margins of a seed scatter like a normal variable around a mean. The first
estimate of that mean is the clean margin minus the usual loss of margin among seeds with the same clean answer. The
number of standard deviations between the mean and 0 becomes a chance through a logistic curve, which is fitted as the
campaign proceeds and shifted for answers that break more or less often than others. A seed's own count of faults
gradually outweighs this estimate. Only tests of the search stream count here, because uniform tests are weaker.

The chance that the fault is new is a Good-Turing estimate from the faults of both streams, over seeds with the same
number of faults and of outcomes seen once. A seed's first fault counts twice, as a distinct fault and as a failing
seed.
"""

import numpy as np

from themis.measure.tests import Bools, Floats, Ints, Results
from themis.search.kinds import BORROWED, FADING_TESTS, FIRST_ASCENT, FLIP, NEAR, PRIOR_TESTS, SWEEP, UNIFORM
from themis.search.policy import FOR_KIND, FOR_PICK, FOR_SEED, SEARCH_STREAM, Numbers, Space, State

MIN_PRECISION = 1e-6
"""Least precision of the curve, however long no test has broken a seed."""
ESTIMATE_WEIGHT = 5
"""Weight, in tests, of the chance estimated from margins; with more tests, a seed's own count of faults outweighs
it."""
ANSWER_PRIOR_FAULTS = 5
"""Weight, in faults, of the prior that seeds with the same clean answer break as often as their margins suggest."""
CLEAN_MARGIN_WEIGHT = 0.25
"""Weight of a clean margin, in tests: seeds differ about twice as much as the tests of one seed do."""
REPEAT_VALUE = 0.3
"""Relative value of another test after all corners of a seed have been tried, if there is no noise."""
FIRST_FAULT_BONUS = 1.0
"""Additional value of a seed's first fault: it also shows a failing seed, which may have other outcomes."""
KEPT_MARGIN_OFFSET = 0.03
"""Until the first fault, the value of a test rises to 1 / KEPT_MARGIN_OFFSET as its seed loses its margin."""
MAX_SEED_FAULTS, MAX_SEEN_ONCE = 32, 16
"""Seeds with at least this many faults, or outcomes seen once, are treated alike."""
PRIOR_NEW_FAULTS = PRIOR_TESTS / 2 * (1 / (1 + np.arange(MAX_SEED_FAULTS)))[:, None]
"""New pseudo-faults: one in `n + 1` for seeds with `n` faults."""
KIND_PRIOR_FAULTS = 6.0
"""Pseudo-faults added to those of each kind, which limit the randomness while there are few faults."""
BORROWED_JITTER = 1 / 64
"""Largest move of a fault's theta for another seed, as a share of the range. Without it, the faults of a cause would
all be at the first theta that revealed it."""
N_LEADING_SEEDS = 10
"""The number of seeds closest to breaking whose best theta is tried on other seeds."""
FOR_BORROWED, FOR_DIMENSION, FOR_STEP, FOR_LEAD, FOR_LEADING, FOR_MOVE = -1, -2, -5, -7, -8, -9
"""What a test uses random numbers of the purpose FOR_PICK for: whose theta is borrowed, which dimension is flipped, the
length of a step, which seed leads, whether its theta is used, and the moves along the dimensions, from FOR_MOVE
downwards. The numbers from 0 upwards decide the bounds of a corner."""


def before_tests(space: Space) -> State:
    """What is known before the first test."""
    n = len(space.seeds)
    answers, answer_index = np.unique(space.answer, return_inverse=True)
    counts = {name: np.zeros(n, dtype=np.int64) for name in ("tests", "broke", "faults", "seen_once", "corners")}
    return {
        **counts,  # of the search stream; faults of both streams, outcomes seen once, corners tried
        "ahead": np.zeros(n, dtype=np.int64),  # tests that were proposed and have not been observed
        "total_margin": np.zeros(n),
        "margin": space.margin.astype(np.float32).copy(),  # the smallest seen
        "squared_shortfall": np.zeros(()),  # summed over tests
        "curve": np.array([0.0, -1.7]),  # logit and slope, those of the normal curve
        "precision": np.diag([1.0, 4.0]),  # of the curve
        "answer_index": answer_index.astype(np.int64),  # seeds with the same clean answer share a number
        "margin_losses": np.zeros((2, len(answers))),  # by answer: tests, and their summed loss of margin
        "answer_faults": np.zeros((2, len(answers))),  # by answer: faults, and faults expected from margins alone
        "seen_faults": np.zeros((MAX_SEED_FAULTS, MAX_SEEN_ONCE)),  # by faults of the seed, and outcomes seen once
        "new_faults": np.zeros((MAX_SEED_FAULTS, MAX_SEEN_ONCE)),  # the new ones among them
        "known": np.zeros(0, dtype=np.int64),  # distinct faults, as seed and outcome in one number, ascending
        "times": np.zeros(0, dtype=np.int64),  # how often each was seen
    }


class Arithmetic:
    """The computations of the policy on its state; `Compiled` has the same methods in C."""

    def __init__(self, space: Space) -> None:
        self.space = space

    # Which seeds

    def choose_seeds(self, state: State, depth: int, n: int, first: int) -> tuple[Ints, Numbers]:
        """The positions of the `n` most valuable tests, ascending, and `spreads_above`; ties are broken at random.

        depth: tests per seed at most. first: the number of the first test.
        """
        space, n_seeds = self.space, len(self.space.seeds)
        draw, spreads = space.uniform(FOR_SEED, SEARCH_STREAM, first, np.arange(n_seeds)), self.spreads_above(state)
        less = self.values(state, depth, spreads) * -(1 + 1e-6 * draw)
        best = less.ravel().argpartition(n - 1)[:n] if 0 < n < less.size else np.arange(n) % less.size
        return np.sort(best % n_seeds), spreads

    def values(self, state: State, depth: int, spreads: Numbers) -> Numbers:
        """The weighted chance of a new fault in each seed's next tests, `[depth, seeds]`.

        `spreads` is what `spreads_above` returns.
        """
        space = self.space
        level, slope = state["curve"].tolist()
        read = _logistic(level + slope * spreads + _frailty(state))
        known = ESTIMATE_WEIGHT + state["tests"]
        chances = (ESTIMATE_WEIGHT * read + state["broke"]) / known
        further = state["ahead"] + np.arange(depth)[:, None]
        worth: Numbers = chances * known / (known + further * (1 - chances))
        faults = np.minimum(np.rint(state["faults"] + further * chances).astype(np.int64), MAX_SEED_FAULTS - 1)
        worth *= _fault_values(state).take(faults * MAX_SEEN_ONCE + np.minimum(state["seen_once"], MAX_SEEN_ONCE - 1))
        if not len(state["known"]):
            worth /= KEPT_MARGIN_OFFSET + self._kept_margin(state).clip(min=0)
        if not space.is_random:  # without noise, trying a corner again gives the same result
            worth *= np.where(
                state["corners"] + further - state["ahead"] < 1 << len(space.free_dimensions), 1, REPEAT_VALUE
            )
        return worth

    def spreads_above(self, state: State) -> Numbers:
        """Each seed's expected next margin, in standard deviations."""
        n = state["margin_losses"][0].sum()
        # At first, assume that the typical seed rarely breaks.
        spread = np.sqrt(state["squared_shortfall"] / n) if n else np.median(self.space.margin) / 4
        inflation = np.sqrt(1 + 1 / (CLEAN_MARGIN_WEIGHT + state["tests"]))
        above: Numbers = (self._expected(state) / (max(float(spread), 1e-12) * inflation)).clip(-6, 6)
        return above

    def _kept_margin(self, state: State) -> Numbers:
        """The smallest margin of each seed so far, as a share of its clean margin."""
        kept: Numbers = state["margin"] / np.maximum(self.space.margin, 1e-12)
        return kept

    def _expected(self, state: State) -> Numbers:
        """Each seed's mean margin."""
        tests, losses = state["margin_losses"]
        usual = losses.sum() / max(tests.sum(), 1)
        fall = ((losses + PRIOR_TESTS * usual) / (tests + PRIOR_TESTS))[state["answer_index"]]
        first = CLEAN_MARGIN_WEIGHT * (self.space.margin - fall)
        expected: Numbers = (first + state["total_margin"]) / (CLEAN_MARGIN_WEIGHT + state["tests"])
        return expected

    # Learning

    def learn_margins(self, state: State, position: Ints, results: Results, spreads: Numbers) -> Numbers:
        """Learn from tests of the search stream; `spreads` is what `spreads_above` predicted for them.

        `position` are the positions of their seeds. Returns how much lower than expected the margins were, in standard
        deviations.
        """
        clean = self.space.margin
        limit = float(np.abs(clean).max())
        _fit_curve(state, spreads, results.is_fault, position)
        margin = results.margin.clip(-limit, limit)  # an extreme output counts as one fault
        state["margin_losses"] += _by_answer(state, position, np.ones(len(margin)), clean[position] - margin)
        expected = self._expected(state)[position]
        inflation = 1 + 1 / (CLEAN_MARGIN_WEIGHT + state["tests"][position])
        state["squared_shortfall"] += ((margin - expected) ** 2 / inflation).sum()
        spread = np.sqrt(state["squared_shortfall"] / state["margin_losses"][0].sum() * inflation)
        shortfall: Numbers = (expected - margin) / np.maximum(spread, 1e-12)
        np.add.at(state["total_margin"], position, margin)
        np.add.at(state["tests"], position, 1)
        np.add.at(state["broke"], position[results.is_fault], 1)
        return shortfall

    def learn_faults(self, state: State, position: Ints, outcome: Ints) -> Ints:
        """Learn from faults of both streams. Returns which are new."""
        seen_once = np.minimum(state["seen_once"][position], MAX_SEEN_ONCE - 1)
        cell = np.minimum(state["faults"][position], MAX_SEED_FAULTS - 1) * MAX_SEEN_ONCE + seen_once
        seen, new_ones = (state[name].reshape(-1) for name in ("seen_faults", "new_faults"))
        np.add.at(seen, cell, 1)
        key = position << 32 | outcome & 0xFFFFFFFF
        keys, first, times = np.unique(key, return_index=True, return_counts=True)
        is_old = are_in(keys, state["known"])
        new: Ints = first[~is_old]
        place = state["known"].searchsorted(keys[is_old])
        np.add.at(new_ones, cell[new], 1)
        np.add.at(state["seen_once"], position[first[~is_old & (times == 1)]], 1)
        np.add.at(state["seen_once"], position[first[is_old][state["times"][place] == 1]], -1)
        state["times"][place] += times[is_old]
        at = state["known"].searchsorted(keys[~is_old])
        state["known"] = np.insert(state["known"], at, keys[~is_old])
        state["times"] = np.insert(state["times"], at, times[~is_old])
        np.add.at(state["faults"], position, 1)
        return new

    def keep_least(self, state: State, theta: Floats, position: Ints, margin: Floats) -> None:
        """Keep the smallest margin of each seed and its theta."""
        # In descending order of margin, so that a seed tested twice keeps the smaller one.
        lower = (margin < state["margin"][position]).nonzero()[0]
        lower = lower[np.argsort(-margin[lower], kind="stable")]
        state["margin"][position[lower]] = margin[lower]
        state["theta"][position[lower]] = theta[lower]

    # Which kinds, and which theta

    def sample_kinds(self, number: Ints, state: State, prior: Numbers, costs: Numbers, n: int) -> tuple[Ints, Ints]:
        """The kind with the largest sampled return per pass for each test: without a gradient, and among the first `n`.

        prior: the prior return of each kind. costs: the cost of a test of each kind.
        """
        from scipy.special import ndtri

        tried, paid = state["tried"], state["paid"]
        average = (paid.sum() + 1) / (tried.sum() + PRIOR_TESTS)
        expected = paid + PRIOR_TESTS * average * prior / costs
        # The return of a kind has a gamma distribution, whose logarithm is approximately normal.
        scores = ndtri(self.space.uniforms(FOR_KIND, range(n), number).clip(1e-9, 1 - 1e-9))
        scores /= np.sqrt(expected + KIND_PRIOR_FAULTS)[:n]
        scores += np.log(expected / (tried + PRIOR_TESTS))[:n]
        return scores[:, :FIRST_ASCENT].argmax(1), scores.argmax(1)

    def thetas(self, state: State, chosen: Ints, position: Ints, number: Ints) -> Floats:
        """Theta by kind: at bounds drawn at random for corners, and the first step of an ascent near a good theta."""
        theta: Floats = state["theta"][position]
        for is_kind, propose in (
            (chosen <= SWEEP, self._corners),
            (chosen == BORROWED, self._borrowed),
            (chosen == FLIP, self._flipped),
            (chosen == UNIFORM, self._uniform),
            ((chosen == NEAR) | (chosen >= FIRST_ASCENT), self._near),
        ):
            theta[is_kind] = propose(state, position[is_kind], number[is_kind])
        return theta

    def _corners(self, state: State, position: Ints, number: Ints) -> Floats:
        return self.space.corners(number)

    def _uniform(self, state: State, position: Ints, number: Ints) -> Floats:
        return self.space.uniform_theta(SEARCH_STREAM, number)

    def _borrowed(self, state: State, position: Ints, number: Ints) -> Floats:
        """Thetas of faults, preferably of seeds with the same clean answer; slightly moved unless at a bound."""
        answer, order = self.space.answer[position], np.argsort(state["fault_answer"], kind="stable")
        answers = state["fault_answer"][order]
        low, high = (answers.searchsorted(answer, side) for side in ("left", "right"))
        low, high = np.where(low < high, low, 0), np.where(low < high, high, len(order))
        pick = low + (self.space.uniform(FOR_PICK, FOR_BORROWED, number) * (high - low)).astype(np.int64)
        theta: Floats = state["fault_theta"][order[pick]]
        is_inside = (theta > self.space.low) & (theta < self.space.high)
        return np.where(is_inside, self._moved(theta, np.full(len(theta), BORROWED_JITTER), number), theta)

    def _flipped(self, state: State, position: Ints, number: Ints) -> Floats:
        """Each seed's best theta with one coordinate moved to a bound."""
        theta: Floats = state["theta"][position]
        dimension = (self.space.uniform(FOR_PICK, FOR_DIMENSION, number) * theta.shape[1]).astype(np.int64)
        rows = np.arange(len(theta))
        theta[rows, dimension] = self.space.corners(number)[rows, dimension]
        return theta

    def _near(self, state: State, position: Ints, number: Ints) -> Floats:
        """Each seed's best theta, or half of the time that of a leading seed, moved by 1/64 to 1/2 of its range."""
        lead, is_led, step = (self.space.uniform(FOR_PICK, use, number) for use in (FOR_LEAD, FOR_LEADING, FOR_STEP))
        leads = least(self._kept_margin(state), N_LEADING_SEEDS)
        theta = state["theta"][np.where(is_led < 0.5, leads[(lead * len(leads)).astype(np.int64)], position)]
        return self._moved(theta, 2.0 ** -(1 + 5 * step), number)

    def _moved(self, theta: Floats, step: Numbers, number: Ints) -> Floats:
        """Each theta moved in every dimension by at most `step`, a share of the range."""
        space = self.space
        moves = space.uniforms(FOR_PICK, range(FOR_MOVE, FOR_MOVE - theta.shape[1], -1), number)
        moved: Floats = (theta + step[:, None] * (2 * moves - 1) * space.width).astype(np.float32)
        return np.minimum(np.maximum(moved, space.low), space.high)


def are_in(keys: Ints, known: Ints) -> Bools:
    """Which keys are in `known`, which must be ascending."""
    if not len(known):
        return np.zeros(len(keys), dtype=bool)
    are: Bools = known[np.minimum(known.searchsorted(keys), len(known) - 1)] == keys
    return are


def least(numbers: Numbers, n: int) -> Ints:
    """The positions of the `n` smallest numbers, as the first `n` of a stable sort."""
    if len(numbers) > n:
        few: Ints = (numbers <= np.partition(numbers, n - 1)[n - 1]).nonzero()[0]
        if len(few):  # none if even the smallest numbers include a NaN
            return few[numbers[few].argsort(kind="stable")][:n]
    return numbers.argsort(kind="stable")[:n]


def _by_answer(state: State, position: Ints, first: Numbers | Bools, second: Numbers) -> Numbers:
    """Two numbers per test, summed by the clean answer of the test's seed."""
    index, n = state["answer_index"][position], state["margin_losses"].shape[1]
    return np.array([np.bincount(index, column, n) for column in (first, second)])


def _fault_values(state: State) -> Numbers:
    """The value of a fault, by the number of faults of its seed and of outcomes seen once.

    It is the chance that the fault is new, plus a bonus for the first fault.
    """
    values: Numbers = (state["new_faults"] + PRIOR_NEW_FAULTS) / (state["seen_faults"] + PRIOR_TESTS / 2)
    values[0] *= 1 + FIRST_FAULT_BONUS
    return values


def _frailty(state: State) -> Numbers:
    """How much more often seeds of each clean answer break than their margins suggest, as a logit."""
    broke, expected = state["answer_faults"]
    frailty: Numbers = np.log((broke + ANSWER_PRIOR_FAULTS) / (expected + ANSWER_PRIOR_FAULTS))[state["answer_index"]]
    return frailty


def _fit_curve(state: State, spreads: Numbers, broke: Bools, position: Ints) -> None:
    """Fit the most likely logistic curve by Newton steps; the previous estimate, which fades, is the prior."""
    fading = float(np.exp(-len(spreads) / FADING_TESTS))
    frailty = _frailty(state)[position]
    first, second = before = state["curve"].tolist()
    (p11, p12), (_, p22) = (fading * state["precision"]).tolist()
    p11, p22 = max(p11, MIN_PRECISION), max(p22, MIN_PRECISION)
    for _ in range(4):
        chance = _logistic(first + second * spreads + frailty)
        missed, weight = broke - chance, chance * (1 - chance)
        weighted = weight * spreads
        moved = first - before[0], second - before[1]
        slope1 = float(missed.sum()) - p11 * moved[0] - p12 * moved[1]
        slope2 = float(missed @ spreads) - p12 * moved[0] - p22 * moved[1]
        c11, c12, c22 = float(weight.sum()) + p11, float(weighted.sum()) + p12, float(weighted @ spreads) + p22
        ratio = c12 / c11
        step = (slope2 - ratio * slope1) / max(c22 - ratio * c12, MIN_PRECISION)
        first += min(max((slope1 - c12 * step) / c11, -2.0), 2.0)
        second += min(max(step, -2.0), 2.0)
    state["curve"], state["precision"] = np.array([first, second]), np.array([[c11, c12], [c12, c22]])
    expected = _logistic(first + second * spreads)
    state["answer_faults"] = fading * state["answer_faults"] + _by_answer(state, position, broke, expected)


def _logistic(x: Numbers) -> Numbers:
    logistic: Numbers = 1 / (1 + np.exp(-x.clip(-30, 30)))
    return logistic
