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
        if self.variant == "deepxplore":
            activation = scaled(activation)
        values = as_neurons(activation, self.neurons, channel_axis)
        return scaled(values) if self.variant == "neural-coverage" else values

    def hits(self, readings: Readings) -> Tensor:
        return (readings.values > self.threshold) & (readings.values < torch.inf)


def scaled(activation: Tensor) -> Tensor:
    """Each input's values brought to 0..1; zero where they are all the same."""
    low, high = torch.aminmax(activation.flatten(1), dim=1)
    shape = (-1,) + (1,) * (activation.ndim - 1)
    low, reach = low.view(shape), (high - low).view(shape)
    return torch.where(reach > 0, (activation - low) / reach, 0.0)
