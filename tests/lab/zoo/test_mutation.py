"""Mutation operators: what each of them changes, what it leaves alone, and what it refuses."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import themis
from themis import ModelError, Target, UsageError
from themis_lab.zoo import MUTATIONS, find_killed, make_mutants, mutate


class Small(nn.Module):
    """A convolution with a normalisation, a layer that keeps the shape, and functional activations."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.same = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(48, 4)

    def forward(self, inputs):
        x = F.relu(self.norm(self.conv(inputs)))
        return self.head(torch.sigmoid(self.same(x)).flatten(1))


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Small().eval()
        net.norm.running_mean.normal_()
        net.norm.bias.data += 2  # no channel is dead
        return net


@pytest.fixture(scope="module")
def inputs():
    return torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def mlp(width=5):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.Sigmoid(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


@torch.no_grad()
@pytest.mark.parametrize("operator", MUTATIONS)
def test_a_mutant_differs_is_repeatable_and_leaves_the_model_alone(operator, net, inputs):
    state, before = deepcopy(net.state_dict()), net(inputs)
    mutants = [mutate(net, operator, random_seed=seed) for seed in (1, 1, 2)]
    outputs = [mutant(inputs) for mutant in mutants]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], before)
    assert torch.equal(net(inputs), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert not {id(one) for one in net.parameters()} & {id(one) for one in mutants[0].parameters()}
    assert not mutants[0].training


@torch.no_grad()
def test_weights_are_changed_as_the_ratio_says():
    net = mlp()
    weights = [torch.cat([own[k].weight.flatten() for k in (0, 2, 4)]) for own in (net, mutate(net, "gf", ratio=0.1))]
    assert (weights[0] != weights[1]).sum() == 6  # of 60
    for before, after in zip(net[::2], mutate(net, "WS", ratio=1.0)[::2], strict=True):
        assert not torch.equal(before.weight, after.weight)
        assert torch.equal(before.weight.sort(1).values, after.weight.sort(1).values)


@torch.no_grad()
def test_neurons_are_blocked_inverted_and_switched():
    net, x = mlp(), torch.rand(6, 4)
    hidden = net[:2](x)

    def rest(values):
        return net[2:](values)

    def after(operator):
        """What mutants in which one neuron of the first layer is mutated return."""
        mutants = [mutate(net, operator, ratio=0.01, random_seed=seed) for seed in range(12)]
        return [mutant(x) for mutant in mutants if hasattr(mutant, "mutated__1") or hasattr(mutant, "mutated__0")]

    def is_one_of(value, expected):
        return any(torch.allclose(value, other, atol=1e-6) for other in expected)

    units = torch.eye(5)
    blocked = [rest(hidden * (1 - unit)) for unit in units]
    inverted = [rest(torch.sigmoid(net[0](x) * (1 - 2 * unit))) for unit in units]
    switched = []
    for i in range(5):
        for j in range(i):
            order = list(range(5))
            order[i], order[j] = j, i
            switched.append(rest(hidden[:, order]))
    for operator, expected in (("NEB", blocked), ("NAI", inverted), ("NS", switched)):
        found = after(operator)
        assert len(found) > 1
        assert all(is_one_of(value, expected) for value in found)


@torch.no_grad()
def test_channels_are_the_neurons_of_a_convolution(net, inputs):
    mutant = mutate(net, "NAI", ratio=1.0)
    x = torch.relu(-net.norm(net.conv(inputs)))
    assert torch.allclose(mutant(inputs), net.head(torch.sigmoid(-net.same(x)).flatten(1)), atol=1e-6)


@torch.no_grad()
def test_layers_are_left_out_repeated_and_linearised(net, inputs):
    x = F.relu(net.norm(net.conv(inputs)))
    assert torch.equal(mutate(net, "LD")(inputs), net.head(x.flatten(1)))
    twice = torch.sigmoid(net.same(torch.sigmoid(net.same(x))))
    assert torch.equal(mutate(net, "LAm")(inputs), net.head(twice.flatten(1)))
    linear = [
        net.head(net.same(x).flatten(1)),
        net.head(torch.sigmoid(net.same(net.norm(net.conv(inputs)))).flatten(1)),
    ]
    found = [mutate(net, "AFRm", random_seed=seed)(inputs) for seed in range(8)]
    assert all(any(torch.equal(value, expected) for value in found) for expected in linear)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return F.relu(self.layer(inputs)) if inputs.sum() > 0 else inputs


@pytest.mark.parametrize(
    ("make", "operator", "options", "error", "message"),
    [
        (mlp, "NEBB", {}, UsageError, "operator must be a known name, got 'NEBB': did you mean 'NEB'"),
        (mlp, "GF", {"ratio": 0}, UsageError, r"ratio must lie in \(0, 1\], got 0"),
        (nn.ReLU, "GF", {}, UsageError, "needs linear or convolutional layers, but ReLU has none"),
        (
            lambda: nn.Sequential(nn.Linear(3, 2)),
            "LD",
            {},
            UsageError,
            "same shape, but none of 1 has: choose another operator",
        ),
        (lambda: nn.Sequential(nn.Linear(3, 2)), "NEB", {}, UsageError, "a layer that an activation function follows"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), "AFRm", {}, UsageError, "AFRm needs an activation function"),
        (lambda: mlp(1), "NS", {}, UsageError, "NS needs a layer of at least two neurons"),
        (Branching, "LD", {}, ModelError, "needs a model that torch.fx can trace, but Branching cannot"),
    ],
)
def test_what_is_refused(make, operator, options, error, message):
    with pytest.raises(error, match=message):
        mutate(make(), operator, **options)


