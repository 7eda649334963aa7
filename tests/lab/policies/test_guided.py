"""Campaigns that a criterion guides or observes: what it sees, when they stop, what they report and keep."""

import json
import re

import numpy as np
import pytest
import torch
from guided import QUICK, SPECS, Seen, labelled
from torch import nn

import themis
from themis import Callback, DataError, Target, UsageError
from themis.cli import main
from themis.criteria import choose_criterion
from themis.measure.runner import TestRunner
from themis.measure.tests import Results
from themis.runs.store.reader import Reader
from themis.search.policy import Space
from themis_lab.criteria import NC
from themis_lab.criteria.view import activations, fit_to
from themis_lab.policies.fuzz import Fuzz


class FromNow(Callback):
    """Starts to record after the clean sweep."""

    def __init__(self, net):
        self.net = net

    def on_start(self, start):
        self.net.seen = []


@pytest.fixture
def net():
    return Seen()


@pytest.fixture
def data(net):
    return labelled(net)


@pytest.fixture
def sizes(monkeypatch):
    """The number of tests of each chunk that is measured; the rest of its forward pass is padding."""
    sizes, measure = [], TestRunner.measure

    def counted(self, *arguments, **options):
        measurement = measure(self, *arguments, **options)
        sizes.append(len(measurement))
        return measurement

    monkeypatch.setattr(TestRunner, "measure", counted)
    return sizes


@pytest.mark.parametrize("spec", [each for each in SPECS if not each.startswith(("scc", "nlc"))])
def test_a_criterion_is_shown_every_test_of_the_campaign(net, data, spec, sizes):
    run = themis.run(net, data, "gaussian", criterion=spec, callbacks=[FromNow(net)], **QUICK)
    tests = torch.cat([batch[:n] for batch, n in zip(net.seen, sizes, strict=True)])
    net.seen = None
    assert len(tests) == run.rounds[-1].tests == 640
    criterion = fit_to(choose_criterion(spec), Target(net), data)
    raised = torch.cat([criterion.update(batch) for batch in activations(Target(net), tests)]).numpy()
    assert run.summary()["criterion"]["score"] == run.rounds[-1].criterion_score == criterion.score() > 0
    assert run.summary()["criterion"]["raised"] == raised.sum()
    np.testing.assert_array_equal(run.faults.columns["raised"], raised[run.faults.columns["id"]])


def test_faults_record_whether_their_test_raised_the_criterion(net, data, tmp_path):
    run = themis.run(net, data, "gaussian", criterion="kmnc(k=5)", out=tmp_path, **QUICK)
    raised = run.faults.columns["raised"]
    assert 0 < raised.sum() < len(raised)
    found = run.summary()["criterion"]
    assert found["faults_selected"] == raised.sum()
    assert found["raised"] > found["faults_selected"]
    assert found["distinct_faults_selected"] == len({(f.seed_id, f.answer) for f in run.faults if f.raised})
    reader = Reader(tmp_path)
    np.testing.assert_array_equal(reader.faults().columns["raised"], raised)
    assert [each.criterion_score for each in reader.rounds()] == [each.criterion_score for each in run.rounds]
    reader.close()


def test_the_fuzzer_keeps_tests_that_raise_the_criterion_and_are_not_faults():
    low, high = np.zeros(2, np.float32), np.ones(2, np.float32)
    space = Space(np.arange(5), np.arange(5), np.ones(5, np.float32), low, high, low, True, 0)
    policy = Fuzz()
    policy.init(space)
    tests = policy.propose(np.arange(8))
    assert set(tests.kind) == {"first"}
    is_fault, raised = np.arange(8) < 2, np.arange(8) % 2 == 0  # of 0, 2, 4, 6 only 2, 4, 6 join
    policy.observe(tests, Results(is_fault, np.zeros(8, int), np.zeros(8, np.float32), None, raised=raised))
    assert len(policy.state["position"]) == 5 + 3
    np.testing.assert_array_equal(policy.state["theta"][5:], tests.theta[[2, 4, 6]])
    children = policy.propose(np.arange(8, 4008))
    mutants = children.kind == "mutant"
    kept = (children.theta[:, None] == policy.state["theta"][None, 5:]).any(1)
    assert 0.45 < kept[mutants].mean() < 0.55  # half of the dimensions of a parent are kept
    assert not kept[~mutants].any()
    fresh = space.uniform_theta(1, np.arange(8, 4008))
    assert ((children.theta == fresh) | kept).all()  # the others are drawn as by `random`


def test_a_parent_is_mutated_less_often_after_each_mutation():
    space = Space(np.arange(3), np.arange(3), np.ones(3, np.float32), *np.zeros((3, 1), np.float32), True, 0)
    policy = Fuzz()
    policy.init(space)
    policy.state["mutated"] = np.array([0, 2, 50])
    np.testing.assert_allclose(policy.weights(), [0.8, 0.4, 0.3])
    drawn = np.bincount(policy.propose(np.arange(3000)).seed, minlength=3) / 3000
    np.testing.assert_allclose(drawn, np.array([0.8, 0.4, 0.3]) / 1.5, atol=0.03)


