"""What every runner of chunks promises: here operation by operation, on a GPU as a CUDA graph."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from moments import moments_of
from torch import nn

from themis import Target
from themis.compute.rng import mix, uniform
from themis.data import read_seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator
from themis.measure.runner import CapturedRunner, LocalMeasurer, PlannedTests, Portion, TestRunner
from themis.measure.sweep import sweep
from themis.measure.tests import Tests
from themis.oracle import NOT_FINITE, Changed
from themis.perturb import choose_perturbation

pytestmark = pytest.mark.quick
ON_GPU = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PANEL = torch.tensor([0, 3, 21, 22])
CHUNK = 16


class Breaks(nn.Module):
    """Two layers; the answer to a bright first value is NaN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.second = nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3)

    def forward(self, x):
        scores = self.second(self.act(self.first(x.flatten(1)))) * 3
        return torch.where(x.flatten(1)[:, :1] > 0.8, float("nan"), scores)


class Joined:
    """Runs three chunks at once as a graph does, or one that is three times as wide, by means of another runner."""

    def __init__(self, runner, is_wide):
        self.runner, self.calculator, self.is_wide = runner, runner.calculator, is_wide

    def run(self, planned, ahead=()):
        tests, into, objective = planned
        if not into.count:
            return self.runner.run(planned)
        sums, parts = Accumulator(self.calculator.n_neurons), []
        sums.begin(into.shift, into.count)
        for first in range(0, min(3 * CHUNK, len(tests)), CHUNK):
            part = self.runner.run(PlannedTests(tests[first : first + CHUNK], sums, objective))
            parts.append(part)
            if part.is_finite is None:
                part.commit(len(part.tests))

        def joined(values):
            return torch.cat(values) if isinstance(values[0], torch.Tensor) else np.concatenate(values)

        finite = [np.ones(len(part.tests), bool) if part.is_finite is None else part.is_finite for part in parts]
        names = ("is_fault", "outcome", "margin", "value", "seed", "disturbed", "outputs", "panel")
        gradient = None if objective is None else joined([part.gradient for part in parts])
        inputs, by_layer = self.calculator.inputs, joined([part.by_layer() for part in parts])
        columns = {name: joined([getattr(part, name) for part in parts]) for name in names}
        return replace(
            parts[0],
            chunk=3 * CHUNK if self.is_wide else CHUNK,
            tests=tests[: 3 * CHUNK],
            gradient=gradient,
            is_finite=joined(finite),
            clean_inputs=lambda rows: inputs[columns["seed"][rows]],
            by_layer=lambda: by_layer,
            commit=lambda n: into.commit_sums(sums.take_sums(), n),
            **columns,
        )


@pytest.fixture(
    params=[
        "eager",
        "joined",
        "wide",
        "second",
        *(pytest.param(f"captured{of}", marks=ON_GPU) for of in ("", " second")),
    ]
)
def runner(request):
    """A runner of each kind; "second": after another campaign on the same clean inputs."""
    inputs = torch.rand(30, 1, 2, 2, generator=torch.Generator().manual_seed(1)) * 0.7
    target = Target(Breaks().eval().to("cuda" if "captured" in request.param else "cpu"))
    limits = Limits(1 << 20, chunk=CHUNK)
    with target.opened():
        gaussian = choose_perturbation("gaussian", 0.3)
        calculator = Calculator.trace(target, read_seeds(inputs), gaussian, Changed(), limits)
        sweep(calculator)
        if "second" in request.param:
            first = LocalMeasurer(calculator.with_perturbation(choose_perturbation("gaussian + brightness")))
            first.begin(PANEL, None)
            two = replace(make_tests(20), theta=np.zeros((20, 2), np.float32))
            pending = Portion("search", two, calculator.accumulator(), lambda tests: (tests, None))
            for upcoming in ([pending], []):  # the last tests are left under way
                first.measure(pending, upcoming, None)
            first.end()
            assert not first.calculator.clean.kept.n_kept
            calculator = calculator.with_perturbation(gaussian)
        runner = TestRunner(calculator, PANEL)
        if request.param in ("joined", "wide"):
            runner.runner = Joined(runner.runner, request.param == "wide")
        yield runner


def make_tests(n):
    k = np.arange(n)
    theta = (uniform(1, k) * 0.3).astype(np.float32)[:, None]
    return Tests(k, mix(0, k) % 30, theta, mix(2, k), np.where(k % 3 == 0, "down", "up"))


def begun(runner):
    """Moments of one test, after which a chunk may be captured."""
    into = runner.calculator.accumulator()
    runner.measure(make_tests(1), into)
    return into


def run_plainly(calculator, tests):
    """The disturbed inputs of tests, the outputs, and the activations `[tests, neurons]` less the clean ones."""
    rows, noise = (torch.from_numpy(column).to(calculator.device) for column in (tests.seed, tests.noise_seed))
    theta, parts = torch.from_numpy(tests.theta).to(calculator.device), []
    with torch.no_grad():
        inputs, disturbed, _ = calculator.disturb(rows, theta, noise, len(tests))
        for each in (inputs, disturbed):
            layers = []
            outputs = calculator.forward(each, lambda layer, flat, layers=layers: layers.append(flat.clone()))
            parts.append(torch.cat(layers, 1))
    return disturbed, outputs, parts[1] - parts[0]


