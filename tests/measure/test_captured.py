"""Chunks captured as a CUDA graph give the results of the plain path. Needs a GPU."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Normalize, Target
from themis.measure import captured as captured_module
from themis.measure import captured as graphs_module
from themis.measure import runner as runner_module
from themis.measure.captured import capturing
from themis_lab.criteria.view import View
from themis_lab.zoo import lenet5

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPTIONS = {"coverage": None, "plateau": None, "max_tests": 2000}
CUDA = torch.device("cuda")


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = lenet5()
    for layer in net.fcs:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5 * 2)
        nn.init.zeros_(layer.bias)
    return net.cuda().eval()


@pytest.fixture
def inputs():
    return torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("neurons", ["element", "channel"])
@pytest.mark.parametrize(
    ("perturbation", "magnitude", "policy"),
    [
        ("gaussian", 0.5, "scheduled"),
        ("rotate", None, "corners"),
        ("gaussian", 0.5, "paper"),
        ("fgsm", 0.1, "scheduled"),
    ],
)
def test_a_campaign_is_the_same_captured_or_not(net, inputs, neurons, perturbation, magnitude, policy, monkeypatch):
    def run():
        target = Target(net, neurons=neurons)
        return themis.run(target, inputs, perturbation, magnitude=magnitude, policy=policy, **OPTIONS)

    captured, again = run(), run()
    monkeypatch.setattr(runner_module, "can_fold", lambda device: False)
    plain = run()
    assert captured.rounds[-1].passes == plain.rounds[-1].passes
    assert len(captured.faults) > 20
    for name in ("id", "seed_id", "theta", "noise_seed", "answer"):
        assert np.array_equal(captured.faults.columns[name], plain.faults.columns[name]), name
        assert np.array_equal(captured.faults.columns[name], again.faults.columns[name]), name
    for name in ("distance", "ssim", "signature", "margin"):
        np.testing.assert_allclose(captured.faults.columns[name], plain.faults.columns[name], rtol=1e-3, atol=1e-3)
    assert captured.judged == again.judged
    assert captured.judged.all == pytest.approx(plain.judged.all, abs=2e-3)
    assert captured.design_effect == pytest.approx(plain.design_effect, rel=1e-2)
    assert captured.faults[0].replay().is_same


@pytest.fixture
def launches(monkeypatch):
    """The sizes of the launches of captured chunks."""
    sizes, launch = [], captured_module.CapturedChunk.launch

    def launch_and_count(self, tests, *arguments):
        sizes.append(len(tests))
        return launch(self, tests, *arguments)

    monkeypatch.setattr(captured_module.CapturedChunk, "launch", launch_and_count)
    return sizes


@pytest.mark.parametrize("policy", ["corners", "paper"])
@pytest.mark.parametrize("criterion", ["kmnc(k=20)", "nbc(neurons=element)", "tknp(k=3)", "scc", "nlc"])
def test_a_criterion_is_shown_the_same_tests_captured_or_not(net, inputs, launches, criterion, policy, monkeypatch):
    def run():
        target = Target(net, preprocess=Normalize(0.1, 0.9))
        return themis.run(target, inputs, "gaussian", magnitude=0.5, policy=policy, criterion=criterion, **OPTIONS)

    captured = run()
    assert launches
    launches.clear()
    monkeypatch.setattr(View, "can_be_captured", False)
    plain = run()
    assert not launches
    assert np.array_equal(captured.faults.columns["id"], plain.faults.columns["id"])
    mine, expected = (found.summary()["criterion"] for found in (captured, plain))
    assert mine["score"] == pytest.approx(expected["score"], rel=1e-3)
    assert mine["raised"] == pytest.approx(expected["raised"], rel=1e-2, abs=2)


class Synchronises(nn.Module):
    """Has control flow that depends on the data, so it cannot be captured."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) if float(x.mean()) > -1 else -self.net(x)


def test_a_model_that_cannot_be_captured_takes_the_plain_path(net, inputs):
    expected = themis.run(Target(net), inputs, "gaussian", magnitude=0.5, **OPTIONS)
    run = themis.run(Target(Synchronises(net)), inputs, "gaussian", magnitude=0.5, **OPTIONS)
    assert np.array_equal(run.faults.columns["id"], expected.faults.columns["id"])


def waits(values):
    float(values.sum())


def runs_out_of_memory(values):
    torch.empty(1 << 50, device=values.device)


def leaves_a_stream(values):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        values.add_(1)


def test_the_first_error_of_a_capture_is_the_one_that_is_raised():
    with pytest.raises(torch.OutOfMemoryError), capturing(torch.cuda.CUDAGraph(), torch.cuda.Stream(), CUDA):
        runs_out_of_memory(torch.zeros(3, device=CUDA))


