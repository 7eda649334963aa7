"""The campaign end to end, on a real model and real digits."""

import json

import numpy as np
import pytest
import torch
from nets import WRAPPINGS, Conv, Wrapped
from test_probe import assert_same_state, hooks_of, state_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import themis
from themis import Callback, DataError, ModelError, Target, UsageError


def campaign(trained, *, perturbation="gaussian", **options):
    model, digits = trained
    options = {"magnitude": 0.3, "max_tests": 2560, "max_seeds": 300, **options}
    return themis.run(Target(model), digits, perturbation, **options)


@pytest.fixture(scope="module")
def result(trained):
    return campaign(trained)


def test_it_finds_faults_that_are_real(trained, result):
    model, digits = trained
    assert len(result.faults) > 20
    for fault in result.faults[:10]:
        row = int((digits.seed_id == fault.seed_id).nonzero())
        again = fault.replay()
        with torch.no_grad():
            clean, disturbed = model(digits.inputs[row][None]), model(again.inputs[None])
        assert clean.argmax() == digits.labels[row] == fault.clean_answer == fault.label
        assert disturbed.argmax() == fault.answer != fault.clean_answer
        assert 0 < fault.distance == pytest.approx(float((again.inputs - digits.inputs[row]).norm()), rel=1e-4)
        assert sum(fault.signature.values()) == pytest.approx(1, abs=1e-4)


def test_every_fault_replays_to_the_bit(result):
    for fault in result.faults:
        again = fault.replay()
        assert again.is_fault
        assert again.is_same
        assert again.confidence == fault.confidence


def test_counts_agree_with_the_faults(result):
    faults, last = list(result.faults), result.rounds[-1]
    assert last.tests == 2560
    assert last.faults == len(faults)
    assert last.distinct_faults == len({(f.seed_id, f.answer) for f in faults}) == len(result.faults.distinct())
    assert last.failing_seeds == len({f.seed_id for f in faults})
    assert sum(kind["tests"] for kind in result.kinds.values()) == last.tests
    assert sum(kind["faults"] for kind in result.kinds.values()) == last.faults
    assert result.kinds["uniform"]["tests"] == 512
    uniform = [f for f in faults if f.stream == "uniform"]
    assert sum(result.faults.columns["stream"] == "uniform") == len(uniform) > 0
    assert result.fault_rate.low < result.fault_rate.value < result.fault_rate.high


def test_passes_are_those_of_discovery_sweep_and_tests(result):
    assert result.rounds[-1].passes == 5 + 300 + 2560


def test_coverage_rises_and_is_reported_in_full(result):
    coverage = [each.coverage.sampled for each in result.rounds]
    assert coverage[0] < coverage[-1] == result.coverage
    judged = result.judged
    assert abs(judged.sampled - judged.all) <= 1 / 1000
    assert set(judged.by_layer) == {"relu()", "relu()#2", "relu()#3", "relu()#4", "output"}
    assert judged.n_neurons == 8054
    assert result.coverage_interval.low <= judged.all <= result.coverage_interval.high
    assert result.coverage_uniform < judged.all
    assert result.design_effect > 1
    assert "skewness" in result.normality.sentence


def test_the_summary_has_what_it_promises_and_is_plain_data(result, tmp_path):
    summary = json.loads(json.dumps(result.summary(), allow_nan=False))
    promised = {
        *("stop", "coverage", "coverage_all", "coverage_uniform", "coverage_interval", "tests", "passes", "faults"),
        *("distinct_faults", "failing_seeds", "seeds", "neurons", "fault_rate", "residual_risk", "seconds"),
        *("random_seed", "version"),
    }
    assert promised <= set(summary)
    assert set(summary["seconds"]) == {"measure", "judge", "search", "total"}
    assert set(summary["fault_rate"]) == {"value", "low", "high"}


def same(a, b):
    assert a.summary()["coverage_all"] == b.summary()["coverage_all"]
    assert len(a.faults) == len(b.faults)
    for name, column in a.faults.columns.items():
        assert (column == b.faults.columns[name]).all() or column.dtype.kind == "f", name
        if column.dtype.kind == "f":
            np.testing.assert_array_equal(column, b.faults.columns[name])


