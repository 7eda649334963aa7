"""The calculator folds exactly the sensitivities that a plain loop would compute."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from moments import moments_of
from torch import nn

from themis import DataError, ModelError, Target
from themis.compute.rng import mix, uniform
from themis.data import read_seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.chunk import chunk_size, pass_size
from themis.measure.clean import CleanActivations
from themis.measure.fold import Objective
from themis.measure.repeats import check_repeats
from themis.measure.runner import TestRunner
from themis.measure.sweep import sweep
from themis.measure.tests import FaultDetails, Results, Tests
from themis.oracle import NOT_FINITE, Changed
from themis.perturb import choose_perturbation
from themis.target.activations import Layer
from themis_lab.zoo import lenet5

pytestmark = pytest.mark.quick


def make_tests(n, n_seeds, high=0.3):
    k = np.arange(n)
    theta = (uniform(1, k) * high).astype(np.float32)[:, None]
    return Tests(k, mix(0, k) % n_seeds, theta, mix(2, k), np.full(n, "test"))


def make(net=None, n_seeds=40, clean_bytes=1 << 30, batch_size=None, neurons="element"):
    if net is None:
        torch.manual_seed(0)
        net = lenet5()
        for layer in net.fcs:  # so that answers depend on the input, not on the biases
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5 * 2)
            nn.init.zeros_(layer.bias)
    inputs = torch.rand(n_seeds, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    target = Target(net, neurons=neurons)
    target.module.eval()
    perturbation = choose_perturbation("gaussian", 0.3)
    return Calculator.trace(
        target, read_seeds(inputs), perturbation, Changed(), Limits(clean_bytes, batch_size=batch_size)
    )


def measure_all(calculator, tests, into, objective=None):
    """The results of all tests, run chunk by chunk, and the details of their faults."""
    runner, parts, done = TestRunner(calculator), [], 0
    while done < len(tests):
        parts.append(runner.measure(tests[done:], into, objective))
        done += len(parts[-1])
    faults = [each.faults for each in parts if len(each.faults)] or [parts[0].faults]
    details = FaultDetails(
        {name: np.concatenate([each.columns[name] for each in faults]) for name in faults[0].columns},
        torch.cat([each.inputs for each in faults]),
        torch.cat([each.outputs for each in faults]),
    )
    return Results.join([part.results for part in parts]), details


def disturb(calculator, tests, theta=None):
    rows, noise_seed = torch.from_numpy(tests.seed), torch.from_numpy(tests.noise_seed)
    return calculator.disturb(rows, torch.from_numpy(tests.theta) if theta is None else theta, noise_seed, len(tests))


def activations(calculator, inputs):
    """All activations [inputs, neurons], layer after layer."""
    parts = []
    with torch.no_grad():
        calculator.forward(inputs, lambda layer, flat: parts.append(flat.clone()))
    return torch.cat(parts, 1).double()


@pytest.mark.parametrize("neurons", ["element", "channel"])
def test_moments_equal_those_of_the_complete_sensitivities(neurons):
    calculator = make(neurons=neurons)
    sweep(calculator)
    tests = make_tests(150, 40)
    into = calculator.accumulator()
    results, faults = measure_all(calculator, tests, into)
    clean = activations(calculator, calculator.inputs)
    rows = torch.from_numpy(tests.seed)
    _, disturbed, _ = calculator.disturb(
        rows, torch.from_numpy(tests.theta), torch.from_numpy(tests.noise_seed), len(tests)
    )
    sensitivity = (activations(calculator, disturbed) - clean[rows]).abs()
    expected, moments = moments_of(sensitivity), into.moments()
    torch.testing.assert_close(moments.mean, expected.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.m2, expected.m2, rtol=1e-4, atol=1e-5)
    by_layer = torch.stack([sensitivity[:, each.start : each.stop].sum(1) for each in calculator.layers], 1)
    signature = (by_layer / by_layer.sum(1, keepdim=True))[results.is_fault]
    assert len(signature) > 5
    np.testing.assert_allclose(faults.columns["signature"], signature, atol=6e-5)
    with torch.no_grad():
        answers = calculator.target.module(disturbed).argmax(1)
    assert results.outcome.tolist() == answers.tolist()
    assert results.is_fault.tolist() == (answers != calculator.clean.outputs[rows].argmax(1)).tolist()


def test_clean_moments_equal_those_of_the_activations():
    calculator = make()
    moments = sweep(calculator)
    expected = moments_of(activations(calculator, calculator.inputs))
    torch.testing.assert_close(moments.mean, expected.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.m2, expected.m2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_kept", [0, 400])
def test_results_do_not_depend_on_how_many_clean_activations_fit(n_kept):
    everything, some = make(n_seeds=500), make(n_seeds=500, clean_bytes=n_kept * 8054 * 4)
    outcomes = []
    for calculator in (everything, some):
        sweep(calculator)
        into = calculator.accumulator()
        outcomes.append((measure_all(calculator, make_tests(900, 500), into)[0], into.moments()))
    assert everything.clean.kept.n_kept == 500
    assert everything.n_recomputed == 0
    assert some.clean.kept.n_kept == max(n_kept, some.chunk)
    assert 50 < some.n_recomputed < 600
    assert some.passes == everything.passes  # so that budgets mean the same, whatever the memory
    (a, first), (b, second) = outcomes
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(first.m2, second.m2, rtol=1e-5, atol=1e-9)
    assert a.margin.tolist() == b.margin.tolist()


def test_the_seeds_that_are_used_most_keep_their_clean_activations():
    kept = CleanActivations((Layer("a", (1,), 0, 1, None),), 6, 3 * 4, torch.float32, torch.device("cpu"))

    def use(*seeds):
        missing, rows = kept.make_room(np.array(seeds))
        kept.by_layer["a"][kept.index(rows)] = torch.tensor(missing).float()[:, None]
        kept.filled(missing, rows)
        assert kept.by_layer["a"][kept.rows(np.array(seeds))][:, 0].tolist() == list(seeds)
        return missing.tolist()

    assert use(0, 1, 2) == [0, 1, 2]
    assert use(0, 0, 2) == []
    assert use(5) == [5]  # in place of 1
    assert use(0, 2) == []
    assert use(1, 5) == [1]  # in place of 2, which was used less than 0
    assert kept.n_fitting(np.array([3, 3, 4, 3, 5, 4, 1, 2])) == 6
    kept.make_room(np.array([3]))  # and then the model fails
    assert use(3) == [3]
    held = int(np.flatnonzero(kept._row >= 0)[0])
    row = kept.rows(np.array([held]))
    for seed in range(6):  # one after the other takes the two other rows
        missing, rows = kept.make_room(np.array([seed]), in_use=np.array([held]))
        kept.filled(missing, rows)
        assert kept.rows(np.array([held])) == row


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_results_are_identical_bit_for_bit_for_any_batch_size(batch_size):
    plain, other = make(), make(batch_size=batch_size)
    outcomes = []
    for calculator in (plain, other):
        sweep(calculator)
        into = calculator.accumulator()
        outcomes.append((measure_all(calculator, make_tests(300, 40), into)[0], into.moments()))
    (a, first), (b, second) = outcomes
    assert a.margin.tobytes() == b.margin.tobytes()
    assert torch.equal(first.m2, second.m2)


def test_chunks_follow_from_the_model_on_a_cpu_and_from_the_batch_size_elsewhere():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chunk_size(532_490, cpu, None) == chunk_size(532_490, cpu, 4) == 32
    assert chunk_size(8_054, cpu, None) == 256
    assert chunk_size(10**9, cpu, None) == 8
    assert chunk_size(8_054, gpu, 1000) == 1000


def test_a_pass_of_few_tests_is_padded_to_a_part_of_the_chunk():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [pass_size(n, 256, cpu) for n in (1, 16, 17, 240, 241, 256)] == [16, 16, 32, 240, 256, 256]
    assert [pass_size(n, 32, cpu) for n in (1, 9, 32)] == [8, 16, 32]
    assert [pass_size(n, 8, cpu) for n in (1, 8)] == [8, 8]
    assert pass_size(1, 4, cpu) == 4
    assert [pass_size(n, 256, cpu, block=128) for n in (1, 129)] == [128, 256]  # attacks run in blocks
    assert pass_size(33, 1000, gpu, block=128) == 64


def test_results_of_few_tests_are_those_of_a_full_chunk():
    calculator, tests = make(), make_tests(256, 40)
    sweep(calculator)
    full, few = calculator.accumulator(), calculator.accumulator()
    whole = TestRunner(calculator).measure(tests, full)
    parts = [TestRunner(calculator).measure(part, few) for part in (tests[:40], tests[40:128], tests[128:])]
    assert [part.pass_size for part in parts] == [48, 96, 128]
    assert whole.pass_size == 256
    joined = Results.join([part.results for part in parts])
    np.testing.assert_array_equal(joined.is_fault, whole.results.is_fault)
    np.testing.assert_allclose(joined.margin, whole.results.margin, rtol=1e-5, atol=1e-6)
    for name in ("mean", "m2"):
        torch.testing.assert_close(getattr(few.moments(), name), getattr(full.moments(), name), rtol=1e-3, atol=1e-4)


def test_passes_count_every_forward_and_backward():
    calculator = make()
    before = calculator.passes
    sweep(calculator)
    assert calculator.passes - before == 40
    before = calculator.passes
    measure_all(calculator, make_tests(30, 40), calculator.accumulator())
    assert calculator.passes - before == 30
    before = calculator.passes
    objective = Objective(torch.arange(100))
    measure_all(calculator, make_tests(30, 40), calculator.accumulator(), objective)
    assert calculator.passes - before == 90


def test_the_gradient_in_theta_is_that_of_the_summed_sensitivity():
    calculator = make()
    sweep(calculator)
    neurons = torch.tensor([0, 50, 5000, 7900, 8000, 8050])
    tests = make_tests(20, 40)
    results, _ = measure_all(calculator, tests, calculator.accumulator(), Objective(neurons))
    clean = activations(calculator, calculator.inputs)

    def climbed(theta):
        rows = torch.from_numpy(tests.seed)
        _, disturbed, _ = disturb(calculator, tests, theta)
        return (activations(calculator, disturbed) - clean[rows]).abs()[:, neurons].sum(1)

    theta = torch.from_numpy(tests.theta)
    slope = (climbed(theta + 1e-3) - climbed(theta - 1e-3)) / 2e-3
    error = np.abs(results.gradient[:, 0] - slope.numpy()) / (np.abs(slope.numpy()) + 0.1)
    assert np.median(error) < 0.05  # single ones are larger because of the kinks of ReLU
    assert np.corrcoef(results.gradient[:, 0], slope.numpy())[0, 1] > 0.99


def test_each_test_of_a_chunk_climbs_its_own_objective():
    calculator = make()
    sweep(calculator)
    tests = make_tests(20, 40)
    by_margin = np.arange(20) % 3 == 0
    tests = replace(tests, kind=np.where(by_margin, "down", "up"))
    neurons = torch.arange(7000, 8000)

    def gradient(objective):
        return measure_all(calculator, tests, calculator.accumulator(), objective)[0].gradient

    mixed = gradient(Objective(neurons, margin_kind="down"))
    sensitivity, margin = gradient(Objective(neurons)), gradient(Objective(neurons[:0], margin_kind="down"))
    np.testing.assert_allclose(mixed[~by_margin], sensitivity[~by_margin], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mixed[by_margin], margin[by_margin], rtol=1e-4, atol=1e-5)
    assert np.abs(mixed[by_margin] - sensitivity[by_margin]).min() > 0.01
    assert not margin[~by_margin].any()


def test_the_panel_gets_the_signed_differences_of_its_neurons():
    calculator = make()
    sweep(calculator)
    neurons = torch.tensor([3, 4703, 4704, 7840, 8053])
    tests = make_tests(150, 40)
    differences, seed = TestRunner(calculator, neurons).measure(tests, calculator.accumulator()).panel
    assert seed.tolist() == tests.seed.tolist()
    rows = torch.from_numpy(tests.seed)
    _, disturbed, _ = calculator.disturb(
        rows, torch.from_numpy(tests.theta), torch.from_numpy(tests.noise_seed), len(tests)
    )
    expected = activations(calculator, disturbed) - activations(calculator, calculator.inputs)[rows]
    torch.testing.assert_close(differences.double(), expected[:, neurons], rtol=1e-4, atol=1e-5)


class BreaksDown(nn.Module):
    """Returns NaN if a corner pixel is bright."""

    def __init__(self):
        super().__init__()
        self.net = lenet5()

    def forward(self, x):
        scores = self.net(x)
        return torch.where(x[:, :, 0, 0] > 0.7, float("nan"), scores)


def test_an_output_that_is_not_finite_is_a_fault_and_leaves_the_moments_finite():
    torch.manual_seed(0)
    calculator = make(BreaksDown())
    calculator.inputs[:, :, 0, 0] = 0.5
    sweep(calculator)
    into = calculator.accumulator()
    results, faults = measure_all(calculator, make_tests(200, 40), into)
    broken = results.outcome == NOT_FINITE
    assert 0 < broken.sum() < 200
    assert results.is_fault[broken].all()
    assert into.count == 200 - broken.sum()
    assert into.moments().m2.isfinite().all()
    assert np.isfinite(faults.columns["signature"]).all()


def test_a_model_that_returns_nan_on_clean_inputs_is_rejected():
    calculator = make(BreaksDown())
    calculator.inputs[:, :, 0, 0] = 0.9
    with pytest.raises(ModelError, match="finite outputs on clean inputs, but 40 of 40"):
        sweep(calculator)


class Tight(nn.Module):
    """Has room for `most` inputs, rounds by the shape of a pass, and adds what `change` returns to the scores."""

    def __init__(self, most, change=torch.zeros_like):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.most, self.change = nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), most, change

    def forward(self, x):
        if len(x) > self.most:
            raise MemoryError
        scores = self.net(x) * (1 + 1e-3 * len(x))
        return scores + self.change(scores)


def halved(most_in_sweep, most_in_check, change=torch.zeros_like):
    """A calculator that has checked whether answers repeat, while memory ran out."""
    calculator = make(Tight(most_in_sweep, change), n_seeds=300)

    def check():
        sweep(calculator)
        calculator.target.module.most = most_in_check
        check_repeats(calculator)

    with pytest.warns(RuntimeWarning, match="out of memory"):
        check()
    return calculator


@pytest.mark.parametrize("most", [(100, 100), (1000, 100), (100, 30)])
def test_a_chunk_that_is_halved_before_or_while_answers_are_checked_is_compared_with_its_own_shape(most):
    assert halved(*most).chunk == (16 if most[1] == 30 else 64)


def test_kernels_that_change_while_memory_is_short_are_not_taken_for_random_answers():
    left = iter([0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.02, 0.02])  # tracing finds the layers; the sweep has five chunks

    def change(scores):
        return scores * next(left, 0.02)

    assert halved(100, 100, change).chunk == 64


@pytest.mark.parametrize("most", [(100, 100), (1000, 100), (100, 30)])
def test_a_random_model_is_refused_after_the_chunk_was_halved_too(most):
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ModelError, match="outputs differ between two runs"):
        halved(*most, lambda scores: 0.01 * torch.rand(scores.shape, generator=generator))


class Recording(nn.Module):
    """Records the sizes of its passes; what `change` returns is added to the scores."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change, self.sizes = lenet5(), change, []

    def forward(self, x):
        self.sizes.append(len(x))
        scores = self.net(x)
        return scores + self.change(scores)


