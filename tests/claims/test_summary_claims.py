"""The summary promises: every count, share and forecast of a campaign, checked by running all of its tests again."""

from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.judge.interval import design_effect
from themis.judge.normality import MIN_CONCLUSIVE_TESTS, describe_normality
from themis.measure.moments import Moments, Shape
from themis.measure.tests import Tally
from themis.perturb.names import disturb
from themis.report.page import read_view
from themis.runs.display.text import about, summary_rows
from themis.runs.estimates import rates_by_theta, read_progress
from themis.runs.store.reader import Reader


class Net(nn.Module):
    """Three classes; one hidden neuron is dead, and one moves only for strong noise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.last = nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
        with torch.no_grad():
            self.first.bias[0] = -1e3
            self.first.weight[1] = 2.0
            self.first.bias[1] = -2.0 * 16 * 0.75

    def forward(self, x):
        return self.last(self.relu(self.first(x.flatten(1))))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A campaign, its folder, and all of its tests with their results, stream by stream."""
    seen, out = [], tmp_path_factory.mktemp("claims") / "run"
    add = Tally.add

    def record(tally, tests, results, is_uniform):
        seen.append((tests, results, is_uniform))
        add(tally, tests, results, is_uniform)

    inputs = torch.rand(80, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tally, "add", record)
        run = themis.run(
            Net().eval(), inputs, "gaussian", magnitude=0.6, max_tests=1500, round_size=250, coverage=None, out=out
        )
    return run, out, seen, inputs


def joined(seen, name, is_uniform=None):
    return np.concatenate(
        [getattr(tests, name) for tests, _, uniform in seen if is_uniform is None or uniform == is_uniform]
    )


def test_counts_of_tests_faults_and_seeds_are_those_of_the_tests_that_ran(campaign):
    run, _, seen, _ = campaign
    summary = run.summary()
    is_fault = np.concatenate([results.is_fault for _, results, _ in seen])
    seed, answer = joined(seen, "seed"), np.concatenate([results.outcome for _, results, _ in seen])
    assert summary["tests"] == len(is_fault) == 1500
    assert summary["faults"] == is_fault.sum() > 20
    pairs = set(zip(seed[is_fault].tolist(), answer[is_fault].tolist(), strict=True))
    assert summary["distinct_faults"] == len(pairs)
    assert summary["failing_seeds"] == len({s for s, _ in pairs})


def test_the_fault_rate_is_the_mean_of_the_seeds_own_rates_in_the_uniform_stream(campaign):
    run, _, seen, _ = campaign
    seed = joined(seen, "seed", True)
    is_fault = np.concatenate([results.is_fault for _, results, uniform in seen if uniform])
    own = [is_fault[seed == s].mean() for s in np.unique(seed)]
    assert run.fault_rate.value == pytest.approx(np.mean(own))
    assert len(seed) == pytest.approx(0.2 * 1500, abs=2)


def test_the_fault_rate_of_a_class_is_that_of_its_seeds(campaign):
    run, out, seen, inputs = campaign
    clean, seed = Net().eval()(inputs).argmax(1).numpy(), joined(seen, "seed", True)
    is_fault = np.concatenate([results.is_fault for _, results, uniform in seen if uniform])
    assert {rate.name for rate in run.slices} == {f"class {number}" for number in np.unique(clean)}
    for rate in run.slices:
        is_mine = clean == int(rate.value)
        own = [is_fault[seed == s].mean() for s in np.unique(seed) if is_mine[s]]
        assert rate.fault_rate.value == pytest.approx(np.mean(own))
        assert rate.at_least <= rate.fault_rate.low
        assert (rate.seeds, rate.tests) == (len(own), is_mine[seed].sum())
    assert themis.open_run(out).slices == run.slices == tuple(read_view(out).slices)


def activations(net, inputs):
    with torch.no_grad():
        hidden = net.relu(net.first(inputs.flatten(1)))
        return torch.cat([hidden, net.last(hidden)], 1).double()


