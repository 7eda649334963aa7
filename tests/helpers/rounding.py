"""Nets that differ by rounding from those that their random seed gives, as they do after a training on another CPU."""

import torch
from torch import nn

SHARE = 2e-6
"""About twenty roundings of a number of 32 bits."""


def round_initial_weights_otherwise():
    """From now on, initial weights of linear and convolutional layers are off by a share of `SHARE`; draws stay."""
    for layer in (nn.Linear, nn.modules.conv._ConvNd):
        layer.reset_parameters = _rounded(layer.reset_parameters)


def _rounded(reset_parameters):
    def reset(self):
        reset_parameters(self)
        with torch.no_grad():
            for tensor in self.parameters():
                if tensor.is_floating_point() and tensor.is_cpu:
                    signs = torch.arange(tensor.numel(), device="cpu").mul(2654435761).remainder(7).view(tensor.shape)
                    tensor.mul_(1 + SHARE * (signs - 3) / 3)

    return reset