def measure_all(runner, tests, into, objective=None, max_passes=None):
    parts, done = [], 0
    while done < len(tests):
        parts.append(runner.measure(tests[done:], into, objective, max_passes))
        done += len(parts[-1])
    return parts


def test_a_runner_gives_results_faults_panel_and_moments_of_every_test(runner):
    calculator, tests, into = runner.calculator, make_tests(100), begun(runner)
    before = calculator.passes
    parts = measure_all(runner, tests, into)
    disturbed, outputs, differences = (part.cpu() for part in run_plainly(calculator, tests))
    finite = outputs.isfinite().all(1)
    assert 0 < (~finite).sum() < 50
    clean = calculator.clean.outputs.cpu()[torch.from_numpy(tests.seed)].argmax(1)
    answers = torch.where(finite, outputs.argmax(1), NOT_FINITE)
    is_fault = np.concatenate([part.results.is_fault for part in parts])
    assert np.concatenate([part.results.outcome for part in parts]).tolist() == answers.tolist()
    assert is_fault.tolist() == (answers != clean).tolist()
    faults, answers = (
        torch.cat([getattr(part.faults, name) for part in parts]).cpu() for name in ("inputs", "outputs")
    )
    torch.testing.assert_close(faults, disturbed[torch.from_numpy(is_fault)])
    torch.testing.assert_close(answers, outputs[is_fault], equal_nan=True)
    for part in parts:
        if len(part.faults):
            positions = np.flatnonzero(part.results.is_fault) % part.pass_size
            assert part.faults.columns["position"].tolist() == positions.tolist()
    by_layer = differences.abs()[is_fault].split([layer.n_neurons for layer in calculator.layers], 1)
    shares = torch.stack([part.sum(1) for part in by_layer], 1)
    found = np.concatenate([part.faults.columns["signature"] for part in parts if len(part.faults)])
    is_answer = finite[is_fault].numpy()
    np.testing.assert_allclose(found[is_answer], (shares / shares.sum(1, keepdim=True))[is_answer], atol=1e-3)
    first = run_plainly(calculator, make_tests(1))[2].cpu()
    moments, expected = into.moments(), moments_of(torch.cat([first, differences[finite]]).abs())
    assert int(moments.count) == finite.sum() + 1
    torch.testing.assert_close(moments.mean.cpu(), expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments.m2.cpu(), expected.m2, rtol=1e-3, atol=1e-4)
    panel, seed = (torch.cat([part.panel[k] for part in parts if part.panel is not None]).cpu() for k in (0, 1))
    order = np.lexsort(panel.T.numpy())  # tests that are folded again come after the others
    plain = differences[finite][:, PANEL]
    torch.testing.assert_close(panel[order], plain[np.lexsort(plain.T.numpy())], rtol=1e-3, atol=1e-5)
    assert sorted(seed.tolist()) == sorted(tests.seed[finite.numpy()].tolist())
    spoilt = sum(int(chunk.sum()) for chunk in finite.split(max(part.pass_size for part in parts)) if not chunk.all())
    assert calculator.passes - before == sum(part.passes for part in parts) == 100 + spoilt


def test_a_runner_folds_again_only_what_passes_are_left_for(runner):
    into = begun(runner)
    count, parts = into.count, measure_all(runner, make_tests(100), into, max_passes=3 * CHUNK)
    assert all(part.passes <= max(3 * CHUNK, len(part)) for part in parts)
    assert count < into.count < count + 100


def test_a_runner_gives_each_test_the_gradient_of_its_own_objective(runner):
    neurons = torch.arange(20, device=runner.calculator.device)
    tests = make_tests(100)
    parts = measure_all(runner, tests, begun(runner), Objective(neurons, margin_kind="down"))
    gradient = np.concatenate([part.results.gradient for part in parts])[:, 0]
    outputs = run_plainly(runner.calculator, tests)[1]
    climbs = (tests.kind == "up") & outputs.isfinite().all(1).cpu().numpy()

    def height(step):
        moved = replace(tests, theta=tests.theta + np.float32(step))
        return run_plainly(runner.calculator, moved)[2].abs()[:, :20].sum(1).cpu().numpy()

    slope = (height(1e-3) - height(-1e-3)) / 2e-3
    assert np.median(np.abs(gradient - slope)[climbs]) < 0.05 * np.abs(slope[climbs]).mean()
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[~climbs]).max() > 0


def test_tests_run_on_a_gpu_are_captured(runner):
    begun_on_gpu = runner.calculator.device.type == "cuda"
    measure_all(runner, make_tests(100), begun(runner))
    assert isinstance(runner.runner, CapturedRunner) == begun_on_gpu
    assert not begun_on_gpu or runner.runner.captures
