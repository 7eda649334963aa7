"""Neuron coverage (DeepXplore)."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.errors import UsageError
from themis_lab.criteria.covering import Crossing
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import as_neurons


class NC(Crossing):
    """Neurons above `threshold` on some test, over all neurons.

    `deepxplore` scales each layer of each input to 0..1 over its whole tensor and then takes the channels' means;
    `neural-coverage` takes the means first and scales across channels; `mindarmour` (and dnn-tip) does not scale. A
    layer that is constant on an input scales to 0.
    """

    name = "nc"
    learns = False
    variants: ClassVar = {
        "deepxplore": "github.com/peikexin9/deepxplore, MNIST/utils.py: scale, update_coverage",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: NC",
        "mindarmour": "github.com/mindspore-ai/mindarmour, coverage_criterion.py: NeuronCoverage; dnn-tip: NAC",
    }

    def __init__(self, threshold: float = 0.5, **options: Unpack[CriterionOptions]) -> None:
        super().__init__(**options)
        if not math.isfinite(threshold):
            raise UsageError(f"nc: threshold must be a number, got {threshold}")
        if self.variant != "mindarmour" and not 0 <= threshold < 1:
            raise UsageError(
                f"nc: threshold must lie in [0, 1), where values are scaled to, got {threshold}: variant 'mindarmour' "
                "does not scale"
            )
        self.threshold = threshold

    def read_layer(self, activation: Tensor, channel_axis: int | None = None, out: Tensor | None = None) -> Tensor:
        values = as_neurons(activation, self.neurons, channel_axis)
        if self.variant == "mindarmour":
            return values if out is None else out.copy_(values)
        if out is None:
            out = values.new_empty(values.shape)
        elif out.dtype != values.dtype:
            return out.copy_(self.read_layer(activation, channel_axis))
        # Scaling and taking the mean of a channel commute: both are linear.
        scaled_over = activation.flatten(1) if self.variant == "deepxplore" else values
        if scaled_over.shape == values.shape and values.device.type == "cuda" and values.dtype == torch.float32:
            from themis_lab.criteria import kernels_cuda

            if kernels_cuda.can_scale_rows(values.device):
                return kernels_cuda.scale_rows(values.contiguous(), out)
        low, high = (bound.to(values.dtype) for bound in row_range(scaled_over))
        return scale_rows(values, low, high, out)

    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        threshold = torch.full(values.shape[1:], self.threshold, dtype=torch.float64, device=values.device)
        return None, threshold.to(values.dtype)


def row_range(values: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each row, `[inputs]`."""
    if values.device.type == "cuda":
        low, high = torch.aminmax(values, dim=1)
        return low, high
    return values.amin(1), values.amax(1)  # on a CPU twenty times faster than aminmax


def scale_rows(values: Tensor, low: Tensor, high: Tensor, out: Tensor) -> Tensor:
    """Each input's values `[inputs, neurons]` scaled from `low..high` to 0..1; zero where `low` equals `high`."""
    width = high - low
    return torch.sub(values, low[:, None], out=out).div_(torch.where(width == 0, torch.inf, width)[:, None])