@pytest.mark.parametrize("fails", [waits, runs_out_of_memory, leaves_a_stream])
def test_a_capture_that_fails_leaves_the_gpu_as_it_was(fails):
    def fail():
        with capturing(torch.cuda.CUDAGraph(), torch.cuda.Stream(), CUDA):
            fails(values + torch.rand_like(values))

    values = torch.zeros(1 << 22, device=CUDA)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.current_stream(), torch.cuda.memory_reserved(), torch.cuda.get_rng_state().tolist()
    with pytest.raises(RuntimeError):
        fail()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert (torch.cuda.current_stream(), torch.cuda.memory_reserved(), torch.cuda.get_rng_state().tolist()) == before
    assert torch.rand(8, device=CUDA).std() > 0


def test_the_members_of_a_suite_find_the_same_captured_or_not(net, inputs, launches, tmp_path, monkeypatch):
    members = [
        {"perturb": "fog", "levels": [{"density": 1.8, "patchiness": 0.3, "scale": 0.5}]},
        {"perturb": "gaussian", "magnitude": 0.5, "levels": [{"sigma": 0.1}, {"sigma": 0.4}]},
        {"perturb": "rotate + shift", "levels": [{"angle": 10, "x": 0.05, "y": 0.0}]},
        {"perturb": "fgsm", "magnitude": 0.1},
    ]

    def run(name):
        options = {"max_tests": 8000, "coverage": None, "plateau": None, "max_stored": 10}
        return themis.run_suite(
            Target(net), inputs, {"name": "four", "members": members}, out=tmp_path / name, **options
        )

    captured, again = run("captured"), run("again")
    assert sum(launches) > 2 * 7000
    monkeypatch.setattr(runner_module, "can_fold", lambda device: False)
    monkeypatch.setattr(runner_module, "captured_function", lambda function, *examples: function)
    plain = run("plain")
    assert [row.passes for row in captured.rows] == [row.passes for row in plain.rows]
    assert captured.errors == plain.errors == again.errors
    for member in captured:
        mine, others = captured[member], (plain[member], again[member])
        assert len(mine.faults) > 20
        for other in others:
            for name in ("id", "seed_id", "theta", "noise_seed", "answer"):
                assert np.array_equal(mine.faults.columns[name], other.faults.columns[name]), (member, name)
        assert mine.judged.all == pytest.approx(plain[member].judged.all, abs=2e-3)
        assert mine.judged == again[member].judged