def test_without_noise_a_child_never_equals_its_parent(net, data):
    run = themis.run(net, data, "brightness", criterion="kmnc(k=20)", **{**QUICK, "magnitude": 1.0})
    kinds = run.kinds
    assert kinds["mutant"]["tests"] > 0
    assert kinds.get("redrawn", {"tests": 0})["tests"] < 20


def test_a_criterion_that_leads_decides_when_to_stop(net, data):
    options = {**QUICK, "max_tests": 5000}
    run = themis.run(net, data, "gaussian", criterion="nc(threshold=0.1)", **{**options, "coverage": 0.5}, recall=None)
    assert run.stop_reason == "coverage"
    assert run.stop.startswith("Stopped because nc(threshold=0.1) ")
    assert run.rounds[-1].criterion_score >= 0.5
    options = {**options, "magnitude": 1e-6, "plateau": 3}
    flat = themis.run(net, data, "gaussian", criterion="nc(threshold=5, variant=mindarmour)", **options)
    assert flat.stop_reason == "plateau"
    assert flat.rounds[-1].criterion_score == 0


def test_without_a_goal_no_coverage_stops_a_campaign(net, data):
    options = {**QUICK, "tolerance": 1.0, "coverage": None}
    for how in ({"criterion": "nc(threshold=0.01)"}, {"policy": "random"}):
        run = themis.run(net, data, "gaussian", **options, **how)
        assert run.stop_reason == "tests"
        assert max(run.coverage, run.rounds[-1].criterion_score or 0) == 1


def test_a_small_budget_still_has_rounds_to_learn_from(net, data):
    options = {name: value for name, value in QUICK.items() if name not in ("round_size", "max_tests")}
    run = themis.run(net, data, "gaussian", criterion="kmnc(k=20)", max_tests=1000, **options)
    assert len(run.rounds) == 7
    assert run.kinds["mutant"]["tests"] > 0
    assert len(themis.run(net, data, "gaussian", policy="random", max_tests=1000, **options).rounds) < 3


def test_a_criterion_can_observe_another_policy(net, data):
    plain = themis.run(net, data, "gaussian", policy="corners", **QUICK)
    watched = themis.run(net, data, "gaussian", policy="corners", criterion="kmnc(k=20)", **QUICK)
    assert [fault.id for fault in plain.faults] == [fault.id for fault in watched.faults]
    assert watched.summary()["criterion"]["leads"] is False
    assert watched.rounds[-1].criterion_score > 0
    assert plain.summary()["criterion"] is None


def test_a_criterion_learns_from_training_data_if_there_is_any(net, data):
    far = (data[0] * 0.1, data[1])
    own = themis.run(net, data, "gaussian", criterion="nbc(neurons=element)", **{**QUICK, "magnitude": 0.02})
    other = themis.run(
        net, data, "gaussian", criterion="nbc(neurons=element)", train=far, **{**QUICK, "magnitude": 0.02}
    )
    assert own.summary()["criterion"]["source"] == "the seeds"
    assert other.summary()["criterion"]["source"] == "training data"
    assert other.rounds[-1].criterion_score > own.rounds[-1].criterion_score  # more lies outside the learnt range
    fitted = fit_to(choose_criterion("nbc(neurons=element)"), Target(net), far)
    again = themis.run(net, data, "gaussian", criterion=fitted, **{**QUICK, "magnitude": 0.02})
    assert again.rounds[-1].criterion_score == other.rounds[-1].criterion_score
    assert fitted.score() == 0  # the campaign used a copy


def test_the_criterion_of_the_caller_is_left_unchanged(net, data):
    criterion = choose_criterion("nbc(neurons=element)")
    options = {**QUICK, "magnitude": 0.02}
    scores = [
        themis.run(net, data, "gaussian", criterion=criterion, train=train, **options).rounds[-1].criterion_score
        for train in (data[0], data[0] * 0.1)
    ]
    assert scores[0] < scores[1]
    assert (criterion.learnt, criterion.state, criterion.tests) == ({}, {}, 0)
    fitted = fit_to(criterion, Target(net), data)
    with pytest.raises(UsageError, match="is fitted already, train would change nothing"):
        themis.run(net, data, "gaussian", criterion=fitted, train=data[0], **options)
    watched = NC(neurons="element")
    pair = {"policy": "deepxplore", "rivals": [Seen()], "criterion": watched}
    raised = [themis.run(net, data, "brightness", **QUICK | {"magnitude": None}, **pair).raised for _ in range(2)]
    assert raised[0] == raised[1] > 0
    assert watched.tests == 0


