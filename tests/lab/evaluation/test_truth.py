"""Known faults: cells and regions of theta, recall by hand, and tests that are recorded without changing a campaign."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.errors import DataError
from themis.perturb import choose_perturbation
from themis.search import choose_policy
from themis.target.blackbox import as_target
from themis_lab.comparison.cells import CellRunner
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan
from themis_lab.contest.cells import record_tests
from themis_lab.evaluation.truth import (
    GroundTruth,
    ThetaGrid,
    can_be_mapped,
    describe_map,
    measure_recall,
    summarise_truth,
)

TECHNIQUES = ("random", "scheduled", "paper-preset", "nc")


@pytest.fixture(scope="module")
def truth():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 3, bias=False))
        inputs = torch.rand(60, 1, 6, 6)
    with torch.no_grad():
        net[3].weight -= net[3].weight @ net[:3](inputs).mean(0)[:, None] / 24  # all classes are answered
    seeds = themis.data.read_seeds((inputs, net(inputs).argmax(1)))
    plan = ComparisonPlan.of(techniques=",".join(TECHNIQUES), round_size=64)
    runner = CellRunner(as_target(net), seeds, choose_perturbation("shear"), plan, None, ())
    return GroundTruth.of(runner, seeds, 2)


def test_theta_lies_in_the_cell_whose_centre_is_next_to_it():
    grid = ThetaGrid.of(choose_perturbation("shear").at(1.0), 30)
    assert grid.shape == (5, 5)
    centres = grid.centres()
    assert grid.locate(centres).tolist() == list(range(25))
    size = (grid.high - grid.low) / 5
    assert grid.locate(centres + 0.49 * size).tolist() == list(range(25))
    assert grid.locate(np.stack([grid.low, grid.high])).tolist() == [0, 24]
    assert ThetaGrid.of(choose_perturbation("rotate"), 30).shape == (30,)


def test_neighbouring_cells_are_one_region():
    grid = ThetaGrid(np.zeros(2), np.ones(2), 3)
    fails = np.array([1, 1, 0, 0, 0, 0, 1, 0, 1], dtype=bool)
    assert grid.find_regions(fails).tolist() == [1, 1, 0, 0, 0, 0, 2, 0, 3]


@pytest.mark.parametrize(("name", "expected"), [("gaussian", False), ("shear", True), ("rolling_shear", False)])
def test_noise_and_many_dimensions_cannot_be_mapped(name, expected):
    assert can_be_mapped(choose_perturbation(name)) == expected


def test_recall_worked_out_by_hand():
    failing = {
        "seed_id": [7, 7, 7, 9, 9],
        "cell": [0, 1, 5, 0, 4],
        "region": [1, 1, 2, 1, 2],
        "is_planted": [False, True, True, True, False],
    }
    searched = {"found": {"seed_id": [7, 7, 9, 8], "cell": [0, 5, 3, 0]}}  # 9 is found where no centre fails
    assert measure_recall({"failing": failing}, searched) == {
        "seeds": 1.0,
        "regions": 2 / 4,
        "cells": 2 / 5,
        "planted": 1 / 2,
    }
    nothing = {name: [] for name in failing}
    assert set(measure_recall({"failing": nothing}, searched).values()) == {None}


def test_a_map_has_every_cell_that_fails(truth):
    mutant = truth.plant(0, 1)
    mapped = truth.map_failures(mutant, 2.0, 16)
    shear = truth.runner.perturbation.at(2.0)
    centres = torch.from_numpy(ThetaGrid.of(shear, 16).centres())
    theta = {one.name: centres[:, k] for k, one in enumerate(shear.theta)}
    seeds = truth.runner.seeds
    expected = set()
    for seed_id, inputs, label in zip(seeds.seed_id, seeds.take(torch.arange(60)), seeds.labels, strict=True):
        own = inputs.expand(16, 1, 6, 6).contiguous()
        disturbed = themis.perturb.disturb(shear, own, theta)
        with torch.no_grad():
            if mutant.target.module(own[:1]).argmax() == label:
                wrong = mutant.target.module(disturbed).argmax(1) != label
                expected |= {(int(seed_id), int(cell)) for cell in wrong.nonzero()}
    assert len(expected) > 10
    assert set(zip(mapped["failing"]["seed_id"], mapped["failing"]["cell"], strict=True)) == expected
    described = describe_map(mapped)
    assert described["failing_cells"] == len(expected)
    assert described["failing_seeds"] <= described["failing_regions"] <= len(expected)


def test_more_passes_find_more_of_what_is_known(truth):
    mutant = truth.plant(0, 1)
    mapped = truth.map_failures(mutant, 2.0, 64)
    few, many = (
        measure_recall(mapped, truth.search(mutant, CampaignCell("random", 2.0, 0), passes, 64))
        for passes in (200, 2000)
    )
    assert all(few[name] < many[name] for name in ("seeds", "regions", "cells"))
    assert many["seeds"] > 0.7


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_recording_tests_changes_nothing(technique, truth):
    campaign = CampaignCell(technique, 2.0, 0)
    limits = {"max_tests": 200, "max_passes": None, "plateau": None, "coverage": None}
    plain = truth.runner.search(campaign, **limits)[0]
    policy = choose_policy({"paper-preset": "paper", "nc": "fuzz"}.get(technique, technique))
    recorded = record_tests(policy)
    watched = truth.runner.search(campaign, policy=policy, **limits)[0]
    assert watched.faults.columns["id"].tolist() == plain.faults.columns["id"].tolist()
    number = np.concatenate([tests.number[results.was_run] for tests, results in recorded])
    assert number.tolist() == list(range(200))
    theta = np.concatenate([tests.theta[results.was_run] for tests, results in recorded])
    assert np.array_equal(theta[plain.faults.columns["id"]], plain.faults.columns["theta"])


def test_mutants_are_killed_by_tests_that_the_model_answers_correctly(truth):
    kills = truth.kill(CampaignCell("random", 2.0, 0), 1000)
    assert kills["mutants"] == len(truth.mutants.kept)
    assert 0 < kills["score"] <= kills["killed"] <= 1
    assert kills["clean_score"] <= kills["clean_killed"]
    identity = {"model": "net", "perturbation": "shear", "magnitude": 2.0, "campaign": 0, "technique": "random"}
    (summary,) = summarise_truth([], [], [{**identity, **kills}])
    assert summary["techniques"]["random"]["scores"] == [{name: kills[name] for name in ("score", "killed", "tests")}]


def test_too_few_mutants_are_refused(truth):
    with pytest.raises(DataError, match=r"99 mutants must be planted, but only .* were kept: raise mutants"):
        truth.plant(0, 99)
