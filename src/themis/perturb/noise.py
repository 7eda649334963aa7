"""Noise of sensors, photons and broken pixels, for inputs of any shape and unit."""

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector, column
from themis.perturb.picture import eased

RAMP_SHARE = 0.1
"""Half the width of the ramp between replaced and unchanged pixels, relative to the share of replaced pixels."""
MIN_RAMP = 1e-9
MIN_SIGNAL = 1e-6
"""Signal, as a share of the range, below which photon noise does not decrease, so that the derivative stays finite."""


NOISE: list[Perturbation] = []
_noise = collector(NOISE, theta_is_magnitude=True, family="noise", moves=False, flickers=True)


@_noise(Theta("sigma", 0.0, 0.1, unit="share of the input range", limits=(0, 10)))
def gaussian(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Independent normal noise on every value."""
    return rng.add_normal(inputs, theta[:, 0] * context.span)


@_noise(Theta("sigma", 0.0, 0.15, unit="share of the input range, at white", limits=(0, 1)))
def shot(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Photon noise on every value: its variance grows with the signal, as when few photons are counted.

    The Poisson distribution is approximated by the normal one with the same mean and variance; sigma is
    `1 / sqrt(photons)`, where `photons` is the number that makes white.
    """
    signal = (_above_black(inputs, context) / context.span).clamp_min(MIN_SIGNAL).sqrt()
    return torch.addcmul(inputs, rng.normal(*inputs.shape[1:]) * signal, column(theta, 0, inputs) * context.span)


@_noise(Theta("sigma", 0.0, 0.25, unit="share of the signal", limits=(0, 10)))
def speckle(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Normal noise on every value in proportion to the signal, as with coherent light or radar."""
    grain = _above_black(inputs, context) * rng.normal(*inputs.shape[1:])
    return torch.addcmul(inputs, grain, column(theta, 0, inputs))


@_noise(Theta("share", 0.0, 0.1, unit="share of the pixels", limits=(0, 1)))
def impulse(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Some pixels, or values of inputs that are not pictures, are replaced by random ones."""
    hit = soft_hits(rng.uniform(*_pixels(inputs)), column(theta, 0, inputs)).to(inputs.dtype)
    replacement = rng.uniform(*inputs.shape[1:]).to(inputs.dtype).mul_(context.span).add_(context.bounds[0])
    return torch.lerp(inputs, replacement, hit)


@_noise(Theta("share", 0.0, 0.1, unit="share of the pixels", limits=(0, 1)))
def salt_and_pepper(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Some pixels, or values of inputs that are not pictures, turn black or white with equal chance."""
    chance = rng.uniform(*_pixels(inputs)).mul_(2).sub_(1)
    hit = soft_hits(chance.abs(), column(theta, 0, inputs)).to(inputs.dtype)
    ends = (chance > 0).to(inputs.dtype).mul_(context.span).add_(context.bounds[0])
    return torch.lerp(inputs, ends.expand_as(inputs), hit)


def _above_black(inputs: Tensor, context: Context) -> Tensor:
    return inputs - context.bounds[0] if context.bounds[0] else inputs


def _pixels(inputs: Tensor) -> tuple[int, ...]:
    """The shape of the random numbers if pixels with all their channels, or single values, are replaced as units."""
    if inputs.ndim == 5:  # clips
        return (inputs.shape[1], 1, *inputs.shape[3:])
    return (1, *inputs.shape[2:]) if inputs.ndim == 4 else tuple(inputs.shape[1:])


def soft_hits(chance: Tensor, share: Tensor) -> Tensor:
    """1 where `chance`, uniform in 0..1, is below `share`, and 0 where it is above.

    A smooth ramp in between makes it differentiable in the share. On average, exactly this share is hit.
    """
    half = RAMP_SHARE * share * (1 - share)
    return eased((share + half - chance) / (2 * half + MIN_RAMP))