def sizes_of_check(change, n_seeds=300):
    """The sizes of the passes that check whether answers repeat."""
    calculator = make(Recording(change), n_seeds=n_seeds)
    sweep(calculator)
    calculator.target.module.sizes.clear()
    check_repeats(calculator)
    return calculator.target.module.sizes


def at_row(row):
    """A random number for one row of a pass, from the generator of torch, if there is such a row."""
    return lambda scores: torch.rand(()) * (torch.arange(len(scores)) == row)[:, None]


def test_a_model_that_repeats_runs_a_part_of_the_first_chunk_again():
    assert sizes_of_check(torch.zeros_like) == [64]
    assert sizes_of_check(torch.zeros_like, n_seeds=3) == [64]


def test_the_whole_chunk_is_run_again_if_the_model_draws_random_numbers():
    assert sizes_of_check(at_row(1000)) == [64, 256]
    with pytest.raises(ModelError, match="but 1 of 256 outputs differ between two runs"):
        sizes_of_check(at_row(200))


def test_a_model_with_a_generator_of_its_own_is_refused():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ModelError, match="but 256 of 256 outputs differ between two runs"):
        sizes_of_check(lambda scores: torch.rand(scores.shape, generator=generator))


def test_answers_that_depend_on_the_batch_are_not_taken_for_random():
    assert sizes_of_check(lambda scores: scores.mean(0)) == [64, 256]


