"""An attack runs in blocks of one size: little padding is paid for, and a result does not depend on other tests."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Target
from themis.compute.rng import mix, uniform
from themis.data import read_seeds
from themis.measure import chunk
from themis.measure.calculator import Calculator, Limits
from themis.measure.chunk import attack_size
from themis.measure.fold import Objective
from themis.measure.runner import TestRunner
from themis.measure.sweep import sweep
from themis.measure.tests import Tests
from themis.oracle import Changed
from themis.perturb import Context, choose_perturbation
from themis.target.activations import Layer
from themis_lab.zoo import lenet5

CPU = torch.device("cpu")


def make_tests(n):
    k = np.arange(n)
    theta = (uniform(1, k) * 0.03).astype(np.float32)[:, None]
    return Tests(k, mix(0, k) % 40, theta, mix(2, k), np.full(n, "test"))


def layers(n_layers, width):
    return [Layer(str(k), (width,), k * width, width, None) for k in range(n_layers)]


@pytest.mark.parametrize(
    ("n_layers", "width", "expected"),
    [(3, 134, 256), (5, 1610, 128), (56, 9508, 16), (10, 8266, 16), (122, 40322, 16), (1, 10**7, 16)],
)
def test_the_block_depends_on_the_width_of_layers_and_is_never_larger_than_the_chunk(n_layers, width, expected):
    assert attack_size(256, layers(n_layers, width), CPU) == expected
    assert attack_size(8, layers(n_layers, width), CPU) == 8
    assert attack_size(256, layers(n_layers, width), torch.device("cuda")) == 256  # one piece is faster there


def count_climbs(monkeypatch, sizes):
    """Append the number of inputs of every gradient that an attack takes."""
    climb = Context.climb

    def counted(context, inputs, objective):
        sizes.append(len(inputs))
        return climb(context, inputs, objective)

    monkeypatch.setattr(Context, "climb", counted)


@pytest.fixture(params=["fgsm", "pgd"])
def attacked(request, monkeypatch):
    """A calculator whose attack has blocks of 16 tests in chunks of 256, and the sizes of the attack's own passes."""
    monkeypatch.setattr(chunk, "ATTACK_ACTIVATIONS", 1)
    torch.manual_seed(0)
    target = Target(lenet5().eval())
    sizes = []
    seeds = read_seeds(torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(1)))
    perturbation = choose_perturbation(request.param)
    calculator = Calculator.trace(target, seeds, perturbation, Changed(), Limits(1 << 30))
    with target.opened():
        sweep(calculator)
        count_climbs(monkeypatch, sizes)
        assert calculator.chunk == 256
        yield calculator, sizes


def test_a_few_tests_cost_one_block(attacked):
    calculator, sizes = attacked
    own = calculator.perturbation.passes // 3
    for n, n_blocks in ((1, 1), (16, 1), (17, 2), (40, 3)):
        sizes.clear()
        calculator.run_chunk(make_tests(n), 256)
        assert sizes == [16] * len(sizes)
        assert len(sizes) == pytest.approx(own * n_blocks, abs=n_blocks)


def test_results_are_the_same_bits_whatever_the_filling_of_the_chunk(attacked):
    calculator, _ = attacked
    tests = make_tests(70)
    inputs, outputs, _ = calculator.run_chunk(tests, 256)
    for n in (1, 15, 16, 33):
        fewer, few_outputs, _ = calculator.run_chunk(tests[:n], 256)
        assert torch.equal(fewer, inputs[:n])
        assert torch.equal(few_outputs, outputs[:n])
    into, few_into = calculator.accumulator(), calculator.accumulator()
    results = TestRunner(calculator).measure(tests, into).results
    few = TestRunner(calculator).measure(tests[:20], few_into).results
    assert np.array_equal(results.margin[:20], few.margin)


def test_the_passes_of_padding_do_not_count(attacked):
    calculator, _ = attacked
    for n in (3, 16, 50):
        before = calculator.passes
        calculator.run_chunk(make_tests(n), 256)
        assert calculator.passes - before == n * (1 + calculator.perturbation.passes)


def test_the_gradient_in_theta_passes_through_blocks(attacked, monkeypatch):
    calculator, _ = attacked
    tests = make_tests(40)
    tests = replace(tests, theta=np.full_like(tests.theta, 0.02))
    objective = Objective(torch.arange(50))
    blocks = TestRunner(calculator).measure(tests, calculator.accumulator(), objective).results.gradient
    monkeypatch.setattr(chunk, "ATTACK_ACTIVATIONS", 1 << 30)
    whole = TestRunner(calculator).measure(tests, calculator.accumulator(), objective).results.gradient
    assert blocks.shape == whole.shape == (40, 1)
    assert np.abs(blocks).max() > 0
    np.testing.assert_allclose(blocks, whole, rtol=0.05, atol=0.05 * np.abs(whole).max())


@pytest.mark.parametrize(("name", "magnitude", "n_steps"), [("pgd", 0.5, 10), ("cw", 0.1, 101)])
def test_faults_of_an_attack_replay_bit_for_bit_and_pay_for_one_block(monkeypatch, name, magnitude, n_steps):
    monkeypatch.setattr(chunk, "ATTACK_ACTIVATIONS", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 3)).eval()
    sizes = []
    run = themis.run(
        net, torch.rand(60, 1, 8, 8), name, magnitude=magnitude, coverage=None, max_tests=200, round_size=50
    )
    faults = sorted(run.faults, key=lambda fault: -fault.position)[:3]
    assert faults[0].position > 16  # in a later block
    count_climbs(monkeypatch, sizes)
    for fault in faults:
        sizes.clear()
        assert fault.replay().is_same
        assert sizes == [16] * n_steps
