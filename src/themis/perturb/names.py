"""The table of perturbations, their specifications as text, and a way to apply one outside of a campaign."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from themis.errors import DataError, UsageError, nearest
from themis.perturb.attack import ATTACKS
from themis.perturb.blur import BLUR
from themis.perturb.clips import over_time
from themis.perturb.context import Context
from themis.perturb.geometry import GEOMETRY
from themis.perturb.jpeg import JPEG
from themis.perturb.light import LIGHT
from themis.perturb.noise import NOISE
from themis.perturb.perturbation import (
    OVER_TIME,
    Perturbation,
    Range,
    check_fits,
    check_gradient,
    combine,
    narrowed,
    perturb,
)
from themis.perturb.sensor import SENSOR
from themis.perturb.signal import SIGNAL
from themis.perturb.table import TABLE
from themis.perturb.weather import RAIN, WEATHER
from themis.plugins import Extensible

if TYPE_CHECKING:
    from themis.data.features import Features
    from themis.target.target import AnyTarget

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


PART = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)


def read_perturbation(text: str, known: Mapping[str, Perturbation], *, imports: bool = True) -> Perturbation:
    """Read names joined by `+`, each optionally with ranges (`LOW:HIGH`) or fixed values of its theta in brackets.

    A name with a colon, `module:perturbation`, is one of the user's own; it is refused if nothing may be imported.
    `over_time` has a specification in brackets.
    """
    parts = [_read_part(name, ranges, known, imports=imports) for name, ranges in _read_names(text)]
    return parts[0] if len(parts) == 1 else combine(*parts)


def own_perturbations(text: str) -> list[str]:
    """The names in a specification that are of the user's own, for which modules have to be imported."""
    try:
        names = _read_names(text)
    except UsageError:  # it cannot be read, so nothing would be imported
        return []
    own = []
    for name, inside in names:
        own += own_perturbations(inside) if name == OVER_TIME and inside else [name] if ":" in name else []
    return own


def _read_names(text: str) -> list[tuple[str, str | None]]:
    """Each name with the text in brackets after it."""
    names = []
    for part in map(str.strip, _split(text, "+")):
        match = PART.fullmatch(part)
        if match is None:
            raise UsageError(
                f"perturbation must be names joined by +, each optionally with theta in brackets, got {part!r}: write "
                "for instance rain(angle=-10:10) + fog"
            )
        names.append((match[1].strip(), match[2]))
    return names


def _read_part(name: str, ranges: str | None, known: Mapping[str, Perturbation], *, imports: bool) -> Perturbation:
    if name == OVER_TIME:
        if ranges is None or not ranges.strip():
            raise UsageError(f"{OVER_TIME} must have a perturbation in brackets, got none: write {OVER_TIME}(rotate)")
        return over_time(read_perturbation(ranges, known, imports=imports))
    if ":" in name and not imports:
        raise UsageError(f"perturbation must be a known name, got {name!r}: nothing is imported here")
    chosen = _load_own(name) if ":" in name else known.get(name)
    if chosen is None:
        hint = nearest(name, known).partition("known:")[0]
        raise UsageError(
            f"perturbation must be a known name or module:name, got {name!r}: {hint}themis perturbations lists them"
        )
    if ranges is None or not ranges.strip():
        return chosen
    return narrowed(chosen, dict(_read_range(part, name) for part in _split(ranges, ",")))


def _load_own(name: str) -> Perturbation:
    from themis.target.loaders.factory import call_factory

    try:
        loaded = call_factory(name, "perturb")
    except DataError as error:
        raise UsageError(
            f"--perturb {name!r} must be a themis.Perturbation, or a function that returns one: {error}"
        ) from error
    if not isinstance(loaded, Perturbation):
        raise UsageError(f"--perturb {name!r} must be a themis.Perturbation, got {type(loaded).__name__}")
    return replace(loaded, name=name, parts=())


