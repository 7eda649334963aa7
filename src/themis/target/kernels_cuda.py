"""A Triton kernel for the means of channels, which reads each activation once, at the speed of memory."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from themis.compute.gpu import tl, triton, works_on

LARGE_BLOCK, SMALL_BLOCK = (4, 256), (16, 64)
"""Channels per program, and values per channel that it loads at a time; SMALL_BLOCK is for up to 128 values."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _mean(values, means, n_channels, size, channels: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
        channel = tl.program_id(0).to(tl.int64) * channels + tl.arange(0, channels)
        is_channel = channel < n_channels
        total = tl.zeros([channels, width], dtype=tl.float32)
        for start in range(0, size, width):
            at = start + tl.arange(0, width)
            is_value = is_channel[:, None] & (at < size)[None, :]
            total += tl.load(values + channel[:, None] * size + at[None, :], mask=is_value, other=0.0)
        tl.store(means + channel, tl.sum(total, 1) / size, mask=is_channel)


def _means_by_kernel(values: Tensor) -> Tensor:
    means, size = values.new_empty(values.shape[:2]), values[0, 0].numel()
    channels, width = SMALL_BLOCK if size <= 2 * SMALL_BLOCK[1] else LARGE_BLOCK
    _mean[(triton.cdiv(means.numel(), channels),)](
        values, means, means.numel(), size, channels=channels, width=width, num_warps=1
    )
    return means


class _ChannelMeans(torch.autograd.Function):
    """The kernel and its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        return _means_by_kernel(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shape: torch.Size = ctx.shape
        means = gradient.reshape(*gradient.shape, *(1 for _ in shape[2:]))
        return (means / shape[2:].numel()).expand(shape)


def channel_means(values: Tensor) -> Tensor:
    """The mean of each channel of `values [inputs, channels, ...]`, as `[inputs, channels]`."""
    is_usual = values.dtype == torch.float32 and values.is_contiguous() and values.numel() > 0
    if is_usual and values.ndim > 2 and _can_average(values.device):
        function: Any = _ChannelMeans
        means: Tensor = function.apply(values)
        return means
    return values.mean(tuple(range(2, values.ndim)))


@cache
def _can_average(device: torch.device) -> bool:
    """Whether the kernel compiles on `device` and agrees with torch there."""

    def check() -> bool:
        samples = [torch.rand(5, 3, size, device=device) for size in (1, 49, 300)]
        return all(torch.allclose(_means_by_kernel(values), values.mean(2)) for values in samples)

    return works_on(device, check)
