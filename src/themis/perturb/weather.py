"""Weather that affects the whole scene: fog, frost on the lens, glare of the sun, shadows and darkness."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, columns
from themis.perturb.picture import eased, field, places, sample_rotated, side

DETAIL = 56
"""Pixels along the shorter side at which clouds are drawn at most."""
HORIZON = 0.6
"""Share of the height, from the bottom."""
LUMA = (0.299, 0.587, 0.114)


def fog(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fog in drifting banks: exp(-density * depth) of the light remains, and grey replaces the rest.

    The depth of the scene is assumed to grow from the bottom of the picture up to a horizon above its middle.
    """
    density, patchiness, scale = columns(theta, inputs)
    banks = 1 + patchiness * (eased(_clouds(inputs, rng, scale) * 2 - 0.5) * 2 - 1)
    up = 0.5 - places(inputs)[1] * (side(inputs) / inputs.shape[2])
    depth = 0.35 + 0.65 * eased(up / HORIZON)
    return _mixed(inputs, (-density * depth * banks).exp(), (0.85, 0.85, 0.85))


def _clouds(pictures: Tensor, rng: Rng, scale: Tensor) -> Tensor:
    """A smooth random field, drawn no finer than necessary."""
    height, width = pictures.shape[2:]
    times = max(1, side(pictures) // DETAIL)
    coarse = pictures.new_empty(len(pictures), 1, -(-height // times), -(-width // times))
    clouds = field(coarse, rng, scale, octaves=3)
    return F.interpolate(clouds, (height, width), mode="bilinear", align_corners=False) if times > 1 else clouds


def frost(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Ice that grows over the lens in crossing needles, starting at the edges; the middle stays clear longest."""
    amount, scale = columns(theta, inputs)
    x, y = places(inputs)
    unit = side(inputs)
    bottom, right = (length / unit / 2 for length in inputs.shape[2:])
    inward = torch.minimum(right - x.abs(), bottom - y.abs())
    turn = rng.uniform(1, 1, 1).to(inputs.dtype) * math.pi
    thin = (scale * scale + (2.5 / unit) ** 2).sqrt()  # no finer than a few pixels
    away = torch.full_like(amount, math.inf)
    for k in range(6):  # three directions, first coarse and then fine
        needle = _needle(inputs, rng, turn + math.pi / 3 * k, thin if k < 3 else thin * 0.5)
        away = torch.minimum(away, needle if k < 3 else needle + 0.25)
    needles = 1 / (1 + away)
    grown = amount * 2.4 - inward * 2.4 - 0.7 + (_clouds(inputs, rng, thin * 5) - 0.5) * 1.8 + needles * 0.5
    alpha = eased(grown) * (0.2 + 0.55 * needles) * eased(amount * 5)
    return _mixed(inputs, 1 - alpha, (0.9, 0.95, 1.0))


def _needle(pictures: Tensor, rng: Rng, turn: Tensor, thin: Tensor) -> Tensor:
    """The squared distance of pixels from long lines in one direction, along which a stretched random field is 0."""
    rows, columns = 8, 48
    lattice = rng.uniform(1, rows, columns).to(pictures.dtype) * 8 - 4
    return sample_rotated(lattice, pictures, turn, thin * columns, thin * (8 * rows)).square()


def glare(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The sun in the picture: its disc, bloom and rays, two ghost images in the lens, and stray light everywhere."""
    strength, x, y, size = columns(theta, inputs)
    right, below = places(inputs)
    turn = rng.uniform(1, 1, 1).to(inputs.dtype) * (math.pi / 2)
    area = size * size
    dx, dy = (right - x) / size, (below - y) / size
    off = dx * dx + dy * dy
    # The cosine of twice the angle around the sun, and then of eight times the angle.
    cos = (turn.cos() * dx * dx - turn.cos() * dy * dy + 2 * turn.sin() * dx * dy) / (off + 0.1)
    for _ in range(2):
        cos = 2 * cos * cos - 1
    rays = (0.5 + 0.5 * cos).square().square()
    light = 5 / (1 + off * off) + (1.5 + 2.5 * rays) / (1 + off * 0.12) + 0.15
    for place, radius, opacity in ((-0.5, 0.9, 0.25), (-1.1, 1.6, 0.15)):
        ghost = ((right - place * x).square() + (below - place * y).square()) / (area * radius**2)
        light = light + eased((1 - ghost) * 4) * (opacity * (0.5 + 0.5 * ghost.clamp(max=1)))
    return _mixed(inputs, (-strength * light).exp(), (1.0, 0.97, 0.86))


def shadow(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A cast shadow: a band across the picture that gets less light, with soft edges."""
    strength, offset, angle, width, softness = columns(theta, inputs)
    x, y = places(inputs)
    lean = (rng.uniform(2, 1, 1, 1).to(inputs.dtype) - 0.5) * 0.5  # its edges are not quite parallel
    inside = torch.ones_like(strength)
    for k, edge in enumerate((1, -1)):
        turn = angle * (math.pi / 180) + lean[:, k]
        across = (x - offset) * turn.cos() + y * turn.sin()
        inside = inside * eased((width / 2 - across * edge) / softness + 0.5)
    return inputs * (1 - inside * strength)


def low_light(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A dark scene: less light, noise of the few remaining photons and of the sensor, and paler colours."""
    stops, noise, fade = columns(theta, inputs)
    remaining = torch.exp(stops * (-math.log(2) / 2.2))  # of a value as displays encode it; exp2 rounds by position
    grey = _grey(inputs) * remaining
    sigma = (grey * 0.5 + 0.1).sqrt() * noise  # photons, and the sensor itself
    is_coloured = inputs.shape[1] == 3
    channels = []
    for channel in inputs.chunk(inputs.shape[1], 1):  # one by one: noise is faster to draw in smaller pieces
        dim = channel * remaining
        dim = dim + (grey - dim) * fade if is_coloured else dim
        channels.append(dim + rng.normal(*channel.shape[1:]).to(inputs.dtype) * sigma)
    return torch.cat(channels, 1)


def _grey(pictures: Tensor) -> Tensor:
    n = pictures.shape[1]
    weights = LUMA if n == 3 else (1 / n,) * n
    grey = pictures[:, :1] * weights[0]
    for k in range(1, n):
        grey = grey + pictures[:, k : k + 1] * weights[k]
    return grey


def _mixed(pictures: Tensor, share: Tensor, colour: tuple[float, float, float]) -> Tensor:
    """A `share` of the pictures' light, and light of a colour, or of its grey, in place of the rest."""
    rest = 1 - share
    if pictures.shape[1] == 3 and len(set(colour)) > 1:
        parts = zip(pictures.chunk(3, 1), colour, strict=True)
        return torch.cat([channel * share + rest * light for channel, light in parts], 1)
    grey = sum(weight * light for weight, light in zip(LUMA, colour, strict=True))
    return (pictures * share).add_(rest * grey)


_weather = partial(Perturbation, inputs="picture", family="weather", moves=False)

WEATHER = (
    _weather(
        "fog",
        (
            Theta("density", 0.0, 1.8, unit="optical depth at the horizon", limits=(0, 20)),
            Theta("patchiness", 0.0, 0.6, unit="share that the density varies by", limits=(0, 1)),
            Theta("scale", 0.2, 1.0, 0.2, unit="size of a bank as a share of the shorter side", limits=(0.02, 10)),
        ),
        fog,
    ),
    _weather(
        "frost",
        (
            Theta("amount", 0.0, 0.6, unit="share of the lens that is iced", limits=(0, 1)),
            Theta("scale", 0.02, 0.06, 0.02, unit="width of a needle, share of the shorter side", limits=(0.005, 1)),
        ),
        frost,
    ),
    _weather(
        "glare",
        (
            Theta("strength", 0.0, 0.9, unit="share of the sensor's range", limits=(0, 1)),
            Theta("x", -0.5, 0.5, unit="shares of the shorter side to the right of the centre", limits=(-10, 10)),
            Theta("y", -0.5, 0.0, -0.5, unit="shares of the shorter side below the centre", limits=(-10, 10)),
            Theta("size", 0.03, 0.12, 0.03, unit="radius as a share of the shorter side", limits=(0.005, 1)),
        ),
        glare,
    ),
    _weather(
        "shadow",
        (
            Theta("strength", 0.0, 0.65, unit="share of the light that is lost", limits=(0, 1)),
            Theta("offset", -0.4, 0.4, unit="shares of the shorter side right of the centre", limits=(-10, 10)),
            Theta("angle", -60.0, 60.0, unit="degrees from the vertical", limits=(-180, 180)),
            Theta("width", 0.3, 0.7, 0.3, unit="share of the shorter side", limits=(0, 20)),
            Theta("softness", 0.02, 0.15, 0.02, unit="width of its edge, share of the shorter side", limits=(0.005, 5)),
        ),
        shadow,
    ),
    _weather(
        "low_light",
        (
            Theta("stops", 0.0, 2.5, unit="halvings of the light", limits=(0, 16)),
            Theta("noise", 0.0, 0.06, unit="sigma at full light, share of the input range", limits=(0, 10)),
            Theta("fade", 0.0, 0.6, unit="share of the colour that is lost", limits=(0, 1)),
        ),
        low_light,
        flickers=True,
    ),
)
