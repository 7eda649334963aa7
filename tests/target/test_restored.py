"""A model is as it was before, whatever its forward passes write to."""

import pytest
import torch
from torch import nn

import themis
from themis import Target


class Stateful(nn.Module):
    """Changes its own tensors in forward passes, even in evaluation mode."""

    def __init__(self, change):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.change = change

    def forward(self, x):
        return self.net(self.change(self, x))


def adapt(net, x):
    return nn.functional.batch_norm(x, net.mean, net.var, training=True)


def count(net, x):
    net.mean.data += len(x)
    return x


def limit_norm(net, x):
    net.net[0].weight.data = torch.renorm(net.net[0].weight.data, 2, 0, 0.1)
    return x


def halve(net, x):
    net.net[0].weight.data.mul_(0.5)
    return x


def replace(net, x):
    net.mean = 0.9 * net.mean + x.detach().mean(0)
    return x


def shrink(net, x):
    with torch.no_grad():
        net.net[0].weight.mul_(0.5)
    return x


CHANGES = [("mean", adapt), ("mean", replace), ("net.0.weight", limit_norm)]


GPU = pytest.param(
    "cuda", marks=[pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("change", [adapt, count, halve, limit_norm, replace, shrink])
def test_the_model_is_restored_to_the_last_bit(change, device):
    net = Stateful(change).to(device)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    target = Target(net)
    with target.opened(), torch.no_grad():
        assert not target.changed_tensors()
        target.forward(torch.rand(6, 4, device=device))
        assert target.changed_tensors()
    assert not target.changed_tensors()
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert places == {name: tensor.data_ptr() for name, tensor in after.items()}


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_campaign_warns_of_a_model_that_changes_itself_and_restores_it(name, change):
    net = Stateful(change)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.warns(RuntimeWarning) as caught:
        themis.run(net, torch.rand(64, 4), "gaussian", max_tests=100)
    assert any(f"the model changes its own {name}" in str(each.message) for each in caught)
    assert all(torch.equal(before[name], after) for name, after in net.state_dict().items())