def test_trivial_and_equivalent_mutants_are_not_kept():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight.copy_(torch.eye(2))
    inputs = torch.tensor([[0.9, 0.1], [0.8, 0.3], [0.1, 0.7]])
    found = make_mutants(net, (inputs, torch.tensor([0, 0, 1])), operators=["AFRm", "NS", "LAm"], per_operator=3)
    assert found.accuracy == 1
    assert found.equivalent["AFRm"] == 3  # the activation function never sees a negative value
    assert found.trivial == {"NS": 3}  # two classes are swapped
    assert not found.kept  # applied twice, an identity is the same
    assert make_mutants(net, (inputs, torch.tensor([0, 0, 1])), operators=["GF"], per_operator=3).accuracy == 1
    assert list(make_mutants(Branching(), (torch.rand(4, 4), torch.ones(4)), operators=["LD"]).refused) == ["LD"]
    with pytest.raises(UsageError, match="accuracy, which needs labels"):
        make_mutants(net, inputs)
    with pytest.raises(UsageError, match="operator must be a known name, got 'nothing'"):
        make_mutants(net, (inputs, torch.tensor([0, 0, 1])), operators=["nothing"])


def test_a_mutant_is_killed_for_the_classes_of_tests_that_only_the_model_answers_correctly():
    net = nn.Sequential(nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(3))
    other = deepcopy(net)
    with torch.no_grad():
        other[0].weight[1] = 0  # never answers 1, unless all scores are negative
    inputs, labels = torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 2, 0])
    killed = find_killed(Target(net), [Target(other), Target(net)], inputs, labels)
    assert killed.tolist() == [[False, True, False], [False] * 3]


def test_mutants_can_be_tested_like_any_model(net, inputs):
    labels = net(inputs).argmax(1)
    found = make_mutants(net, (inputs, labels), per_operator=1, ratio=0.05)
    assert len(found.kept) >= 3
    for mutant in found.kept[:3]:
        assert mutant.accuracy >= 0.9
        run = themis.run(mutant.target, (inputs, labels), "brightness", max_tests=32)
        assert run.start.n_neurons > 0
