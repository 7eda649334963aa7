"""Error rates and counts, checked against slow references on small nets."""

import numpy as np
import pytest
import torch
from nets import Conv

import themis
from themis import Target
from themis.data.seeds import from_arrays
from themis.perturb import choose_perturbation
from themis.perturb.context import Context
from themis.perturb.perturbation import perturb
from themis.search.policy import Space
from themis_lab.comparison.cells import BOX, CellRunner, ErrorRates, count_by_seed, last_rise
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan
from themis_lab.executors import Failure, attempt


@pytest.fixture
def case():
    torch.manual_seed(0)
    net = Conv().eval()
    inputs = torch.rand(60, 1, 8, 8)
    with torch.no_grad():
        labels = net(inputs).argmax(1)
    labels[::4] = (labels[::4] + 1) % 3  # answered incorrectly, so not part of the error rate
    return Target(net), from_arrays(inputs, labels), net


@pytest.mark.parametrize("name", ["gaussian", "rotate", "brightness"])
def test_errors_are_the_share_of_draws_that_change_a_correct_answer(case, name):
    target, seeds, net = case
    perturbation, magnitude = choose_perturbation(name), {"gaussian": 0.5, "rotate": 2.0, "brightness": 1.5}[name]
    with target.opened():
        rates = ErrorRates(target, seeds, perturbation, 7)
        fast = rates.errors(magnitude)
    assert rates.draws == (5 if name == "gaussian" else 1)
    right = [k for k in range(60) if k % 4]
    assert rates.seed_id.tolist() == right
    chosen = perturbation.at(magnitude)
    space = Space.of(chosen, np.array(right), np.array(right), np.zeros(45, np.float32), 7)
    breaks = np.zeros((rates.draws, 45))
    for draw in range(rates.draws):
        for at, k in enumerate(right):
            number = np.array([draw * 45 + at])
            test = space.tests(number, np.array([at]), space.corners(number), "corner")
            theta, noise = torch.from_numpy(test.theta), torch.from_numpy(test.noise_seed)
            assert theta.tolist() == [[chosen.theta[0].high]] or theta.tolist() == [[chosen.theta[0].low]]
            disturbed = perturb(chosen, seeds.inputs[k : k + 1], theta, noise, Context((0.0, 1.0), target))
            with torch.no_grad():
                breaks[draw, at] = int(net(disturbed).argmax()) != int(seeds.labels[k])
    assert 0 < breaks.mean() < 1
    np.testing.assert_allclose(fast, breaks.mean(0))
    assert rates.rate(magnitude) == pytest.approx(breaks.mean())


@pytest.mark.parametrize("name", ["gaussian", "brightness"])
def test_errors_over_the_box_are_those_of_uniform_theta(case, name):
    target, seeds, net = case
    perturbation, magnitude = choose_perturbation(name), {"gaussian": 0.5, "brightness": 1.5}[name]
    with target.opened():
        rates = ErrorRates(target, seeds, perturbation, 7)
        fast, full = rates.errors(magnitude, BOX), rates.errors(magnitude)
    assert rates.box_draws == 5
    chosen = perturbation.at(magnitude)
    right = np.array([k for k in range(60) if k % 4])
    space = Space.of(chosen, right, right, np.zeros(45, np.float32), 7)
    number = np.arange(5 * 45)
    tests = space.tests(number, number % 45, space.uniform_theta(0, number), "uniform")
    assert chosen.theta[0].low <= tests.theta.min() < tests.theta.max() <= chosen.theta[0].high
    theta, noise = torch.from_numpy(tests.theta), torch.from_numpy(tests.noise_seed)
    disturbed = perturb(chosen, seeds.inputs[tests.seed], theta, noise, Context((0.0, 1.0), target))
    with torch.no_grad():
        breaks = (net(disturbed).argmax(1) != seeds.labels[tests.seed]).numpy().reshape(5, 45)
    np.testing.assert_allclose(fast, breaks.mean(0))
    assert 0 < fast.mean() < full.mean()


def test_expensive_attacks_draw_once_per_seed(case):
    target, seeds, _ = case
    with target.opened():
        draws = [ErrorRates(target, seeds, choose_perturbation(name), 0).box_draws for name in ("fgsm", "pgd", "cw")]
    assert draws == [5, 1, 1]


