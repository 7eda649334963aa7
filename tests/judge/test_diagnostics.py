"""The diagnostics against arviz-stats on the same draws."""

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from torch import Tensor

from themis.judge import diagnostics
from themis.judge.diagnostics import ess, rhat, summarise


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def autoregressive(phi: float, *shape: int) -> Tensor:
    noise = normal(*shape)
    draws = noise / (1 - phi**2) ** 0.5
    for t in range(1, shape[-1]):
        draws[..., t] = phi * draws[..., t - 1] + noise[..., t]
    return draws


def tied(n_values: int, *shape: int) -> Tensor:
    return (normal(*shape) * n_values / 4).round()


DRAWS = {
    "independent": normal(60, 4, 1000),
    "independent, odd": normal(60, 4, 101),
    "two chains": normal(60, 2, 250),
    "AR(1) -0.9": autoregressive(-0.9, 30, 4, 400),
    "AR(1) -0.3": autoregressive(-0.3, 30, 4, 400),
    "AR(1) 0.5": autoregressive(0.5, 30, 4, 400),
    "AR(1) 0.9, odd": autoregressive(0.9, 30, 4, 401),
    "AR(1) 0.99": autoregressive(0.99, 30, 4, 1000),
    "AR(1) 0.999": autoregressive(0.999, 30, 4, 1000),
    "chains in different places": normal(30, 4, 300) + 3 * normal(30, 4, 1),
    "chains of different width": normal(30, 4, 300) * normal(30, 4, 1).exp(),
    "trend": normal(30, 4, 300) + torch.linspace(0, 4, 300, dtype=torch.float64),
    "heavy tails": normal(60, 4, 500) / normal(60, 4, 500 + 1)[..., 1:].abs(),
    "few values": tied(8, 30, 4, 333),
    "two values": tied(1, 30, 4, 332).clamp(0, 1),
    "large mean": 1e4 + normal(30, 4, 300),
    "large": 1e15 * normal(30, 4, 300),
    "small": 1e-10 * normal(30, 4, 300),
    "too small for ArviZ": 1e-17 * normal(30, 4, 300),
    **{f"{n} draws": normal(60, 4, n) for n in range(4, 14)},
}


@pytest.fixture(params=DRAWS, ids=lambda name: name)
def draws(request: pytest.FixtureRequest) -> Tensor:
    return DRAWS[request.param]


def assert_equal(got: Tensor, expected: np.ndarray, tolerance: float) -> None:
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), expected, rtol=tolerance)


def test_ess_equals_that_of_arviz(draws: Tensor) -> None:
    assert_equal(ess(draws), array_stats.ess(draws.numpy(), method="mean"), 1e-8)


def test_rhat_equals_that_of_arviz(draws: Tensor) -> None:
    assert_equal(rhat(draws), array_stats.rhat(draws.numpy()), 1e-8)


def test_mcse_equals_that_of_arviz(draws: Tensor) -> None:
    assert_equal(summarise(draws).mcse, array_stats.mcse(draws.numpy()), 1e-8)


def test_float32_draws_have_nearly_the_diagnostics_that_arviz_computes_in_float64(draws: Tensor) -> None:
    draws = draws.float()
    assert_equal(ess(draws), array_stats.ess(draws.double().numpy(), method="mean"), 1e-5)
    assert_equal(summarise(draws).mcse, array_stats.mcse(draws.double().numpy()), 1e-5)
    assert_equal(rhat(draws), array_stats.rhat(draws.numpy()), 1e-6)


