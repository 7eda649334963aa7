"""Steering draws fresh inputs where the model, as it is now, answers incorrectly."""

import numpy as np
import pytest
import torch

from themis.perturb import choose_perturbation
from themis.retraining.batches import N_BINS, Steering

CASES = [choose_perturbation("gaussian", 0.8), choose_perturbation("fog")]
LABELS = torch.arange(60) % 3
N = 6_000


def steered(steer):
    """After errors on class 2, under the second perturbation, and in the last part of the first theta of the first."""
    steering = Steering(CASES, LABELS, steer)
    rng = np.random.default_rng(0)
    row, case = rng.integers(0, 60, N), rng.integers(0, 2, N)
    bins = rng.integers(0, N_BINS, (N, steering.n_dimensions))
    steering.expect(row, case, bins)
    is_wrong = (LABELS.numpy()[row] == 2) & (case == 1) | (case == 0) & (bins[:, 0] == N_BINS - 1)
    for batch in np.array_split(is_wrong, 5):
        steering.observe(torch.from_numpy(batch.astype(np.float64)))
    steering.fold()
    return steering


def test_draws_follow_the_errors_and_all_else_is_drawn_too():
    steering, draws = steered(0.5), (np.arange(N) + 0.5) / N
    classes = np.bincount(LABELS.numpy()[steering.choose_rows(draws)], minlength=3) / N
    assert classes[2] > 1.3 * classes[0] > 0.2
    cases = np.bincount(steering.choose_cases(draws), minlength=2) / N
    assert cases[1] > cases[0] > 0.25
    shares, bins = steering.warp(0, draws[:, None].astype(np.float32))
    counts = np.bincount(bins[:, 0], minlength=N_BINS) / N
    assert counts[-1] > 2 * counts[0] > 0.1
    assert 0 <= shares.min() < shares.max() <= 1
    assert (np.diff(shares[:, 0]) >= 0).all()


def test_without_steering_draws_are_uniform():
    steering, draws = steered(0.0), (np.arange(N) + 0.5) / N
    assert np.bincount(steering.choose_rows(draws)) == pytest.approx(np.full(60, N / 60), abs=1)
    shares, _ = steering.warp(0, draws[:, None].astype(np.float32))
    assert shares[:, 0] == pytest.approx(draws, abs=1e-5)


def test_seeds_on_which_the_original_model_was_wrong_have_their_share_of_the_draws_besides_that_of_all_seeds():
    steering = Steering(CASES, LABELS, 0.5)
    steering.favour(np.repeat([0.1, 0.3], [40, 20]), 0.5)
    counts = np.bincount(steering.choose_rows((np.arange(N) + 0.5) / N), minlength=60) / N
    assert counts[:40] == pytest.approx(np.full(40, 0.5 / 60 + 0.5 * 0.1 / 10), abs=1e-3)
    assert counts[40:] == pytest.approx(np.full(20, 0.5 / 60 + 0.5 * 0.3 / 10), abs=1e-3)


def test_a_state_continues_where_it_was_stored():
    steering = steered(0.5)
    other = Steering(CASES, LABELS, 0.5)
    other.restore(steering.state())
    draws = np.random.default_rng(1).random(100)
    assert np.array_equal(other.choose_rows(draws), steering.choose_rows(draws))
