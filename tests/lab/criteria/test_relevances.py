"""Relevance of neurons: worked out by hand, LRP compared with its fallback, and the model is not changed."""

import sys
from copy import deepcopy

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from themis import BlackBox, Target
from themis.errors import DataError, MissingExtraError, ModelError, UsageError
from themis_lab.criteria import relevances as module
from themis_lab.criteria.relevances import relevance

W1 = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [2.0, -1.0]])
W2 = torch.tensor([[1.0, -1.0, 2.0], [0.0, 3.0, 1.0]])
W3 = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
INPUTS = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]])
# Hidden values relu(W1 x): (5, 1, 0), (4, 0, 3), (6, 3, 0). Scores W2 h: (4, 3), (10, 3), (3, 9).
# A neuron's relevance is h_i W2[winner, i]: (5, -1, 0), (4, 0, 6), (0, 9, 0).


def linear(weight):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data.copy_(weight)
    return made


class Spelled(nn.Module):
    """Linear layers with functional activations between them."""

    def __init__(self, *weights):
        super().__init__()
        self.layers = nn.ModuleList(linear(each) for each in weights)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def modules(*weights):
    found = [linear(weights[0])]
    for each in weights[1:]:
        found += [nn.ReLU(inplace=True), linear(each)]
    return nn.Sequential(*found)


@pytest.mark.parametrize("method", ["lrp", "gradient", "auto"])
@pytest.mark.parametrize("make", [Spelled, modules])
def test_two_layers_by_hand(make, method):
    target = Target(make(W1, W2), bounds=(0, 4))
    every = relevance(target, INPUTS, None, method=method)
    assert torch.allclose(every.values, torch.tensor([9.0, 8.0, 6.0]).double())
    assert (every.n_inputs, every.method) == (3, "gradient" if method == "gradient" else "lrp")
    assert every.conservation_error < 1e-6
    # The third input is classified as class 1.
    right = relevance(target, INPUTS, torch.zeros(3, dtype=torch.long), method=method, batch_size=1)
    assert torch.allclose(right.values, torch.tensor([9.0, -1.0, 6.0]).double())
    assert right.n_inputs == 2


@pytest.mark.parametrize("method", ["lrp", "gradient"])
@pytest.mark.parametrize("make", [Spelled, modules])
def test_a_layer_further_down_by_hand(make, method):
    # h2 = relu(W2 h): (4, 3), (10, 3); scores (7, 1), (13, 7), so R2 = h2. Epsilon rule: R1_i = sum over j of
    # h_i W2[j, i] / h2_j R2_j = h_i (W2[0, i] + W2[1, i]): (5, 2, 0) and (4, 0, 9).
    net = make(W1, W2, W3)
    first = "relu()" if make is Spelled else "1"
    found = relevance(Target(net, bounds=(0, 4)), INPUTS[:2], None, first, method=method)
    assert torch.allclose(found.values, torch.tensor([9.0, 2.0, 9.0]).double())
    assert found.layer == first


def test_the_conservation_error_is_the_share_absorbed_by_biases():
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))
    for parameter, value in zip(net.parameters(), ([[1], [1]], [0, 0], [[1, 1], [0, 0]], [2, 0]), strict=True):
        parameter.data.copy_(torch.tensor(value))
    # Scores 2x + 2, relevance 2x: a third is lost at x = 2, half at x = 1, 2/3 at x = 0.5.
    inputs = torch.tensor([[2.0], [1.0], [0.5]])
    for method in ("lrp", "gradient", "auto"):
        found = relevance(Target(net, bounds=(0, 4)), inputs, None, method=method)
        assert found.method == ("gradient" if method == "gradient" else "lrp")  # both lose the same
        assert found.conservation_error == pytest.approx(0.5, abs=1e-6)
        assert "50.00%" in found.describe()


def test_lrp_is_gradient_times_activation_in_a_relu_net_without_biases():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(80, 3, bias=False),
    )  # fmt: skip
    target, inputs = Target(net), torch.rand(9, 1, 14, 14)
    for layer in ("0", "1", "2", "3", "4"):
        by_lrp, by_gradient = (relevance(target, inputs, None, layer, method=m) for m in ("lrp", "gradient"))
        assert torch.allclose(by_lrp.values, by_gradient.values, rtol=1e-3, atol=1e-4), layer
        assert by_gradient.conservation_error < 1e-5
        elements = relevance(target, inputs, None, layer, method="gradient", neurons="element")
        summed = elements.values.reshape(len(by_gradient.values), -1).sum(1)
        assert torch.allclose(summed, by_gradient.values)


def test_the_default_is_the_last_hidden_layer_and_the_output_can_be_requested():
    torch.manual_seed(0)
    net, inputs = nets.Functional(), torch.rand(6, 4)
    assert relevance(Target(net), inputs, None).layer == "gelu()"
    found = relevance(Target(net), inputs, None, "output")
    assert found.values.sum() == pytest.approx(net(inputs).max(1).values.sum().item(), rel=1e-5)
    only = nn.Linear(4, 3)
    assert relevance(Target(only), inputs, None).layer == "output"


def test_one_output_counts_every_input():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    assert relevance(Target(net), torch.rand(5, 3), torch.rand(5)).n_inputs == 5


