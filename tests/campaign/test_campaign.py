"""The campaign end to end, on a real model and real digits."""

import json

import numpy as np
import pytest
import torch
from digit_campaign import campaign
from nets import WRAPPINGS, Wrapped
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import themis
from themis import Callback, Target

pytestmark = pytest.mark.xdist_group("campaign")


@pytest.fixture(scope="module")
def result(trained):
    return campaign(trained)


@pytest.mark.quick
def test_a_campaign_finds_real_faults(trained, result):
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
        assert sum(fault.signature.values()) == pytest.approx(1, abs=5e-4)


@pytest.mark.quick
def test_every_fault_replays_bit_for_bit(result):
    for fault in result.faults:
        again = fault.replay()
        assert again.is_fault
        assert again.is_same
        assert again.confidence == fault.confidence


@pytest.mark.quick
def test_a_campaign_that_has_ended_keeps_no_clean_activations(result):
    calculator = result.faults.handle.calculator
    assert calculator.clean.kept.n_kept == 0
    assert not calculator.memory.buffers


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


@pytest.mark.quick
def test_passes_are_those_of_tracing_the_clean_sweep_the_probes_and_the_tests(result):
    assert result.rounds[-1].passes == 5 + 4 + 2 + 6 + 300 + 2560  # 4 + 2 check the answers, 6 probe the gradient


@pytest.mark.quick
def test_coverage_rises_and_is_reported_in_full(result):
    coverage = [each.coverage.sampled for each in result.rounds]
    assert coverage[0] < coverage[-1] == result.coverage
    judged = result.judged
    assert abs(judged.sampled - judged.all) <= 1 / 1000
    assert set(judged.by_layer) == {"relu1", "relu2", "relu3", "relu4", "output"}
    assert judged.n_neurons == 8054
    assert result.coverage_interval.low <= judged.all <= result.coverage_interval.high
    assert result.coverage_uniform < judged.all
    assert result.design_effect > 1
    assert "skewness" in result.normality.sentence


@pytest.mark.quick
def test_the_summary_is_complete_and_plain_data(result, tmp_path):
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


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["scheduled", "paper"])
def test_the_same_seed_gives_the_same_campaign_for_any_batch_size(trained, policy):
    options = {"max_tests": 400, "max_seeds": 100, "policy": policy, "magnitude": 0.4}
    first = campaign(trained, **options)
    same(first, campaign(trained, batch_size=7, **options))
    same(first, campaign(trained, batch_size=1000, clean_memory_gib=0.0, **options))
    other = campaign(trained, random_seed=1, **options)
    assert list(other.faults.columns["noise_seed"]) != list(first.faults.columns["noise_seed"])


@pytest.mark.quick
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


@pytest.mark.quick
def test_search_beats_random_testing(trained):
    distinct = {
        policy: campaign(trained, policy=policy, max_tests=3000, magnitude=0.2).rounds[-1].distinct_faults
        for policy in ("random", "corners", "scheduled")
    }
    assert distinct["random"] < distinct["corners"]
    assert distinct["random"] < distinct["scheduled"]


def test_fgsm_runs_and_its_passes_are_counted(trained):
    result = campaign(trained, perturbation="fgsm", magnitude=0.15, max_tests=640, max_seeds=100)
    assert result.rounds[-1].passes == 5 + 4 + 2 + 100 + 640 * 4
    assert len(result.faults) > 50
    assert result.faults[0].replay().is_same
    tests = {(f.seed_id, f.theta["radius"]) for f in result.faults}
    assert len(tests) == len(result.faults)  # no noise, so no test may run twice


# Stop reasons


@pytest.mark.quick
def test_a_campaign_stops_at_the_coverage_goal_and_gives_the_reason(trained):
    result = campaign(trained, coverage=0.95, recall=None, max_tests=20_000)
    assert result.stop_reason == "coverage"
    assert result.coverage >= 0.95
    assert result.stop.startswith("Stopped because coverage 9")
    assert result.stop.endswith("confirmed by Markov chains.")


