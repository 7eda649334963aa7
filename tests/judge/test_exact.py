"""The closed form against scipy's Student t."""

import numpy as np
import pytest
import torch
from moments import moments_of
from scipy import stats

from themis.judge.coverage import exact
from themis.measure.moments import Moments

pytestmark = pytest.mark.quick


def test_mean_and_sd_are_those_of_the_student_t() -> None:
    sensitivity = torch.rand(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for n in (4, 5, 10, 200):
        posterior = exact(moments_of(sensitivity[:n]))
        values = sensitivity[:n].numpy()
        t = stats.t(df=n - 1, loc=values.mean(0), scale=values.std(0, ddof=1) / n**0.5)
        np.testing.assert_allclose(posterior.mean, t.mean(), rtol=1e-12)
        np.testing.assert_allclose(posterior.sd, t.std(), rtol=1e-12)


def test_mcse_is_that_of_independent_draws() -> None:
    moments = moments_of(torch.rand(50, 3))
    for draws in (400, 4000):
        posterior = exact(moments, draws=draws)
        assert posterior.ess.tolist() == [draws] * 3
        assert posterior.rhat.tolist() == [1] * 3
        torch.testing.assert_close(posterior.mcse, posterior.sd / draws**0.5)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_up_to_three_tests_leave_the_sd_infinite(n: int) -> None:
    posterior = exact(moments_of(torch.ones(n, 2)))
    assert posterior.sd.tolist() == posterior.mcse.tolist() == [torch.inf] * 2


def test_no_spread_means_no_error_from_the_fourth_test_on() -> None:
    posterior = exact(moments_of(torch.full((4, 2), 0.1)))
    assert posterior.sd.tolist() == posterior.mcse.tolist() == [0] * 2


def test_each_neuron_may_have_its_own_number_of_tests() -> None:
    count = torch.tensor([2, 10, 1000])
    mean, m2 = torch.rand(2, 3, dtype=torch.float64)
    posterior = exact(Moments(count, mean, m2))
    for i, n in enumerate(count):
        alone = exact(Moments(n, mean[i : i + 1], m2[i : i + 1]))
        assert posterior.sd[i] == alone.sd[0]
