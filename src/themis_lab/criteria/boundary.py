"""Neuron boundary coverage and strong neuron activation coverage (DeepGauge)."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.errors import UsageError
from themis_lab.criteria.covering import Crossing
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Readings

DNN_TIP = "dnn-tip"


class Boundary(Crossing):
    """Neurons that leave the range of their training values, widened by `sigma` standard deviations on both sides."""

    def __init__(self, sigma: float = 0.0, **options: Unpack[CriterionOptions]) -> None:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise UsageError(f"{self.name}: sigma must be a number of at least 0, got {sigma!r}")
        super().__init__(**options)
        self.sigma = sigma

    def _learn(self, readings: Readings) -> None:
        widen_range(self.learnt, readings.values)
        if self.sigma:
            _update_moments(self.learnt, readings.values)

    def _finish_fit(self) -> None:
        low, high = self.learnt["low"], self.learnt["high"]
        if self.sigma:
            margin = (self.sigma * _standard_deviation(self.learnt)).to(low.dtype)
            low, high = low - margin, high + margin
        self.learnt = {"low": low, "high": high}

    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.learnt["low"], self.learnt["high"]

    def includes_bound(self) -> bool:
        return self.variant == DNN_TIP


class NBC(Boundary):
    """Boundaries that some test has crossed, out of two per neuron.

    `deepgauge` counts upper and lower boundaries over twice the number of neurons. `mindarmour` counts the neurons that
    crossed either one over the number of neurons. `dnn-tip` counts like `deepgauge`, and a value on the boundary has
    crossed it. All three take `sigma`.
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

    `dnn-tip` also counts a value on the boundary. Both variants take `sigma`.
    """

    name = "snac"
    variants: ClassVar = {
        "deepgauge": "DeepGauge (ASE 2018), section 3.2.1; the same in NeuraL-Coverage, DeepImportance and MindArmour",
        DNN_TIP: "github.com/testingautomated-usi/dnn-tip, neuron_coverage.py: SNAC",
    }

    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, self.learnt["high"]


def widen_range(learnt: dict[str, Tensor], values: Tensor) -> None:
    """Extend the range of each neuron's training values, `low` and `high`, by `values [inputs, neurons]`."""
    low, high = values.amin(0), values.amax(0)
    if learnt:
        low, high = torch.minimum(low, learnt["low"]), torch.maximum(high, learnt["high"])
    learnt["low"], learnt["high"] = low, high


def _update_moments(learnt: dict[str, Tensor], values: Tensor) -> None:
    """Add `values [inputs, neurons]` to each neuron's mean and squared deviations (Chan's merge, float64)."""
    n = torch.tensor(len(values), device=values.device)
    variance, mean = (moment.double() for moment in torch.var_mean(values, 0, correction=0))
    squares = variance * n
    if "mean" in learnt:
        before, gap = learnt["n"], mean - learnt["mean"]
        n = before + n
        mean = learnt["mean"] + gap * ((n - before) / n)
        squares = learnt["squares"] + squares + gap.square() * (before * (n - before) / n)
    learnt["n"], learnt["mean"], learnt["squares"] = n, mean, squares


def _standard_deviation(learnt: dict[str, Tensor]) -> Tensor:
    return (learnt["squares"] / (learnt["n"] - 1).clamp(min=1)).sqrt()
