"""The Gibbs chains: their target, their randomness, their edge cases."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats
from torch import Tensor

from themis.judge import JUDGES, Judge
from themis.judge.coverage import Posterior, exact
from themis.judge.gibbs import gibbs
from themis.measure.moments import Moments

pytestmark = pytest.mark.quick

module = sys.modules["themis.judge.gibbs"]  # the name in the package is the function
FIELDS = ("mean", "sd", "ess", "mcse", "rhat")


def moments_of(n_neurons: int, n_tests: int | Tensor = 50) -> Moments:
    count = torch.as_tensor(n_tests)
    mean = torch.linspace(0.1, 1, n_neurons, dtype=torch.float64)
    return Moments(count, mean, mean * (count - 1))


def assert_same(one: Posterior, other: Posterior) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("n_tests", [4, 5, 20, 100_000])
def test_gamma_variates_follow_the_gamma_distribution(n_tests: int) -> None:
    shape = torch.full((4096,), n_tests / 2 - 1 / 3)
    gamma = torch.cat([module._gamma_over_shape(shape, rng(i)) for i in range(4)]) * shape
    statistic = stats.kstest(gamma.flatten().double().numpy(), stats.gamma(n_tests / 2).cdf).statistic
    assert statistic < 1.95 / math.sqrt(gamma.numel())  # 0.1% of right samplers would fail


@pytest.mark.parametrize("n_tests", [4, 10, 1000])
def test_chains_draw_from_the_student_t(n_tests: int) -> None:
    z = module._chains(torch.full((100,), float(n_tests)), 1000, rng())
    statistic = stats.kstest(z.flatten().numpy(), stats.t(n_tests - 1).cdf).statistic
    assert statistic < 0.005  # one degree of freedom more or less is 0.01 at 4 tests


def test_chains_forget_where_they_started() -> None:
    first = module._chains(torch.full((4000,), 10.0), 4, rng())[..., 0]
    expected = stats.t(9).std()
    assert ((first.std(0) / expected - 1).abs() < 0.06).all()


def test_draws_of_a_chain_depend_on_one_another() -> None:
    """The variance carries over from one step to the next, which independent draws would not show."""
    z = module._chains(torch.full((500,), 5.0), 1000, rng()).square().log()
    z = z - z.mean()
    lag_1, lag_2 = ((z[..., lag:] * z[..., :-lag]).mean() / z.square().mean() for lag in (1, 2))
    assert lag_1 > 0.1
    assert lag_2 > 0.02  # part of what a step passes on came from the step before


def test_neurons_with_different_numbers_of_tests_are_judged_together() -> None:
    count = torch.tensor([4, 10, 100, 100_000]).repeat(50)
    moments = moments_of(200, count)
    ratio = gibbs(moments).sd / exact(moments).sd
    assert ((ratio[count > 4] - 1).abs() < 0.08).all()
    assert 0.7 < ratio[count == 4].median() < 1.1  # the variance of a t with 3 degrees has no finite error


def test_results_scale_with_the_sensitivities() -> None:
    small, large = moments_of(20), moments_of(20)
    large = Moments(large.count, large.mean * 2.0**40, large.m2 * 2.0**80)
    one, other = gibbs(small), gibbs(large)
    assert torch.equal(one.mcse * 2.0**40, other.mcse)
    assert torch.equal(one.mean * 2.0**40, other.mean)
    assert torch.equal(one.ess, other.ess)


def test_the_same_random_seed_gives_the_same_result() -> None:
    moments = moments_of(30)
    assert_same(gibbs(moments, random_seed=5), gibbs(moments, random_seed=5))
    assert not torch.equal(gibbs(moments, random_seed=5).mean, gibbs(moments, random_seed=6).mean)


def test_the_random_state_of_the_caller_is_neither_used_nor_changed() -> None:
    moments = moments_of(5)
    torch.manual_seed(1)
    one = gibbs(moments)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert_same(one, gibbs(moments))
    assert torch.equal(before, torch.get_rng_state())


def test_the_number_of_threads_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_NEURONS", 8)
    moments, n_threads = moments_of(40), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gibbs(moments)
        torch.set_num_threads(3)
        assert_same(one, gibbs(moments))
        in_new_thread = ThreadPoolExecutor(1).submit(torch.get_num_threads).result()
        assert torch.get_num_threads() == in_new_thread == 3
    finally:
        torch.set_num_threads(n_threads)


def test_a_block_does_not_depend_on_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_NEURONS", 8)
    moments = moments_of(20)
    whole, first = gibbs(moments), gibbs(moments[torch.arange(8)])
    for name in FIELDS:
        assert torch.equal(getattr(whole, name)[:8], getattr(first, name))


def test_neurons_on_both_sides_of_a_block_boundary_are_judged_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_NEURONS", 64)
    moments = Moments(torch.tensor(50), torch.ones(130).double(), torch.full((130,), 49.0).double())
    posterior, closed = gibbs(moments), exact(moments)
    assert (((posterior.mean - closed.mean) / posterior.mcse).abs() < 4.5).all()
    assert ((posterior.sd / closed.sd - 1).abs() < 0.06).all()
    assert (posterior.rhat < 1.01).all()
    assert len(posterior.mean.unique()) == 130  # no stream is used twice


def test_long_chains_are_sampled_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def chains(n: Tensor, n_draws: int, rng: torch.Generator) -> Tensor:
        sizes.append(len(n) * 4 * n_draws)
        return torch.randn(len(n), 4, n_draws, generator=rng)

    monkeypatch.setattr(module, "_chains", chains)
    monkeypatch.setattr(module, "BLOCK_DRAWS", 10_000)
    gibbs(moments_of(10), draws=4000)
    assert sum(sizes) == 40_000
    assert max(sizes) <= 10_000


def test_more_draws_lower_the_error() -> None:
    moments = moments_of(100)
    ratio = gibbs(moments, draws=1000).mcse / gibbs(moments, draws=16_000).mcse
    assert ratio.mean() == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("judge", [JUDGES["gibbs"], JUDGES["pymc"]])
def test_neurons_without_a_chain_are_left_to_the_closed_form(judge: Judge) -> None:
    count = torch.tensor([0, 1, 3, 3, 4, 5000])
    mean = torch.tensor([0.0, 0.5, 0.5, 0.5, 0.5, 0.0], dtype=torch.float64)
    m2 = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    moments = Moments(count, mean, m2)
    posterior = judge(moments, draws=400)
    assert_same(posterior, exact(moments, draws=400))
    assert posterior.sd.tolist() == [math.inf] * 4 + [0] * 2
    assert posterior.ess.tolist() == [400] * 6


def test_the_moments_are_left_unchanged() -> None:
    moments = moments_of(10)
    mean, m2 = moments.mean.clone(), moments.m2.clone()
    gibbs(moments, draws=400)
    assert torch.equal(moments.mean, mean)
    assert torch.equal(moments.m2, m2)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_judges_as_the_cpu_does() -> None:
    moments = moments_of(2000)
    there, here = gibbs(Moments(moments.count.cuda(), moments.mean.cuda(), moments.m2.cuda())), gibbs(moments)
    assert there.mean.device.type == "cuda"
    assert_same(Posterior(*(column.cpu() for column in there)), here)
