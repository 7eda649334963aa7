"""The interval on coverage and the design effect: closed forms, edges, and a few simulated campaigns."""

import numpy as np
import pytest
import torch
from moments import moments_of
from simulation import NETWORKS, coverage_campaigns, holds, textbook_coverage

from themis.judge.coverage import Rule
from themis.judge.interval import _leave_one_out, coverage_interval, design_effect
from themis.measure.moments import Moments, Panel


def blocks_of(values, seed):
    panel = Panel.empty(torch.arange(values.shape[1]))
    panel.add(torch.as_tensor(values, dtype=torch.float32), torch.as_tensor(np.asarray(seed)))
    return panel.blocks()


def random_blocks(n_tests=500, n_neurons=30, sd=1.0, random_seed=0):
    rng = np.random.default_rng(random_seed)
    return blocks_of(np.abs(rng.standard_normal((n_tests, n_neurons))) * sd, rng.integers(200, size=n_tests))


def test_leaving_a_block_out_equals_measuring_the_others():
    values, seed = torch.rand(300, 4), torch.arange(300) % 77
    blocks = blocks_of(values.clone(), seed)
    total, without = _leave_one_out(blocks)
    everything = moments_of(values.double())
    torch.testing.assert_close(total.m2, everything.m2, rtol=1e-5, atol=1e-6)
    block = Panel.empty(torch.arange(4)).table[seed]
    for b in range(20):
        others = moments_of(values[block != b].double())
        torch.testing.assert_close(without.mean[b], others.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(without.variance[b], others.variance, rtol=1e-5, atol=1e-6)


def test_the_estimate_always_lies_within_its_interval():
    for point in (0.0, 0.3, 1.0):
        interval = coverage_interval(random_blocks(), point, Rule())
        assert interval.value == point
        assert 0 <= interval.low <= point <= interval.high <= 1


def test_a_certain_coverage_has_no_interval_if_every_neuron_is_in_the_panel():
    covered = coverage_interval(random_blocks(sd=0.01), 1.0, Rule(), n_neurons=30)
    assert (covered.low, covered.high) == (1, 1)
    open_ = coverage_interval(random_blocks(sd=100.0), 0.0, Rule(), n_neurons=30)
    assert (open_.low, open_.high) == (0, 0)


def test_a_panel_cannot_represent_all_neurons_without_error():
    interval = coverage_interval(random_blocks(sd=0.01), 1.0, Rule(), n_neurons=100_000)
    assert interval.low == pytest.approx(0.025 ** (1 / 30), abs=1e-4)
    assert interval.low == pytest.approx(coverage_interval(random_blocks(sd=0.01), 1.0, Rule()).low, abs=1e-3)


def test_neurons_that_are_not_judged_do_not_count():
    settled, doubtful = random_blocks(sd=0.01), random_blocks(sd=1.18)
    both = Moments(settled.count, torch.cat([settled.mean, doubtful.mean], 1), torch.cat([settled.m2, doubtful.m2], 1))
    is_judged = torch.arange(60) < 30
    assert coverage_interval(both, 1.0, Rule(), is_judged, 30).low == 1
    assert coverage_interval(both, 1.0, Rule(), ~is_judged, 30).low < 1


def test_neurons_that_never_moved_may_have_converged_or_not():
    unseen = coverage_interval(blocks_of(np.zeros((500, 10)), np.arange(500)), 0.0, Rule(), n_neurons=10)
    assert (unseen.low, unseen.high) == (0, 1)
    long_unseen = coverage_interval(blocks_of(np.zeros((3000, 10)), np.arange(3000)), 1.0, Rule(), n_neurons=10)
    assert (long_unseen.low, long_unseen.high) == (1, 1)


def test_too_few_tests_or_seeds_give_no_interval():
    nothing = Panel.empty(torch.arange(3)).blocks()
    for blocks in (
        nothing,
        blocks_of(np.ones((29, 3)), range(29)),
        blocks_of(np.random.default_rng(0).random((100, 3)), [5] * 100),
    ):
        interval = coverage_interval(blocks, 0.5, Rule())
        assert (interval.low, interval.high) == (0, 1)
        assert design_effect(blocks) is None


def test_no_judged_neuron_gives_no_interval():
    interval = coverage_interval(random_blocks(), 0.0, Rule(), torch.zeros(30, dtype=torch.bool))
    assert (interval.low, interval.high) == (0, 1)


def test_a_neuron_moved_by_a_single_test_is_uncertain():
    values = np.zeros((1000, 5))
    values[17] = 30.0
    interval = coverage_interval(blocks_of(values, np.arange(1000)), 1.0, Rule(), n_neurons=5)
    assert interval.low == 0


def test_the_design_effect_is_one_for_independent_tests():
    rng = np.random.default_rng(0)
    assert design_effect(blocks_of(rng.random((4000, 200)), np.arange(4000))) == pytest.approx(1, abs=0.1)


def test_the_design_effect_grows_with_what_tests_of_a_seed_share():
    rng = np.random.default_rng(0)
    seed = np.repeat(np.arange(400), 9)
    values = rng.random((400, 300))[seed] + rng.random((3600, 300))  # half of the variance is due to the seed
    assert design_effect(blocks_of(values, seed)) == pytest.approx(1 + (9 - 1) / 2, rel=0.1)


def test_the_design_effect_is_unknown_if_nothing_moved():
    assert design_effect(blocks_of(np.zeros((100, 3)), np.arange(100))) is None


@pytest.mark.parametrize("name", NETWORKS)
def test_coverage_intervals_hold_in_a_short_simulation(name):
    assert holds(coverage_campaigns(NETWORKS[name], 300, 600, 60, 60, 60)) >= 0.93


def test_coverage_intervals_hold_for_all_neurons_from_a_panel():
    assert holds(coverage_campaigns(NETWORKS["errors each neuron's own"], 300, 600, 60, 200, 40)) >= 0.93


def test_the_plain_jackknife_of_coverage_does_not_hold():
    network = NETWORKS["the same, under the limit"]
    assert holds(coverage_campaigns(network, 300, 600, 60, 60, 60, stated=textbook_coverage)) < 0.8