@pytest.mark.quick
def test_a_campaign_stops_at_each_budget_and_gives_the_reason(trained):
    tests = campaign(trained, max_tests=777)
    assert (tests.stop_reason, tests.rounds[-1].tests) == ("tests", 777)
    assert tests.stop == "Stopped because the budget of 777 tests is spent."
    passes = campaign(trained, max_passes=1500, max_tests=None, policy="paper")
    assert passes.stop_reason == "passes"
    assert 1490 <= passes.rounds[-1].passes <= 1500
    seconds = campaign(trained, max_seconds=0.5, max_tests=None, coverage=1.0, magnitude=0.9)
    assert seconds.stop_reason == "seconds"


@pytest.mark.quick
def test_a_campaign_stops_on_a_plateau(trained):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    nn.init.constant_(model[1].weight, 0.0)  # nothing changes its output, so there is no fault and no coverage
    result = themis.run(Target(model), trained[1].inputs[:50], "gaussian", plateau=3, round_size=50)
    assert result.stop_reason == "plateau"
    assert "3 rounds" in result.stop
    assert result.coverage == 0
    assert result.judged.n_dead == 10


@pytest.mark.quick
def test_the_user_can_stop_a_campaign_and_keeps_everything(trained):
    class Interrupt(Callback):
        def on_round(self, round):
            if round.number == 2:
                raise KeyboardInterrupt

    result = campaign(trained, callbacks=[Interrupt()], max_tests=None, magnitude=0.9)
    assert result.stop_reason == "user"
    assert result.rounds[-1].tests == 2560
    assert len(result.faults) == result.rounds[-1].faults > 0


def test_an_interrupt_within_a_round_keeps_the_finished_chunks(trained):
    class Interrupts(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.left = net, 16

        def forward(self, x):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return self.net(x)

    model, digits = trained
    result = themis.run(Target(Interrupts(model)), digits, "gaussian", magnitude=0.9, max_seeds=300)
    # 2 find the layers, 2 are clean, 1 checks repeats, 2 run inputs alone, 1 probes the gradient, then both streams up
    # to 16, 32 and 64 tests, and 13 uniform tests
    assert result.stop_reason == "user"
    assert result.rounds[-1].tests == 64 + 13
    assert result.judged.tests == 64 + 13
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
    options = {"magnitude": 0.3, "max_tests": 700, "max_seeds": 100, "batch_size": 32}  # the chunk of every replay
    result = themis.run(Target(model), trained[1], "gaussian", **options)
    assert result.rounds[-1].tests == 700
    assert all(fault.replay().is_same for fault in result.faults)


@pytest.mark.parametrize("options", [{"neurons": "channel"}, {"layers": ["relu[34]", "output"]}])
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


def test_preset_paper_runs_on_beyond_a_plateau_unless_one_is_given(trained):
    options = {"preset": "paper", "round_size": 50, "judge": "exact"}
    model, inputs = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), trained[1].inputs[:50]
    nn.init.constant_(model[1].weight, 0.0)  # no fault and no coverage, however long it runs
    result = themis.run(Target(model), inputs, "gaussian", max_tests=1500, **options)
    assert (result.stop_reason, result.rounds[-1].tests) == ("tests", 1500)
    assert len(result.rounds) > 20
    assert len({(round.distinct_faults, round.coverage.sampled) for round in result.rounds}) == 1
    result = themis.run(Target(model), inputs, "gaussian", max_tests=1500, plateau=3, **options)
    assert result.stop_reason == "plateau"


def test_preset_paper_follows_the_paper_exactly(trained):
    result = campaign(trained, preset="paper", max_tests=None, coverage=0.995)
    settings = result.start.settings
    assert (settings.policy, settings.judge, settings.alpha, settings.uniform_share) == ("paper", "gibbs", None, 0.0)
    assert result.fault_rate is result.residual_risk is result.coverage_uniform is None
    assert set(result.kinds) == {"draw", "ascent", "bound"}
    assert result.rounds[0].tests == result.start.n_usable  # one test per seed and round
    assert result.stop_reason == "coverage"
    assert campaign(trained, preset="paper", judge="exact", max_tests=300).start.settings.judge == "exact"
