"""Two versions of a model: the same tests on both."""

import copy

import pytest
import torch
from averaging_nets import Mean, seeds
from torch import nn

import themis
from themis.errors import DataError, ModelError, UsageError

pytestmark = pytest.mark.xdist_group("diff_versions")


def campaign(over=0.5, perturb="brightness", data=None, **options):
    options = {"max_tests": 500, "policy": "random", "tolerance": 1e-9, **options}
    return themis.run(Mean(over), seeds() if data is None else data, perturb, **options)


@pytest.fixture(scope="module")
def base():
    return campaign()


def test_a_model_that_breaks_earlier_is_worse_and_its_new_faults_are_named(base):
    later = campaign(0.42, random_seed=1)
    found = themis.diff(base, later, tests=1000)
    assert (found.kind, found.verdict) == ("versions", "worse")
    assert found.sentence.startswith("The model after is worse: fault rate")
    paired = found.paired
    assert (paired.seeds, paired.tests, paired.dropped) == (100, 1000, 0)
    assert paired.both + paired.only_before + paired.only_after + paired.neither == 1000
    assert (paired.only_before, paired.seeds_better) == (0, 0)
    # Seeds of mean 0.31 to 0.41 break over 0.5 - mean, or 0.42 - mean, of shifts drawn from -0.25 to 0.25; half never.
    assert paired.before.value == pytest.approx(0.5 * (0.25 - 0.14) / 0.5, abs=0.03)
    assert paired.after.value == pytest.approx(0.5 * (0.25 - 0.06) / 0.5, abs=0.03)
    assert paired.difference.low > 0.01
    assert paired.p_value < 0.01
    assert found.fixed == ()
    assert set(found.still) == {fault.id for fault in base.faults.distinct()}
    assert found.new
    for fault in found.new_faults:
        mean = float(seeds()[0][fault.seed_id].mean())
        assert mean + fault.theta["shift"] >= 0.42 - 1e-5
        assert mean + fault.theta["shift"] <= 0.5 + 1e-5
    assert {fault.id for fault in found.new_faults} == set(found.new)


def test_in_the_opposite_order_the_model_is_better_and_the_faults_are_fixed(base):
    earlier = campaign(0.42, random_seed=1)
    found = themis.diff(earlier, base, tests=1000)
    assert found.verdict == "better"
    assert found.new == ()
    assert set(found.fixed) == set(themis.diff(base, earlier, tests=1).new)
    assert "The model after is better" in found.markdown()


def test_the_luck_of_another_search_is_not_a_difference(base):
    again = campaign(0.5, random_seed=7)
    found = themis.diff(base, again, kind="versions")
    assert found.verdict == "even"
    assert (found.new, found.fixed) == ((), ())
    assert (found.paired.p_value, found.paired.difference.value) == (1.0, 0.0)
    assert "same weights and behave alike" in found.notes[-1]


def test_faults_that_occur_with_other_noise_are_moved_not_new():
    one = campaign(0.42, "gaussian", magnitude=0.6, max_tests=800)
    other = campaign(0.4201, "gaussian", magnitude=0.6, max_tests=800, random_seed=3)
    found = themis.diff(one, other, tests=200)
    assert found.verdict == "even"
    assert len(found.new) <= 1
    assert len(found.faults_after.still) + len(found.faults_after.moved) > 5


