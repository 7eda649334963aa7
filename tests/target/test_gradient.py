import numpy as np
import pytest
import torch
from torch import nn

from themis import BlackBox, Target
from themis.target.traits import is_differentiable

INPUTS = torch.rand(1, 6)


class Net(nn.Module):
    """A linear layer with something done to its input and its result."""

    def __init__(self, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(6, 3), before, after

    def forward(self, x):
        return self.after(self.linear(self.before(x)))


class UnderNoGrad(Net):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("no backward")


class ReturnsNoGradient(RaisesInBackward):
    @staticmethod
    def backward(ctx, gradient):
        return None


def frozen():
    return torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: Net(before=lambda x: x.mul_(2)),
        lambda: Net(after=torch.round),
        lambda: Net().double(),
        lambda: Net().requires_grad_(False),
        frozen,
    ],
    ids=["plain", "writes to its input", "a gradient of zero", "double", "frozen weights", "frozen TorchScript"],
)
def test_a_model_that_can_be_differentiated_has_a_gradient(make):
    target = Target(make())
    with target.opened():
        assert is_differentiable(target.forward, INPUTS) is True


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(before=torch.Tensor.detach),
        lambda: Net(after=torch.Tensor.detach),
        lambda: Net(before=lambda x: torch.from_numpy(x.detach().numpy())),
        lambda: Net(before=lambda x: torch.from_numpy(x.numpy())),
        lambda: UnderNoGrad(),
        lambda: Net(after=lambda x: x.argmax(1)),
        lambda: Net(before=RaisesInBackward.apply),
        lambda: Net(before=ReturnsNoGradient.apply),
        lambda: Net(after=lambda x: torch.zeros(len(x), 3)),
    ],
    ids=[
        "detaches its input",
        "detaches its output",
        "passes through NumPy",
        "raises in the forward pass",
        "runs under no_grad",
        "integer outputs",
        "raises in the backward pass",
        "an operator without a gradient",
        "ignores its input",
    ],
)
def test_a_model_that_cannot_be_differentiated_has_no_gradient(make):
    target = Target(make())
    with target.opened():
        assert is_differentiable(target.forward, INPUTS) is False


def test_a_black_box_has_no_gradient():
    target = BlackBox(lambda inputs: np.zeros((len(inputs), 2)))
    assert not target.has_gradient
    assert not is_differentiable(target.forward, INPUTS)


def test_preprocessing_that_detaches_hides_the_gradient():
    assert not is_differentiable(Target(Net(), preprocess=torch.Tensor.detach).forward, INPUTS)


@pytest.mark.parametrize("before", [lambda x: x + torch.rand_like(x), RaisesInBackward.apply])
def test_the_probe_leaves_no_trace(before):
    net = Net(before)
    target, inputs, state = Target(net), INPUTS.clone(), torch.get_rng_state()
    with torch.no_grad():
        is_differentiable(target.forward, inputs)
        assert not torch.is_grad_enabled()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert torch.equal(inputs, INPUTS)
    assert not inputs.requires_grad
    assert inputs.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not net._forward_hooks


def test_the_probe_works_in_inference_mode():
    target = Target(Net())
    with torch.inference_mode():
        inputs = torch.rand(1, 6)
        assert is_differentiable(target.forward, inputs)


def test_a_function_of_theta_can_be_probed():
    net, theta = Net(), torch.zeros(1, 2)
    assert is_differentiable(lambda t: net(INPUTS + t[:, :1]), theta)
    assert not is_differentiable(lambda t: net(INPUTS + t[:, :1].detach()), theta)
    assert not is_differentiable(lambda t: net(INPUTS + t[:, :1].long()), theta)
