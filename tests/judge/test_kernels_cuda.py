"""The GPU kernels of the Gibbs judge: the right distribution, and sums that torch computes as well."""

import sys

import pytest
import torch
from kernels import DEVICE, HAS_GPU, needs_gpu, needs_triton
from scipy import stats

from themis.judge import kernels_cuda
from themis.judge.coverage import exact
from themis.judge.diagnostics import summarise, summarise_sums
from themis.judge.gibbs import STARTS, WARM_UP_STEPS, gibbs
from themis.measure.moments import Moments

pytestmark = needs_triton
N_DRAWS = 1000 if HAS_GPU else 24
N_TESTS = (4, 10, 1000, 1_000_000)
"""Tests of neurons 0, 4, 8, ..., of neurons 1, 5, 9, ..., and so on."""


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """The interpreter is faster with fewer and larger programs."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(kernels_cuda, "CHAIN_NEURONS", kernels_cuda.NEURON_MULTIPLE)
            patch.setattr(kernels_cuda, "HALF_NEURONS", kernels_cuda.NEURON_MULTIPLE)
        yield


def draw(counts, *, seed=1, first=0, warm_up=WARM_UP_STEPS if HAS_GPU else 12, n_draws=N_DRAWS):
    numbers = torch.tensor([seed, first], device=DEVICE).split(1)
    return kernels_cuda.draw_chains(counts, torch.tensor(STARTS, device=DEVICE), *numbers, warm_up, n_draws)


def counts_of(*numbers):
    return torch.tensor(numbers, device=DEVICE).float().repeat(kernels_cuda.NEURON_MULTIPLE // len(numbers))


@pytest.fixture(scope="module")
def draws(few_programs):
    """Of neurons with `N_TESTS` tests, in turn; one more than `N_DRAWS`."""
    return draw(counts_of(*N_TESTS), n_draws=N_DRAWS + 1)


@needs_gpu
def test_the_kernels_compile():
    assert kernels_cuda.can_draw(DEVICE)


@pytest.mark.parametrize("n_tests", N_TESTS)
def test_draws_follow_the_student_t(draws, n_tests):
    z = draws[..., N_TESTS.index(n_tests) :: len(N_TESTS)].flatten().double().cpu().numpy()
    statistic = stats.kstest(z, stats.t(n_tests - 1).cdf).statistic
    assert statistic < 1.95 / len(z) ** 0.5  # 0.1% of right samplers would fail
    assert abs(z.mean()) < 4 * z.std() / len(z) ** 0.5


@needs_gpu
@pytest.mark.parametrize("n_tests", [4, 5, 20])
def test_draws_of_a_chain_depend_on_one_another_as_in_torch(n_tests):
    """The variance carries over from one step to the next."""

    def lag_correlations(z):
        z = z.square().clamp(min=1e-12).log()  # a draw may be exactly 0
        z = z - z.mean()
        return [float((z[..., lag:] * z[..., :-lag]).mean() / z.square().mean()) for lag in (1, 2, 3)]

    ours = draw(counts_of(n_tests).repeat(8)).permute(2, 0, 1)
    stream = torch.Generator(DEVICE).manual_seed(3)
    theirs = sys.modules["themis.judge.gibbs"]._chains(counts_of(n_tests).repeat(8), N_DRAWS, stream)
    assert lag_correlations(ours) == pytest.approx(lag_correlations(theirs), abs=0.003)


def test_a_neuron_has_its_own_stream():
    counts, few = counts_of(4, 50), {"warm_up": 0, "n_draws": 2}
    one, later, other = draw(counts, **few), draw(counts, first=64, **few), draw(counts, seed=2, **few)
    assert torch.equal(one[..., 64:], later[..., :-64])
    assert not (one == other).any()
    assert len(one.unique()) > 0.99 * one.numel()


def test_sums_are_those_of_torch():
    counts = counts_of(10)
    draws = torch.distributions.StudentT(counts - 1).sample((4, 80))
    sums, products = kernels_cuda.sum_halves(draws, counts)
    halves = draws.view(8, 40, -1)
    centred = halves - halves.mean(1, keepdim=True)
    lags = range(kernels_cuda.LAGS)
    expected = torch.stack([(centred[:, lag:] * centred[:, : 40 - lag]).sum(1) for lag in lags], 1)
    torch.testing.assert_close(sums[:2], torch.stack([halves.sum(1), halves.square().sum(1)]), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(products, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("n_draws", [N_DRAWS, N_DRAWS + 1, 4, 5, 9])
def test_sums_give_the_summary_of_the_draws(draws, n_draws):
    counts, draws = counts_of(*N_TESTS), draws[:, :n_draws].contiguous()
    middle = draws[:, n_draws // 2] if n_draws % 2 else None
    got, is_unfinished = summarise_sums(*kernels_cuda.sum_halves(draws, counts), n_draws, middle)
    expected = summarise(draws.permute(2, 0, 1).contiguous())
    torch.testing.assert_close(got.mean, expected.mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.sd, expected.sd, rtol=1e-5, atol=0)
    assert is_unfinished.double().mean() < 0.01
    difference = (got.ess / expected.ess - 1).abs()[~is_unfinished]
    assert (difference < 1e-4).double().mean() > 0.98  # a sign that is in doubt in float32 ends a sequence elsewhere
    if n_draws >= 1000:
        assert (got.rhat - expected.rhat).abs().max() < 5e-4
        assert torch.corrcoef(torch.stack((got.rhat, expected.rhat)))[0, 1] > 0.9


def test_chains_that_have_not_mixed_have_a_large_rhat(draws):
    def rhat(draws):
        summary, _ = summarise_sums(*kernels_cuda.sum_halves(draws.contiguous(), counts_of(*N_TESTS)), N_DRAWS, None)
        return summary.rhat[2::4]  # of many tests

    draws = draws[:, :N_DRAWS]
    assert rhat(draws + torch.tensor([0.0, 0.0, 0.0, 3.0], device=DEVICE)[:, None, None]).min() > 1.2
    assert rhat(draws * torch.tensor([1.0, 1.0, 1.0, 4.0], device=DEVICE)[:, None, None]).min() > 1.05


def test_the_size_of_the_tiles_does_not_matter(monkeypatch):
    module, n, draws = sys.modules["themis.judge.gibbs"], *((3000, 4000) if HAS_GPU else (300, 16))
    if not HAS_GPU:
        monkeypatch.setattr(kernels_cuda, "can_draw", lambda device: True)
        monkeypatch.setattr(module, "WARM_UP_STEPS", 1)
    ones = torch.ones(n, dtype=torch.float64, device=DEVICE)
    whole = gibbs(Moments(ones * 20, ones, ones), draws=draws, random_seed=7)
    monkeypatch.setattr(module, "TILE", 1024 if HAS_GPU else 256)
    parts = gibbs(Moments(ones * 20, ones, ones), draws=draws, random_seed=7)
    for name in ("mean", "sd", "ess", "mcse", "rhat"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    few = ones[:100]
    assert not (gibbs(Moments(few * 20, few, few), draws=draws, random_seed=8).mean == whole.mean[:100]).any()


@needs_gpu
@pytest.mark.parametrize("draws", [16, 20, 400, 4000, 4004])
def test_the_posterior_agrees_with_the_closed_form(draws):
    n = 20_000
    count = torch.tensor([10, 100, 100_000, 50], device=DEVICE).repeat(n // 4)
    moments = Moments(count, torch.ones(n, device=DEVICE).double(), (count - 1).double())
    got, closed = gibbs(moments, draws=draws), exact(moments, draws=draws)
    error = (got.mean - closed.mean) / closed.mcse
    assert error.square().mean().item() == pytest.approx(1, abs=5 * (2 / n) ** 0.5)
    assert (got.sd / closed.sd).square().mean().item() == pytest.approx(1, abs=0.02)
    if draws >= 4000:
        assert (got.ess / draws).mean().item() == pytest.approx(1, abs=0.03)
        assert got.rhat.max() < 1.01
