"""Retraining against several perturbations at once: a suite, one table, and the mean corruption error."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.retraining.changes import corruption_error
from themis.retraining.examine import Reading
from themis.retraining.result import markdown, tables

N = 360


def reading(disturbed):
    seeds = np.arange(len(disturbed))
    ones = np.ones(len(disturbed))
    return Reading("p", 0, 1, seeds, ones, np.array(disturbed, float), None, None, None, None, None, None)


def test_the_mean_corruption_error_is_the_mean_of_the_ratios_of_errors():
    before = [reading([0, 0, 1, 1]), reading([0, 1, 1, 1])]  # errors of 1/2 and 1/4
    after = [[reading([1, 0, 1, 1])], [reading([0.5, 1, 1, 1])]]
    error = corruption_error(before, after)
    assert (error.before, error.after) == (1, pytest.approx(0.5))
    assert error.combined.low < error.difference < error.combined.high
    assert corruption_error([reading([1, 1])], [[reading([1, 0])]]) is None  # the original model makes no errors
    same = corruption_error(before, [[each] for each in before])
    assert (same.after, same.combined) == (1, None)


def test_the_interval_of_the_mean_corruption_error_is_that_of_repeated_samples():
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(400):
        weak = rng.random(300)  # seeds that are weak are so under both perturbations
        before = [reading(rng.random(300) > scale * weak) for scale in (0.5, 0.9)]
        after = [[reading(rng.random(300) > scale * weak)] for scale in (0.3, 0.6)]
        error = corruption_error(before, after)
        truth = np.mean([0.3 / 0.5, 0.6 / 0.9]) - 1
        shares.append(error.combined.low <= truth <= error.combined.high)
    assert 0.9 < np.mean(shares) < 0.99


@pytest.fixture(scope="module")
def retrained(tmp_path_factory):
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (N,), generator=rng)
    inputs = 0.4 + 0.2 * torch.rand(N, 1, 8, 8, generator=rng)
    inputs[labels == 0, :, :4] += 0.15
    inputs[labels == 1, :, 4:] += 0.15
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(10):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimiser.step()
    folder = tmp_path_factory.mktemp("suite")
    members = [{"perturb": "gaussian", "magnitude": 0.6}, {"perturb": "fog"}]
    suite = themis.run_suite(
        net, (inputs, labels), {"members": members}, out=folder / "noise", max_tests=400, split=(0.4, 0.2, 0.4)
    )
    options = {"random_seeds": 2, "epochs": 2, "batches": 30, "draws": 4, "passes": 250, "learning_rate": 1e-2}
    result = themis.retrain(suite, target=net, data=(inputs, labels), out=folder / "better", **options)
    return result, folder / "better"


def test_a_suite_is_retrained_on_with_one_table(retrained):
    result, out = retrained
    names = [outcome.name for outcome in result.outcomes]
    assert names == ["gaussian-0.6", "fog"]  # as the suite calls them
    scores, frontier = tables(result, is_whole=False)
    assert [row[0] for row in scores.rows] == [
        "clean",
        *names,
        "mean of 2 perturbations",
        "mCE, relative to the original",
    ]
    assert frontier.columns[3] == "disturbed"
    assert result.mce.after < 1
    kept = json.loads((out / "retrain.json").read_text())
    assert kept["mce"]["after"] == result.mce.after
    text = markdown(result)
    assert "withstood a campaign" in text  # the tables by perturbation are in the file
    assert result.verdict[0].startswith("mean of 2 perturbations: the disturbed score rose")
    assert result.verdict[1].startswith("mCE is ")
    mean = np.mean([outcome.change.disturbed.difference for outcome in result.outcomes])
    assert result.gain == pytest.approx(mean)
