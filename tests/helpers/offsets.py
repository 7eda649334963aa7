"""Tensors that lie at odd addresses, as views into a larger buffer do."""

from itertools import cycle, product

import torch

OFFSETS = (1, 3, 2, 5, 7)
"""Elements from an address that is a multiple of 64 bytes, which is where torch places tensors of its own."""


def at_offset(tensor, offset):
    """The same numbers, `offset` elements after a multiple of 64 bytes; keeps the graph of gradients."""
    before = torch.empty(offset, dtype=tensor.dtype)
    return torch.cat([before, tensor.reshape(-1)])[offset:].view(tensor.shape)


def shift_inputs():
    """From now on, every pass of a target gets inputs at another offset."""
    from themis import Target

    forward, offsets = Target.forward, cycle(OFFSETS)

    def shifted(self, inputs, *rest, **options):
        if isinstance(inputs, torch.Tensor) and inputs.is_cpu:
            inputs = at_offset(inputs, next(offsets))
        return forward(self, inputs, *rest, **options)

    Target.forward = shifted


def every_offset(*tensors):
    """The tensors at each combination of offsets."""
    for offsets in product((0, *OFFSETS[:2]), repeat=len(tensors)):
        yield [at_offset(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
