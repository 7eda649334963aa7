"""Neuron boundary coverage and strong neuron activation coverage (DeepGauge)."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.criteria.covering import Marking
from themis.criteria.criterion import Common
from themis.criteria.ranges import deviation, spread, widen
from themis.criteria.readings import Readings
from themis.errors import UsageError

DNN_TIP = "dnn-tip"


class Boundary(Marking):
    """Neurons that leave the range of their training values, widened by `sigma` standard deviations on both sides."""

    def __init__(self, sigma: float = 0.0, **common: Unpack[Common]) -> None:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise UsageError(f"{self.name}: sigma must be a number of at least 0, got {sigma!r}")
        super().__init__(**common)
        self.sigma = sigma

    def _learn(self, readings: Readings) -> None:
        widen(self.learnt, readings.values)
        if self.sigma:
            spread(self.learnt, readings.values)

    def _conclude(self) -> None:
        low, high = self.learnt["low"], self.learnt["high"]
        if self.sigma:
            further = (self.sigma * deviation(self.learnt)).to(low.dtype)
            low, high = low - further, high + further
        self.learnt = {"low": low, "high": high}

    def above(self, values: Tensor) -> Tensor:
        """Which values leave their range upwards, bool `[tests, neurons]`."""
        high = self.learnt["high"]
        return (values >= high if self.variant == DNN_TIP else values > high) & (values < torch.inf)

    def below(self, values: Tensor) -> Tensor:
        """Which values leave their range downwards, bool `[tests, neurons]`."""
        low = self.learnt["low"]
        return (values <= low if self.variant == DNN_TIP else values < low) & (values > -torch.inf)

    def n_neurons(self) -> int:
        return 0 if self.layout is None else self.layout.n_neurons


class NBC(Boundary):
    """Boundaries that some test has crossed, of two a neuron.

    `deepgauge` counts upper and lower ones over twice the neurons; `mindarmour` neurons with either over all neurons;
    `dnn-tip` counts as `deepgauge`, and a value on the boundary has crossed it. All take `sigma`.
    """

    name = "nbc"
    variants: ClassVar = {
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.1; the same in NeuraL-Coverage and DeepImportance",
        "mindarmour": "github.com/mindspore-ai/mindarmour, model_coverage_metrics.py: NeuronBoundsCoverage",
        DNN_TIP: "github.com/testingautomated-usi/dnn-tip, neuron_coverage.py: NBC",
    }

    def n_items(self) -> int:
        return self.n_neurons() * (1 if self.variant == "mindarmour" else 2)

    def hits(self, readings: Readings) -> Tensor:
        below, above = self.below(readings.values), self.above(readings.values)
        return below | above if self.variant == "mindarmour" else torch.cat([below, above], 1)


class SNAC(Boundary):
    """Neurons that some test has driven above their training values, over all neurons.

    `dnn-tip` counts a value on the boundary too. Both take `sigma`.
    """

    name = "snac"
    variants: ClassVar = {
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.1; the same in NeuraL-Coverage, DeepImportance and MindArmour",
        DNN_TIP: "github.com/testingautomated-usi/dnn-tip, neuron_coverage.py: SNAC",
    }

    def n_items(self) -> int:
        return self.n_neurons()

    def hits(self, readings: Readings) -> Tensor:
        return self.above(readings.values)