def _read_range(text: str, name: str) -> tuple[str, Range]:
    theta, _, value = text.partition("=")
    try:
        ends = [float(end) for end in value.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or not all(map(math.isfinite, ends)) or ends[0] > ends[-1]:
        raise UsageError(
            f"theta of {name!r} must be NAME=LOW:HIGH, or NAME=VALUE to hold it fixed, got {text.strip()!r}"
        )
    return theta.strip(), ends[0] if len(ends) == 1 else (ends[0], ends[1])


def _split(text: str, separator: str) -> list[str]:
    """`text` split at each `separator` outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def disturb(
    perturbation: str | Perturbation,
    inputs: Tensor,
    theta: Mapping[str, float | Tensor],
    *,
    noise_seed: int = 0,
    bounds: tuple[float, float] = (0.0, 1.0),
    target: AnyTarget | None = None,
    labels: Tensor | None = None,
    features: Features | None = None,
) -> Tensor:
    """The `inputs [tests, ...]`, disturbed; each theta is a number or `[tests]`, and its identity if it is left out.

    Input `k` has the noise seed `noise_seed + k`. An attack needs the target; `features` are those of a table.
    """
    perturbation = choose_perturbation(perturbation)
    check_fits(perturbation, tuple(inputs.shape[1:]))
    perturbation = perturbation.fitted(tuple(inputs.shape[1:]))
    if not inputs.is_floating_point():
        raise UsageError(f"inputs must be floating-point numbers, got {inputs.dtype}: write inputs.float() / 255")
    values = _theta_columns(perturbation, theta, inputs)
    seeds = torch.arange(noise_seed, noise_seed + len(inputs), device=inputs.device)
    if target is None:
        return perturb(perturbation, inputs, values, seeds, Context(bounds, features=features))
    check_gradient(perturbation, target)
    with target.opened():
        return perturb(perturbation, inputs, values, seeds, _attack_context(target, inputs, labels, features))


def _theta_columns(perturbation: Perturbation, theta: Mapping[str, float | Tensor], inputs: Tensor) -> Tensor:
    known = [parameter.name for parameter in perturbation.theta]
    for name in theta:
        if name not in known:
            raise UsageError(f"theta {name!r} of {perturbation.name!r} must be one it has: {nearest(name, known)}")
    columns = []
    for parameter in perturbation.theta:
        name, low, high = parameter.name, parameter.low, parameter.high
        value = torch.as_tensor(theta.get(name, parameter.identity), dtype=torch.float32, device=inputs.device)
        if value.ndim and value.shape != inputs.shape[:1]:
            raise UsageError(
                f"theta {name!r} must be a number or one for each of {len(inputs)} inputs, got {list(value.shape)}"
            )
        outside = value.detach()[(value < np.float32(low)) | (value > np.float32(high))]
        if len(outside.reshape(-1)):
            lowest, highest = parameter.limits
            raise UsageError(
                f"theta {name!r} of {perturbation.name!r} must lie in {low:g}..{high:g}, got "
                f"{float(outside.reshape(-1)[0]):g}: widen its range with {_widened(perturbation, name)}, within "
                f"{lowest:g}..{highest:g}"
            )
        columns.append(value.expand(len(inputs)))
    return torch.stack(columns, 1)


def _widened(perturbation: Perturbation, theta: str) -> str:
    """How a user widens the range of theta."""
    plain, bracket, inside = perturbation.name.partition("(")
    if plain != OVER_TIME:
        return f"{plain}({theta}=LOW:HIGH)"
    inner = inside.partition("(")[0].rstrip(")")
    return f"{plain}{bracket}{inner}({theta.rpartition('_')[0]}=LOW:HIGH))"


def _attack_context(target: AnyTarget, inputs: Tensor, labels: Tensor | None, features: Features | None) -> Context:
    from themis.oracle import choose_oracle

    with torch.no_grad():
        clean = target.forward(inputs).float()
    oracle = choose_oracle(target.oracle).settle(clean, labels)

    return Context.of_task(target, oracle, clean, labels, features)