def test_stronger_noise_breaks_more(case):
    target, seeds, _ = case
    with target.opened():
        rates = ErrorRates(target, seeds, choose_perturbation("gaussian"), 0)
        found = [rates.rate(magnitude) for magnitude in (1e-6, 0.3, 3.0)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_counts_by_seed():
    columns = {
        "seed_id": np.array([7, 3, 7, 7, 3]),
        "answer": np.array([1, 0, 1, 2, -1]),
        "raised": np.array([True, False, True, False, False]),
    }
    assert count_by_seed(columns) == {
        "seed_id": [3, 7],
        "faults": [2, 3],
        "distinct": [2, 2],
        "selected": [0, 2],
        "selected_distinct": [0, 1],
    }
    none = count_by_seed({**columns, "raised": np.zeros(5, dtype=bool)})
    assert none["selected"] == none["selected_distinct"] == [0, 0]
    assert set(map(tuple, count_by_seed({}).values())) == {()}


def test_the_last_rise():
    assert last_rise([10, 20, 30, 40], [0.2, 0.5, 0.5, 0.4]) == 20
    assert last_rise([10, 20], [0.0, 0.0]) == 0


@pytest.mark.parametrize("technique", ["random", "scheduled", "nc"])
def test_a_cell_is_the_campaign_that_run_would_run(case, technique):
    target, seeds, _ = case
    plan = ComparisonPlan(techniques="nc,scheduled", max_passes=900, random_seed=5)
    runner = CellRunner(target, seeds, choose_perturbation("gaussian"), plan, None, ())
    record = runner.run(CampaignCell(technique, 0.4, 2))
    how = {"criterion": "nc(threshold=0.5)"} if technique == "nc" else {"policy": technique}
    options = {"max_passes": 900, "max_tests": None, "plateau": None, "magnitude": 0.4, "random_seed": 7}
    run = themis.run(target, seeds, "gaussian", round_size=160, coverage=None, **options, **how)
    last = run.rounds[-1]
    assert record["random_seed"] == 7
    assert record["seeds"] == 45
    assert record["passes"] == last.passes <= 900
    assert record["tests"] == last.tests
    assert record["faults"] == last.faults == sum(record["by_seed"]["faults"]) > 0
    assert record["distinct_faults"] == last.distinct_faults == sum(record["by_seed"]["distinct"])
    assert record["failing_seeds"] == last.failing_seeds == len(record["by_seed"]["seed_id"])
    assert record["scc"] == last.coverage.all
    if technique == "nc":
        assert record["coverage"] == last.criterion_score
        assert record["by_seed"]["seed_id"] == sorted({fault.seed_id for fault in run.faults})
        assert sum(record["by_seed"]["selected"]) == sum(fault.raised for fault in run.faults)
    else:
        assert record["coverage"] == last.coverage.all
        assert sum(record["by_seed"]["selected"]) == 0


def test_a_fit_that_fails_is_tried_once(case):
    target, seeds, _ = case
    asked = []

    def train():
        asked.append(1)
        raise OSError("no such disk")

    runner = CellRunner(
        target, seeds, choose_perturbation("gaussian"), ComparisonPlan(techniques="kmnc", max_passes=900), train, ()
    )
    for campaign in range(3):
        assert "OSError: no such disk" in attempt(runner.run, CampaignCell("kmnc", 0.4, campaign)).reason
    assert len(asked) == 1
    assert not isinstance(attempt(runner.run, CampaignCell("random", 0.4, 0)), Failure)


def test_every_technique_gets_the_same_uniform_tests(case):
    target, seeds, _ = case
    plan = ComparisonPlan(techniques="nc,paper,scheduled", max_passes=900)
    runner = CellRunner(target, seeds, choose_perturbation("gaussian"), plan, None, ())
    found = {}
    for technique in ("random", "corners", "scheduled", "nc"):
        record = runner.run(CampaignCell(technique, 0.4, 0))
        found[technique] = record["tests"], record["passes"]
    assert len(set(found.values())) == 1


def test_errors_on_small_pictures_are_those_of_the_range_that_campaigns_search(case):
    target, seeds, _ = case
    campaign = themis.run(target, seeds, "pixelate", magnitude=0.5, max_tests=100)
    with target.opened():
        rates = ErrorRates(target, seeds, choose_perturbation("pixelate"), 0)
        rates.rate(0.5)
    assert rates.calculator.perturbation.theta == campaign.start.theta
    assert campaign.start.theta[0].high == 0.125
