"""Neuron boundary coverage and strong neuron activation coverage (DeepGauge)."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

from torch import Tensor

from themis.criteria.criterion import Common
from themis.criteria.crossing import Crossing
from themis.criteria.ranges import deviation, spread, widen
from themis.criteria.readings import Readings
from themis.errors import UsageError

DNN_TIP = "dnn-tip"


class Boundary(Crossing):
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

    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.learnt["low"], self.learnt["high"]

    def is_met(self) -> bool:
        return self.variant == DNN_TIP


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

    def n_sides(self) -> int:
        return 1 if self.variant == "mindarmour" else 2


class SNAC(Boundary):
    """Neurons that some test has driven above their training values, over all neurons.

    `dnn-tip` counts a value on the boundary too. Both take `sigma`.
    """

    name = "snac"
    variants: ClassVar = {
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.1; the same in NeuraL-Coverage, DeepImportance and MindArmour",
        DNN_TIP: "github.com/testingautomated-usi/dnn-tip, neuron_coverage.py: SNAC",
    }

    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, self.learnt["high"]
