"""The means of channels by the kernel are those of torch, gradients included. Needs a GPU."""

import pytest
import torch

from themis.target import kernels_cuda
from themis.target.kernels_cuda import channel_means

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7, 7), (2, 64, 128), (2, 3, 129), (4, 6, 56, 56), (2, 3, 4, 5, 6)])
def test_means_of_channels(shape):
    assert kernels_cuda._can_average(torch.device("cuda"))
    values = torch.randn(shape, device="cuda", requires_grad=True)
    means, expected = channel_means(values), values.flatten(2).mean(2)
    torch.testing.assert_close(means, expected)
    weight = torch.randn_like(means)
    gradient, expected = (torch.autograd.grad((weight * m).sum(), values)[0] for m in (means, expected))
    torch.testing.assert_close(gradient, expected)


def test_the_mean_of_a_channel_does_not_depend_on_the_others():
    values = torch.randn(70, 30, 9, 9, device="cuda")
    assert torch.equal(channel_means(values)[20:21, 7:8], channel_means(values[20:21, 7:8].contiguous()))


def test_other_layouts_are_left_to_torch():
    values = torch.randn(4, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    assert torch.equal(channel_means(values), values.mean((2, 3)))