def test_the_gradient_replaces_lrp_where_it_is_unsupported_and_says_why():
    torch.manual_seed(0)
    inputs = torch.rand(6, 4)
    for net, layer, why in ((nets.Reused(), "act#2", "captum raised"), (nets.InPlace(), "relu", "outside")):
        target = Target(net)
        found = relevance(target, inputs, None, layer)
        assert found.method == "gradient"
        assert why in found.describe()
        with pytest.raises(UsageError, match="pass method='gradient'"):
            relevance(target, inputs, None, layer, method="lrp")
    # Activations that are overwritten later count with their original value: after relu, 100 is added and subtracted.
    y = F.relu(net.a(inputs)).detach()
    winners = net(inputs).argmax(1)
    assert torch.allclose(found.values, (y * net.b.weight[winners]).sum(0).double(), atol=1e-5)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu = nn.Linear(3, 4, bias=False), nn.ReLU()
        self.inner, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        x = self.relu(self.first(x))
        return self.last(x + self.inner(x))


def test_a_sum_that_lrp_would_count_twice_uses_the_gradient():
    torch.manual_seed(3)
    target, inputs = Target(Residual()), torch.rand(8, 3)
    for layer in ("relu", "inner"):
        found = relevance(target, inputs, None, layer)
        assert found.method == "gradient"
        assert "the model computes add outside of its modules" in found.describe()
    assert relevance(target, inputs, None, "relu").conservation_error < 1e-5
    assert relevance(target, inputs, None, "inner").conservation_error > 0.1  # the rest bypasses it


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.GELU, nn.Tanh, nn.ReLU6, nn.Softplus])
def test_activation_modules_pass_relevance_on_unchanged(activation):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), activation(), nn.Dropout(), nn.Linear(4, 2, bias=False)).eval()
    inputs = torch.rand(6, 3)
    values = net[1](net[0](inputs)).detach()
    expected = (values * net[3].weight[net(inputs).argmax(1)]).sum(0).detach().double()
    for layer in ("0", "1", "2"):
        found = relevance(Target(net), inputs, None, layer, method="lrp")
        assert torch.allclose(found.values, expected, atol=1e-5), layer
        assert found.conservation_error < 1e-5


def test_lrp_is_not_used_if_it_loses_more_than_the_gradient(monkeypatch):
    target = Target(modules(W1, W2), bounds=(0, 4))
    lrp = module.Lrp.__call__

    def thrice(self, prepared, winners):
        found, scores = lrp(self, prepared, winners)
        return 3 * found, scores

    monkeypatch.setattr(module.Lrp, "__call__", thrice)
    assert relevance(target, INPUTS, None, method="lrp").conservation_error == pytest.approx(2)
    found = relevance(target, INPUTS, None)
    assert found.method == "gradient"
    assert "since LRP loses 200.00%" in found.describe()
    assert found.values.tolist() == [9, 8, 6]


def test_relevance_that_is_not_finite(monkeypatch):
    target = Target(modules(W1, W2), bounds=(0, 4))
    monkeypatch.setattr(module.Lrp, "__call__", lambda self, x, w: (torch.full((len(x), 3), torch.nan), w.float()))
    assert relevance(target, INPUTS, None).method == "gradient"
    with pytest.raises(UsageError, match="not finite"):
        relevance(target, INPUTS, None, method="lrp")

    class Root(nn.Module):
        def forward(self, x):
            return F.relu(x - 9).sqrt() @ torch.ones(2, 2)

    with pytest.raises(ModelError, match="finite"):
        relevance(Target(Root(), bounds=(0, 4)), INPUTS, None, method="gradient")


def test_without_captum(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    target = Target(modules(W1, W2), bounds=(0, 4))
    found = relevance(target, INPUTS, None)
    assert (found.method, found.values.tolist()) == ("gradient", [9, 8, 6])
    with pytest.raises(MissingExtraError, match=r"themis-dl\[lrp\]"):
        relevance(target, INPUTS, None, method="lrp")


@pytest.mark.parametrize("method", ["lrp", "gradient", "auto"])
def test_the_model_is_not_changed(method):
    torch.manual_seed(0)
    net = nets.Conv().train()
    net.seen = nn.ReLU(inplace=True)
    before = deepcopy(net)
    relevance(Target(net), torch.rand(5, 1, 8, 8), None, method=method)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.state_dict().values(), strict=True))
    for now, then in zip(net.modules(), before.modules(), strict=True):
        assert vars(now).keys() == vars(then).keys()
        assert (now.training, len(now._forward_hooks), len(now._forward_pre_hooks)) == (True, 0, 0)
        assert not now._backward_hooks
    assert net.seen.inplace
    assert all(each.grad is None for each in net.parameters())


def test_invalid_use_is_rejected():
    target = Target(modules(W1, W2), bounds=(0, 4))
    with pytest.raises(UsageError, match="gradients, but a BlackBox has none"):
        relevance(BlackBox(lambda x: x, bounds=(0, 4)), INPUTS, None)
    for wrong in ({"neurons": "row"}, {"method": "shap"}, {"batch_size": 0}, {"layer": "9"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            relevance(target, INPUTS, None, **wrong)
    with pytest.raises(DataError, match="got none"):
        relevance(target, INPUTS[:0], None)
    with pytest.raises(DataError, match="2 for 3"):
        relevance(target, INPUTS, torch.zeros(2))
    with pytest.raises(DataError, match="correctly"):
        relevance(target, INPUTS[:2], torch.ones(2))
    with pytest.raises(UsageError, match="classes"):
        relevance(Target(nn.Conv2d(1, 2, 1)), torch.rand(2, 1, 3, 3), None)
