"""Neuron coverage (DeepXplore)."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Marking
from themis.criteria.criterion import Common
from themis.criteria.readings import Readings, as_neurons
from themis.errors import UsageError


class NC(Marking):
    """Neurons above `threshold` on some test, over all neurons.

    `deepxplore` scales each layer of each input to 0..1 over its whole tensor and takes the channels' means then;
    `neural-coverage` takes the means first and scales across channels; `mindarmour` (dnn-tip does the same) does not
    scale. A layer that is constant on an input has nothing above anything: it scales to 0.
    """

    name = "nc"
    learns = False
    variants: ClassVar = {
        "deepxplore": "github.com/peikexin9/deepxplore, MNIST/utils.py: scale, update_coverage",
        "neural-coverage": "github.com/Yuanyuan-Yuan/NeuraL-Coverage, coverage.py: NC",
        "mindarmour": "github.com/mindspore-ai/mindarmour, coverage_criterion.py: NeuronCoverage; dnn-tip: NAC",
    }

    def __init__(self, threshold: float = 0.5, **common: Unpack[Common]) -> None:
        if not threshold == threshold:
            raise UsageError("nc: threshold must be a number, got nan")
        super().__init__(**common)
        self.threshold = threshold

    def n_items(self) -> int:
        return 0 if self.layout is None else self.layout.n_neurons

    def read_layer(self, activation: Tensor, channel_axis: int | None = None) -> Tensor:
        values = as_neurons(activation, self.neurons, channel_axis)
        if self.variant == "mindarmour":
            return values
        # Scaling and taking a channel's mean may change places: both are linear.
        return scaled(
            values, *torch.aminmax((activation if self.variant == "deepxplore" else values).flatten(1), dim=1)
        )

    def hits(self, readings: Readings) -> Tensor:
        return (readings.values > self.threshold) & (readings.values < torch.inf)


def scaled(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Each input's values `[inputs, neurons]` brought from `low..high` to 0..1; zero where that is a point."""
    reach = (high - low).to(values.dtype)
    return (values - low[:, None]).div_(torch.where(reach == 0, torch.inf, reach)[:, None])
