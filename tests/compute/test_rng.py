"""Noise is a function of its noise seed only, and has the right distribution."""

import numpy as np
import pytest
import torch
from scipy import stats

from themis.compute import gpu, native
from themis.compute.rng import BELOW_ONE, Rng, mix, mix_in_numpy, uniform

pytestmark = pytest.mark.quick


def seeds(n, salt=0):
    return torch.from_numpy(mix(salt, np.arange(n)))


def test_a_row_depends_only_on_its_own_seed():
    noise = Rng(seeds(20)).normal(3, 5, 5)
    assert torch.equal(Rng(seeds(20)[7:9]).normal(3, 5, 5), noise[7:9])


def test_later_draws_continue_the_stream():
    rng = Rng(seeds(4))
    first, second = rng.uniform(100), rng.uniform(100)
    assert not torch.equal(first, second)
    assert torch.equal(Rng(seeds(4)).uniform(200), torch.cat([first, second], 1))


def test_normal_noise_is_normal():
    noise = Rng(seeds(2000)).normal(501)
    assert noise.shape == (2000, 501)
    sample = noise.flatten().double().numpy()
    assert stats.kstest(sample[::3], "norm").pvalue > 1e-3
    n = len(sample)
    assert abs(sample.mean()) < 4 / n**0.5
    assert abs(stats.skew(sample)) < 4 * (6 / n) ** 0.5
    assert abs(stats.kurtosis(sample)) < 4 * (24 / n) ** 0.5


def test_normal_noise_is_the_transform_of_uniform_noise_to_rounding():
    first, second = Rng(seeds(300)).uniform(2000).double().view(300, 2, 1000).unbind(1)
    radius, angle = (-2 * first.log()).sqrt(), 2 * np.pi * second
    expected = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
    for n in (2000, 1999):
        error = (Rng(seeds(300)).normal(n) - expected[:, :n]).abs() / torch.cat([radius, radius], 1)[:, :n]
        assert error.max() < 3e-7


def test_uniform_noise_is_uniform_inside_the_open_interval():
    noise = Rng(seeds(1000)).uniform(300)
    assert noise.min() > 0
    assert noise.max() < 1
    assert stats.kstest(noise.flatten().numpy(), "uniform").pvalue > 1e-3


def test_neither_positions_nor_tests_are_correlated():
    noise = Rng(seeds(4000)).normal(200)
    for rows in (noise.T, noise[:200]):
        correlation = torch.corrcoef(rows)
        off = correlation[~torch.eye(len(rows), dtype=bool)]
        n = rows.shape[1]
        assert off.abs().max() < 6 / n**0.5
        assert 0.9 < off.std() * n**0.5 < 1.1


def test_noise_seeds_are_distinct_and_not_negative():
    numbers = mix(3, np.arange(1000)[:, None], np.arange(1000))
    assert numbers.min() >= 0
    assert len(np.unique(numbers)) == numbers.size


def test_every_word_and_their_order_matter():
    assert len({int(mix(1, 2)), int(mix(2, 1)), int(mix(1, 2, 0)), int(mix(1, 3)), int(mix(-1, 2))}) == 5


def test_uniform_numbers_by_counter_are_uniform():
    assert stats.kstest(uniform(0, np.arange(20_000)), "uniform").pvalue > 1e-3


@pytest.mark.skipif(native.library() is None, reason="the library was not compiled")
def test_the_compiled_numbers_are_identical_to_those_of_torch():
    compiled = Rng(seeds(50))
    plain = Rng(seeds(50))
    plain._native = None
    for n in (1, 7, 5000, 3):
        assert torch.equal(compiled.uniform(n), plain.uniform(n))
        assert torch.equal(compiled.normal(n), plain.normal(n))
    assert torch.equal(compiled.normal(31, 9), plain.normal(31, 9))
    for shape in ((1,), (3, 5, 5), (2, 8, 9)):
        inputs, sigma = torch.rand(50, *shape), torch.rand(50, 2)[:, 0]
        assert torch.equal(compiled.add_normal(inputs, sigma), plain.add_normal(inputs, sigma))
    assert compiled.drawn == plain.drawn


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_largest_number_is_below_one(is_compiled):
    rng = Rng(torch.tensor([7]), 34_941_495)  # whose word has all of its first 24 bits set
    rng._native = native.library() if is_compiled else None
    assert rng.uniform(1).item() == BELOW_ONE


def words_of_many_shapes():
    numbers = np.random.default_rng()
    for n in (1, 2, 7, 511, 513, 1500):
        first, second = numbers.integers(-(2**62), 2**62, (2, n))
        yield (first,)
        yield 3, -5, first, 7, second
        yield 1, np.arange(-9, 4), 5, first[:, None]
        yield first[:, None], np.arange(3)
        yield (first[::-1], *numbers.integers(-(2**31), 2**31, (n, 6)).T)
        yield np.int64(4), first.astype(np.int32), second
        yield 2, first[:0]
    yield 0, np.arange(3)[:, None, None], np.arange(4)[:, None], np.arange(5)


@pytest.mark.skipif(native.library() is None, reason="the library was not compiled")
def test_the_compiled_hash_is_identical_to_that_of_numpy():
    for words in words_of_many_shapes():
        expected = mix_in_numpy(0, words)
        for mixed, right in ((mix(*words), expected), (uniform(*words), (expected >> 10) * 2.0**-53)):
            assert mixed.dtype == right.dtype
            np.testing.assert_array_equal(mixed, right)


def test_the_compiled_hash_takes_arrays_that_cannot_be_written_or_are_not_contiguous():
    words = np.arange(24).reshape(8, 3)
    fixed = words.copy()
    fixed.flags.writeable = False
    expected = mix_in_numpy(0, list(words.T))
    assert np.array_equal(mix(*words.T), expected)
    assert np.array_equal(mix(*np.ascontiguousarray(words.T)), expected)
    assert np.array_equal(mix(*fixed.T), expected)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_numbers_in_one_kernel(monkeypatch):
    fused, on_cpu = Rng(seeds(50).cuda()), Rng(seeds(50))
    assert gpu.uniform_kernel(torch.device("cuda:0")) is not None, "the kernel was compiled"
    for n in (1, 7, 5000, 3):
        assert torch.equal(fused.uniform(n).cpu(), on_cpu.uniform(n))
    normal = fused.normal(31, 9)
    torch.testing.assert_close(normal.cpu(), on_cpu.normal(31, 9), atol=1e-5, rtol=1e-5)
    plain = Rng(seeds(50).cuda())
    monkeypatch.setattr(gpu, "uniform_kernel", lambda device: None)
    monkeypatch.setattr(gpu, "pairs_kernel", lambda device: None)
    assert torch.equal(plain.uniform(5011), Rng(seeds(50)).uniform(5011).cuda())
    torch.testing.assert_close(plain.normal(31, 9), normal, atol=1e-5, rtol=1e-5)
