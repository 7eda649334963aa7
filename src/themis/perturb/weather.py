"""Weather: fog, frost on the lens, glare of the sun, shadows and darkness; rain, snow, and raindrops on the lens."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector, columns
from themis.perturb.picture import LUMA, eased, field, places, sample_rotated, side, warp, weighted_sum

MAX_CLOUD_SIDE = 56
"""Largest shorter side, in pixels, at which clouds are drawn; they are enlarged for larger pictures."""
HORIZON_HEIGHT = 0.6
"""Height of the horizon, as a share of the picture's height."""


WEATHER: list[Perturbation] = []
_weather = collector(WEATHER, inputs="picture", family="weather", moves=False)


@_weather(
    Theta("density", 0.0, 1.8, unit="optical depth at the horizon", limits=(0, 20)),
    Theta("patchiness", 0.0, 0.6, unit="share that the density varies by", limits=(0, 1)),
    Theta("scale", 0.2, 1.0, 0.2, unit="size of a bank as a share of the shorter side", limits=(0.02, 10)),
)
def fog(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Fog in drifting banks: exp(-density * depth) of the light remains, and grey replaces the rest.

    The depth of the scene is assumed to grow from the bottom of the picture up to a horizon above its middle.
    """
    density, patchiness, scale = columns(theta, inputs)
    banks = 1 + patchiness * (eased(_clouds(inputs, rng, scale) * 2 - 0.5) * 2 - 1)
    up = 0.5 - places(inputs)[1] * (side(inputs) / inputs.shape[2])
    depth = 0.35 + 0.65 * eased(up / HORIZON_HEIGHT)
    return _mixed(inputs, (-density * depth * banks).exp(), (0.85, 0.85, 0.85))


def _clouds(pictures: Tensor, rng: Rng, scale: Tensor) -> Tensor:
    """A smooth random field, drawn at no higher resolution than necessary."""
    height, width = pictures.shape[2:]
    times = max(1, side(pictures) // MAX_CLOUD_SIDE)
    coarse = pictures.new_empty(len(pictures), 1, -(-height // times), -(-width // times))
    clouds = field(coarse, rng, scale, octaves=3)
    return F.interpolate(clouds, (height, width), mode="bilinear", align_corners=False) if times > 1 else clouds


@_weather(
    Theta("amount", 0.0, 0.6, unit="share of the lens that is iced", limits=(0, 1)),
    Theta("scale", 0.02, 0.06, 0.02, unit="width of a needle, share of the shorter side", limits=(0.005, 1)),
)
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


@_weather(
    Theta("strength", 0.0, 0.9, unit="share of the sensor's range", limits=(0, 1)),
    Theta("x", -0.5, 0.5, unit="shares of the shorter side to the right of the centre", limits=(-10, 10)),
    Theta("y", -0.5, 0.0, -0.5, unit="shares of the shorter side below the centre", limits=(-10, 10)),
    Theta("size", 0.03, 0.12, 0.03, unit="radius as a share of the shorter side", limits=(0.005, 1)),
)
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


@_weather(
    Theta("strength", 0.0, 0.65, unit="share of the light that is lost", limits=(0, 1)),
    Theta("offset", -0.4, 0.4, unit="shares of the shorter side right of the centre", limits=(-10, 10)),
    Theta("angle", -60.0, 60.0, unit="degrees from the vertical", limits=(-180, 180)),
    Theta("width", 0.3, 0.7, 0.3, unit="share of the shorter side", limits=(0, 20)),
    Theta("softness", 0.02, 0.15, 0.02, unit="width of its edge, share of the shorter side", limits=(0.005, 5)),
)
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


@_weather(
    Theta("stops", 0.0, 2.5, unit="halvings of the light", limits=(0, 16)),
    Theta("noise", 0.0, 0.06, unit="sigma at full light, share of the input range", limits=(0, 10)),
    Theta("fade", 0.0, 0.6, unit="share of the colour that is lost", limits=(0, 1)),
    flickers=True,
)
def low_light(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A dark scene: less light, noise of the few remaining photons and of the sensor, and paler colours."""
    stops, noise, fade = columns(theta, inputs)
    remaining = torch.exp(stops * (-math.log(2) / 2.2))  # of a value as displays encode it; exp2 rounds by position
    grey = as_grey(inputs) * remaining
    sigma = (grey * 0.5 + 0.1).sqrt() * noise  # photons, and the sensor itself
    is_coloured = inputs.shape[1] == 3
    channels = []
    for channel in inputs.chunk(inputs.shape[1], 1):  # one by one: noise is faster to draw in smaller pieces
        dim = channel * remaining
        dim = dim + (grey - dim) * fade if is_coloured else dim
        channels.append(dim + rng.normal(*channel.shape[1:]).to(inputs.dtype) * sigma)
    return torch.cat(channels, 1)


def as_grey(pictures: Tensor) -> Tensor:
    """The brightness of each pixel, `[tests, 1, height, width]`."""
    n = pictures.shape[1]
    return weighted_sum(pictures, LUMA if n == 3 else (1 / n,) * n)


def _mixed(pictures: Tensor, share: Tensor, colour: tuple[float, float, float]) -> Tensor:
    """Keep a `share` of the pictures' light, and replace the rest by a colour, or by its grey if there is no colour."""
    rest = 1 - share
    if pictures.shape[1] == 3 and len(set(colour)) > 1:
        parts = zip(pictures.chunk(3, 1), colour, strict=True)
        return torch.cat([channel * share + rest * light for channel, light in parts], 1)
    grey = sum(weight * light for weight, light in zip(LUMA, colour, strict=True))
    return (pictures * share).add_(rest * grey)


# Drops and flakes lie on a lattice, one per cell, at a random position inside the cell. A layer therefore takes a few
# passes over its pixels, however many drops it has. Falling drops are drawn upright on a sheet, which is then rotated.

SOFT_SHARE = 0.25
"""Share of the drops that are only partly visible, which makes the result smooth in the density."""
SMALL_SIDE = 64
"""Shorter side, in pixels, up to which single pixels matter."""
SHEET_MARGIN = 1.15
"""Size of the sheet relative to the picture."""
DROP_SPREAD = 0.45
"""Standard deviation of drops on a lens around their centre, as a share of the shorter side."""
LONGEST_STREAK = 0.5
"""Length of the cells of the nearest streaks, as a share of the shorter side."""


class DropLayer(NamedTuple):
    """A layer of drops or flakes; layers are ordered from near to far."""

    size: float
    """The size of drops relative to the nearest layer."""
    opacity: float
    share: float = 1.0
    """The share of cells that can have a drop."""
    power: int = 1
    """How fast a drop fades towards its edge."""


STREAKS = (DropLayer(1.0, 0.85), DropLayer(0.7, 0.7), DropLayer(0.45, 0.5))
FLAKES = (DropLayer(1.0, 1.5, 0.3, 2), DropLayer(0.65, 1.35, 0.3, 2), DropLayer(0.4, 1.2, 0.3, 2))


@_weather(
    Theta("density", 0.0, 1.0, unit="share of the drops there can be", limits=(0, 1)),
    Theta("length", 0.1, 0.3, 0.1, unit="share of the shorter side", limits=(0.01, LONGEST_STREAK)),
    Theta("angle", -35.0, 35.0, unit="degrees from the vertical, down to the left", limits=(-180, 180)),
    Theta("brightness", 0.5, 0.9, 0.5, unit="opacity of a streak", limits=(0, 1)),
    Theta("depth", 0.0, 1.0, unit="share of the layers behind the nearest", limits=(0, 1)),
    flickers=True,
)
def rain(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Streaks of falling rain, large near the camera and fine far away, and the grey veil of the rain behind them."""
    density, length, angle, brightness, depth = columns(theta, inputs)
    unit, pixel = _grain(inputs)
    step = max(1.0, 0.012 * unit)  # rows may be coarse, because a streak has no detail along its length
    sheet = _sheet(inputs, step)
    streaks = torch.zeros_like(density)
    for k, layer in enumerate(STREAKS):
        near = layer.size * unit
        cell = max(2, round(LONGEST_STREAK * near / step)), max(4 * pixel, round(0.05 * near))
        half = length * (0.5 * near / step), torch.full_like(length, max(0.95 * pixel, 0.006 * near))
        visible = brightness * layer.opacity
        visible = eased(depth * (len(STREAKS) - 1) - (k - 1)) * visible if k else visible
        streaks = streaks + _drops(rng, sheet, cell, half, density, visible, layer)
    streaks = _rotated(inputs, streaks, angle).clamp(max=1)
    return _veiled(inputs, 0.6, density * depth * 0.3, 0.9, streaks)


@_weather(
    Theta("density", 0.0, 1.0, unit="share of the flakes there can be", limits=(0, 1)),
    Theta("size", 0.008, 0.02, 0.008, unit="radius as a share of the shorter side", limits=(0.002, 0.026)),
    Theta("angle", -45.0, 45.0, unit="degrees from the vertical, down to the left", limits=(-180, 180)),
    Theta("brightness", 0.6, 1.0, 0.6, unit="opacity of a flake", limits=(0, 1)),
    flickers=True,
)
def snow(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Falling snowflakes, large near the camera and fine far away, which also whiten the air."""
    density, size, angle, brightness = columns(theta, inputs)
    unit, pixel = _grain(inputs)
    sheet = _sheet(inputs, 1.0)
    flakes = torch.zeros_like(density)
    for layer in FLAKES if pixel == 1 else FLAKES[:-1]:  # in small pictures the last layer would look the same
        near = layer.size * unit
        cell = max(4 * pixel, round(0.13 * near)), max(4 * pixel, round(0.105 * near))
        wide = ((size * (2 * near)).square() + pixel**2).sqrt()  # at least a pixel
        flakes = flakes + _drops(rng, sheet, cell, (wide * 1.25, wide), density, brightness * layer.opacity, layer)
    flakes = torch.minimum(_rotated(inputs, flakes, angle), brightness)
    return _veiled(inputs, 0.9, density * 0.25, 1.0, flakes)


def _grain(pictures: Tensor) -> tuple[int, int]:
    """Columns of the sheet per shorter side and per pixel; small pictures have two columns per pixel."""
    pixel = 1 if side(pictures) > SMALL_SIDE else 2
    return side(pictures) * pixel, pixel


def _sheet(pictures: Tensor, step: float) -> tuple[int, int]:
    """The number of rows, each `step` columns high, and columns of the sheet."""
    pixel = _grain(pictures)[1]
    height, width = (SHEET_MARGIN * pixel * length for length in pictures.shape[2:])
    return math.ceil(height / step), math.ceil(width)


def _drops(
    rng: Rng,
    sheet: tuple[int, int],
    cell: tuple[int, int],
    half: tuple[Tensor, Tensor],
    density: Tensor,
    opacity: Tensor,
    layer: DropLayer,
) -> Tensor:
    """A layer of drops, `[tests, 1, rows, columns]`; `opacity` is that of their centres.

    cell: rows and columns per cell. half: half the size of the largest drops, in rows and columns.
    """
    down, across = (math.ceil(total / size) for total, size in zip(sheet, cell, strict=True))
    chance, row, column, small = rng.uniform(4, down, 1, across, 1).to(density.dtype).unbind(1)
    presence = eased((density[:, :, None] * (1 + SOFT_SHARE) - chance / layer.share) / SOFT_SHARE) * opacity[:, :, None]

    def profile(reach: Tensor, position: Tensor, n: int, shape: tuple[int, ...]) -> Tensor:
        reach = (reach[:, :, None] * (0.6 + 0.4 * small)).clamp(max=n / 2)
        middle = n / 2 + (2 * position - 1) * (n / 2 - reach)
        at = torch.arange(n, dtype=density.dtype, device=density.device) + 0.5
        fade = (1 - ((at.view(shape) - middle) / reach).square()).clamp(min=0)
        return fade if layer.power == 1 else fade**layer.power

    along = profile(half[0], row, cell[0], (-1, 1, 1))
    drops = along * (profile(half[1], column, cell[1], (-1,)) * presence)
    return drops.view(len(density), 1, down * cell[0], across * cell[1])[:, :, : sheet[0], : sheet[1]]


def _rotated(pictures: Tensor, sheet: Tensor, angle: Tensor) -> Tensor:
    height, width = (SHEET_MARGIN * length / side(pictures) for length in pictures.shape[2:])
    return sample_rotated(sheet, pictures, angle * (math.pi / 180), width, height)


@_weather(
    Theta("count", 0.0, 16.0, unit="large drops", limits=(0, 100)),
    Theta("radius", 0.05, 0.11, 0.05, unit="share of the shorter side", limits=(0.01, 0.125)),
    Theta("x", -0.5, 0.5, unit="shares of the shorter side to the right of the centre", limits=(-3, 3)),
    Theta("y", -0.5, 0.5, unit="shares of the shorter side below the centre", limits=(-3, 3)),
    Theta("refraction", 1.0, 4.0, 1.0, unit="shift per distance from the drop's centre", limits=(0, 10)),
)
def raindrops(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Drops of water on the lens, large and small, that refract the scene, in the end upside down."""
    count, radius, x, y, refraction = columns(theta, inputs)
    right, below = places(inputs)
    hidden, shade, glint, beside, under = _domes(inputs, rng, (x, y), count, radius, cell=0.25)
    refracted = hidden * shade
    right, below = right - refraction * beside, below - refraction * under
    if side(inputs) > SMALL_SIDE:  # fine drops in between would not be visible in smaller pictures
        clear = 1 - hidden
        inside, shade, _, beside, under = _domes(inputs, rng, (x, y), count * 6, radius * 0.3, cell=0.085)
        hidden, refracted = hidden + clear * inside, refracted + clear * inside * shade
        bend = refraction * clear
        right, below = right - bend * beside, below - bend * under
    return warp(inputs, right, below).mul_(refracted).add_(inputs * (1 - hidden)).add_(glint)


def _domes(
    pictures: Tensor, rng: Rng, middle: tuple[Tensor, Tensor], count: Tensor, radius: Tensor, cell: float
) -> tuple[Tensor, ...]:
    """About `count` drops on the lens around `middle`, as properties of each pixel.

    Returns whether a drop covers the pixel, how much light the drop transmits and reflects, and the offsets from the
    centre of the drop to the right and below.
    """
    height, width = pictures.shape[2:]
    unit = side(pictures)
    size = max(2, round(cell * unit))
    room = size / unit / 2
    down, across = math.ceil(height / size), math.ceil(width / size)
    chance, row, column, small = rng.uniform(4, down, 1, across, 1).to(pictures.dtype).unbind(1)
    share = _distribution(middle[1], down, size / unit, height / unit).view(-1, down, 1, 1, 1)
    share = share * _distribution(middle[0], across, size / unit, width / unit).view(-1, 1, 1, across, 1)
    presence = eased((share * count[:, :, None] * (1 + SOFT_SHARE) - chance) / SOFT_SHARE)
    reach = (radius[:, :, None] * (0.55 + 0.45 * small)).clamp(max=room) * (0.4 + 0.6 * presence)
    at = (torch.arange(size, dtype=pictures.dtype, device=pictures.device) + 0.5) / unit - room
    below = (at.view(-1, 1, 1) - (2 * row - 1) * (room - reach)) / reach
    right = (at - (2 * column - 1) * (room - reach)) / reach
    off = right * right * 1.2 + below * below
    inside = eased((1 - off) * 3) * presence
    spot = (1 - ((right + 0.35).square() + (below + 0.4).square()) * 16).clamp(min=0)
    parts = (inside, 1 - 0.55 * off * off, spot * (presence * 0.8), inside * (right * reach), inside * (below * reach))

    def joined(part: Tensor) -> Tensor:
        return part.view(len(pictures), 1, down * size, across * size)[:, :, :height, :width]

    return tuple(joined(part) for part in parts)


def _distribution(middle: Tensor, cells: int, size: float, length: float) -> Tensor:
    """The distribution of the drops over rows or columns of cells, `[tests, cells]`; it sums to 1."""
    at = (torch.arange(cells, dtype=middle.dtype, device=middle.device) + 0.5) * size - length / 2
    weight = (((at - middle[:, 0, 0]) / DROP_SPREAD).square() * -0.5).exp()
    return weight / weight.cumsum(1)[:, -1:]  # unlike sum, adds in the same order for any number of tests


def _veiled(pictures: Tensor, far: float, veil: Tensor, near: float, alpha: Tensor) -> Tensor:
    """Cover the pictures with a veil of grey `far`, and then with grey `near` of opacity `alpha`, in one pass."""
    light = alpha * (near - veil * far) + veil * far
    return (pictures * ((1 - alpha) * (1 - veil))).add_(light)
