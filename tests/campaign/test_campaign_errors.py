"""A campaign restores the model, keeps its results if something fails, and explains errors."""

import json
import math

import pytest
import torch
from digit_campaign import campaign
from module_state import assert_same_state, hooks_of, state_of
from nets import Conv
from torch import nn
from torch.utils.data import TensorDataset

import themis
from themis import BlackBox, Callback, DataError, ModelError, Target, UsageError
from themis.data.seeds import read_seeds
from themis.runs.store.reader import Reader

pytestmark = pytest.mark.xdist_group("campaign")


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_restored_to_its_previous_state(fails):
    net = Conv()
    net.bn.eval()
    net.conv.weight.requires_grad_(False)
    state, hooks = state_of(net), hooks_of(net)

    def preprocess(inputs):
        if fails and len(inputs) > 3 and preprocess.left <= 0:
            raise ZeroDivisionError("no more")
        preprocess.left -= 1
        return inputs

    preprocess.left = 5
    target = Target(net, preprocess=preprocess)
    if fails:
        with pytest.raises(ModelError, match="the model raised ZeroDivisionError"):
            themis.run(target, torch.rand(30, 1, 8, 8), "fgsm", policy="paper", max_tests=300)
    else:
        themis.run(target, torch.rand(30, 1, 8, 8), "fgsm", policy="paper", max_tests=300)
    assert_same_state(state, state_of(net))
    assert hooks_of(net) == hooks


def test_a_callback_that_raises_is_reported_and_dropped(trained):
    class Bad(Callback):
        calls = 0

        def on_fault(self, fault):
            Bad.calls += 1
            raise ZeroDivisionError("oops")

    with pytest.warns(RuntimeWarning, match="callback Bad raised ZeroDivisionError in on_fault and was dropped: oops"):
        result = campaign(trained, callbacks=[Bad()])
    assert Bad.calls == 1
    assert result.rounds[-1].tests == 2560


def test_callbacks_receive_all_events_in_order(trained):
    heard = []

    class Listen(Callback):
        def on_start(self, start):
            heard.append(("start", start.n_neurons))

        def on_round(self, round):
            heard.append(("round", round.number))

        def on_fault(self, fault):
            heard.append(("fault", fault.id))

        def on_end(self, run):
            heard.append(("end", run.stop_reason))

    result = campaign(trained, callbacks=[Listen()], max_tests=2560)
    assert heard[0] == ("start", 8054)
    assert heard[-1] == ("end", "tests")
    assert [value for name, value in heard if name == "round"] == [1, 2]
    assert [value for name, value in heard if name == "fault"] == [fault.id for fault in result.faults]