WRONG = {
    "a criterion of contributions": ({"criterion": "npc"}, "npc cannot be used in a campaign"),
    "layers of numbers": ({"criterion": "kmnc(layers=[7])"}, "layers must be among those given, got '7'"),
    "clean readings without room": (
        {"criterion": "scc", "clean_memory_gib": 0},
        "scc compares tests with the clean readings of all seeds",
    ),
    "fuzz without a criterion": ({"policy": "fuzz"}, "policy 'fuzz' follows a criterion, got none"),
    "train without a criterion": ({"train": torch.rand(3, 1, 8, 8)}, "train is data that a criterion learns from"),
    "unknown criterion": ({"criterion": "kmcn"}, "got 'kmcn': did you mean 'kmnc'?"),
    "unknown option": ({"criterion": "kmnc(q=3)"}, "kmnc: unknown option 'q'"),
    "not in words": ({"criterion": "kmnc(k"}, "criterion must be a name, perhaps with options"),
    "no rivals": ({"policy": "deepxplore"}, "compares the target with other models, got none: pass rivals="),
    "rivals of another policy": ({"rivals": [Seen()]}, "rivals are models that some policies compare"),
    "deepxplore with another criterion": (
        {"policy": "deepxplore", "rivals": [Seen()], "criterion": "kmnc"},
        "requires nc over all layers and the target's neurons",
    ),
    "rivals of another task": (
        {"policy": "deepxplore", "rivals": [nn.Sequential(nn.Flatten(), nn.Linear(64, 3))]},
        "rival 1 must give scores of the target's shape [5], got [3]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_combinations_are_rejected_with_an_explanation(net, data, name):
    options, message = WRONG[name]
    with pytest.raises(UsageError, match=re.escape(message)):
        themis.run(net, data, "gaussian", **QUICK, **options)


def test_wrong_training_data_is_named_in_the_error(net, data):
    for train, message in (
        (torch.rand(5, 1, 9, 9), r"training data: its inputs must have the seeds' shape \[1, 8, 8\], got \[1, 9, 9\]"),
        (torch.rand(5, 1, 8, 8) + 2, "training data: inputs must lie in bounds"),
        (torch.full((5, 1, 8, 8), torch.nan), "training data: .*NaN"),
    ):
        with pytest.raises(DataError, match=message):
            themis.run(net, data, "gaussian", criterion="nbc", train=train, **QUICK)


def test_a_single_output_has_no_classes(data):
    one = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
    lsa = themis.run(one, data[0], "gaussian", criterion="lsa(lower=-100)", **QUICK)  # there is only one class
    assert lsa.rounds[-1].criterion_score > 0
    with pytest.raises(DataError, match="dsa"):
        themis.run(one, data[0], "gaussian", criterion="dsa", **QUICK)
    with pytest.raises(UsageError, match="policy 'deepxplore' needs class scores, but this model's output has"):
        themis.run(one, data[0], "brightness", policy="deepxplore", rivals=[one], max_tests=200)


def test_channels_of_conv1d_are_the_same_everywhere():
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)), torch.rand(50, 2, 8)
    for neurons in ("channel", "element"):
        criterion = fit_to(choose_criterion(f"nbc(neurons={neurons})"), Target(net), inputs)
        assert not any(bool(criterion.update(batch).any()) for batch in activations(Target(net), inputs))


def test_idc_reports_more_figures(net, data):
    found = themis.run(net, data, "gaussian", criterion="idc(m=3)", **QUICK).summary()["criterion"]
    assert found["score_reachable"] >= found["score"]
    assert found["relevance"] in ("lrp", "gradient")
    assert 0 <= found["conservation_error"] < 1


def test_relevance_uses_training_data_of_all_classes():
    seen = []

    class Looks(NC):
        def prepare(self, target, inputs, labels):
            seen.append(labels)

    labels = torch.arange(5500) // 550  # sorted by class
    fit_to(Looks(), Target(nn.Linear(3, 10)), (torch.rand(5500, 3), labels))
    assert set(seen[0].tolist()) == set(range(10))
    assert len(seen[0]) <= 1000


def test_the_command_line_accepts_a_criterion(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.py").write_text(MINE)
    words = "run --model pair:net --data pair:data --perturb gaussian --magnitude 0.5 --max-tests 640"
    assert main([*words.split(), "--criterion", "kmnc(k=20)", "--train", "pair:train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["criterion"]
    assert found["name"] == "kmnc(k=20)"
    assert (found["source"], found["inputs"]) == ("training data", 70)
    assert main([*words.split(), "--policy", "deepxplore", "--rivals", "pair:rival", "--out", "both"]) == 0
    told = capsys.readouterr().out
    assert "nc(neurons=element) guides the search" in told
    assert "policy deepxplore" in told
    assert main(["resume", "both", "--max-tests", "1280", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"]["rivals"] == 1


MINE = """
import torch

def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def rival():
    return net(1)

def data():
    torch.manual_seed(2)
    return torch.rand(50, 6)

def train():
    torch.manual_seed(3)
    return torch.rand(70, 6)
"""