def test_summary_holds_the_same_diagnostics_and_the_moments_of_the_draws(draws: Tensor) -> None:
    summary = summarise(draws)
    flat = draws.flatten(1).numpy()
    assert_equal(summary.ess, ess(draws).numpy(), 1e-12)
    assert_equal(summary.rhat, rhat(draws).numpy(), 1e-12)
    assert_equal(summary.sd, flat.std(1, ddof=1), 1e-8)
    np.testing.assert_allclose(summary.mean.numpy(), flat.mean(1), atol=1e-12 * np.abs(flat).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_draws", [50, 51])
def test_constant_draws_count_in_full_have_no_error_and_no_rhat(dtype: torch.dtype, n_draws: int) -> None:
    draws = torch.full((3, 4, n_draws), 0.1, dtype=dtype)
    assert ess(draws).tolist() == array_stats.ess(draws.numpy(), method="mean").tolist() == [200] * 3
    assert summarise(draws).mcse.tolist() == [0] * 3
    with np.errstate(invalid="ignore"):
        assert np.isnan(array_stats.rhat(draws.numpy())).all()
    assert rhat(draws).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chains_stuck_in_different_places_have_a_huge_rhat_and_hardly_any_ess(dtype: torch.dtype) -> None:
    draws = normal(20, 4, 1).to(dtype).expand(20, 4, 100).contiguous()
    assert_equal(ess(draws), array_stats.ess(draws.double().numpy(), method="mean"), 1e-5)
    assert (ess(draws) < 10).all()
    assert (rhat(draws) > 1e3).all()


def test_negative_zero_is_tied_with_zero() -> None:
    draws = DRAWS["few values"].float()
    signed = torch.where((draws == 0) & (normal(*draws.shape) > 0), -0.0, draws)
    assert signed.signbit().logical_and(signed == 0).any()
    assert torch.equal(rhat(signed), rhat(draws.abs().copysign(draws) + 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_draw_affects_only_its_own_neuron(dtype: torch.dtype) -> None:
    draws = normal(3, 4, 100).to(dtype)
    draws[1, 2, 3] = torch.nan
    expected = summarise(draws[[0, 2]])
    summary = summarise(draws)
    for name in ("mean", "sd", "ess", "mcse", "rhat"):
        assert getattr(summary, name)[1].isnan()
        assert torch.allclose(getattr(summary, name)[[0, 2]], getattr(expected, name), rtol=1e-6)


def test_one_chain_has_no_rhat_as_in_arviz() -> None:
    draws = normal(3, 1, 100)
    assert rhat(draws).isnan().all()
    assert_equal(ess(draws), array_stats.ess(draws.numpy(), method="mean"), 1e-8)


def second_pair(draws: Tensor) -> Tensor:
    """The sum of the autocorrelations at lags 2 and 3, whose sign decides where Geyer's sequence ends."""
    split = diagnostics._split(draws)
    mean = split.mean(2, keepdim=True)
    half = split.shape[2]
    centred = split - mean
    covariance = [(centred[..., lag:] * centred[..., : half - lag]).sum(2).mean(1) / half for lag in (0, 2, 3)]
    total = covariance[0] + mean[..., 0].var(1)
    return 2 - (2 * covariance[0] * half / (half - 1) - covariance[1] - covariance[2]) / total


def test_float64_is_used_if_a_sign_is_in_doubt() -> None:
    one, other = normal(2000, 4, 200), normal(2000, 4, 200 + 1)[..., 1:]
    is_useful = (second_pair(one) < -0.01) & (second_pair(other) > 0.01)
    one, other = one[is_useful], other[is_useful]
    low, high = torch.zeros(len(one), 1, 1).double(), torch.ones(len(one), 1, 1).double()
    for _ in range(40):  # bisection finds draws whose second pair is almost zero
        middle = (low + high) / 2
        is_below = (second_pair(one + middle * (other - one)) < 0)[:, None, None]
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    draws = (one + low * (other - one)).float()
    assert len(draws) > 200
    assert second_pair(draws.double()).abs().max() < 1e-6
    assert_equal(ess(draws), array_stats.ess(draws.double().numpy(), method="mean"), 1e-3)


def test_the_size_of_the_chunks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = DRAWS["AR(1) 0.9, odd"].float()
    whole = summarise(draws)
    monkeypatch.setattr(diagnostics, "CHUNK_DRAWS", 7 * draws[0].numel())
    parts = summarise(draws)
    for name in ("mean", "sd", "ess", "mcse", "rhat"):
        assert_equal(getattr(parts, name), getattr(whole, name).numpy(), 1e-5)


def test_no_neurons_have_no_diagnostics() -> None:
    assert summarise(torch.empty(0, 4, 100)).ess.shape == (0,)
