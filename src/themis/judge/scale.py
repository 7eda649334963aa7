"""The unit of sensitivity: absolute, or relative to how much a neuron varies on clean inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from themis.measure.moments import Moments
from themis.target.activations import Layer

LEAST = 1e-3
"""A neuron's unit is at least this share of its layer's median: a nearly constant neuron must not dominate."""


def relative_scale(clean: Moments, layers: Sequence[Layer]) -> Tensor:
    """Each neuron's clean spread, `[neurons]`; never zero."""
    spread = clean.variance.nan_to_num(posinf=0.0).sqrt()
    for layer in layers:
        part = spread[layer.start : layer.stop]
        moving = part[part > 0]
        median = moving.median() if len(moving) else torch.ones((), dtype=part.dtype, device=part.device)
        part.clamp_(min=float(median) * LEAST)
    return spread


def rescale(moments: Moments, scale: Tensor | None) -> Moments:
    """The moments of the sensitivities divided by `scale`."""
    return moments if scale is None else Moments(moments.count, moments.mean / scale, moments.m2 / scale.square())
