"""Campaigns that stop as soon as a claim about the fault rate or the recall is decided."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Perturbation, Target, Theta, UsageError
from themis.cli import main
from themis.judge.decide import rate_at_any_time
from themis.perturb.perturbation import column
from themis.report.page import read_view
from themis.runs.analysis.operation import rate_in_operation
from themis.runs.display.text import summary_lines
from themis.runs.estimates import read_progress
from themis.runs.store.reader import Reader


class Mean(nn.Module):
    """Says 1 where an input's mean is over a half."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        over = self.relu(x).flatten(1).mean(1) - 0.5
        return torch.stack([-over, over], 1)


def shifted(inputs, theta, rng, context):
    """All values moved up."""
    return inputs + column(theta, 0, inputs)


SHIFT = Perturbation("shift", (Theta("by", 0, 0.5),), shifted, is_random=False)


def data_of(rate, n_seeds):
    """Inputs of which this share fail: half of them never, the others twice as often."""
    labels = torch.arange(n_seeds) % 2
    return torch.where(labels == 0, rate, 0.9)[:, None].expand(-1, 4).clone(), labels


def campaign(rate, n_seeds=2000, **options):
    options = {"decide": "fault_rate<=0.02", **options}
    return themis.run(Target(Mean(), bounds=(0, 1)), data_of(rate, n_seeds), SHIFT, **options)


def test_a_rate_far_above_the_limit_is_refuted_within_100_tests():
    run = campaign(0.2)
    assert (run.stop_reason, run.decision.verdict) == ("decided", "does not hold")
    assert run.counts.tests <= 100
    assert not run.gate()


def test_a_model_without_faults_is_accepted_after_200_tests():
    run = campaign(0.0)
    assert (run.stop_reason, run.decision.verdict, run.counts.tests) == ("decided", "holds", 200)
    assert run.gate()
    assert run.stop == "Stopped because fault_rate<=0.02 is decided."
    assert any("holds (certain at 95%): 0 faults on 200 seeds" in " ".join(row.split()) for row in summary_lines(run))


def test_every_test_is_of_another_seed_and_no_fault_but_the_claim_stops_it(tmp_path):
    run = campaign(0.04, 300, out=tmp_path / "run", random_seed=2, decide="fault_rate<=0.04")
    with closing(Reader(tmp_path / "run")) as reader:
        assert read_progress(reader).uniform_tests_by_seed.tolist() == [1] * 300
    assert (run.stop_reason, run.decision.verdict, run.decision.tests) == ("seeds", "undecided", 300)
    assert run.stop == "Stopped because every seed was tested once."


def test_the_search_gets_the_tests_that_the_user_leaves_it():
    run = campaign(0.01, 400, uniform_share=0.5, decide="fault_rate<=0.01")
    assert (run.stop_reason, run.decision.tests, run.counts.tests) == ("seeds", 400, 800)


def test_the_interval_of_the_fault_rate_holds_at_all_times():
    run = campaign(0.2)
    assert run.fault_rate == rate_at_any_time(run.decision.tests, run.decision.faults)


def test_a_budget_that_ends_first_leaves_it_undecided_and_says_what_it_would_take():
    run = campaign(0.0, max_tests=100)
    assert (run.stop_reason, run.decision.verdict, run.decision.more_tests) == ("tests", "undecided", 94)
    results = run.gate()
    assert not results
    assert results.is_undecided
    assert results.results[-1].line.endswith("themis resume the run and a larger budget, or give more seeds")


def test_a_resumed_campaign_looks_and_ends_as_if_it_had_not_been_stopped(tmp_path):
    whole = campaign(0.05, random_seed=4)
    campaign(0.05, random_seed=4, out=tmp_path / "run", max_tests=50)
    model, data = Target(Mean(), bounds=(0, 1)), data_of(0.05, 2000)
    resumed = themis.resume(tmp_path / "run", model, data, perturbation=SHIFT, max_tests=20_000)
    assert resumed.decision == whole.decision
    assert whole.decision.tests > 50
    again = themis.resume(tmp_path / "run", model, data, perturbation=SHIFT, max_tests=30_000)
    assert again.decision == whole.decision


