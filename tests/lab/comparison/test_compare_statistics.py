"""Correlations, their intervals and degenerate grids, checked against known answers and slow references."""

import numpy as np
import pytest

from themis_lab.comparison.statistics import (
    Measured,
    ResampledEstimate,
    Weights,
    agreed_lead,
    correlate,
    measure_correlation,
    measure_total,
    why_degenerate,
)


def slow_r(x, y):
    """Pearson's r as the textbook writes it."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    under = sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)
    return over / under**0.5


def test_r_of_exact_data():
    x = np.array([0.1, 0.2, 0.4, 0.9])
    assert correlate(x, 3 * x + 7) == pytest.approx(1, abs=1e-12)
    assert correlate(x, -x) == pytest.approx(-1, abs=1e-12)
    assert correlate(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(0.5)


def test_r_agrees_with_the_textbook_formula():
    generator = np.random.default_rng(0)
    rates, counts = generator.random((4, 1, 6)), generator.random((4, 3, 6))
    fast = correlate(rates, counts)
    for b in range(4):
        for t in range(3):
            assert fast[b, t] == pytest.approx(slow_r(rates[b, 0].tolist(), counts[b, t].tolist()))


@pytest.mark.parametrize("counts", [[5.0, 5, 5], [0.0, 0, 0], [0.1 + 0.2, 0.3, 0.3]])
def test_r_of_equal_counts_is_undefined(counts):
    assert np.isnan(correlate(np.array([0.1, 0.5, 0.9]), np.array(counts)))


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ([0.1, 0.5, 0.9], None),
        ([0.10, 0.15, 0.19], "span"),
        ([0.40, 0.94, 0.99, 1.0, 1.0], "one magnitude"),  # FGSM on LeNet-5: without 0.40 a span of 0.06
        ([0.01, 0.01, 0.01, 0.60], "one magnitude"),
        ([0.1, 0.9], "2 magnitudes are too few"),
        ([0.5], "1 magnitude is too few"),
        ([0.0, 0.1, 0.2], None),
    ],
)
def test_degenerate_grids_are_marked(rates, why):
    said = why_degenerate(np.array(rates))
    assert said is None if why is None else why in said


def test_counts_are_resampled_over_seeds_and_campaigns():
    generator = np.random.default_rng(1)
    counts, errors = generator.integers(0, 9, (2, 3, 2, 5)).astype(float), generator.random((3, 4))
    weights = Weights.draw(6, 8, 4, 2, 0)  # three of the eight seeds never fail
    assert (weights.search.sum(1) == 8).all()
    assert (weights.judge.sum(1) == 4).all()
    assert (weights.campaigns.sum(1) == 2).all()
    fast, rates = weights.counts(counts), weights.rates(errors)
    for b in range(6):
        seeds = np.repeat(np.arange(8), weights.search[b].astype(int))
        campaigns = np.repeat(np.arange(2), weights.campaigns[b].astype(int))
        judges = np.repeat(np.arange(4), weights.judge[b].astype(int))
        for m in range(3):
            assert rates[b, m] == pytest.approx(errors[m, judges].mean())
            for t in range(2):
                drawn = [counts[t, m, c, s] if s < 5 else 0.0 for c in campaigns for s in seeds]
                assert fast[b, t, m] == pytest.approx(sum(drawn) / 2)


def test_equal_techniques_are_equal_in_every_resample():
    generator = np.random.default_rng(2)
    counts = generator.poisson(np.linspace(0.2, 2, 5)[:, None, None], (5, 3, 40))[None].repeat(2, 0).astype(float)
    errors = (generator.random((5, 40)) < np.linspace(0.1, 0.9, 5)[:, None]).astype(float)
    weights = Weights.draw(200, 40, 40, 3, 0)
    r = measure_correlation(errors, counts, weights)
    assert r.difference(0, [1]).as_list() == [0.0, None, None]  # no variation is no interval of zero width
    assert measure_total(counts, weights).ratio(0, 1).as_list() == [1.0, None, None]
    assert r.estimate(0).low < r.estimate(0).value < r.estimate(0).high


def test_a_paired_interval_is_narrower_than_an_unpaired_one():
    generator = np.random.default_rng(3)
    hard = generator.exponential(1, 100)  # seeds differ much, and both techniques feel it
    means = np.linspace(0.2, 2, 6)[:, None, None] * hard
    counts = np.stack([generator.poisson(scale * means, (6, 3, 100)) for scale in (1.0, 1.3)]).astype(float)
    total = measure_total(counts, Weights.draw(500, 100, 10, 3, 0))
    ratio = total.ratio(1, 0)
    widths = [np.diff(total.estimate(k).as_list()[1:])[0] / total.values[k] for k in range(2)]
    assert ratio.low < 1.3 < ratio.high
    assert (ratio.high - ratio.low) / ratio.value < 0.7 * min(widths)


def test_rivals_and_means():
    r = Measured(np.array([0.5, np.nan, 0.9, 0.7]), np.zeros((4, 4)))
    assert [r.best_rivals(k) for k in range(4)] == [[2], [2], [3], [2]]
    assert r.difference(0, [2, 3]).value == pytest.approx(0.5 - 0.8)
    assert Measured(np.array([0.5, np.nan]), np.zeros((4, 2))).best_rivals(0) == []
    assert Measured(np.array([0.5, 0.2, 0.5, 0.5]), np.zeros((4, 4))).best_rivals(0) == [2, 3]


@pytest.mark.parametrize(("n_faults", "is_there"), [(1, False), (9, False), (10, True)])
def test_an_r_of_few_faults_is_undefined(n_faults, is_there):
    errors = np.linspace(0.1, 0.9, 5)[:, None].repeat(200, 1)
    counts = np.zeros((1, 5, 3, 200))
    counts[0, -1, :, :n_faults] = 1
    r = measure_correlation(errors, counts, Weights.draw(300, 200, 200, 3, 0))
    assert np.isfinite(r.values[0]) == is_there
    assert (r.estimate(0).as_list() == [None] * 3) != is_there
    raw = measure_correlation(errors, 100 * counts, Weights.draw(300, 200, 200, 3, 0), distinct=counts)
    assert np.isfinite(raw.values[0]) == is_there


def test_an_r_that_many_resamples_lack_is_undefined():
    errors = np.linspace(0.1, 0.9, 5)[:, None].repeat(200, 1)
    counts = np.zeros((1, 5, 1, 200))
    counts[0, -1, 0, :2] = 10  # 20 faults of two seeds: one resample in seven draws neither
    weights = Weights.draw(300, 200, 200, 1, 0)
    assert np.isnan(correlate(weights.rates(errors)[:, None], weights.counts(counts))).mean() > 0.05
    assert measure_correlation(errors, counts, weights).estimate(0).as_list() == [None] * 3


def test_a_lead_needs_both_definitions():
    up, down, open_ = [0.2, 0.1, 0.3], [-0.2, -0.3, -0.1], [0.2, -0.1, 0.5]
    assert agreed_lead(up, up) == "ahead"
    assert agreed_lead(down, down) == "behind"
    unclear = [(up, down), (down, up), (up, open_), (open_, open_), (up, None), (None, None), (up, [0.2, None, None])]
    assert all(agreed_lead(*pair) is None for pair in unclear)


def test_undefined_estimates_are_none_in_plain_data():
    assert ResampledEstimate.of(np.nan, np.zeros(9)).as_list() == [None, None, None]
    mostly = np.array([0.5, 0.6] + [np.nan] * 8)
    assert ResampledEstimate.of(0.5, mostly).as_list() == [0.5, None, None]
    ratio = Measured(np.array([1.0, 0.0]), np.zeros((9, 2))).ratio(0, 1)
    assert ratio.as_list() == [None, None, None]


def test_if_campaigns_differ_only_by_chance_the_interval_of_a_ratio_is_wide_enough():
    generator, hits = np.random.default_rng(5), 0
    for k in range(100):
        means = generator.beta(0.5, 2, (1, 5, 1, 200))
        counts = generator.poisson(np.broadcast_to(means, (2, 5, 3, 200))).astype(float)
        ratio = measure_total(counts, Weights.draw(200, 200, 10, 3, k)).ratio(0, 1)
        hits += ratio.low <= 1 <= ratio.high
    assert hits >= 95


def test_the_interval_contains_the_true_correlation():
    """Simulated seeds, campaigns and draws; the truth is the correlation of what is expected."""
    magnitudes, generator = np.linspace(0.1, 1, 8)[:, None], np.random.default_rng(4)

    def chance(hardness):
        return 1 / (1 + np.exp(-(4 * (magnitudes - 0.55) + 1.5 * hardness)))

    many = chance(generator.normal(size=100_000))
    truth = float(correlate(many.mean(1), (many**3).mean(1)))
    hits = 0
    for k in range(100):
        errors = (generator.random((5, 8, 400)) < chance(generator.normal(size=400))).mean(0)
        counts = generator.poisson(2 * chance(generator.normal(size=400))[:, None] ** 3, (8, 3, 400))[None]
        r = measure_correlation(errors, counts.astype(float), Weights.draw(200, 400, 400, 3, k)).estimate(0)
        hits += r.low <= truth <= r.high
    assert hits >= 87
