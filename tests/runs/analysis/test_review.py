"""Marks of people in a run folder, and the rate of valid faults that follows from them."""

import json
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from simulation import REVIEWED, holds, review_campaigns
from torch import nn

import themis
from themis import Perturbation, StoreError, Target, Theta, UsageError
from themis.cli import main
from themis.perturb.perturbation import column
from themis.runs.analysis.review import (
    MIN_MARKS,
    REVIEW_FILE,
    agree,
    identity,
    read_marks,
    read_review,
    uniform_faults,
)
from themis.runs.display.text import summary_rows
from themis.runs.store.reader import Reader
from themis_integrations.browser.marking import add_mark, check_reviewer
from themis_integrations.evidence.evidence import write_evidence

READABLE = 0.3
"""Up to this theta, a person still gives the right answer."""


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
MEANS = torch.cat([torch.linspace(0.1, 0.45, 150), torch.linspace(0.55, 0.9, 50)])
DATA = MEANS[:, None, None, None].expand(-1, 1, 8, 8).clone(), (MEANS > 0.5).long()
TRUTH = float(np.mean([max(0.0, READABLE - (0.5 - mean)) / 0.5 if mean < 0.5 else 0.0 for mean in MEANS.tolist()]))


def campaign(out, **options):
    options = {"coverage": None, "uniform_share": 0.5, "max_tests": 2000, "plateau": None, **options}
    return themis.run(Target(Mean(), bounds=(0, 1)), DATA, SHIFT, out=out, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("reviewed") / "run"
    campaign(path)
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def review(path, number, by="ann", judge=lambda fault: "valid" if fault.theta["by"] <= READABLE else "invalid"):
    """Mark the first faults of the sample; returns them."""
    with closing(Reader(path)) as run:
        faults = uniform_faults(run)[:number]
        for fault in faults:
            add_mark(path, identity(run), fault, judge(fault), by)
    return faults


def test_the_rate_of_valid_faults_follows_from_the_marks(run):
    review(run, 150)
    result = read_review(run)
    everything = themis.open_run(run)
    assert result.fault_rate.low < TRUTH < result.fault_rate.high < 2 * TRUTH
    assert everything.fault_rate.low > TRUTH  # the interval says something that the fault rate does not
    assert (result.marked, result.unsure, result.reviewers) == (150, 0, {"ann": 150})
    assert everything.review == result
    assert everything.summary()["review"]["fault_rate"]["high"] == result.fault_rate.high
    assert f"{result.valid:,} of 150 marked faults valid" in dict(summary_rows(everything))["valid faults"]
    assert everything.gate(max_valid_fault_rate=result.fault_rate.high)
    assert not everything.gate(max_valid_fault_rate=TRUTH)


def test_the_rate_of_valid_faults_is_evidence(run, tmp_path):
    review(run, 60)
    evidence = write_evidence(run, tmp_path / "evidence")
    stored = json.loads((evidence / "summary.json").read_text())
    assert stored["review"] == json.loads(json.dumps(read_review(run).as_dict()))
    assert "of faults that people marked as valid tests |" in (evidence / "model-card.md").read_text()


def test_without_marks_nothing_changes(run):
    opened = themis.open_run(run)
    assert opened.review is None
    assert "review" not in opened.summary()
    assert "valid faults" not in dict(summary_rows(opened))


def test_the_sample_is_random_and_the_same_for_everybody(run):
    first, again = (review(run, 60, by) for by in ("ann", "bob"))
    assert [fault.id for fault in first] == [fault.id for fault in again]
    ids = [fault.id for fault in first]
    assert ids != sorted(ids)
    assert all(fault.stream == "uniform" for fault in first)
    assert np.mean(ids) == pytest.approx(1000, rel=0.2)


def test_the_gate_refuses_too_few_marks_and_says_how_many_are_needed(run, capsys):
    review(run, 10)
    assert main(["gate", str(run), "--max-valid-fault-rate", "0.1"]) == 2
    assert f"needs marks on at least {MIN_MARKS}" in (error := capsys.readouterr().err)
    assert "has 10: mark 20 more with themis review" in error
    assert "unknown: 10 of at least 30 faults marked" in read_review(run).text
    review(run, MIN_MARKS)
    junit = run.parent / "gates.xml"
    assert main(["gate", str(run), "--max-valid-fault-rate", "0.9", "--junit", str(junit)]) == 0
    assert 'name="max_valid_fault_rate"' in junit.read_text()
    assert main(["gate", str(run), "--max-valid-fault-rate", "0.01"]) == 1


def test_a_limit_that_is_no_share_is_refused(run, capsys):
    assert main(["gate", str(run), "--max-valid-fault-rate", "5"]) == 2
    assert "max_valid_fault_rate must lie in 0..1" in capsys.readouterr().err


def test_a_run_without_faults_needs_no_marks(tmp_path):
    weak = Perturbation("weak", (Theta("by", 0, 0.01),), shifted, is_random=False)
    options = {"coverage": None, "uniform_share": 0.5, "max_tests": 400, "plateau": None}
    run = themis.run(Target(Mean(), bounds=(0, 1)), DATA, weak, out=tmp_path / "run", **options)
    gates = themis.open_run(tmp_path / "run").gate(max_valid_fault_rate=0.05, max_fault_rate=0.05)
    assert [result.value for result in gates.results[1:]] == [run.fault_rate.high] * 2


@pytest.mark.parametrize("name", ["seed_weights", "decide"])
def test_runs_with_another_kind_of_interval_are_refused(tmp_path, name):
    table = tmp_path / "often.csv"
    table.write_text("often\n" + "1\n" * 200)
    campaign(tmp_path / "run", **{name: {"seed_weights": f"{table}:often", "decide": "fault_rate<=0.5"}[name]})
    with pytest.raises(UsageError, match=f"needs a run without {name}"):
        themis.open_run(tmp_path / "run").gate(max_valid_fault_rate=0.1)


def test_marks_survive_a_campaign_that_is_resumed_and_its_report(run):
    review(run, 50)
    before = (run / REVIEW_FILE).read_bytes()
    target = Target(Mean(), bounds=(0, 1))
    resumed = themis.resume(run, target, DATA, perturbation=SHIFT, max_tests=3000)
    assert resumed.review == read_review(run)
    page = themis.open_run(run).report()
    assert (run / REVIEW_FILE).read_bytes() == before
    result = read_review(run)
    assert result.marked == 50
    assert result.fault_rate.low < TRUTH < result.fault_rate.high
    assert '"counts":"' + result.counts in page.read_text()


def test_a_campaign_with_the_marks_of_another_run_is_not_resumed(run, tmp_path):
    campaign(tmp_path / "other", random_seed=9)
    review(tmp_path / "other", 5)
    (run / REVIEW_FILE).write_bytes((tmp_path / "other" / REVIEW_FILE).read_bytes())
    target, before = Target(Mean(), bounds=(0, 1)), (run / "summary.json").read_bytes()
    with pytest.raises(StoreError, match="about a fault of another"):
        themis.resume(run, target, DATA, perturbation=SHIFT, max_tests=3000)
    assert (run / "summary.json").read_bytes() == before


def test_a_process_killed_while_it_writes_a_mark_loses_no_other(run):
    faults = review(run, 2)
    whole = (run / REVIEW_FILE).read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    with closing(Reader(run)) as reader:
        for kept in range(len(last) + 1):
            (run / REVIEW_FILE).write_bytes(whole[: len(whole) - 1 - len(last) + kept])
            n = 1 + (kept == len(last))
            assert len(read_marks(reader, faults)["ann"]) == n
            add_mark(run, identity(reader), faults[0], "unsure", "bob")
            marks = read_marks(reader, faults)
            assert (len(marks["ann"]), marks["bob"]) == (n, {faults[0].id: "unsure"})


def test_the_last_mark_counts_and_can_be_undone(run):
    faults = review(run, 3, judge=lambda fault: "invalid")
    review(run, 2, judge=lambda fault: "valid")
    review(run, 1, judge=lambda fault: "undone")
    with closing(Reader(run)) as reader:
        assert read_marks(reader, faults) == {"ann": {faults[1].id: "valid", faults[2].id: "invalid"}}
    assert len((run / REVIEW_FILE).read_text().splitlines()) == 6


def test_marks_of_another_run_are_refused(run, tmp_path):
    campaign(tmp_path / "other", random_seed=1)
    review(tmp_path / "other", 1)
    shutil.copy(tmp_path / "other" / REVIEW_FILE, run / REVIEW_FILE)
    with pytest.raises(StoreError, match="of this run, but line 1 is about a fault of another"):
        themis.open_run(run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mark": "good"}, "one of valid, invalid, unsure, undone"),
        ({"by": "<b>"}, "a name of letters"),
        ({"fault": -1}, "a whole number"),
        ({"more": 1}, "does not know"),
        ({"noise_seed": 1}, "of another"),
    ],
    ids=str,
)
def test_damaged_marks_are_refused(run, capsys, change, reason):
    review(run, 2)
    lines = (run / REVIEW_FILE).read_text().splitlines()
    (run / REVIEW_FILE).write_text(lines[0] + "\n" + json.dumps(json.loads(lines[1]) | change) + "\n")
    assert main(["review", str(run), "--results"]) == 3
    assert "line 2" in (error := capsys.readouterr().err)
    assert reason in error


