"""The table of perturbations."""

from __future__ import annotations

from themis.errors import UsageError
from themis.perturb.attack import ATTACKS
from themis.perturb.blur import BLUR
from themis.perturb.geometry import GEOMETRY
from themis.perturb.jpeg import JPEG
from themis.perturb.light import LIGHT
from themis.perturb.noise import NOISE
from themis.perturb.perturbation import Perturbation
from themis.perturb.rain import RAIN
from themis.perturb.sensor import SENSOR
from themis.perturb.signal import SIGNAL
from themis.perturb.spec import read_perturbation
from themis.perturb.table import TABLE
from themis.perturb.weather import WEATHER
from themis.plugins import Extensible

FAMILIES: tuple[tuple[Perturbation, ...], ...] = (
    NOISE,
    BLUR,
    LIGHT,
    JPEG,
    SENSOR,
    RAIN,
    WEATHER,
    GEOMETRY,
    ATTACKS,
    TABLE,
    SIGNAL,
)

PERTURBATIONS: dict[str, Perturbation] = {
    perturbation.name: perturbation for family in FAMILIES for perturbation in family
}

ALIASES = {"blur": "gaussian_blur", "noise": "gaussian", "pgd_linf": "pgd", "cw_l2": "cw"}
"""Further names by which some perturbations are known."""
KNOWN: Extensible[Perturbation] = Extensible(
    "themis.perturbations", PERTURBATIONS | {alias: PERTURBATIONS[name] for alias, name in ALIASES.items()}
)
"""All names, with those that packages add."""


def choose_perturbation(
    perturbation: str | Perturbation, magnitude: float | None = None, *, imports: bool = True
) -> Perturbation:
    """The perturbation of a specification (`rain`, `rain(angle=-10:10) + fog`, `mine:BAND`), at a magnitude.

    `imports`: whether modules of the user's own may be imported.
    """
    if isinstance(perturbation, str):
        perturbation = read_perturbation(perturbation, KNOWN, imports=imports)
    if not isinstance(perturbation, Perturbation):
        raise UsageError(
            "perturbation must be a name, such as 'gaussian' or 'rain + fog', or a Perturbation, got "
            f"{type(perturbation).__name__}: wrap a function of yours as themis.Perturbation(name, theta, function)"
        )
    return perturbation.at(magnitude)