def test_the_verdict_is_in_the_folder_the_report_and_junit(tmp_path, capsys):
    run = campaign(0.2, out=tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["decision"] == vars(run.decision)
    assert themis.open_run(tmp_path / "run").decision == run.decision
    assert read_view(tmp_path / "run").decision == run.decision.clause
    assert main(["gate", str(tmp_path / "run"), "--junit", str(tmp_path / "gates.xml")]) == 1
    assert main(["gate", str(tmp_path / "run")]) == 1
    assert "FAILED  decide: fault_rate<=0.02 does not hold" in capsys.readouterr().out
    assert 'name="decide"' in (tmp_path / "gates.xml").read_text()
    campaign(0.0, out=tmp_path / "open", max_tests=50)
    assert main(["gate", str(tmp_path / "open")]) == 4
    assert main(["gate", str(tmp_path / "open"), "--max-fault-rate", "0.01"]) == 1


def test_a_constant_model_cannot_pass():
    inputs = torch.full((300, 4), 0.1)
    target = Target(Mean(), bounds=(0, 1), oracle="changed")
    with pytest.warns(RuntimeWarning, match="says nothing"):
        run = themis.run(target, inputs, SHIFT, magnitude=0.1, decide="fault_rate<=0.02")
    assert run.decision.verdict == "holds"
    assert not run.gate()
    assert run.gate(allow_constant=True)


def test_a_run_whose_end_depends_on_its_results_is_not_weighted_by_a_profile(tmp_path):
    campaign(0.2, out=tmp_path / "run")
    with pytest.raises(UsageError, match="was run with decide"):
        rate_in_operation(tmp_path / "run", "by~beta(1,2)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decide": "recall<=0.9"}, "decide must be fault_rate<=X or recall>=X"),
        ({"decide": "recall>=1"}, "with X between 0 and 1"),
        ({"decide": "recall>=0.9", "uniform_share": 0.0}, "uniform_share must lie above 0"),
        ({"decide": "recall>=0.9", "preset": "paper"}, "preset must be left out with decide"),
        ({"decide": "fault_rate<=2%"}, "decide must be fault_rate<=X"),
        ({"decide": "fault_rate<=1.5"}, "with X between 0 and 1"),
        ({"decide": 0.02}, "decide must be fault_rate<=X"),
        ({"uniform_share": 0.0}, "uniform_share must lie above 0"),
        ({"min_ssim": 0.5}, "min_ssim must be left out with decide"),
        ({"seed_weights": "class=a:1"}, "seed_weights must be left out with decide"),
        ({"preset": "paper"}, "preset must be left out with decide"),
    ],
)
def test_what_cannot_be_decided_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        campaign(0.0, **options)


def test_a_suite_decides_no_fault_rate(tmp_path):
    with pytest.raises(UsageError, match="decide must be mce<=X or mean_error<=X"):
        themis.run_suite(Target(Mean()), torch.rand(5, 4), [SHIFT], out=tmp_path / "suite", decide="fault_rate<=0.02")


@pytest.mark.slow
@pytest.mark.parametrize("relative", [0.9, 1.0, 1.1])
def test_campaigns_on_seeds_of_different_rates_are_rarely_wrong(relative):
    """Each campaign has new seeds: a tenth fail at ten times the rate of all, the others never."""
    wrong, target = 0, Target(Mean(), bounds=(0, 1))
    for k in range(100):
        inputs, labels = data_of(0.0, 600)
        often = torch.from_numpy(np.random.default_rng(k).random(600) < 0.2) & (labels == 0)
        inputs[often] = 0.5 * 10 * relative * 0.02
        run = themis.run(target, (inputs, labels), SHIFT, decide="fault_rate<=0.02", random_seed=k)
        wrong += run.decision.verdict == ("does not hold" if relative <= 1 else "holds")
    assert wrong <= 5


def seeds_that_fail(chances):
    """A seed for each of these chances of a fault, and one of the other class, which never fails."""
    inputs = torch.tensor([*chances, 1.8], dtype=torch.float32)[:, None].expand(-1, 4) / 2
    return inputs, torch.tensor([*[0] * len(chances), 1])


def recall_campaign(data, **options):
    return themis.run(Target(Mean(), bounds=(0, 1)), data, SHIFT, decide="recall>=0.9", **options)


@pytest.mark.parametrize("policy", ["random", "scheduled"])
def test_campaigns_stop_when_they_know_where_most_random_faults_are(policy):
    chances = np.repeat([0.5, 0.1], [20, 100])
    for k in range(4):
        run = recall_campaign(seeds_that_fail(chances), policy=policy, random_seed=k)
        found = np.unique(run.faults.columns["seed_id"])
        assert (run.stop_reason, run.decision.verdict) == ("decided", "holds")
        assert chances[found].sum() >= 0.9 * chances.sum()


def test_a_campaign_that_knows_all_faults_stops_and_a_resumed_one_does_as_well(tmp_path, capsys):
    data = seeds_that_fail([0.0] * 50 + [0.5] * 10)
    run = recall_campaign(data, round_size=100, out=tmp_path / "whole")
    assert (run.stop_reason, run.decision.verdict, run.start.settings.uniform_share) == ("decided", "holds", 0.5)
    assert run.gate()
    assert main(["gate", str(tmp_path / "whole")]) == 0
    recall_campaign(data, round_size=100, max_tests=200, out=tmp_path / "part")
    assert main(["gate", str(tmp_path / "part")]) == 4
    assert "recall>=0.9 is undecided" in " ".join(capsys.readouterr().out.split())
    model = Target(Mean(), bounds=(0, 1))
    resumed = themis.resume(tmp_path / "part", model, data, perturbation=SHIFT, max_tests=20_000)
    assert resumed.decision == run.decision == themis.open_run(tmp_path / "part").decision
    assert read_view(tmp_path / "part").decision == run.decision.clause


def test_a_model_without_faults_has_no_recall_to_decide():
    run = recall_campaign(seeds_that_fail([0.0] * 50), max_tests=1000)
    assert (run.stop_reason, run.decision.verdict, run.decision.faults) == ("tests", "undecided", 0)
    assert run.decision.clause == "recall>=0.9 is undecided: no random test was a fault; decide the fault rate instead"
    assert run.gate().is_undecided
