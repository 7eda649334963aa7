"""Rounds of retraining and campaign: each campaign is a run, and they end when the fault rate stops falling."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Target, UsageError
from themis.retraining.api import retrain
from themis.retraining.changes import normal_interval
from themis.retraining.result import markdown
from themis.runs.parts import read_parts
from themis.runs.store.reader import Reader
from themis.target.ledger import read_ledger

pytestmark = [pytest.mark.xdist_group("retrain_loop"), pytest.mark.usefixtures("few_held_out_tests")]

QUICK = {
    "random_seeds": 1,
    "epochs": 4,
    "draws": 6,
    "passes": 400,
    "batch_size": 32,
    "learning_rate": 5e-3,
    "distill": 0.0,
}


def stripes(n=400):
    """Two kinds of pictures, brighter above or below."""
    rng = torch.Generator().manual_seed(3)
    inputs = 0.4 + 0.2 * torch.rand(n, 1, 6, 6, generator=rng)
    labels = torch.randint(0, 2, (n,), generator=rng)
    inputs[labels == 0, :, :3] += 0.15
    inputs[labels == 1, :, 3:] += 0.15
    return inputs, labels


def one_row():
    """A model that looks at one row only of each half."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].bias.zero_()
        net[1].weight[0, :6], net[1].weight[1, 30:] = 1.0, 1.0
    return Target(net)


def search(data, **options):
    how = {"magnitude": 0.6, "max_tests": 500, "split": (0.4, 0.2, 0.4), "tolerance": 1e-9, "plateau": None, **options}
    return themis.run(one_row(), data, "gaussian", **how)


@pytest.fixture(scope="module")
def searched():
    data = stripes()
    return data, search(data)


@pytest.fixture(scope="module")
def looped(searched, tmp_path_factory):
    data, run = searched
    out = tmp_path_factory.mktemp("loop") / "out"
    return retrain(run, data=data, out=out, rounds=3, **{**QUICK, "learning_rate": 0.05}), out


def test_the_fault_rate_falls_and_the_result_says_why_the_rounds_ended(looped):
    result, out = looped
    first = 1 - result.stages[0].outcomes[0].before.disturbed_score
    assert result.stages[0].fault_rate < first - 0.005
    assert result.stage.fault_rate <= min(first, result.stages[0].fault_rate)
    assert result.stop.startswith("Stopped because ")
    text = markdown(result)
    assert "### Rounds" in text
    assert result.stop in text
    assert len(json.loads((out / "retrain.json").read_text())["rounds"]) == len(result.stages)


def test_each_round_is_a_run_on_its_own_model(searched, looped):
    data, _ = searched
    result, out = looped
    for stage in result.stages:
        folder = out / f"round-{stage.number}"
        assert stage.campaign["folder"] == str(folder)
        with closing(Reader(folder)) as run:
            assert run.summary()["faults"] == stage.campaign["faults"]
            assert run.record["environment"]["model_sha256"] == stage.model.target.fingerprint()
            assert run.record["settings"]["random_seed"] == stage.number
            fault = run.faults()[0]
            replayer = themis.runs.replay.Replayer(run, stage.model.target, data)
            assert replayer.replay(fault).is_same


def test_rounds_learn_from_all_faults_so_far_and_the_ledger_has_no_judge_seed(searched, looped):
    data, run = searched
    result, _ = looped
    numbers = [stage.n_faults for stage in result.stages]
    assert numbers[0] == len(run.faults)
    for stage, learnt in zip(result.stages, numbers[1:], strict=False):
        assert learnt == stage.n_faults + stage.campaign["faults"]
    parts = read_parts(run, data)
    for stage in result.stages:
        seen = read_ledger(stage.model.weights)
        assert seen.knows(parts.search).all()
        assert not seen.knows(parts.judge).any()


def test_more_rounds_continue_after_finished_ones(searched, tmp_path):
    data, run = searched
    out = tmp_path / "out"
    one = retrain(run, data=data, out=out, rounds=1, **QUICK)
    assert one.stop == ""
    assert not (out / "round-1").exists()
    weights = one.stage.model.weights.read_bytes()
    two = retrain(run, data=data, out=out, rounds=2, **QUICK)
    assert two.stages[0].model.weights.read_bytes() == weights
    assert np.array_equal(two.stages[0].outcomes[0].after[0].disturbed, one.outcomes[0].after[0].disturbed)
    assert (out / "round-1/run.sqlite").is_file()
    again = retrain(run, data=data, out=out, rounds=2, **QUICK)
    assert again.summary()["rounds"] == two.summary()["rounds"]


def test_a_retraining_goes_on_wherever_its_run_is_but_not_on_another_run(tmp_path):
    data, first, second = stripes(), tmp_path / "first", tmp_path / "second"
    search(data, out=first)
    how = {"target": one_row(), "data": data, "out": tmp_path / "out", **QUICK}
    before = retrain(first, **how)
    first.rename(second)
    assert retrain(second, **how).gain == before.gain
    search(data, out=first, random_seed=1)
    with pytest.raises(UsageError, match="campaign_seed 0 then, 1 now"):
        retrain(first, **how)


def test_the_campaign_of_a_round_can_be_retrained_from(searched, looped):
    data, _ = searched
    result, out = looped
    stage = result.stages[0]
    with pytest.raises(UsageError, match="does not record how to create its target"):
        retrain(out / "round-1", **QUICK)
    more = retrain(out / "round-1", target=stage.model.target, data=data, **QUICK)
    assert more.outcomes[0].before.disturbed_score == pytest.approx(1 - stage.fault_rate, abs=0.05)
    assert np.isin(stage.model.ledger.hashes, more.ledger.hashes).all()


def test_a_fall_is_paired_by_seed(looped):
    result, _ = looped
    before = result.outcomes[0].before
    assert normal_interval(before.disturbed - before.disturbed) is None
    fell = normal_interval(result.stages[0].outcomes[0].after[0].disturbed - before.disturbed)
    assert 0 < fell.low < fell.value
