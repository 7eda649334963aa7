"""The sums of the panel per seed block are the moments of each block; its shapes equal those of scipy."""

import numpy as np
import pytest
import torch
from moments import moments_of
from scipy import stats

from themis.measure.moments import N_BLOCKS, Panel, Shape, block_table, choose_panel

pytestmark = pytest.mark.quick


def some_tests(n_tests=700, n_neurons=5, n_seeds=90, random_seed=0):
    generator = torch.Generator().manual_seed(random_seed)
    values = torch.rand(n_tests, n_neurons, generator=generator) + torch.arange(n_neurons)
    return values, torch.randint(n_seeds, (n_tests,), generator=generator)


def filled(values, seed, chunk=64):
    panel = Panel.empty(torch.arange(values.shape[1]))
    for first in range(0, len(values), chunk):
        panel.add(values[first : first + chunk].clone(), seed[first : first + chunk])
    return panel


def assert_same(found, expected):
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.m2, expected.m2, rtol=1e-4, atol=1e-6)


def test_blocks_are_the_moments_of_each_block():
    values, seed = some_tests()
    blocks = filled(values, seed).blocks()
    block = block_table()[seed]
    assert blocks.count.shape == (N_BLOCKS, 1)
    for b in range(N_BLOCKS):
        expected = moments_of(values[block == b].double())
        assert blocks.count[b, 0] == expected.count
        torch.testing.assert_close(blocks.mean[b], expected.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(blocks.m2[b], expected.m2, rtol=1e-4, atol=1e-6)


def test_the_size_of_the_chunks_does_not_matter():
    values, seed = some_tests(3000)
    assert_same(filled(values, seed, 1000).blocks(), filled(values, seed, 32).blocks())


def test_asking_for_blocks_between_chunks_changes_nothing():
    values, seed = some_tests()
    panel = filled(values[:300], seed[:300])
    panel.blocks()
    panel.add(values[300:].clone(), seed[300:])
    assert_same(panel.blocks(), filled(values, seed).blocks())


def test_accelerators_compute_the_same_sums():
    values, seed = some_tests(100)
    by_index, by_product = filled(values, seed, 100), Panel.empty(torch.arange(5))
    by_product._start(values)
    by_product._add_by_product(block_table()[seed], values - values[0])
    assert_same(by_product.blocks(), by_index.blocks())


def test_a_neuron_that_always_moves_by_the_same_amount_has_no_spread():
    values = torch.full((400, 2), 123.456)
    blocks = filled(values, torch.arange(400)).blocks()
    assert (blocks.m2 == 0).all()
    torch.testing.assert_close(blocks.mean, torch.full_like(blocks.mean, 123.456), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_type_is_summed_in_the_same_way(dtype):
    values, seed = some_tests()
    values = values.to(dtype)
    assert_same(filled(values, seed).blocks(), filled(values.float(), seed).blocks())


def test_without_tests_the_blocks_are_empty():
    panel = Panel.empty(torch.arange(3))
    panel.add(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    blocks = panel.blocks()
    assert int(blocks.count.sum()) == 0
    assert (blocks.mean == 0).all()


def test_blocks_are_even_and_follow_no_order_of_the_data():
    table = block_table().numpy()
    # Neighbours, and every class when 2, 5, 10 or 20 of them take turns, are assigned to blocks as if at random.
    for seeds in [np.arange(500), *(np.arange(0, 4096, turns) for turns in (1, 2, 5, 10, 20))]:
        counts = np.bincount(table[seeds], minlength=N_BLOCKS)
        assert 0.001 < stats.chisquare(counts).pvalue < 0.999


def test_the_panel_is_a_fixed_random_sample_in_ascending_order():
    panel = choose_panel(100_000, random_seed=7)
    assert len(panel) == len(panel.unique()) == 1000
    assert torch.equal(panel, panel.sort().values)
    assert torch.equal(panel, choose_panel(100_000, random_seed=7))
    assert not torch.equal(panel, choose_panel(100_000, random_seed=8))
    assert 45_000 < panel.double().mean() < 55_000
    assert torch.equal(choose_panel(10), torch.arange(10))


def test_shape_equals_that_of_scipy():
    rng = np.random.default_rng(0)
    signed = np.stack([rng.standard_normal(900), rng.standard_t(8, 900), rng.exponential(size=900) - 0.3], 1)
    shape = Shape.empty(3)
    for part in np.array_split(signed, 7):
        shape.add(torch.from_numpy(part).float())
    for found, values in ((shape.signed(), signed), (shape.absolute(), np.abs(signed))):
        np.testing.assert_allclose(found[0], stats.skew(values), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[1], stats.kurtosis(values), rtol=1e-4, atol=1e-4)


def test_shape_is_unknown_if_nothing_varies():
    shape = Shape.empty(2)
    shape.add(torch.tensor([[0.0, 0.3]] * 50))
    assert shape.signed()[0].isnan().all()
    assert shape.absolute()[1].isnan().all()


def test_a_shift_of_another_length_is_refused():
    state = Panel.empty(torch.arange(3)).state()
    with pytest.raises(ValueError, match="has 3 neurons, and its shift 2"):
        Panel.empty(torch.arange(3)).restore({**state, "shift": torch.zeros(2)}, torch.device("cpu"))
