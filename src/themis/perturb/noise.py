"""Noise: of a sensor, its photons and its broken pixels. It fits inputs of any shape, in any unit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, column

SOFTNESS = 0.1
"""Half the width of the ramp between pixels that are hit and those that are not, as a share of the chance to be hit."""
NO_WIDTH = 1e-9
DARKEST = 1e-6
"""Signal below which photon noise falls no further, so that its slope stays finite; a share of the range."""


def gaussian(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Independent normal noise on every value."""
    return inputs + rng.normal(*inputs.shape[1:]) * (column(theta, 0, inputs) * context.span)


def shot(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Photon noise on every value: its variance grows with the signal, as when few photons are counted.

    Poisson's distribution is taken as the normal one of the same mean and variance; sigma is `1 / sqrt(photons)` of
    those that make white.
    """
    signal = (_above_black(inputs, context) / context.span).clamp_min(DARKEST).sqrt()
    return torch.addcmul(inputs, rng.normal(*inputs.shape[1:]) * signal, column(theta, 0, inputs) * context.span)


def speckle(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Normal noise in proportion to the signal on every value, as of coherent light or radar."""
    grain = _above_black(inputs, context) * rng.normal(*inputs.shape[1:])
    return torch.addcmul(inputs, grain, column(theta, 0, inputs))


def impulse(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Some pixels, or values of other inputs, are replaced by random ones."""
    hit = _hit(rng.uniform(*_pixels(inputs)), column(theta, 0, inputs)).to(inputs.dtype)
    found = rng.uniform(*inputs.shape[1:]).to(inputs.dtype).mul_(context.span).add_(context.bounds[0])
    return torch.lerp(inputs, found, hit)


def salt_and_pepper(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Some pixels, or values of other inputs, turn black or white, one as likely as the other."""
    chance = rng.uniform(*_pixels(inputs)).mul_(2).sub_(1)
    hit = _hit(chance.abs(), column(theta, 0, inputs)).to(inputs.dtype)
    ends = (chance > 0).to(inputs.dtype).mul_(context.span).add_(context.bounds[0])
    return torch.lerp(inputs, ends.expand_as(inputs), hit)


def _above_black(inputs: Tensor, context: Context) -> Tensor:
    return inputs - context.bounds[0] if context.bounds[0] else inputs


def _pixels(inputs: Tensor) -> tuple[int, ...]:
    """What is hit as one: a picture's pixel with all its channels, else each value."""
    return (1, *inputs.shape[2:]) if inputs.ndim == 4 else tuple(inputs.shape[1:])


def _hit(chance: Tensor, share: Tensor) -> Tensor:
    """1 where `chance`, even in 0..1, is below `share` and 0 where above it.

    Between them a smooth ramp gives the share its slope. On average just that share is hit: none at 0, all at 1.
    """
    half = SOFTNESS * share * (1 - share)
    ramp = ((share + half - chance) / (2 * half + NO_WIDTH)).clamp(0, 1)
    return ramp * ramp * (3 - 2 * ramp)


_noise = partial(Perturbation, theta_is_magnitude=True, family="noise")

NOISE = (
    _noise(
        "gaussian",
        (Theta("sigma", 0.0, 0.1, unit="share of the input range", limits=(0, 10)),),
        gaussian,
    ),
    _noise(
        "shot",
        (Theta("sigma", 0.0, 0.15, unit="share of the input range, at white", limits=(0, 1)),),
        shot,
    ),
    _noise(
        "speckle",
        (Theta("sigma", 0.0, 0.25, unit="share of the signal", limits=(0, 10)),),
        speckle,
    ),
    _noise(
        "impulse",
        (Theta("share", 0.0, 0.1, unit="share of the pixels", limits=(0, 1)),),
        impulse,
    ),
    _noise(
        "salt_and_pepper",
        (Theta("share", 0.0, 0.1, unit="share of the pixels", limits=(0, 1)),),
        salt_and_pepper,
    ),
)