@pytest.mark.parametrize("policy", ["scheduled", "paper"])
def test_the_same_seed_gives_the_same_campaign_for_any_batch_size(trained, policy):
    options = {"max_tests": 700, "max_seeds": 100, "policy": policy, "magnitude": 0.4}
    first = campaign(trained, **options)
    same(first, campaign(trained, batch_size=7, **options))
    same(first, campaign(trained, batch_size=1000, clean_memory_gib=0.0, **options))
    other = campaign(trained, random_seed=1, **options)
    assert list(other.faults.columns["noise_seed"]) != list(first.faults.columns["noise_seed"])


def test_the_uniform_stream_is_the_same_whatever_the_policy(trained):
    options = {"max_tests": 1280, "max_seeds": 100, "magnitude": 0.5}
    uniform = [
        {
            (f.seed_id, f.theta["sigma"])
            for f in campaign(trained, policy=policy, **options).faults
            if f.stream == "uniform"
        }
        for policy in ("random", "corners")
    ]
    assert uniform[0] == uniform[1] != set()


def test_search_beats_random_testing(trained):
    distinct = {
        policy: campaign(trained, policy=policy, max_tests=3000, magnitude=0.2).rounds[-1].distinct_faults
        for policy in ("random", "corners", "scheduled")
    }
    assert distinct["random"] < distinct["corners"]
    assert distinct["random"] < distinct["scheduled"]


def test_fgsm_runs_and_its_passes_are_counted(trained):
    result = campaign(trained, perturbation="fgsm", magnitude=0.15, max_tests=640, max_seeds=100)
    assert result.rounds[-1].passes == 5 + 100 + 640 * 4
    assert len(result.faults) > 50
    assert result.faults[0].replay().is_same
    tests = {(f.seed_id, f.theta["radius"]) for f in result.faults}
    assert len(tests) == len(result.faults)  # no noise, so no test may run twice


# Stop reasons


def test_it_stops_at_the_coverage_goal_and_says_so(trained):
    result = campaign(trained, coverage=0.95, max_tests=20_000)
    assert result.stop_reason == "coverage"
    assert result.coverage >= 0.95
    assert result.stop.startswith("Stopped because coverage 9")
    assert result.stop.endswith("confirmed by Markov chains.")


def test_it_stops_at_each_budget_and_says_so(trained):
    tests = campaign(trained, max_tests=777)
    assert (tests.stop_reason, tests.rounds[-1].tests) == ("tests", 777)
    assert tests.stop == "Stopped because the budget of 777 tests is spent."
    passes = campaign(trained, max_passes=1500, max_tests=None, policy="paper")
    assert passes.stop_reason == "passes"
    assert 1490 <= passes.rounds[-1].passes <= 1500
    seconds = campaign(trained, max_seconds=0.5, max_tests=None, coverage=1.0, magnitude=0.9)
    assert seconds.stop_reason == "seconds"


def test_it_stops_on_a_plateau(trained):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    nn.init.constant_(model[1].weight, 0.0)  # nothing moves it: no fault, no coverage
    result = themis.run(Target(model), trained[1].inputs[:50], "gaussian", plateau=3, round_size=50)
    assert result.stop_reason == "plateau"
    assert "3 rounds" in result.stop
    assert result.coverage == 0
    assert result.judged.n_dead == 10


def test_the_user_can_stop_it_and_keeps_everything(trained):
    class Interrupt(Callback):
        def on_round(self, round):
            if round.number == 2:
                raise KeyboardInterrupt

    result = campaign(trained, callbacks=[Interrupt()], max_tests=None, magnitude=0.9)
    assert result.stop_reason == "user"
    assert result.rounds[-1].tests == 2560
    assert len(result.faults) == result.rounds[-1].faults > 0


