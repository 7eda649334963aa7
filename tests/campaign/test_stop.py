"""When a campaign stops: coverage alone is not enough if much is left to find."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import themis
from themis.campaign.loop import is_little_left, stop_reason
from themis.errors import UsageError
from themis.judge.coverage import Coverage
from themis.judge.estimate import Estimate
from themis.runs.run import Round
from themis.settings import MAX_RISK, Settings

COVERED = Coverage(1.0, 1.0, {}, 10, 0, 0, 5000, 0)
SMALL, LARGE = Estimate(0.0, 0.0, 0.004), Estimate(0.01, 0.0, 0.04)
DONE = Round(4, 5000, 0, 5000, 90, 40, 30, COVERED, 1.0, residual_risk=SMALL, recall=0.95)


def test_much_is_left_if_too_few_of_the_faults_within_reach_were_found():
    assert is_little_left(0.9, 0.9, SMALL)
    assert not is_little_left(0.9, 0.89, SMALL)
    assert not is_little_left(0.9, 0.95, LARGE)
    assert is_little_left(0.9, 0.9, Estimate(0, 0, MAX_RISK))


def test_without_a_fault_the_residual_risk_decides():
    assert is_little_left(0.9, None, SMALL)
    assert not is_little_left(0.9, None, LARGE)
    assert is_little_left(0.9, None, None)  # no uniform tests either: nothing is known


def test_without_a_goal_for_the_recall_coverage_is_enough():
    assert is_little_left(None, 0.1, LARGE)
    settings = Settings.of(recall=None)
    assert stop_reason(settings, [replace(DONE, recall=0.1, residual_risk=LARGE)], 1) == (
        "coverage",
        "coverage 100.0% of the sampled neurons reached the goal of 100.0%, confirmed by Markov chains",
    )


def test_the_stop_sentence_says_how_little_is_left():
    reason, why = stop_reason(Settings(), [DONE], 1)
    assert reason == "coverage"
    assert why.endswith(
        "confirmed by Markov chains, and little is left to find: with a probability of 75%, 95.0% or more of the "
        "distinct faults within reach were found, and the residual risk is at most 0.40%"
    )
    clean = replace(DONE, faults=0, distinct_faults=0, recall=None)
    assert stop_reason(Settings(), [clean], 1)[1].endswith("and no fault was found: the residual risk is at most 0.40%")


@pytest.mark.parametrize(
    "unfinished", [{"recall": 0.7}, {"residual_risk": LARGE}, {"recall": None, "residual_risk": LARGE}]
)
def test_a_covered_campaign_continues_while_much_is_left_until_the_budget(unfinished):
    round = replace(DONE, **unfinished)
    assert stop_reason(Settings(), [round], 1) is None
    assert stop_reason(Settings(max_tests=5000), [round], 1)[0] == "tests"


@pytest.mark.parametrize("recall", [0, 1, -0.5, 1.5, float("nan")])
def test_a_recall_that_cannot_be_reached_is_refused(recall):
    with pytest.raises(UsageError, match=r"recall must lie in \(0, 1\), or be None for coverage alone"):
        Settings(recall=recall)


def test_the_papers_preset_stops_at_the_coverage_goal():
    assert Settings.of(preset="paper").recall is None
    assert Settings.of(preset="paper", recall=0.8).recall == 0.8
    assert Settings.of().recall == 0.9


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def data():
    return torch.rand(150, 1, 8, 8, generator=torch.Generator().manual_seed(1))


OPTIONS = {"magnitude": 0.3, "round_size": 200, "plateau": None, "max_tests": 6000}


def test_a_campaign_goes_on_beyond_coverage_and_finds_most_of_what_is_within_reach(tmp_path):
    covered = themis.run(net(), data(), "gaussian", recall=None, **OPTIONS)
    assert (covered.stop_reason, covered.rounds[-1].recall < 0.9) == ("coverage", True)
    run = themis.run(net(), data(), "gaussian", out=tmp_path / "run", **OPTIONS)
    first = next(each for each in run.rounds if each.coverage.sampled == 1)
    assert first.tests <= covered.rounds[-1].tests < run.rounds[-1].tests
    assert run.rounds[-1].distinct_faults > covered.rounds[-1].distinct_faults
    opened = themis.open_run(tmp_path / "run")
    assert opened.rounds == run.rounds
    assert opened.summary() == run.summary()
    reachable = run.summary()["reachable_faults"]
    assert reachable["low"] <= reachable["value"] <= reachable["high"]
    assert reachable["low"] >= run.rounds[-1].distinct_faults


def test_a_resumed_campaign_continues_as_if_it_had_not_stopped(tmp_path):
    whole = themis.run(net(), data(), "gaussian", **OPTIONS)
    themis.run(net(), data(), "gaussian", out=tmp_path / "run", **{**OPTIONS, "max_tests": 1000})
    resumed = themis.resume(tmp_path / "run", net(), data(), max_tests=6000)
    last, expected = resumed.rounds[-1], whole.rounds[-1]
    assert (last.tests, last.distinct_faults) == (expected.tests, expected.distinct_faults)
    assert (last.reachable_faults, last.reachable_seeds) == (expected.reachable_faults, expected.reachable_seeds)
    assert (last.recall, last.residual_risk) == (expected.recall, expected.residual_risk)