def test_a_link_in_place_of_the_marks_is_not_followed(run, tmp_path):
    (tmp_path / "precious").write_text("")
    (run / REVIEW_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match="symbolic link"):
        review(run, 1)
    assert (tmp_path / "precious").read_text() == ""


@pytest.mark.parametrize("name", ["", "a" * 65, "a}b", "\x1b[2J", " ann"])
def test_a_name_that_cannot_stand_beside_marks_is_refused(name):
    with pytest.raises(UsageError, match="the reviewer's name"):
        check_reviewer(name)


def test_agreement_is_that_of_the_textbook():
    first = dict(enumerate(["valid"] * 25 + ["invalid"] * 25))
    second = dict(enumerate(["valid"] * 20 + ["invalid"] * 5 + ["valid"] * 10 + ["invalid"] * 15))
    found = agree(("ann", "bob"), {"ann": first, "bob": second})
    assert (found.faults, found.share, found.kappa) == (50, pytest.approx(0.7), pytest.approx(0.4))
    assert str(found) == "ann and bob agree on 70.0% of 50 faults (kappa 0.40)"
    same = dict.fromkeys(range(9), "valid")
    assert agree(("ann", "bob"), {"ann": same, "bob": same}).kappa is None
    assert agree(("ann", "bob"), {"ann": {1: "valid"}, "bob": {2: "valid"}}) is None


def test_a_fault_on_which_reviewers_differ_is_unsure_and_widens_the_interval(run, capsys):
    review(run, 40)
    alone = read_review(run).fault_rate
    review(run, 20, by="bob", judge=lambda fault: "valid")
    result = read_review(run)
    assert result.unsure > 0
    assert result.valid + result.invalid + result.unsure == 40
    assert result.fault_rate.low <= alone.low
    assert result.fault_rate.high > alone.high
    assert main(["review", str(run), "--results"]) == 0
    assert "ann and bob agree on" in capsys.readouterr().out
    assert main(["review", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agreements"][0]["faults"] == 20


@pytest.mark.parametrize("name", ["few fail often, hardly valid", "few fail, each all or nothing"])
def test_intervals_hold_in_simulated_reviews(name):
    assert holds(review_campaigns(REVIEWED[name], 100, 1000, 40, 0.05, 40)) >= 0.95
