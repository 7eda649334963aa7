"""The means of channels by the kernel are those of torch, gradients included."""

import pytest
import torch
from kernels import DEVICE, needs_triton

from themis.target import kernels_cuda
from themis.target.kernels_cuda import channel_means

pytestmark = needs_triton
SHAPES = [(1, 1, 1), (3, 5, 7, 7), (2, 64, 128), (2, 3, 129), (2, 6, 30, 30), (2, 3, 4, 5, 6)]


@pytest.fixture
def by_kernel(monkeypatch):
    """Has channels averaged by the kernel on the CPU too."""
    monkeypatch.setattr(kernels_cuda, "_can_average", lambda device: True)


def test_the_kernels_pass_their_own_check(monkeypatch):
    monkeypatch.setattr(kernels_cuda, "works_on", lambda device, check: check())
    assert kernels_cuda._can_average.__wrapped__(DEVICE)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("shape", SHAPES)
def test_means_of_channels(shape):
    values = torch.randn(shape, device=DEVICE, requires_grad=True)
    means, expected = channel_means(values), values.flatten(2).mean(2)
    torch.testing.assert_close(means, expected)
    weight = torch.randn_like(means)
    gradient, expected = (torch.autograd.grad((weight * m).sum(), values)[0] for m in (means, expected))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.usefixtures("by_kernel")
def test_the_mean_of_a_channel_does_not_depend_on_the_others():
    values = torch.randn(70, 30, 9, 9, device=DEVICE)
    assert torch.equal(channel_means(values)[20:21, 7:8], channel_means(values[20:21, 7:8].contiguous()))


@pytest.mark.usefixtures("by_kernel")
def test_other_layouts_are_left_to_torch():
    values = torch.randn(4, 3, 8, 8, device=DEVICE).to(memory_format=torch.channels_last)
    assert torch.equal(channel_means(values), values.mean((2, 3)))