WRONG = {
    "unknown option": ({"max_test": 5}, UsageError, "did you mean 'max_tests'"),
    "coverage": ({"coverage": 1.5}, UsageError, r"coverage must lie in \(0, 1\], or be None for no goal, got 1.5"),
    "tolerance": ({"tolerance": 0}, UsageError, "tolerance must be a positive number"),
    "alpha": ({"alpha": 1.0}, UsageError, r"alpha must lie in \[0.5, 1\)"),
    "draws": ({"draws": 4001}, UsageError, "draws must be at least 100 and a multiple"),
    "sample": ({"sample": 0}, UsageError, "sample must be at least 1"),
    "scale": ({"scale": "log"}, UsageError, "scale must be 'absolute' or 'relative'"),
    "uniform share": ({"uniform_share": 2}, UsageError, r"uniform_share must lie in \[0, 1\]"),
    "max tests": ({"max_tests": 0}, UsageError, "max_tests must be positive"),
    "batch size": ({"batch_size": -1}, UsageError, "batch_size must be positive"),
    "preset": ({"preset": "papr"}, UsageError, "preset must be 'paper'"),
    "policy": ({"policy": "corner"}, UsageError, "did you mean 'corners'"),
    "judge": ({"judge": "gibs"}, UsageError, "did you mean 'gibbs'"),
    "magnitude": ({"magnitude": -0.1}, UsageError, "magnitude must be a positive number"),
    "text for a number": ({"max_tests": "100"}, UsageError, "max_tests must be a number, got '100'"),
    "half a test": ({"round_size": 2.5}, UsageError, "round_size must be a whole number, got 2.5"),
    "random seed": ({"random_seed": 2**70}, UsageError, "random_seed must lie in"),
    "max seeds": ({"max_seeds": 0}, UsageError, "max_seeds must be positive"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_rejected_before_anything_runs(name):
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        themis.run(Conv(), torch.rand(3, 1, 8, 8), "gaussian", **options)


def test_wrong_data_is_rejected():
    good = torch.rand(3, 1, 8, 8)
    cases = [
        (torch.rand(0, 1, 8, 8), "at least one seed"),
        (TensorDataset(torch.rand(0, 1, 8, 8)), "at least one seed"),
        ((good, torch.tensor([0, 1])), "labels must be one per seed"),
        ((good, ["cat", 3, "dog"]), "labels must be all numbers or all names, got 3 among names"),
        ((good, torch.eye(3)), "not one-hot rows"),
        ((good, torch.tensor([0.0, 0.5, 1.0])), "labels must be class numbers, .* got 0.5"),
        ((good, torch.tensor([0, 1, 3])), r"labels must lie in 0\.\.2 .*, got 3: subtract 1 if they count from 1"),
        (good * 255, "divide by 255"),
        (good * 16, r"got .*: rescale the inputs or pass their true bounds$"),
        (good.flatten(1) * 9, "rescale the inputs or pass their true bounds; --bounds auto"),
        (good.index_fill(0, torch.tensor([1]), float("nan")), "seed 1 has a NaN"),
        (iter([good]), "an iterable without length"),
        ("npz:digits.npz", "got the text 'npz:digits.npz': load it first, or name it in the shell: themis run --data"),
        ([torch.rand(1, 8, 8), torch.rand(1, 9, 9), torch.rand(1, 8, 8)], "all inputs must have the same shape"),
    ]
    for data, message in cases:
        with pytest.raises(DataError, match=message):
            themis.run(Conv(), data, "gaussian")


TARGETS = {
    "file": "net.onnx",
    "class": Conv,
    "weights": Conv().state_dict(),
    "data": (torch.rand(3, 1, 8, 8), torch.zeros(3)),
    "tensor": torch.rand(3, 1, 8, 8),
    "function": torch.relu,
}


@pytest.mark.parametrize("name", TARGETS)
def test_something_other_than_a_target_is_rejected_with_what_to_pass(name):
    remedy = r"pass a loaded model before the data, or wrap a function .* as themis\.BlackBox\(function\)"
    with pytest.raises(UsageError, match=f"target must be a themis.Target, .*, got .*: {remedy}"):
        themis.run(TARGETS[name], torch.rand(3, 1, 8, 8), "gaussian")


@pytest.mark.parametrize("perturbation", [None, ["gaussian"], torch.relu], ids=["None", "list", "function"])
def test_something_other_than_a_perturbation_is_rejected(perturbation):
    with pytest.raises(UsageError, match=r"must be a name, .*: wrap a function of yours as themis\.Perturbation\("):
        themis.run(Conv(), torch.rand(3, 1, 8, 8), perturbation)


@pytest.mark.parametrize("option", ["oracle", "bounds", "preprocess", "layers"])
def test_an_option_of_the_target_is_sent_there(option, tmp_path):
    data, message = torch.rand(3, 1, 8, 8), rf"pass themis\.Target\(model, {option}=\.\.\.\)"
    with pytest.raises(UsageError, match=message):
        themis.run(Conv(), data, "gaussian", **{option: None})
    with pytest.raises(UsageError, match=message):
        themis.run_suite(Conv(), data, "noise", out=tmp_path / "suite", **{option: None})


@pytest.mark.parametrize("make", [Target, BlackBox])
def test_a_preprocessing_that_is_no_function_is_rejected(make):
    with pytest.raises(UsageError, match=r"preprocess must be a function, .* got 3"):
        make(Conv(), preprocess=3)


def test_a_model_that_returns_nan_is_rejected():
    net = Conv()
    nn.init.constant_(net.fc.weight, float("nan"))
    with pytest.raises(ModelError, match="finite outputs on clean inputs, but 3 of 3"):
        themis.run(net, torch.rand(3, 1, 8, 8), "gaussian")


def test_the_first_seed_without_a_finite_output_is_named_by_its_place_in_the_data():
    class Breaks(Conv):
        def forward(self, x):
            return super().forward(x) / (x.mean((1, 2, 3)) < 2)[:, None]

    data = torch.rand(40, 1, 8, 8)
    tested = read_seeds(data, 5).seed_id
    data[tested[3]] = 3.0
    with pytest.raises(ModelError, match=rf"1 of 5 have a NaN or an infinity, first seed {tested[3]}:"):
        themis.run(Target(Breaks(), bounds=(0, 3)), data, "gaussian", max_seeds=5)


def test_something_other_than_a_model_is_rejected():
    with pytest.raises(UsageError, match="target must be"):
        themis.run("resnet", torch.rand(3, 1, 8, 8), "gaussian")
    with pytest.raises(UsageError, match=r"bounds must be finite and ascending, got \(1, 0\)"):
        Target(Conv(), bounds=(1, 0))
    with pytest.raises(UsageError, match="neurons must be"):
        Target(Conv(), neurons="pixel")


class Rebinds(nn.Module):
    """Replaces a buffer by a new tensor in each forward pass."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.fc(x)


def test_a_buffer_that_is_replaced_in_a_forward_pass_is_restored():
    net = Rebinds()
    calls = net.calls
    with pytest.warns(RuntimeWarning, match="the model changes its own calls in forward passes"):
        themis.run(net, torch.rand(20, 4), "gaussian", max_tests=100)
    assert net.calls is calls
    assert calls == 0


def test_a_model_built_in_inference_mode_can_be_tested():
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert themis.run(net, torch.rand(20, 4), "gaussian", max_tests=100).rounds[-1].tests == 100


def test_an_output_with_one_dimension_is_explained():
    net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    with pytest.raises(ModelError, match=r"scores \[inputs, classes\] with 2 classes or more, got \[20\]"):
        themis.run(themis.Target(net, oracle="changed"), torch.rand(20, 4), "gaussian")


class FailsLater(nn.Module):
    def __init__(self, net, after):
        super().__init__()
        self.net, self.after = net, after

    def forward(self, x):
        self.after -= 1
        if self.after < 0:
            raise ZeroDivisionError("worn out")
        return self.net(x)


def test_no_fault_is_lost_if_the_model_fails_during_a_campaign(trained, tmp_path):
    heard = []

    class Listen(Callback):
        def on_error(self, error):
            heard.append(error)

    model, digits = trained
    options = {"magnitude": 0.9, "max_seeds": 200, "out": tmp_path / "run", "callbacks": [Listen()]}
    with pytest.raises(ModelError, match="worn out") as raised:
        themis.run(FailsLater(model, 12), digits, "gaussian", **options)
    assert heard == [raised.value]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["stop_reason"] == "error"
    assert "worn out" in summary["stop"]
    assert Reader(tmp_path / "run").count() >= summary["faults"] > 0


def test_a_failure_is_stored_and_read_back(trained, tmp_path):
    class BreaksDown(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return torch.where(x[:, :, 0, 0] > 0.5, float("nan"), self.net(x).softmax(1))

    model, digits = trained
    options = {"magnitude": 0.4, "max_tests": 1280, "batch_size": 32}  # the chunk of every replay
    result = themis.run(BreaksDown(model), digits, "gaussian", **options, out=tmp_path / "run")
    faults = Reader(tmp_path / "run").faults()
    assert {fault.answer for fault in faults} > {-1}
    assert all(math.isnan(fault.confidence) and fault.margin == -math.inf for fault in faults if fault.answer == -1)
    assert all(fault.replay().is_same for fault in result.faults)
    assert all(0.1 <= fault.confidence <= 1 for fault in result.faults if fault.answer >= 0)
    assert result.faults.most_telling(5)


def test_counts_may_be_written_as_powers_of_ten():
    assert themis.run(nn.Linear(4, 3), torch.rand(20, 4), "gaussian", max_tests=1e2).start.settings.max_tests == 100


def test_a_pass_budget_must_leave_room_for_a_test():
    with pytest.raises(UsageError, match="must leave room for a test after the 37 passes of the clean sweep"):
        themis.run(nn.Linear(4, 3), torch.rand(20, 4), "gaussian", max_passes=25)
