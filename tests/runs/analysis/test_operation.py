"""The fault rate in operation: profiles of theta and of seeds, in a campaign and afterwards."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import DataError, Perturbation, Target, Theta, UsageError
from themis.cli import main
from themis.data.seeds import read_seeds
from themis.data.slices import read_seed_weights
from themis.perturb.perturbation import column
from themis.report.page import write_report
from themis.runs.analysis.operation import rate_in_operation
from themis.runs.display.text import summary_rows

OPTIONS = {"coverage": None, "policy": "random", "uniform_share": 1.0, "max_tests": 2000, "plateau": None}


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


def shift(distribution=None):
    return Perturbation("shift", (Theta("by", 0, 0.5, distribution=distribution),), shifted, is_random=False)


MEANS = torch.linspace(0.1, 0.45, 200)
INPUTS = MEANS[:, None].expand(-1, 4).clone()
LABELS = torch.zeros(200, dtype=torch.long)


def share_over(density, weights=None):
    """The share of tests that break the model: those whose theta moves the mean of their seed over a half."""
    theta = (np.arange(20_000) + 0.5) / 40_000
    breaks = theta[None] > 0.5 - MEANS.numpy()[:, None]
    by_seed = (breaks * density(theta / 0.5)).mean(1)
    return float(np.average(by_seed, weights=weights))


def early(share):
    """The density of beta(1,4)."""
    return 4 * (1 - share) ** 3


def campaign(distribution=None, out=None, **options):
    target = Target(Mean(), bounds=(0, 1))
    return themis.run(target, (INPUTS, LABELS), shift(distribution), out=out, **OPTIONS | options)


def test_the_uniform_stream_follows_theta():
    run = campaign("beta(1,4)")
    assert run.fault_rate.low < share_over(early) < run.fault_rate.high
    assert not run.fault_rate.low < share_over(np.ones_like) < run.fault_rate.high
    assert run.start.profile == run.summary()["profile"] == "by~beta(1,4)"
    assert "in operation" in dict(summary_rows(run))["fault rate"]


def test_the_profile_is_in_the_report_and_in_junit(tmp_path):
    campaign("beta(1,4)", tmp_path / "run")
    gates = ["--max-fault-rate", "1", "--allow-constant", "--junit", str(tmp_path / "gates.xml")]
    assert main(["gate", str(tmp_path / "run"), *gates]) == 0
    assert 'name="profile" value="by~beta(1,4)"' in (tmp_path / "gates.xml").read_text()
    assert "by~beta(1,4)" in write_report(tmp_path / "run").read_text()


def test_an_even_profile_gives_the_rate_without_a_profile():
    plain, even = campaign(), campaign("beta(1,1)")
    assert plain.fault_rate.value == pytest.approx(even.fault_rate.value, abs=1e-3)
    assert "on average over seeds" in dict(summary_rows(plain))["fault rate"]


def test_the_uniform_stream_follows_the_weights_of_seeds(tmp_path):
    weights = np.linspace(0, 1, 200) ** 3
    table = tmp_path / "traffic.csv"
    table.write_text("row,often\n" + "".join(f"{k},{weight}\n" for k, weight in enumerate(weights)))
    truth = share_over(np.ones_like, weights)
    run = campaign(seed_weights=f"{table}:often")
    assert run.fault_rate.low < truth < run.fault_rate.high
    assert run.fault_rate.value == pytest.approx(truth, abs=0.05)
    assert abs(truth - share_over(np.ones_like)) > 0.1


def test_a_resumed_campaign_must_have_the_same_weights(tmp_path):
    table = tmp_path / "traffic.csv"
    table.write_text("often\n" + "1\n" * 200)
    campaign(out=tmp_path / "run", seed_weights=f"{table}:often", max_tests=300)
    table.write_text("often\n" + "1\n" * 100 + "2\n" * 100)
    target = Target(Mean(), bounds=(0, 1))
    with pytest.raises(DataError, match="the weights of the seeds must be the same as in the run"):
        themis.resume(tmp_path / "run", target, (INPUTS, LABELS), perturbation=shift(), max_tests=600)


def test_a_finished_run_is_weighted_afterwards(tmp_path, capsys):
    run = campaign(out=tmp_path / "run")
    rate = rate_in_operation(tmp_path / "run", "by~beta(1,4)")
    assert rate.fault_rate.low < share_over(early) < rate.fault_rate.high
    assert rate.fault_rate.value == pytest.approx(share_over(early), abs=0.03)
    assert 500 < rate.effective_tests < rate.tests == 2000
    assert rate_in_operation(tmp_path / "run", {"by": "beta(1,1)"}).fault_rate.value == pytest.approx(
        run.fault_rate.value, abs=1e-6
    )
    profile = tmp_path / "profile.yaml"
    profile.write_text("by: beta(1,4)\n")
    assert main(["rate", str(tmp_path / "run"), "--profile", str(profile)]) == 0
    assert "fault rate in operation, by~beta(1,4)" in capsys.readouterr().out


def test_a_run_under_a_profile_is_weighted_back(tmp_path):
    campaign("beta(1,2)", out=tmp_path / "run")
    even = rate_in_operation(tmp_path / "run", {"by": "beta(1,1)"}).fault_rate
    assert even.low < share_over(np.ones_like) < even.high


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (
            "by~beta(1,300)",
            r"at least 50 tests .* 'shift\(by=0:0.5~beta\(1,300\)\)' in --perturb",
        ),
        ("angle~beta(1,2)", "must be one of the run's: known: by"),
        ("by~beta(0,2)", "must have two numbers above 0"),
        ("by~normal(9,0.1)", "at least 1% of its values in the range 0..0.5"),
        ("missing.yaml", "a profile must be a YAML file"),
        ({}, "a profile must name distributions by theta"),
    ],
)
def test_a_profile_that_says_too_little_is_refused(tmp_path, profile, reason):
    campaign(out=tmp_path / "run", max_tests=400)
    with pytest.raises((UsageError, DataError), match=reason):
        rate_in_operation(tmp_path / "run", profile)


SEEDS = read_seeds((INPUTS, (torch.arange(200) % 2))).with_classes(["cat", "dog"])


def test_shares_of_classes_are_divided_among_their_seeds():
    weights = read_seed_weights("class=cat:0.7,dog:0.3", SEEDS)
    assert weights[::2].sum() == pytest.approx(0.7)
    assert weights[1::2].sum() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class", "must have the share of each"),
        ("class=cow:1", "'cow' must be a value of a seed"),
        ("class=cat", "needs VALUE:SHARE"),
        ("class=cat:0", "not all 0"),
        ("class=cat:-1,dog:2", "must be 0 or more"),
        ("often", "must be FILE:COLUMN"),
        ("missing.csv:often", "must name a CSV table"),
        ("/dev/zero:often", "must name a CSV table"),
    ],
)
def test_weights_that_are_none_are_refused(text, reason):
    with pytest.raises((UsageError, DataError), match=reason):
        read_seed_weights(text, SEEDS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a\n1\n", "must have the column 'often'"),
        ("often\n1\n", "must have a row per input"),
        ("often\n" + "x\n" * 200, "must hold numbers"),
    ],
)
def test_a_table_without_weights_is_refused(tmp_path, content, reason):
    table = tmp_path / "traffic.csv"
    table.write_text(content)
    with pytest.raises(DataError, match=reason):
        read_seed_weights(f"{table}:often", SEEDS)
    net, answered = Mean(), []
    net.register_forward_hook(lambda module, inputs, output: answered.append(len(output)))
    with pytest.raises(DataError, match=reason):
        themis.run(Target(net, bounds=(0, 1)), (INPUTS, LABELS), shift(), seed_weights=f"{table}:often", **OPTIONS)
    assert sum(answered) < 100, "the clean inputs may be many, and the model slow"
