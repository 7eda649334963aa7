"""The three judges compute the same posterior and reach the same decisions."""

import importlib.util
from functools import cache

import pytest
import torch
from torch import Tensor

from themis.judge import JUDGES
from themis.judge.coverage import MIN_UNMOVED_TESTS, Posterior, Rule
from themis.measure.moments import Moments

pytestmark = pytest.mark.xdist_group("agreement")

NEURONS = {"gibbs": 6000, "pymc": 160}
PYMC = pytest.param(
    "pymc",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(importlib.util.find_spec("pymc") is None, reason="the extra bayes is not installed"),
    ],
)
by_chains = pytest.mark.parametrize("judge", ["gibbs", PYMC])


def uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    return torch.empty(n, dtype=torch.float64).uniform_(low, high, generator=rng)


@cache
def neurons(n_neurons: int) -> Moments:
    """Neurons with 10 to 100,000 tests and means from 1e-6 to 1e6, half of them within 30% of the tolerance."""
    rng = torch.Generator().manual_seed(n_neurons)
    count = 10 ** uniform(n_neurons, 1, 5, rng)
    mean = 10 ** uniform(n_neurons, -6, 6, rng)
    near = uniform(n_neurons // 2, 0.7, 1.3, rng)
    far = 10 ** uniform(n_neurons - n_neurons // 2, -6, 6, rng)
    count, wanted = count.long(), torch.cat((near, far))
    m2 = torch.ones(n_neurons, dtype=torch.float64)
    # The bound grows with the root of M2: one step reaches the requested ratio to the limit.
    m2 = m2 * (wanted / ratio_to_limit(Moments(count, mean, m2))).square()
    return Moments(count, mean, m2)


def ratio_to_limit(moments: Moments) -> Tensor:
    rule = Rule()
    return rule.mcse_bound(JUDGES["exact"](moments)) / rule.limit


@cache
def judged(judge: str) -> tuple[Posterior, Posterior, Moments]:
    moments = neurons(NEURONS[judge])
    return JUDGES[judge](moments, random_seed=1), JUDGES["exact"](moments), moments


def test_the_neurons_are_as_hard_as_they_should_be() -> None:
    for n_neurons in NEURONS.values():
        moments = neurons(n_neurons)
        ratio = ratio_to_limit(moments)
        assert ((ratio - 1).abs() <= 0.3 + 1e-9).double().mean() >= 0.5
        assert ((ratio - 1).abs() > 0.1).double().mean() >= 0.6
        assert moments.count.min() < 20
        assert moments.count.max() > 50_000


@by_chains
def test_means_differ_by_the_error_that_the_judge_claims(judge: str) -> None:
    got, exact, _ = judged(judge)
    error = (got.mean - exact.mean) / got.mcse
    # Means of 1e6 with errors of 1e-10 are beyond float64; leave those few out.
    error = error[got.mcse > 1e-12 * exact.mean]
    assert len(error) > 0.75 * len(got.mean)
    assert error.abs().max() < 5
    assert error.square().mean() == pytest.approx(1, abs=5 * (2 / len(error)) ** 0.5)


@by_chains
def test_standard_deviations_differ_by_sampling_error_only(judge: str) -> None:
    got, exact, _ = judged(judge)
    ratio = got.sd / exact.sd
    assert ratio.mean() == pytest.approx(1, abs=0.004)
    assert ratio.std() < 0.02  # 1 / sqrt(2 * 4000) = 0.011 for a normal, more for few tests
    assert (ratio - 1).abs().max() < 0.15


@by_chains
def test_the_mcse_is_that_of_independent_draws_up_to_the_error_of_the_ess(judge: str) -> None:
    got, exact, _ = judged(judge)
    ratio = got.mcse / exact.mcse
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    assert ratio.std() < 0.04
    assert (ratio - 1).abs().max() < 0.2
    torch.testing.assert_close(got.mcse, got.sd / got.ess.sqrt())


@by_chains
def test_chains_have_mixed(judge: str) -> None:
    got, _, _ = judged(judge)
    assert got.rhat.max() < 1.01
    assert got.rhat.min() > 0.99


@by_chains
def test_decisions_agree_outside_a_band_around_the_tolerance(judge: str) -> None:
    got, exact, moments = judged(judge)
    is_clear = (ratio_to_limit(moments) - 1).abs() > 0.1
    agree = Rule().converged(got, moments) == Rule().converged(exact, moments)
    assert agree[is_clear].double().mean() >= 0.99
    assert 0.2 < Rule().converged(exact, moments)[is_clear].double().mean() < 0.8


def test_the_tolerance_follows_the_draws_so_that_decisions_do_not() -> None:
    moments = neurons(600)
    is_clear = (ratio_to_limit(moments) - 1).abs() > 0.1
    few, many = ((d, JUDGES["gibbs"](moments, draws=d)) for d in (4000, 16_000))
    decisions = [Rule(draws=d).converged(posterior, moments)[is_clear] for d, posterior in (few, many)]
    assert (decisions[0] == decisions[1]).double().mean() >= 0.99


@pytest.mark.parametrize("judge", ["exact", "gibbs", PYMC])
def test_special_neurons_are_judged_alike(judge: str) -> None:
    wanted = {
        "constant": (10, 0.5, True),
        "constant, too few tests": (3, 0.5, False),
        "all zero, unseen": (MIN_UNMOVED_TESTS - 1, 0.0, False),
        "all zero, long enough": (MIN_UNMOVED_TESTS, 0.0, True),
        "no test": (0, 0.0, False),
    }
    count, mean, expected = zip(*wanted.values(), strict=True)
    moments = Moments(torch.tensor(count), torch.tensor(mean).double(), torch.zeros(len(mean)).double())
    posterior = JUDGES[judge](moments)
    assert dict(zip(wanted, Rule().converged(posterior, moments).tolist(), strict=True)) == dict(
        zip(wanted, expected, strict=True)
    )
    for values in (posterior.mean, posterior.ess, posterior.rhat):
        assert values.isfinite().all()
