"""`themis compare` promises: a lead is not due to chance, and a ratio's interval contains the true ratio."""

import numpy as np
import pytest

from themis_lab.comparison.statistics import Weights, agreed_lead, measure_correlation, measure_total

MAGNITUDES = np.linspace(0.1, 1, 8)[:, None]
N_SEEDS, N_CAMPAIGNS = 200, 3


def chance(hardness, shift=0.0):
    return 1 / (1 + np.exp(-(5 * (MAGNITUDES - 0.55 - shift) + 1.5 * hardness)))


def compared(generator, rates, n_resamples=150):
    """Both measures of r and the totals, of techniques whose counts per seed have these means `[techniques, ...]`."""
    hardness = generator.normal(size=N_SEEDS)
    means = np.stack([2 * rate(chance(hardness)) for rate in rates])[:, :, None]
    counts = generator.poisson(np.broadcast_to(means, (len(rates), 8, N_CAMPAIGNS, N_SEEDS))).astype(float)
    judged = chance(generator.normal(size=N_SEEDS))
    full = (generator.random((5, *judged.shape)) < judged).mean(0)
    box = (generator.random((5, *judged.shape)) < judged / 2).mean(0)
    weights = Weights.draw(n_resamples, N_SEEDS, N_SEEDS, N_CAMPAIGNS, int(generator.integers(1 << 30)))
    return [measure_correlation(errors, counts, weights) for errors in (full, box)], measure_total(counts, weights)


def test_among_equal_techniques_a_lead_in_r_is_rarely_stated():
    """Six techniques that find the same faults on average: one is called ahead of all others by chance in few cases."""
    generator, n_ahead, n_over_mean = np.random.default_rng(0), 0, 0
    for _ in range(60):
        both, _ = compared(generator, [lambda rate: rate] * 6)
        for k in range(6):
            leads = [r.difference(k, r.best_rivals(k)[:1]).as_list() for r in both]
            n_ahead += agreed_lead(*leads) == "ahead"
            others = [j for j in range(6) if j != k][:4]
            n_over_mean += agreed_lead(*(r.difference(k, others).as_list() for r in both)) == "ahead"
    assert n_ahead <= 3  # of 60 comparisons
    assert n_over_mean <= 0.03 * 360


def test_a_technique_whose_faults_follow_both_error_rates_is_ahead():
    generator, n_ahead = np.random.default_rng(1), 0
    for _ in range(20):
        both, _ = compared(generator, [lambda rate: rate, lambda rate: 1 - rate, lambda rate: rate**40])
        n_ahead += agreed_lead(*(r.difference(0, r.best_rivals(0)[:1]).as_list() for r in both)) == "ahead"
    assert n_ahead >= 18


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_ratio_of_distinct_faults_lies_in_its_interval(factor):
    generator, hits = np.random.default_rng(2), 0
    for _ in range(80):
        _, total = compared(generator, [lambda rate: factor * rate, lambda rate: rate])
        ratio = total.ratio(0, 1)
        hits += ratio.low <= factor <= ratio.high
    assert hits >= 74