def test_an_activation_that_overflows_is_named():
    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.act = lenet5(), nn.ReLU()

        def forward(self, x):
            self.act(x.flatten(1) * 3e38 * 10)
            return self.net(x)

    with pytest.raises(ModelError, match="layer 'act' has a NaN or an infinity"):
        sweep(make(Overflows()))


@pytest.mark.parametrize(
    ("low", "high", "remedy"),
    [(0.0, 255.0, "divide by 255 or pass bounds"), (-2.1, 2.6, r"Normalize\(mean, std\)"), (0.0, 1.5, "true bounds")],
)
def test_inputs_outside_the_bounds_get_a_remedy(low, high, remedy):
    refuse(torch.linspace(low, high, 784 * 2).view(2, 1, 28, 28), remedy)


def test_sound_outside_the_bounds_gets_its_own_bounds():
    refuse(
        torch.linspace(-1, 1, 800).view(2, 1, 400), r"sound in -1\.\.1 needs bounds=\(-1, 1\), which is --bounds -1,1"
    )
    refuse(torch.linspace(-1.2, 1, 800).view(2, 1, 400), r"Normalize\(mean, std\)")


def refuse(inputs, remedy):
    with pytest.raises(DataError, match=rf"inputs must lie in bounds \(0, 1\), got .*{remedy}"):
        Calculator.trace(Target(lenet5()), read_seeds(inputs), choose_perturbation("gaussian"), Changed())
