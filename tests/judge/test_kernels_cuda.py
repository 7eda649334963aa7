"""The GPU kernels of the Gibbs judge: the right distribution, and sums that torch computes as well.

Without a GPU, Triton's interpreter runs them: TRITON_INTERPRET=1 pytest -m slow tests/judge/test_kernels_cuda.py
"""

import os
import sys

import pytest
import torch
from scipy import stats

from themis.judge import kernels_cuda
from themis.judge.diagnostics import summarise, summarise_sums
from themis.judge.gibbs import STARTS, WARM_UP, gibbs
from themis.judge.posterior import exact
from themis.measure.moments import Moments

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels_cuda.triton is not None

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="needs a GPU or Triton's interpreter"),
]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
N_DRAWS = 1000 if HAS_GPU else 40


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter is faster with fewer and larger programs."""
    if IS_INTERPRETED:
        monkeypatch.setattr(kernels_cuda, "CHAIN_NEURONS", kernels_cuda.PADDING)
        monkeypatch.setattr(kernels_cuda, "HALF_NEURONS", kernels_cuda.PADDING)


def draw(counts, *, seed=1, first=0, warm_up=WARM_UP if HAS_GPU else 40, n_draws=N_DRAWS):
    numbers = torch.tensor([seed, first], device=DEVICE).split(1)
    return kernels_cuda.draw_chains(counts, torch.tensor(STARTS, device=DEVICE), *numbers, warm_up, n_draws)


def counts_of(*numbers):
    return torch.tensor(numbers, device=DEVICE).float().repeat(kernels_cuda.PADDING // len(numbers))


@needs_gpu
def test_the_kernels_compile():
    assert kernels_cuda.can_draw(DEVICE)


@pytest.mark.parametrize("n_tests", [4, 10, 1000, 1_000_000])
def test_draws_follow_the_student_t(n_tests):
    z = draw(counts_of(n_tests)).flatten().double().cpu().numpy()
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
    counts = counts_of(4, 50)
    one, later, other = draw(counts, n_draws=4), draw(counts, first=64, n_draws=4), draw(counts, seed=2, n_draws=4)
    assert torch.equal(one[..., 64:], later[..., :-64])
    assert not (one == other).any()
    assert len(one.unique()) > 0.99 * one.numel()


@pytest.mark.parametrize("n_draws", [N_DRAWS, N_DRAWS + 1, 4, 5, 9])
def test_sums_give_the_summary_of_the_draws(n_draws):
    counts = counts_of(4, 10, 100, 100_000)
    draws = draw(counts, n_draws=n_draws)
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


def test_chains_that_have_not_mixed_have_a_large_rhat():
    counts = counts_of(50)
    draws = draw(counts) + torch.tensor([0.0, 0.0, 0.0, 3.0], device=DEVICE)[:, None, None]
    apart = summarise_sums(*kernels_cuda.sum_halves(draws, counts), N_DRAWS, None)[0].rhat
    draws = draw(counts) * torch.tensor([1.0, 1.0, 1.0, 4.0], device=DEVICE)[:, None, None]
    wider = summarise_sums(*kernels_cuda.sum_halves(draws, counts), N_DRAWS, None)[0].rhat
    assert apart.min() > 1.2
    assert wider.min() > 1.05


@needs_gpu
def test_the_size_of_the_tiles_does_not_matter(monkeypatch):

    moments = Moments(*(t.to(DEVICE) for t in (torch.tensor(20), torch.ones(3000).double(), torch.ones(3000).double())))
    whole = gibbs(moments, random_seed=7)
    monkeypatch.setattr(sys.modules["themis.judge.gibbs"], "TILE", 1024)
    parts = gibbs(moments, random_seed=7)
    for name in ("mean", "sd", "ess", "mcse", "rhat"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    assert not torch.equal(gibbs(moments, random_seed=8).mean, whole.mean)


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