def test_a_damaged_net_is_worse_on_real_digits_and_a_slightly_trained_one_is_not():
    from themis_integrations.data.digits import read_digits

    every = read_digits()
    train, test = every[torch.arange(0, 5000, 2)], every[torch.arange(1, 5000, 10)]

    def fit(net, epochs, rate):
        torch.manual_seed(0)
        adam = torch.optim.Adam(net.parameters(), rate)
        for _ in range(epochs):
            for rows in torch.randperm(len(train)).split(100):
                adam.zero_grad()
                nn.functional.cross_entropy(net(train.take(rows)), train.labels[rows]).backward()
                adam.step()
        return net

    def search(net, random_seed):
        return themis.run(net, test, "gaussian", magnitude=0.4, max_tests=1200, random_seed=random_seed)

    torch.manual_seed(0)
    net = fit(nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)), 5, 0.003)
    damaged = copy.deepcopy(net)
    with torch.no_grad():
        damaged[1].weight.add_(0.2 * torch.randn(damaged[1].weight.shape, generator=torch.Generator().manual_seed(0)))
    base = search(net, 0)
    worse = themis.diff(base, search(damaged, 1))
    assert worse.verdict == "worse"
    assert worse.paired.difference.low > 0
    assert len(worse.new) > 10
    assert any(note.startswith("left out of the tests: ") for note in worse.notes)
    right = [(model(test.inputs).argmax(1) == test.labels).float().mean().item() for model in (net, damaged)]
    assert (worse.clean.before.value, worse.clean.after.value) == pytest.approx(right)
    assert worse.clean.difference.high < 0
    assert "On clean inputs, the model after is worse: accuracy " in worse.sentence
    even = themis.diff(base, search(fit(copy.deepcopy(net), 1, 1e-5), 2))
    assert even.verdict == "even"
    assert even.paired.difference.low < 0 < even.paired.difference.high
    # Another search found other faults, yet hardly one that the first net does not have.
    assert len(even.new) <= 0.03 * even.faults_after.n


def test_only_common_seeds_and_theta_are_compared(base):
    inputs, labels = seeds()
    other_inputs = inputs.clone()
    other_inputs[:20] = other_inputs[:20].flip(-1) * 0.99  # other pictures under the same numbers
    later = campaign(0.45, data=(other_inputs, labels), magnitude=0.5)
    found = themis.diff(base, later, tests=400)
    assert found.paired.seeds == 80
    notes = " ".join(found.notes)
    assert "of 100 and 100 seeds, the 80 that both runs have were compared" in notes
    assert "only their intersection was compared, shift -0.125 to 0.125" in notes
    assert found.faults_before.apart
    spared = {fault.id: fault for fault in base.faults.distinct()}
    assert all(abs(spared[id].theta["shift"]) <= 0.125 and spared[id].seed_id >= 20 for id in found.still)


def test_runs_that_cannot_be_compared_are_refused_with_a_remedy(base):
    with pytest.raises(UsageError, match=r"the same perturbation.*'brightness'.*'contrast': run one of them again"):
        themis.diff(base, campaign(0.45, "contrast"))
    with pytest.raises(DataError, match="share none of 100 and 100: run one of them again on the other's data"):
        themis.diff(base, campaign(0.45, data=seeds(of=5)))
    with pytest.raises(UsageError, match="must have the same kind of fault"):
        themis.diff(base, themis.run(themis.Target(Mean(0.45), oracle="changed"), seeds(), "brightness", max_tests=50))
    with pytest.raises(UsageError, match="kind must be one of"):
        themis.diff(base, base, kind="other")
    with pytest.raises(UsageError, match="tests must be 1 or more"):
        themis.diff(base, base, tests=0)
    with pytest.raises(UsageError, match="the same model, but the hashes differ"):
        themis.diff(base, campaign(0.45), kind="techniques")


def test_runs_of_models_in_memory_are_opened_with_them(base, tmp_path):
    campaign(0.42, random_seed=1, out=tmp_path / "later")
    later = themis.open_run(tmp_path / "later", themis.Target(Mean(0.42)), seeds())
    found = themis.diff(base, later, tests=300)
    assert found.verdict == "worse"
    assert found.after["run"] == str(tmp_path / "later")
    with pytest.raises(ModelError, match=r"must be the same as in the run.*and was"):
        themis.diff(base, themis.open_run(tmp_path / "later", themis.Target(Mean(0.43)), seeds()))
    with pytest.raises(UsageError, match="does not record how to create its target"):
        themis.diff(base, tmp_path / "later")


def test_comparing_does_not_change_the_campaigns_calculator(base):
    calculator = base.faults.handle.calculator
    before = (calculator.clean.oracle, calculator.limits.least)
    fault = base.faults[0]
    themis.diff(campaign(0.45, min_ssim=0.2), base, tests=50)
    assert (calculator.clean.oracle, calculator.limits.least) == before
    assert fault.replay().is_same


def test_tests_too_dissimilar_from_their_seed_are_dropped_for_both_models(base):
    found = themis.diff(campaign(0.45, min_ssim=0.9), base, tests=300)
    assert found.paired.dropped > 0
    assert found.paired.tests + found.paired.dropped == 300