class BreaksDown(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return torch.where(x[:, :, 0, 0] > 0.99, float("nan"), self.net(x))


def test_outputs_that_are_not_finite_are_faults_and_spoil_no_moment(net, inputs, monkeypatch):
    inputs[:, :, 0, 0] = 0.5
    run = themis.run(Target(BreaksDown(net)), inputs, "gaussian", magnitude=0.5, **OPTIONS)
    assert (run.faults.columns["answer"] < 0).sum() > 20
    assert np.isfinite(run.judged.all)
    monkeypatch.setattr(runner_module, "can_fold", lambda device: False)
    plain = themis.run(Target(BreaksDown(net)), inputs, "gaussian", magnitude=0.5, **OPTIONS)
    assert np.array_equal(run.faults.columns["id"], plain.faults.columns["id"])
    assert run.rounds[-1].passes == plain.rounds[-1].passes
    assert run.judged.all == pytest.approx(plain.judged.all, abs=2e-3)


def test_a_long_campaign_launches_many_chunks_at_once(net, inputs, monkeypatch):
    options = {"magnitude": 0.5, "coverage": None, "plateau": None, "max_tests": 60_000}
    run = themis.run(Target(net), inputs, "gaussian", **options)
    monkeypatch.setattr(captured_module, "MAX_CHUNKS", 1)
    one_by_one = themis.run(Target(net), inputs, "gaussian", **options)
    assert np.array_equal(run.faults.columns["id"], one_by_one.faults.columns["id"])
    assert np.array_equal(run.faults.columns["noise_seed"], one_by_one.faults.columns["noise_seed"])
    assert run.rounds[-1].passes == one_by_one.rounds[-1].passes
    assert run.judged.all == pytest.approx(one_by_one.judged.all, abs=1e-4)
    assert run.faults.most_telling(1)[0].replay().is_same


@pytest.mark.parametrize("idling", [0, 1 << 28])
def test_chunks_run_as_one_if_they_leave_the_gpu_idle(net, inputs, tmp_path, monkeypatch, idling):
    monkeypatch.setattr(graphs_module, "MAX_IDLE_ACTIVATIONS", idling)
    options = {"magnitude": 0.5, "coverage": None, "plateau": None, "out": tmp_path}
    run = themis.run(Target(net), inputs, "gaussian", max_tests=120_000, **options)
    sizes = set(run.faults.columns["chunk"].tolist())
    assert (1024 in sizes) == (idling > 0)
    monkeypatch.setattr(graphs_module, "MAX_IDLE_ACTIVATIONS", 0)  # what was decided is recorded
    resumed = themis.resume(tmp_path, Target(net), inputs, max_tests=160_000)
    last = resumed.faults.columns["chunk"][resumed.faults.columns["id"] > 130_000]
    assert (1024 in last.tolist()) == (idling > 0)
    assert all(fault.replay().is_same for fault in resumed.faults.most_telling(3))


def test_few_tests_of_a_large_model_run_in_small_passes(net, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs_module, "OCCUPYING_ACTIVATIONS", 1)
    options = {"magnitude": 0.5, "coverage": None, "plateau": None, "batch_size": 256}
    run, again = (themis.run(Target(net), inputs, "gaussian", max_tests=6000, **options) for _ in range(2))
    columns = run.faults.columns
    assert {32, 256} <= set(columns["chunk"].tolist())
    assert set(columns["chunk"][columns["id"] < 100].tolist()) == {32}
    for size in (32, 256):
        assert run.faults[int((columns["chunk"] == size).argmax())].replay().is_same
    themis.run(Target(net), inputs, "gaussian", max_tests=2560, out=tmp_path, **options)
    resumed = themis.resume(tmp_path, Target(net), inputs, max_tests=6000)
    monkeypatch.setattr(runner_module, "can_fold", lambda device: False)
    plain = themis.run(Target(net), inputs, "gaussian", max_tests=6000, **options)
    for name in ("id", "seed_id", "theta", "noise_seed", "answer"):
        for other in (again, resumed, plain):
            assert np.array_equal(columns[name], other.faults.columns[name]), name
    assert np.array_equal(columns["chunk"], again.faults.columns["chunk"])
    assert run.judged == again.judged
    assert run.judged.all == pytest.approx(plain.judged.all, abs=2e-3)
    assert run.rounds[-1].passes == plain.rounds[-1].passes


class Overwrites(nn.Module):
    """Adds to the result of an activation in place, and does so at once."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(784, 60), nn.Linear(60, 10)

    def forward(self, x):
        hidden = torch.relu(self.first(x.flatten(1)))
        hidden += 1000.0
        return self.second(hidden)


def test_a_layer_that_the_model_overwrites_is_folded_before(inputs, launches, monkeypatch):
    torch.manual_seed(0)
    net = Overwrites().cuda().eval()
    run = themis.run(Target(net), inputs, "gaussian", magnitude=0.5, **OPTIONS)
    assert sum(launches) > 0.9 * OPTIONS["max_tests"]  # ascents too
    monkeypatch.setattr(runner_module, "can_fold", lambda device: False)
    plain = themis.run(Target(net), inputs, "gaussian", magnitude=0.5, **OPTIONS)
    assert run.judged.all == pytest.approx(plain.judged.all, abs=2e-3)
    assert run.design_effect == pytest.approx(plain.design_effect, rel=1e-2)


@pytest.mark.parametrize("n_kept", [280, 300])
def test_results_do_not_depend_on_how_many_clean_activations_fit(net, inputs, monkeypatch, n_kept):
    started, start = [], graphs_module.Graphs.start

    def watch(graphs, *planned):
        started.append(planned)
        return start(graphs, *planned)

    monkeypatch.setattr(graphs_module.Graphs, "start", watch)
    run, some = (
        themis.run(Target(net), inputs, "gaussian", magnitude=0.5, clean_memory_gib=n * 8054 * 4 / 2**30, **OPTIONS)
        for n in (300.5, n_kept + 0.5)
    )
    assert (run.start.n_kept, some.start.n_kept) == (300, n_kept)
    assert started
    for name in ("id", "seed_id", "theta", "answer"):
        assert np.array_equal(run.faults.columns[name], some.faults.columns[name]), name
    np.testing.assert_allclose(run.posterior_means, some.posterior_means, rtol=1e-4, atol=1e-6)


def test_a_run_that_was_stored_resumes_and_replays(net, inputs, tmp_path):
    options = {"magnitude": 0.5, "coverage": None, "plateau": None}
    whole = themis.run(Target(net), inputs, "gaussian", max_tests=5120, **options)
    themis.run(Target(net), inputs, "gaussian", max_tests=2560, out=tmp_path, **options)
    resumed = themis.resume(tmp_path, Target(net), inputs, max_tests=5120)
    assert np.array_equal(resumed.faults.columns["id"], whole.faults.columns["id"])
    assert themis.open_run(tmp_path, Target(net), inputs).faults.most_telling(1)[0].replay().is_same
