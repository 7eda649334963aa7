"""The suites that Themis knows by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from themis.errors import UsageError, nearest
from themis.perturb.names import PERTURBATIONS
from themis.suites.definition import SuiteDefinition, leave_out_unfitting, read_suite
from themis.target.target import AnyTarget

N_LEVELS = 5
SMALL_SIDE = 64
"""Pictures whose shorter side is below this are graded at the severities published for pictures of 32 pixels."""
TOO_SLOW = ("cw", "square", "square_label")
"""Attacks that are left out of the suite: 303 passes per test, and 100."""
CORRUPTIONS = Path(__file__).with_name("corruptions.json")
"""The members of the suite corruptions, for `large` pictures and for `small` ones.

Levels are severities 1 to 5 as published for ImageNet-C (224 pixels) and CIFAR-10-C (32 pixels). Ranges reach from the
identity to the strongest of them; where they hold a theta constant, from its default bound on. The first word of a note
tells how close a member is to the published corruption: same, close or a substitute.
"""


class NamedSuite(NamedTuple):
    """The perturbations of a family as a suite, and what they are, in words."""

    family: str
    about: str


SUITES = {
    "corruptions": NamedSuite("", "the 15 common corruptions, graded at severities 1 to 5"),
    "weather": NamedSuite("weather", "rain, snow, fog, frost, glare, shadow and darkness"),
    "camera": NamedSuite("camera", "blur, light, colour, compression and faults of the sensor"),
    "noise": NamedSuite("noise", "noise of photons, of the sensor and of broken pixels"),
    "geometry": NamedSuite("geometry", "rotation, shift, scale, shear, perspective and elastic warps"),
    "signals": NamedSuite("signal", "gain, clipping, filters, dropouts and drift of signals"),
    "tables": NamedSuite("table", "valid changes of some features of a row, and noise"),
    "attacks": NamedSuite("attack", "FGSM, PGD and Auto-PGD; not CW and Square, which are slow"),
}


def choose_suite(source: Any, shape: tuple[int, ...], target: AnyTarget | None = None) -> SuiteDefinition:
    """The suite of a name, a YAML file, a dict or a list of perturbations, for inputs `[...]` of this shape.

    A named suite leaves out what does not fit the inputs or the target; in others that is an error.
    """
    if not isinstance(source, str):
        return read_suite(source)
    if source == "corruptions":
        return leave_out_unfitting(_corruptions(shape), shape, target)
    if source in SUITES:
        family = SUITES[source].family
        members = [name for name, of in PERTURBATIONS.items() if of.family == family and name not in TOO_SLOW]
        levels = None if family == "attack" else N_LEVELS
        suite = read_suite({"name": source, "members": members, "levels": levels})
        return leave_out_unfitting(suite, shape, target)
    if source.endswith((".yaml", ".yml")):
        return read_suite(Path(source))
    raise UsageError(
        f"suite must be a known name or a YAML file, got {source!r}: {nearest(source, SUITES)}; to test one "
        f"perturbation, write [{source!r}] or --perturb {source}"
    )


def _corruptions(shape: tuple[int, ...]) -> SuiteDefinition:
    is_small = len(shape) >= 3 and min(shape[-2:]) < SMALL_SIDE
    members = json.loads(CORRUPTIONS.read_text("utf-8"))["small" if is_small else "large"]
    source = "CIFAR-10-C, as the pictures are small" if is_small else "ImageNet-C"
    suite = read_suite({"name": "corruptions", "members": members})
    return SuiteDefinition(suite.name, suite.members, (f"Severities 1 to 5 are those of {source}.",))
