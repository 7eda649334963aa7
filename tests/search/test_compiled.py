"""The search in C chooses the tests of the search in NumPy, and learns the same."""

from dataclasses import replace

import numpy as np
import pytest

from themis.compute import native
from themis.measure.tests import Results
from themis.perturb import choose_perturbation
from themis.search import kinds
from themis.search.arithmetic import Arithmetic
from themis.search.policy import Space
from themis.search.scheduled import Scheduled

pytestmark = [pytest.mark.quick, pytest.mark.skipif(native.library() is None, reason="not compiled on this machine")]
SIX = "rotate + shift + brightness + contrast + gaussian_blur"


def make_space(perturbation, draws, n_seeds=300, gradient_cost=2.0):
    margin = draws.random(n_seeds, dtype=np.float32)
    seeds, answers = np.arange(0, 2 * n_seeds, 2), draws.integers(0, 7, n_seeds)
    space = Space.of(choose_perturbation(perturbation), seeds, seeds + 5, margin, int(draws.integers(1 << 40)), answers)
    return replace(space, gradient_cost=gradient_cost)


def make_results(tests, space, draws):
    """Results in which tests far from the identity break seeds with small margins, of some answers more than others."""
    far = np.abs(tests.theta - space.identity).mean(1) / space.width.mean()
    position = space.position(tests.seed)
    lost = far * draws.random(len(tests)) * (0.5 + space.answer[position] / 7)
    margin = (space.margin[position] - lost).astype(np.float32)
    margin[draws.random(len(tests)) < 0.01] = -np.inf
    outcome = np.where(margin < 0, draws.integers(-1, 4, len(tests)), space.answer[position])
    gradient = draws.standard_normal(tests.theta.shape).astype(np.float32)
    return Results(margin < 0, outcome, margin, gradient)


@pytest.mark.parametrize("gradient_cost", [None, 2.0])
@pytest.mark.parametrize("perturbation", ["gaussian", "fog", SIX])
def test_it_proposes_the_same_tests(perturbation, gradient_cost, monkeypatch):
    draws = np.random.default_rng()
    space = make_space(perturbation, draws, gradient_cost=gradient_cost)
    in_c, in_numpy = Scheduled(), Scheduled()
    in_c.init(space)
    with monkeypatch.context() as context:
        context.setattr(native, "library", lambda: None)
        in_numpy.init(space)
    first = 0
    for n in (1, 13, 40, 100, 256, 256, 350, 900, 256):  # more tests than seeds, too
        number = np.arange(first, first + n)
        tests = in_c.propose(number)
        with monkeypatch.context() as context:
            context.setattr(native, "library", lambda: None)
            assert in_numpy.propose(number).equals(tests)
        uniform = space.uniform_tests(number[: n // 4], 0, number[: n // 4])
        for part in (tests, uniform):
            results = make_results(part, space, draws)
            in_c.observe(part, results)
            in_numpy.observe(part, results)
        first += n
    assert len(in_c.state["known"]) > 50
    for name, array in in_numpy.state.items():
        np.testing.assert_allclose(in_c.state[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


def test_it_samples_the_same_kinds():
    draws = np.random.default_rng()
    space, number, n = make_space("gaussian", draws), np.arange(100_000), len(kinds.KINDS)
    costs, state = 1 + draws.random(n), {"tried": 500 * draws.random(n), "paid": 60 * draws.random(n)}
    policy = Scheduled()
    policy.init(space)
    found = policy._arithmetic.sample_kinds(number, state, kinds.PRIOR_RETURN, costs, n)
    expected = Arithmetic(space).sample_kinds(number, state, kinds.PRIOR_RETURN, costs, n)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("depth", [1, 3])
def test_it_chooses_the_most_valuable_tests(depth):
    policy, space = Scheduled(), make_space("gaussian", np.random.default_rng())
    policy.init(space)
    n_seeds = len(space.seeds)
    worth = Arithmetic(space).values(policy.state, depth, Arithmetic(space).spreads_above(policy.state))
    for n in (0, 1, 57, depth * n_seeds):
        position, spreads = policy._arithmetic.choose_seeds(policy.state, depth, n, 99)
        np.testing.assert_allclose(spreads, Arithmetic(space).spreads_above(policy.state))
        times = np.bincount(position, minlength=n_seeds)
        assert len(position) == n
        assert (np.diff(position) >= 0).all()
        if n:
            is_least = worth < 0.999 * np.sort(worth, None)[-n]
            assert (times <= (~is_least).sum(0)).all()


def test_of_equal_margins_the_last_is_kept():
    policy, space = Scheduled(), make_space(SIX, np.random.default_rng())
    policy.init(space)
    tests = space.uniform_tests(np.arange(5), 0, np.arange(5))
    margin = np.array([-np.inf, 0.5, -1, -np.inf, np.nan], dtype=np.float32)
    policy._arithmetic.keep_least(policy.state, tests.theta, np.array([3, 4, 3, 3, 4]), margin)
    assert policy.state["margin"][3] == -np.inf
    np.testing.assert_array_equal(policy.state["theta"][3], tests.theta[3])


def test_arrays_that_do_not_fit_are_refused():
    draws = np.random.default_rng()
    policy = Scheduled()
    policy.init(make_space("gaussian", draws))
    policy.state["answer_index"][7] = 7
    with pytest.raises(IndexError, match="the number of its clean answer"):
        policy.propose(np.arange(10))
    policy.state["answer_index"] = policy.state["answer_index"].astype(np.int32)
    with pytest.raises(TypeError, match="expected int64"):
        policy.propose(np.arange(10))
