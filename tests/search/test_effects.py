"""`scheduled` learns which corners of theta break the seeds of each clean answer."""

from dataclasses import replace

import numpy as np
import pytest

from themis import Theta
from themis.measure.tests import Results
from themis.perturb import Perturbation
from themis.search import choose_policy
from themis.search.kinds import MAX_COMPARED_DIMENSIONS
from themis.search.policy import Space

pytestmark = pytest.mark.quick

N_SEEDS = 400


def space(n_dimensions, is_random=False, n_seeds=N_SEEDS):
    """Seeds with two clean answers in turn, whose margin is 1."""
    theta = tuple(Theta(f"t{k}", -1, 1) for k in range(n_dimensions))
    perturbation = Perturbation("p", theta, lambda inputs, *rest: inputs, is_random=is_random)
    rows = np.arange(n_seeds)
    answers = rows % 2
    return replace(Space.of(perturbation, rows, rows, np.ones(n_seeds, np.float32), 0), answers=answers)


def results(tests, loss):
    margin = (1 - loss).astype(np.float32)
    return Results(margin < 0, np.zeros(len(tests), int), margin, None)


def proposals(policy, where, loss_of, n_portions=6, size=50):
    """Portions of tests whose loss of margin is a function of clean answer and theta."""
    policy.init(where)
    for first in range(0, n_portions * size, size):
        tests = policy.propose(np.arange(first, first + size))
        loss = loss_of(where.answer[tests.seed], tests.theta)
        policy.observe(tests, results(tests, loss))
        yield tests, loss


def corners(tests):
    return np.isin(tests.kind, ("corner", "sweep"))


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda answer, theta: 0.4 + 0.8 * np.where(answer == 0, theta[:, 0] > 0, theta[:, 0] < 0),
        lambda answer, theta: 0.4 + 0.8 * (theta[:, 0] * theta[:, 1] > 0.5),
    ],
    ids=["a bound that depends on the answer", "a pair of bounds"],
)
@pytest.mark.parametrize("is_random", [False, True])
def test_seeds_are_tried_first_at_the_corners_that_cost_most(loss_of, is_random):
    portions = list(proposals(choose_policy("scheduled"), space(3, is_random), loss_of))
    shares = [(loss[corners(tests)] > 1).mean() for tests, loss in portions]
    assert 0.2 < shares[0] < 0.8
    assert min(shares[2:]) > 0.8


def test_every_corner_of_a_seed_is_tried_and_with_noise_tried_again():
    where = space(2, is_random=True, n_seeds=5)
    tried = {seed: [] for seed in where.seeds.tolist()}
    for tests, _ in proposals(choose_policy("scheduled"), where, lambda answer, theta: 0.1 * theta[:, 0], 20, 10):
        at = (np.abs(tests.theta) == 1).all(1)
        for seed, theta in zip(tests.seed[at].tolist(), tests.theta[at].tolist(), strict=True):
            tried[seed].append(tuple(theta))
    for thetas in tried.values():
        assert len(set(thetas)) == 4
        assert len(thetas) > 8


@pytest.mark.parametrize("n_dimensions", [1, MAX_COMPARED_DIMENSIONS, MAX_COMPARED_DIMENSIONS + 1])
def test_with_too_many_dimensions_seeds_take_their_corners_in_random_order(n_dimensions):
    policy = choose_policy("scheduled")
    portions = proposals(policy, space(n_dimensions), lambda answer, theta: 0.4 + 0.8 * (theta[:, 0] > 0))
    share = np.mean(np.concatenate([loss[corners(tests)] > 1 for tests, loss in portions]))
    assert share > 0.8 if n_dimensions <= MAX_COMPARED_DIMENSIONS else 0.2 < share < 0.8
    assert not policy.state["visited"].any() or n_dimensions <= MAX_COMPARED_DIMENSIONS
