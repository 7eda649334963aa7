"""A model tested against a reference: a fault is a test on which they disagree."""

import copy
import json
import pickle
import sys
import warnings
from contextlib import closing
from functools import cache

import numpy as np
import pytest
import torch
from averaging_nets import Mean
from interruptions import StopAt, assert_same_end
from torch import nn
from wavering import Wavering, embedded, pictures

import themis
from themis import Against, BlackBox, ModelError, Target, UsageError
from themis.cli import main
from themis.runs.store.reader import Reader

ENDLESS = {"tolerance": 1e-12, "plateau": None}
APART = 0.003


def seeds(n=120):
    """Inputs of one value each, from 0.2 to 0.8; the two means lie on both sides of a limit for few of them."""
    return torch.linspace(0.2, 0.8, n).view(-1, 1, 1, 1).expand(n, 1, 8, 8).clone()


def shifted():
    """Adds one number to all pixels, so that it is known which tests come between two limits."""

    def shift(inputs, theta, rng, context):
        return inputs + theta[:, :1, None, None]

    return themis.Perturbation("shift", (themis.Theta("by", -0.1, 0.1),), shift, is_random=False)


def rounded(net):
    """A copy whose weights were rounded to a few bits."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for weights in other.parameters():
            weights.copy_((weights * 256).round() / 256)
    return other


@cache
def run_of(policy):
    net = Wavering()
    target = Against(net, rounded(net))
    return themis.run(target, pictures(200), "gaussian", magnitude=0.2, max_tests=1500, policy=policy, **ENDLESS)


def test_faults_are_the_tests_between_the_limits_of_both_models():
    run = themis.run(Against(Mean(0.5), Mean(0.5 + APART)), seeds(), shifted(), max_tests=2000, **ENDLESS)
    assert len(run.faults) > 20
    for fault in run.faults:
        value = float(seeds()[fault.seed_id, 0, 0, 0]) + fault.theta["by"]
        assert 0.5 - 1e-6 < value < 0.5 + APART + 1e-6
        assert (fault.answer, fault.reference_answer) == (1, 0)
    # The limit moves by 0.003 of the 0.2 that a shift can be, for the seeds that a shift can bring there.
    near = (seeds()[:, 0, 0, 0] - 0.5).abs() < 0.1
    truth = float(near.double().mean()) * APART / 0.2
    assert run.fault_rate.low <= truth <= run.fault_rate.high


@pytest.mark.slow
def test_the_interval_contains_the_true_rate_of_disagreement_in_95_percent_of_campaigns():
    n_right = 0
    for number in range(100):
        values = 0.4 + 0.2 * torch.rand(200, generator=torch.Generator().manual_seed(number))
        inputs = values.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
        options = {"max_tests": 500, "uniform_share": 0.9, "random_seed": number, **ENDLESS}
        run = themis.run(Against(Mean(0.5), Mean(0.5 + 10 * APART)), inputs, shifted(), **options)
        # The share of the shifts of each seed that end between the limits; seeds that lie there are left out.
        apart = 10 * APART
        at = torch.linspace(0.4, 0.6, 20_001)
        usable = at[(at <= 0.5) | (at >= 0.5 + apart)]
        overlap = ((usable + 0.1).clamp(max=0.5 + apart) - (usable - 0.1).clamp(min=0.5)).clamp(min=0)
        n_right += run.fault_rate.low <= float(overlap.mean()) / 0.2 <= run.fault_rate.high
    assert n_right >= 90


def test_an_identical_copy_has_no_fault():
    net = Wavering()
    run = themis.run(Against(net, copy.deepcopy(net)), pictures(), "gaussian", magnitude=0.5, max_tests=600, **ENDLESS)
    assert not len(run.faults)
    assert run.start.n_usable == 40


def test_the_search_finds_many_times_more_disagreements_per_pass_than_random_tests():
    found = {policy: run_of(policy).rounds[-1] for policy in ("boundary", "random")}
    rates = {policy: last.distinct_faults / last.passes for policy, last in found.items()}
    assert rates["boundary"] > 4 * rates["random"] > 0
    assert (
        themis.run(Against(Wavering(), Wavering()), pictures(), "gaussian", max_tests=10).start.settings.policy
        == "boundary"
    )


def test_every_fault_is_a_disagreement_on_one_input_and_replays():
    run, net = run_of("boundary"), Wavering().eval()
    for fault in list(run.faults)[:30]:
        replay = fault.replay()
        own, other = (int(model(replay.inputs[None]).argmax()) for model in (net, rounded(net)))
        assert own != other
        assert (fault.answer, fault.reference_answer) == (own, other)
        assert replay.is_same


def test_seeds_on_which_they_disagree_when_clean_are_left_out_and_counted():
    run = themis.run(Against(Mean(0.5), Mean(0.6)), seeds(), shifted(), max_tests=200, **ENDLESS)
    between = ((seeds()[:, 0, 0, 0] > 0.5) & (seeds()[:, 0, 0, 0] < 0.6)).sum()
    assert run.start.n_seeds - run.start.n_usable == int(between)
    assert run.start.left_out == "the model and its reference disagree on them"


def test_only_the_tested_model_is_covered():
    net = Wavering()
    alone = themis.run(net, pictures(), "gaussian", max_tests=100, **ENDLESS)
    beside = themis.run(Against(net, rounded(net)), pictures(), "gaussian", max_tests=100, **ENDLESS)
    assert beside.start.layers == alone.start.layers
    assert beside.start.n_neurons == 16 + 3


def test_a_run_resumes_to_the_same_end_and_only_against_the_same_reference(tmp_path):
    net, inputs = Wavering(), pictures()
    target = Against(net, rounded(net))
    options = {"magnitude": 0.3, "max_tests": 900, "round_size": 100, **ENDLESS}
    whole = themis.run(target, inputs, "gaussian", out=tmp_path / "whole", **options)
    themis.run(target, inputs, "gaussian", out=tmp_path / "stopped", callbacks=[StopAt(2)], **options)
    with pytest.raises(
        ModelError, match=r"the reference must be the same as in the run, but its hash is \w+\.\.\. and"
    ):
        themis.resume(tmp_path / "stopped", Against(net, copy.deepcopy(net)), inputs)
    with pytest.raises(UsageError, match=r"tested a model against a reference: pass both, as themis\.Against"):
        themis.resume(tmp_path / "stopped", net, inputs)
    assert_same_end(whole, themis.resume(tmp_path / "stopped", target, inputs))
    with closing(Reader(tmp_path / "whole")) as run:
        environment = run.record["environment"]
    assert environment["model_sha256"] == target.model.fingerprint()
    assert environment["reference_sha256"] == target.reference.fingerprint()
    fault = themis.open_run(tmp_path / "whole", target, inputs).faults[0]
    assert fault.replay().is_same
    assert f" against {fault.reference_answer}" in themis.runs.display.fault.describe_fault(fault)


def test_a_function_can_be_the_reference_and_gets_the_preprocessing():
    net = Wavering().eval()
    module = Target(net, preprocess=themis.Normalize(0.5, 0.5))
    sent = []

    def predict(inputs):
        sent.append((inputs.min(), inputs.max()))
        return rounded(net)(torch.from_numpy(inputs)).numpy()

    alike = Against(module, BlackBox(predict, preprocess=themis.Normalize(0.5, 0.5)))
    run = themis.run(alike, pictures(), "gaussian", magnitude=0.3, max_tests=200, **ENDLESS)
    assert len(run.faults)
    assert min(low for low, _ in sent) < 0
    assert Against(module, rounded(net)).reference.preprocess is module.preprocess


class Single(nn.Module):
    def forward(self, x):
        return x.flatten(1).mean(1)


def test_what_cannot_be_compared_is_refused_before_the_first_test():
    net, inputs = Wavering(), pictures()
    cases = (
        (net, Wavering(n_classes=5), ModelError, r"the classes of the model, 3 scores per input, got shape \[2, 5\]"),
        (net, Single(), ModelError, r"the classes of the model, 3 scores per input, got shape \[2\]"),
        (Single(), Single(), ModelError, r"must return scores \[inputs, classes\] with 2 classes or more, got \[2\]"),
        (net, Target(Wavering(), bounds=(0, 255)), UsageError, r"with bounds \(0\.0, 1\.0\), got \(0\.0, 255\.0\)"),
        (net, "int8.onnx", UsageError, "target must be a themis.Target"),
    )
    for model, reference, error, message in cases:
        with pytest.raises(error, match=message):
            themis.run(Against(model, reference), inputs, "gaussian", max_tests=10)
    with pytest.raises(UsageError, match="must have neither a criterion nor a policy that follows one"):
        themis.run(Against(net, rounded(net)), inputs, "gaussian", criterion="kmnc", policy="fuzz", max_tests=10)
    with pytest.raises(UsageError, match="policy 'boundary' must have a reference"):
        themis.run(net, inputs, "gaussian", policy="boundary", max_tests=10)
    with pytest.raises(UsageError, match="a suite must test a model without a reference"):
        themis.run_suite(Against(net, rounded(net)), inputs, ["gaussian"], out="unused")


def test_a_reference_with_the_classes_in_another_order_is_refused():
    def named(*classes):
        def predict(inputs):
            return np.zeros((len(inputs), 2), np.float32)

        predict.classes = classes
        return BlackBox(predict)

    with pytest.raises(ModelError, match="must have the classes of the model, cat, dog, got dog, cat"):
        Against(named("cat", "dog"), named("dog", "cat"))


def test_both_can_be_sent_to_workers():
    net = Wavering()
    target = pickle.loads(pickle.dumps(Against(Target(net, neurons="channel"), rounded(net))))
    inputs = pictures(3)
    with target.opened(), torch.no_grad():
        torch.testing.assert_close(target.forward(inputs)[:, 3:], rounded(net)(inputs))


MODULE = """
import copy
import torch
from wavering import Wavering, pictures

