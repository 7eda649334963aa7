"""DeepXplore: its requirements, its objective and its cost."""

import numpy as np
import pytest
import torch
from guided import QUICK, Seen, labelled

import themis
from themis import BlackBox, Target, UsageError
from themis.data.seeds import read_seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.runner import TestRunner
from themis.measure.sweep import sweep
from themis.oracle import choose_oracle
from themis.perturb import Context, choose_perturbation, perturb
from themis.search.policy import Space
from themis_lab.policies.deepxplore import DeepXplore


@pytest.fixture
def net():
    return Seen()


@pytest.fixture
def data(net):
    return labelled(net)


def test_deepxplore_needs_gradients(data):
    box = BlackBox(lambda x: x.reshape(len(x), -1)[:, :5])
    with pytest.raises(UsageError, match="policy 'deepxplore' needs gradients"):
        themis.run(box, data[0], "gaussian", policy="deepxplore", rivals=[Seen()], **QUICK)


def test_deepxplore_increases_its_joint_objective(net, data):
    """The gradient in theta that it receives is that of the objective, which is written out here."""
    rival, target = Seen().double(), Target(net.double())
    with torch.no_grad():
        rival.conv.weight += 0.3
    policy = DeepXplore([Target(rival)])
    seeds = read_seeds(data)
    chosen = choose_perturbation("brightness")
    calculator = Calculator.trace(target, seeds, chosen, choose_oracle("changed"), Limits(1 << 20))
    sweep(calculator)
    space = Space.of(chosen, np.arange(20), np.arange(20), np.ones(20, np.float32), 0)
    policy.init(space)
    answers, neuron = calculator.clean.outputs.argmax(1), torch.tensor([17])
    objective = policy.joint_objective(answers, neuron, False, 0)
    tests = space.tests(np.arange(20), np.arange(20), space.uniform_theta(0, np.arange(20)), "draw")
    gradient = TestRunner(calculator).measure(tests, calculator.accumulator(), objective).results.gradient

    def height(theta):
        inputs = perturb(chosen, seeds.inputs[:20], theta, torch.zeros(20, dtype=torch.int64), Context((0.0, 1.0)))
        wanted = answers[:20, None]
        own, other = (each(inputs.double()).softmax(1).gather(1, wanted)[:, 0] for each in (net, rival))
        return other - own + 0.1 * net.conv(inputs.double()).relu().flatten(1)[:, 17]

    theta, step = torch.from_numpy(tests.theta), 1e-2
    with torch.no_grad():
        slope = (height(theta + step) - height(theta - step)) / (2 * step)
    np.testing.assert_allclose(gradient[:, 0], slope, rtol=0.05, atol=2e-3)
    assert policy.report()["differences"] > 0


def test_deepxplore_pays_for_its_rivals_and_counts_differences(net, data):
    rival = Seen()
    with torch.no_grad():
        rival.last.weight += 0.2 * torch.randn(rival.last.weight.shape, generator=torch.Generator().manual_seed(0))
    run = themis.run(net, data, "brightness", policy="deepxplore", rivals=[rival], **{**QUICK, "magnitude": None})
    n_search = sum(count["tests"] for kind, count in run.kinds.items() if kind != "uniform")
    n_uniform = run.kinds["uniform"]["tests"]
    assert run.rounds[-1].passes == 5 + 4 + 2 + 6 + len(data[0]) + n_uniform + n_search * (3 + 3)
    assert 0 < run.summary()["policy"]["differences"] < n_search
    assert run.summary()["criterion"]["score"] > 0
