"""The suites that Themis knows by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from themis.errors import UsageError, nearest
from themis.perturb.names import PERTURBATIONS
from themis.suites.definition import SuiteDefinition, leave_out_unfitting, read_suite

N_LEVELS = 5
SMALL_SIDE = 64
"""Pictures whose shorter side is below this are graded at the severities published for pictures of 32 pixels."""
TOO_SLOW = ("cw",)
"""Attacks that are left out of the suite: 303 passes per test."""


class Corruption(NamedTuple):
    """One of the 15 common corruptions as a perturbation: its theta, and their values at severities 1 to 5."""

    name: str
    perturb: str
    theta: tuple[str, ...]
    large: tuple[tuple[Any, ...], ...]
    """As published for ImageNet-C; pictures of 224 pixels."""
    small: tuple[tuple[Any, ...], ...]
    """As published for CIFAR-10-C; pictures of 32 pixels."""
    note: str


SAME, CLOSE, SUBSTITUTE = "same", "close", "substitute"
ANGLES = (-45.0, 45.0)


def _one(*values: float) -> tuple[tuple[float], ...]:
    return tuple((value,) for value in values)


CORRUPTIONS = (
    Corruption(
        "gaussian_noise",
        "gaussian",
        ("sigma",),
        _one(0.08, 0.12, 0.18, 0.26, 0.38),
        _one(0.04, 0.06, 0.08, 0.09, 0.10),
        f"{SAME}: normal noise of the published sigma",
    ),
    Corruption(
        "shot_noise",
        "shot",
        ("sigma",),
        _one(0.129, 0.2, 0.289, 0.447, 0.577),
        _one(0.0447, 0.0632, 0.1, 0.1155, 0.1414),
        f"{CLOSE}: the Poisson distribution of the published photon counts is approximated by the normal one",
    ),
    Corruption(
        "impulse_noise",
        "salt_and_pepper",
        ("share",),
        _one(0.03, 0.06, 0.09, 0.17, 0.27),
        _one(0.01, 0.02, 0.03, 0.05, 0.07),
        f"{CLOSE}: the published share of pixels, with all channels of a pixel replaced together",
    ),
    Corruption(
        "defocus_blur",
        "defocus_blur",
        ("radius",),
        _one(0.0134, 0.0179, 0.0268, 0.0357, 0.04),
        _one(0.0094, 0.0125, 0.0156, 0.0313, 0.04),
        f"{CLOSE}: a disc of the published radius; severity 5 is weaker, a radius of 0.04",
    ),
    Corruption(
        "glass_blur",
        "elastic + gaussian_blur",
        ("amount", "scale", "sigma"),
        (
            (0.013, 0.02, 0.0031),
            (0.018, 0.02, 0.004),
            (0.031, 0.02, 0.0045),
            (0.039, 0.02, 0.0049),
            (0.051, 0.02, 0.0067),
        ),
        (
            (0.064, 0.03, 0.0016),
            (0.064, 0.03, 0.0078),
            (0.064, 0.03, 0.0125),
            (0.09, 0.03, 0.0078),
            (0.09, 0.03, 0.0125),
        ),
        f"{SUBSTITUTE}: a fine elastic warp of the same displacement and a blur, instead of swapped pixels",
    ),
    Corruption(
        "motion_blur",
        "motion_blur",
        ("length", "angle"),
        ((0.03, ANGLES), (0.048, ANGLES), (0.076, ANGLES), (0.09, ANGLES), (0.1, ANGLES)),
        ((0.06, ANGLES), (0.07, ANGLES), (0.08, ANGLES), (0.09, ANGLES), (0.1, ANGLES)),
        f"{CLOSE}: an even line of the same spread, instead of one that fades; severities 4 and 5 are weaker, for "
        "small pictures all, with lines of at most 0.1",
    ),
    Corruption(
        "zoom_blur",
        "zoom_blur",
        ("amount",),
        _one(0.10, 0.15, 0.20, 0.24, 0.30),
        _one(0.05, 0.10, 0.15, 0.20, 0.25),
        f"{SAME}: the average of copies up to the published zoom",
    ),
    Corruption(
        "snow",
        "snow",
        ("density", "size", "brightness"),
        ((0.3, 0.016, 1.0), (0.5, 0.018, 1.0), (0.7, 0.02, 1.0), (0.85, 0.02, 1.0), (1.0, 0.02, 1.0)),
        ((0.1, 0.02, 0.8), (0.2, 0.02, 0.85), (0.3, 0.02, 0.9), (0.45, 0.02, 0.95), (0.6, 0.02, 1.0)),
        f"{SUBSTITUTE}: flakes in layers of depth, at strengths chosen by eye",
    ),
    Corruption(
        "frost",
        "frost",
        ("amount", "scale"),
        ((0.3, 0.04), (0.42, 0.04), (0.5, 0.04), (0.55, 0.04), (0.6, 0.04)),
        ((0.1, 0.06), (0.2, 0.06), (0.3, 0.06), (0.35, 0.06), (0.45, 0.06)),
        f"{SUBSTITUTE}: grown ice, instead of photographs of frost, at strengths chosen by eye",
    ),
    Corruption(
        "fog",
        "fog",
        ("density", "patchiness", "scale"),
        ((1.19, 0.6, 0.5), (1.44, 0.6, 0.5), (1.66, 0.6, 0.5), (1.66, 0.6, 0.4), (1.85, 0.6, 0.3)),
        ((0.23, 0.6, 0.5), (0.51, 0.6, 0.5), (0.71, 0.6, 0.5), (0.89, 0.6, 0.4), (1.19, 0.6, 0.3)),
        f"{CLOSE}: the same light remains on average, but fog is denser towards the horizon",
    ),
    Corruption(
        "brightness",
        "brightness",
        ("shift",),
        _one(0.1, 0.2, 0.3, 0.4, 0.5),
        _one(0.05, 0.1, 0.15, 0.2, 0.3),
        f"{CLOSE}: the published shift of all channels, instead of the value in HSV",
    ),
    Corruption(
        "contrast",
        "contrast",
        ("change",),
        _one(-0.6, -0.7, -0.8, -0.9, -0.95),
        _one(-0.25, -0.5, -0.6, -0.7, -0.85),
        f"{CLOSE}: the published contrast, around the mean of the picture instead of each channel",
    ),
    Corruption(
        "elastic_transform",
        "elastic",
        ("amount", "scale"),
        ((0.024, 1.5), (0.063, 0.2), (0.012, 0.025), (0.016, 0.025), (0.027, 0.025)),
        ((0.005, 0.5), (0.007, 0.5), (0.027, 0.15), (0.036, 0.1), (0.064, 0.08)),
        f"{CLOSE}: the same displacement on average, without the additional affine map",
    ),
    Corruption(
        "pixelate",
        "pixelate",
        ("block",),
        _one(0.00744, 0.00893, 0.01116, 0.01488, 0.01786),
        _one(0.0329, 0.0347, 0.0368, 0.0417, 0.0481),
        f"{CLOSE}: blocks of the published size",
    ),
    Corruption(
        "jpeg_compression",
        "jpeg",
        ("quality",),
        _one(25, 18, 15, 10, 7),
        _one(80, 65, 58, 50, 40),
        f"{SAME}: the published quality",
    ),
)


def corruptions(shape: tuple[int, ...]) -> SuiteDefinition:
    """The 15 common corruptions at severities 1 to 5, for pictures of this shape."""
    is_small = len(shape) >= 3 and min(shape[-2:]) < SMALL_SIDE
    members = []
    for corruption in CORRUPTIONS:
        severities = corruption.small if is_small else corruption.large
        levels = [dict(zip(corruption.theta, severity, strict=True)) for severity in severities]
        members.append(
            {
                "name": corruption.name,
                "perturb": _spanning(corruption.perturb, levels),
                "levels": levels,
                "note": corruption.note,
            }
        )
    source = "CIFAR-10-C, as the pictures are small" if is_small else "ImageNet-C"
    suite = read_suite({"name": "corruptions", "members": members})
    return SuiteDefinition(suite.name, suite.members, (f"Severities 1 to 5 are those of {source}.",))


def _spanning(perturb: str, levels: list[dict[str, Any]]) -> str:
    """The perturbation with ranges from its identity to the strongest of the levels."""
    parts = []
    for name in perturb.split(" + "):
        ranges = []
        for theta in PERTURBATIONS[name].theta:
            values = [level[theta.name] for level in levels if theta.name in level]
            ends = [end for value in values for end in (value if isinstance(value, tuple) else (value,))]
            if ends:
                # A theta that the levels hold constant is searched from its default bound on.
                low, high = min([theta.identity, *ends]), max([theta.identity, *ends])
                low, high = (theta.low, theta.high) if low == high else (low, high)
                ranges.append(f"{theta.name}={low:g}:{high:g}")
        parts.append(f"{name}({', '.join(ranges)})" if ranges else name)
    return " + ".join(parts)


def _family(suite: str, family: str, *, has_levels: bool = True) -> Callable[[tuple[int, ...]], SuiteDefinition]:
    def define(shape: tuple[int, ...]) -> SuiteDefinition:
        names = [
            name
            for name, perturbation in PERTURBATIONS.items()
            if perturbation.family == family and name not in TOO_SLOW
        ]
        return read_suite({"name": suite, "members": names, "levels": N_LEVELS if has_levels else None})

    return define


class NamedSuite(NamedTuple):
    """A suite for inputs of a shape, and what it is, in words."""

    define: Callable[[tuple[int, ...]], SuiteDefinition]
    about: str


SUITES = {
    "corruptions": NamedSuite(corruptions, "the 15 common corruptions, graded at severities 1 to 5"),
    "weather": NamedSuite(_family("weather", "weather"), "rain, snow, fog, frost, glare, shadow and darkness"),
    "camera": NamedSuite(_family("camera", "camera"), "blur, light, colour, compression and faults of the sensor"),
    "noise": NamedSuite(_family("noise", "noise"), "noise of photons, of the sensor and of broken pixels"),
    "geometry": NamedSuite(
        _family("geometry", "geometry"), "rotation, shift, scale, shear, perspective and elastic warps"
    ),
    "signals": NamedSuite(_family("signals", "signal"), "gain, clipping, filters, dropouts and drift of signals"),
    "tables": NamedSuite(_family("tables", "table"), "valid changes of some features of a row, and noise"),
    "attacks": NamedSuite(
        _family("attacks", "attack", has_levels=False), "FGSM, PGD and Auto-PGD; not CW, which is slow"
    ),
}


def choose_suite(source: Any, shape: tuple[int, ...]) -> SuiteDefinition:
    """The suite of a name, a YAML file, a dict or a list of perturbations, for inputs `[...]` of this shape.

    A named suite leaves out what does not fit the inputs; in others that is an error.
    """
    if not isinstance(source, str):
        return read_suite(source)
    if source in SUITES:
        return leave_out_unfitting(SUITES[source].define(shape), shape)
    if source.endswith((".yaml", ".yml")):
        return read_suite(Path(source))
    raise UsageError(
        f"suite must be a known name or a YAML file, got {source!r}: {nearest(source, SUITES)}; to test one "
        f"perturbation, write [{source!r}] or --perturb {source}"
    )