def net():
    return Wavering()

def deployed():
    other = copy.deepcopy(Wavering())
    with torch.no_grad():
        for weights in other.parameters():
            weights.copy_((weights * 16).round() / 16)
    return other

def other_classes():
    return Wavering(n_classes=4)

def data():
    return pictures(60)
"""
RUN = ["--model", "beside:net", "--data", "beside:data", "--perturb", "gaussian", "--magnitude", "0.3"]
SHORT = ["--max-tests", "400", "--quiet"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("beside", None)


def test_the_commands_test_a_model_against_a_reference_of_any_kind(home, capsys):
    import beside

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that TorchScript is old
        torch.jit.trace(beside.deployed().eval(), beside.data()[:2]).save("deployed.pt")
    for reference, name in (("beside:deployed", "factory"), ("deployed.pt", "script")):
        assert main(["run", *RUN, "--against", reference, "--out", name, "--max-fault-rate", "0.001", *SHORT]) == 1
    capsys.readouterr()
    faults = [
        [(fault.seed_id, fault.answer, fault.reference_answer) for fault in themis.open_run(name).faults]
        for name in ("factory", "script")
    ]
    assert faults[0] == faults[1] != []
    assert main(["faults", "script"]) == 0
    header, row = capsys.readouterr().out.splitlines()[1:3]
    shown = dict(zip(header.split(), row.split(), strict=True))
    assert shown["reference"] != shown["answer"]
    fault = themis.open_run("script").faults[0]
    assert main(["replay", "script", str(fault.id)]) == 0
    assert f"against {fault.reference_answer}, now" in capsys.readouterr().out
    assert main(["replay", "script", str(fault.id), "--against", "beside:net"]) == 1
    out = capsys.readouterr().out
    assert "no longer a fault" in out
    assert "reference_sha256" in out
    assert main(["resume", "script", "--max-tests", "500", "--quiet"]) == 0
    assert main(["resume", "script", "--max-tests", "600", "--against", "beside:net", "--quiet"]) == 3
    assert "the reference must be the same as in the run" in capsys.readouterr().err
    assert main(["shrink", "script", str(fault.id)]) == 0
    page = (home / "script" / "report.html").read_text()
    view = json.loads(embedded(page))
    assert (view["task"], view["subject"]) == ("against", "beside:net against deployed.pt")
    assert "the model and its reference disagree" in view["verdict"]["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "beside:other_classes"], "the reference must have the classes of the model, 3 scores per input"),
        (["--against", "nowhere.pt"], "reference 'nowhere.pt': the model file must exist"),
        (["--against", "beside"], "reference 'beside': --against must be module:factory"),
        (
            ["--against", "beside:deployed", "--oracle", "changed"],
            "--oracle must be left out, because --against",
        ),
        (["--policy", "boundary"], "policy 'boundary' must have a reference"),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused_in_one_line(home, capsys, options, message):
    assert main(["run", *RUN, *options, "--out", "none", *SHORT]) in (2, 3)
    error = [line for line in capsys.readouterr().err.splitlines() if "imported" not in line]
    assert len(error) == 1
    assert message in error[0]