def test_coverage_dead_and_unmoved_neurons_are_those_of_a_slow_computation(campaign):
    """Sensitivities test by test; a neuron has converged if its spread over sqrt(tests * 4000) is below 0.0005."""
    run, _, seen, inputs = campaign
    net = Net().eval()
    theta, seed, noise = (joined(seen, name) for name in ("theta", "seed", "noise_seed"))
    disturbed = torch.cat(
        [
            disturb("gaussian(sigma=0:0.6)", inputs[s : s + 1], {"sigma": float(t)}, noise_seed=int(k))
            for s, t, k in zip(seed, theta[:, 0], noise, strict=True)
        ]
    )
    moves = (activations(net, disturbed) - activations(net, inputs[seed])).abs().numpy()
    clean = activations(net, inputs).numpy()
    is_dead = (np.ptp(clean, 0) == 0) & (moves.max(0) == 0)
    is_unmoved = (moves.max(0) == 0) & ~is_dead
    summary = run.summary()
    assert summary["neurons_dead"] == is_dead.sum() >= 1
    assert summary["neurons_unseen"] == is_unmoved.sum()
    mcse = moves.std(0, ddof=1) / np.sqrt(len(moves) * 4000)
    converged = (mcse < 5e-4) & (moves.mean(0) > 0)
    assert summary["coverage_all"] == pytest.approx(converged.sum() / (~is_dead).sum(), abs=1.01 / len(is_dead))


def test_the_tests_and_faults_of_each_part_of_theta_are_counted_exactly(campaign):
    """The report's fault rate by theta comes from counters alone."""
    _, out, seen, _ = campaign
    theta = joined(seen, "theta", True)[:, 0]
    is_fault = np.concatenate([results.is_fault for _, results, uniform in seen if uniform])
    with closing(Reader(out)) as reader:
        (rates,) = rates_by_theta(reader, read_progress(reader))
    assert sum(part.tests for part in rates.parts) == len(theta)
    for part in rates.parts:
        is_inside = (theta >= part.low) & (theta < part.high)
        assert part.tests == pytest.approx(is_inside.sum(), abs=1)  # an edge may round
        assert part.faults == pytest.approx((is_fault & is_inside).sum(), abs=1)
        assert part.rate_low <= part.rate <= part.rate_high


@pytest.mark.parametrize(("policy", "goal"), [("random", 0.9), ("scheduled", 0.9), ("random", 1.0)])
def test_the_forecast_of_tests_comes_true(policy, goal):
    """ "About n more tests to reach the coverage goal": after a tenth of them, it is right to within a fifth."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(8)
    options = {"policy": policy, "coverage": goal, "max_tests": 20_000, "plateau": None, "round_size": 100}
    options["recall"] = None
    run = themis.run(net, torch.rand(100, 1, 8, 8), "gaussian", magnitude=0.5, **options)
    assert run.stop_reason == "coverage"
    needed = run.rounds[-1].tests
    assert needed >= 1000
    for round in run.rounds[:-1]:
        if round.tests >= needed / 10:
            assert round.tests + round.coverage.forecast == pytest.approx(needed, rel=0.2, abs=100)


def test_a_forecast_is_shown_as_it_is_computed(campaign):
    run = campaign[0]
    texts = [text for name, text in summary_rows(run) if name == "forecast"]
    if run.judged.forecast:
        assert texts[0].startswith(f"{about(run.judged.forecast)} more")


@pytest.mark.parametrize(("n_tests", "share"), [(1, 0.5), (5, 0.3), (20, 0.8)])
def test_the_design_effect_is_that_of_tests_that_share_seeds(n_tests, share):
    """Tests of one seed with correlation `share`: the variance of a mean is `1 + (n - 1) share` times as large."""
    rng, found = np.random.default_rng(0), []
    for _ in range(10):
        seeds = rng.normal(size=(100, 1, 40)) * share**0.5
        values = 5 + seeds + rng.normal(size=(100, n_tests, 40)) * (1 - share) ** 0.5
        m2 = ((values - values.mean(1, keepdims=True)) ** 2).sum(1)
        count = torch.full((100, 1), float(n_tests), dtype=torch.float64)
        found.append(design_effect(Moments(count, torch.from_numpy(values.mean(1)), torch.from_numpy(m2))))
    assert np.mean(found) == pytest.approx(1 + (n_tests - 1) * share, rel=0.1)


@pytest.mark.parametrize("n_tests", [25, 100, MIN_CONCLUSIVE_TESTS, 2000])
def test_half_normal_and_skewed_sensitivities_are_never_called_normal(n_tests):
    """The verdict on normality: sizes of normal changes are half normal, and after few tests nothing is claimed."""
    rng = np.random.default_rng(0)
    for signed in (rng.normal(size=(n_tests, 300)), rng.exponential(size=(n_tests, 300))):
        shape = Shape.empty(300)
        shape.add(torch.as_tensor(signed, dtype=torch.float32))
        normality = describe_normality(shape)
        assert "fits most neurons" not in normality.verdict + normality.sentence
        assert ("too few" in normality.verdict) == ("too few" in normality.sentence) == (n_tests < MIN_CONCLUSIVE_TESTS)