def test_an_interrupt_inside_a_round_keeps_the_chunks_that_were_done(trained):
    class Interrupts(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.left = net, 12

        def forward(self, x):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return self.net(x)

    model, digits = trained
    result = themis.run(Target(Interrupts(model)), digits, "gaussian", magnitude=0.9, max_seeds=300)
    # 2 to find the layers, 2 clean chunks, then 7 whole chunks of 256 tests
    assert result.stop_reason == "user"
    assert result.rounds[-1].tests == 256 * 7
    assert result.judged.tests == 256 * 7
    assert len(result.faults) == result.rounds[-1].faults


# Ways in


def test_any_data_gives_the_same_seeds(trained):
    model, digits = trained
    inputs, labels = digits.inputs[:60], digits.labels[:60]
    dataset = TensorDataset(inputs, labels)
    forms = [(inputs, labels), (inputs.numpy(), labels.numpy()), dataset, DataLoader(dataset, 16, shuffle=True)]
    results = [themis.run(Target(model), data, "gaussian", magnitude=0.5, max_tests=640) for data in forms]
    for other in results[1:]:
        same(results[0], other)
    unlabelled = themis.run(Target(model), inputs, "gaussian", magnitude=0.5, max_tests=640)
    assert unlabelled.start.clean_accuracy is None
    assert unlabelled.faults[0].label is None


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_any_output_can_be_tested(wrapping):
    torch.manual_seed(0)
    result = themis.run(Target(Wrapped(WRAPPINGS[wrapping])), torch.rand(40, 4), "gaussian", max_tests=200)
    assert result.rounds[-1].tests == 200
    assert result.start.n_neurons == 13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_can_be_tested(trained, dtype):
    import copy

    model = copy.deepcopy(trained[0]).to(dtype)
    result = themis.run(Target(model), trained[1], "gaussian", magnitude=0.3, max_tests=700, max_seeds=100)
    assert result.rounds[-1].tests == 700
    assert all(fault.replay().is_same for fault in result.faults)


@pytest.mark.parametrize("options", [{"neurons": "channel"}, {"layers": ["fcs.*"]}])
def test_layers_and_granularity_can_be_chosen(trained, options):
    model, digits = trained
    result = themis.run(Target(model, **options), digits, "gaussian", max_tests=640, max_seeds=100)
    assert result.start.n_neurons == {"neurons": 236, "layers": 214}[next(iter(options))]


def test_relative_sensitivity_is_in_units_of_the_clean_spread(trained):
    absolute = campaign(trained, max_tests=640)
    relative = campaign(trained, max_tests=640, scale="relative")
    assert relative.judged.by_layer["output"] > absolute.judged.by_layer["output"]  # logits spread widely


@pytest.mark.parametrize("judge", ["gibbs", "exact"])
def test_judges_agree_on_a_campaign(trained, result, judge):
    other = campaign(trained, judge=judge)
    assert abs(other.coverage - result.coverage) < 0.01
    same(result, other)


def test_preset_paper_is_the_paper_to_the_letter(trained):
    result = campaign(trained, preset="paper", max_tests=None, coverage=0.995)
    settings = result.start.settings
    assert (settings.policy, settings.judge, settings.alpha, settings.uniform_share) == ("paper", "gibbs", None, 0.0)
    assert result.fault_rate is result.residual_risk is result.coverage_uniform is None
    assert set(result.kinds) == {"draw", "ascent", "bound"}
    assert result.rounds[0].tests == result.start.n_usable  # one test a seed and round
    assert result.stop_reason == "coverage"
    assert campaign(trained, preset="paper", judge="exact", max_tests=300).start.settings.judge == "exact"


# The model leaves as it came; errors are for people


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_leaves_as_it_came(fails):
    net = Conv()
    net.bn.eval()
    net.conv.weight.requires_grad_(False)
    state, hooks = state_of(net), hooks_of(net)

    def preprocess(inputs):
        if fails and len(inputs) > 3 and preprocess.left == 0:
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


def test_callbacks_hear_everything_in_order(trained):
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
    "coverage": ({"coverage": 1.5}, UsageError, r"coverage must lie in \(0, 1\], got 1.5"),
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
def test_wrong_options_are_refused_before_anything_runs(name):
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        themis.run(Conv(), torch.rand(3, 1, 8, 8), "gaussian", **options)


def test_wrong_data_is_refused():
    good = torch.rand(3, 1, 8, 8)
    cases = [
        (torch.rand(0, 1, 8, 8), "at least one seed"),
        (TensorDataset(torch.rand(0, 1, 8, 8)), "at least one seed"),
        ((good, torch.tensor([0, 1])), "labels must be one a seed"),
        ((good, torch.eye(3)), "not one-hot rows"),
        ((good, torch.tensor([0.0, 0.5, 1.0])), "labels must be class numbers, got 0.5"),
        ((good, torch.tensor([0, 1, 3])), r"labels must lie in 0\.\.2"),
        (good * 255, "divide by 255"),
        (good.index_fill(0, torch.tensor([1]), float("nan")), "seed 1 has a NaN"),
        (iter([good]), "an iterable without length"),
        ([torch.rand(1, 8, 8), torch.rand(1, 9, 9), torch.rand(1, 8, 8)], "all inputs must have one shape"),
    ]
    for data, message in cases:
        with pytest.raises(DataError, match=message):
            themis.run(Conv(), data, "gaussian")


def test_a_model_that_gives_nan_is_refused():
    net = Conv()
    nn.init.constant_(net.fc.weight, float("nan"))
    with pytest.raises(ModelError, match="finite outputs on clean inputs, 3 of 3"):
        themis.run(net, torch.rand(3, 1, 8, 8), "gaussian")


def test_something_else_than_a_model_is_refused():
    with pytest.raises(UsageError, match="target must be"):
        themis.run("resnet", torch.rand(3, 1, 8, 8), "gaussian")
    with pytest.raises(UsageError, match=r"bounds must be finite and ascending, got \(1, 0\)"):
        Target(Conv(), bounds=(1, 0))
    with pytest.raises(UsageError, match="neurons must be"):
        Target(Conv(), neurons="pixel")


class Rebinds(nn.Module):
    """Puts a new tensor in the place of a buffer in each forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.fc(x)


def test_a_buffer_rebound_in_a_forward_is_put_back():
    net = Rebinds()
    calls = net.calls
    themis.run(net, torch.rand(20, 4), "gaussian", max_tests=100)
    assert net.calls is calls
    assert calls == 0


def test_a_model_made_in_inference_mode_can_be_tested():
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert themis.run(net, torch.rand(20, 4), "gaussian", max_tests=100).rounds[-1].tests == 100


def test_an_output_with_one_dimension_is_explained():
    net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    with pytest.raises(ModelError, match=r"scores \[inputs, classes\] with 2 classes or more, got \[20\]"):
        themis.run(net, torch.rand(20, 4), "gaussian")


class FailsLater(nn.Module):
    def __init__(self, net, after):
        super().__init__()
        self.net, self.after = net, after

    def forward(self, x):
        self.after -= 1
        if self.after < 0:
            raise ZeroDivisionError("worn out")
        return self.net(x)


def test_a_model_that_fails_in_mid_campaign_loses_no_fault(trained, tmp_path):
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
    faults = (tmp_path / "run/faults.jsonl").read_text().splitlines()
    assert summary["stop_reason"] == "error"
    assert "worn out" in summary["stop"]
    assert len(faults) >= summary["faults"] > 0


def test_a_breakdown_is_stored_as_valid_json(trained, tmp_path):
    class BreaksDown(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return torch.where(x[:, :, 0, 0] > 0.5, float("nan"), self.net(x).softmax(1))

    model, digits = trained
    result = themis.run(BreaksDown(model), digits, "gaussian", magnitude=0.4, max_tests=1280, out=tmp_path / "run")

    def refuse(constant):
        raise AssertionError(constant)

    lines = (tmp_path / "run/faults.jsonl").read_text().splitlines()
    faults = [json.loads(line, parse_constant=refuse) for line in lines]
    assert {fault["answer"] for fault in faults} > {-1}
    assert all(fault.replay().is_same for fault in result.faults)
    assert all(0.1 <= fault.confidence <= 1 for fault in result.faults if fault.answer >= 0)
    assert result.faults.most_telling(5)


def test_counts_may_be_written_as_powers_of_ten():
    assert themis.run(nn.Linear(4, 3), torch.rand(20, 4), "gaussian", max_tests=1e2).start.settings.max_tests == 100


def test_a_pass_budget_must_leave_room_for_a_test():
    with pytest.raises(UsageError, match="max_passes must leave room for a test after the clean sweep's 25"):
        themis.run(nn.Linear(4, 3), torch.rand(20, 4), "gaussian", max_passes=25)
