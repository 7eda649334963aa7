"""The table of perturbations, their specifications as text, and `disturb`, which applies one without a campaign."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from themis.data.features import Features
from themis.errors import DataError, UsageError, nearest
from themis.perturb.attack import ATTACKS, QUERY_ATTACKS
from themis.perturb.camera import CAMERA
from themis.perturb.context import Context
from themis.perturb.corruption import CORRUPTIONS
from themis.perturb.distribution import Distribution, read_distribution
from themis.perturb.geometry import GEOMETRY
from themis.perturb.noise import NOISE
from themis.perturb.perturbation import (
    OVER_TIME,
    Perturbation,
    Range,
    check_fits,
    check_gradient,
    combine,
    narrowed,
    over_time,
    perturb,
    with_queries,
)
from themis.perturb.signal import SIGNAL
from themis.perturb.table import TABLE
from themis.perturb.weather import WEATHER
from themis.plugins import Extensible
from themis.target.target import AnyTarget

PERTURBATIONS: dict[str, Perturbation] = {
    perturbation.name: perturbation
    for family in (NOISE, CAMERA, WEATHER, GEOMETRY, CORRUPTIONS, ATTACKS, QUERY_ATTACKS, TABLE, SIGNAL)
    for perturbation in family
}

ALIASES = {"blur": "gaussian_blur", "noise": "gaussian", "pgd_linf": "pgd", "cw_l2": "cw"}
"""Other names of perturbations."""
ALL_PERTURBATIONS: Extensible[Perturbation] = Extensible(
    "themis.perturbations", PERTURBATIONS | {alias: PERTURBATIONS[name] for alias, name in ALIASES.items()}
)
"""Perturbations by name, including aliases and those that packages add."""
TRANSFORMS: Extensible[Callable[[str, str], Perturbation]] = Extensible("themis.transforms", {})
"""Functions that make perturbations from transforms of other packages, by the prefix before the colon."""


def choose_perturbation(
    perturbation: str | Perturbation, magnitude: float | None = None, *, imports: bool = True
) -> Perturbation:
    """Choose a perturbation by its specification (`rain`, `rain(angle=-10:10) + fog`, `mine:BAND`) and magnitude.

    `imports`: whether user modules may be imported.
    """
    if isinstance(perturbation, str):
        if not imports and (own := own_perturbations(perturbation)):
            raise UsageError(f"perturbation must be a known name, got {own[0]!r}: nothing is imported here")
        perturbation = read_perturbation(perturbation)
    if not isinstance(perturbation, Perturbation):
        raise UsageError(
            "perturbation must be a name, such as 'gaussian' or 'rain + fog', or a Perturbation, got "
            f"{type(perturbation).__name__}: wrap a function of yours as themis.Perturbation(name, theta, function)"
        )
    return perturbation.at(magnitude)


PART_PATTERN = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)


def read_perturbation(text: str) -> Perturbation:
    """Read names joined by `+`, each optionally with ranges (`LOW:HIGH`) or fixed values of its theta in brackets.

    A name with a colon, `module:perturbation`, is a perturbation of the user's, or a transform of another package with
    its arguments in brackets. `over_time` has another specification in brackets.
    """
    parts = [_read_part(name, inside or "") for name, inside in _read_names(text)]
    return parts[0] if len(parts) == 1 else combine(*parts)


def own_perturbations(text: str) -> list[str]:
    """The names in a specification that are the user's, for which modules have to be imported."""
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
    for part in map(str.strip, split_outside(text, "+")):
        match = PART_PATTERN.fullmatch(part)
        if match is None:
            raise UsageError(
                f"perturbation must be names joined by +, each optionally with theta in brackets, got {part!r}: write "
                "for instance rain(angle=-10:10) + fog"
            )
        names.append((match[1].strip(), match[2]))
    return names


def _read_part(name: str, inside: str) -> Perturbation:
    if name == OVER_TIME:
        if not inside.strip():
            raise UsageError(f"{OVER_TIME} must have a perturbation in brackets, got none: write {OVER_TIME}(rotate)")
        return over_time(read_perturbation(inside))
    package, _, transform = name.partition(":")
    if package in TRANSFORMS:
        return TRANSFORMS[package](transform, inside)
    if ":" not in name and name not in ALL_PERTURBATIONS:
        hint = nearest(name, ALL_PERTURBATIONS).partition("known:")[0]
        raise UsageError(
            f"perturbation must be a known name or module:name, got {name!r}: {hint}see themis perturbations"
        )
    chosen = _load_own(name) if ":" in name else ALL_PERTURBATIONS[name]
    if not inside.strip():
        return chosen
    ranges: dict[str, Range] = {}
    distributions: dict[str, Distribution] = {}
    for part in split_outside(inside, ","):
        theta, tilde, distribution = part.partition("~")
        if tilde:
            distributions[theta.partition("=")[0].strip()] = read_distribution(distribution)
        if not tilde or "=" in theta:
            ranges.update([_read_range(theta, name)])
    queries = ranges.pop("queries", None) if chosen.has_queries else None
    if ranges or distributions:
        chosen = narrowed(chosen, ranges, distributions)
    return chosen if queries is None else with_queries(chosen, queries)


def _load_own(name: str) -> Perturbation:
    from themis.target.loaders.factory import call_factory

    try:
        loaded = call_factory(name, "perturb")
    except DataError as error:
        raise UsageError(f"--perturb {name!r} must be, or return, a themis.Perturbation: {error}") from error
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
            f"theta of {name!r} must be NAME=LOW:HIGH, NAME=VALUE or NAME~DISTRIBUTION, with finite numbers and "
            f"LOW not above HIGH, got {text.strip()!r}"
        )
    return theta.strip(), ends[0] if len(ends) == 1 else (ends[0], ends[1])


def split_outside(text: str, separator: str) -> list[str]:
    """Split `text` at each `separator` outside brackets."""
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
    """Disturb `inputs [tests, ...]`; each theta is a number or `[tests]`, and by default its identity.

    Input `k` has the noise seed `noise_seed + k`. An attack needs the target, a perturbation of tables the `features`.
    """
    perturbation = choose_perturbation(perturbation)
    check_fits(perturbation, tuple(inputs.shape[1:]))
    perturbation = perturbation.fitted(tuple(inputs.shape[1:]))
    if not inputs.is_floating_point():
        raise UsageError(f"inputs must be floating-point numbers, got {inputs.dtype}: write inputs.float() / 255")
    values = theta_columns(perturbation, theta, inputs)
    seeds = torch.arange(noise_seed, noise_seed + len(inputs), device=inputs.device)
    if target is None:
        return perturb(perturbation, inputs, values, seeds, Context(bounds, features=features))
    from themis.oracle import choose_oracle

    check_gradient(perturbation, target)
    with target.opened():
        with torch.no_grad():
            clean = target.forward(inputs).float()
        oracle = choose_oracle(target.oracle).settle(clean, labels)
        return perturb(perturbation, inputs, values, seeds, Context.of_task(target, oracle, clean, labels, features))


def theta_columns(perturbation: Perturbation, theta: Mapping[str, float | Tensor], inputs: Tensor) -> Tensor:
    """Theta `[tests, dimensions]` from values by name; each is a number or `[tests]`, and by default its identity."""
    perturbation.check_names(theta)
    columns = []
    for parameter in perturbation.theta:
        name, low, high = parameter.name, parameter.low, parameter.high
        value = torch.as_tensor(theta.get(name, parameter.identity), dtype=torch.float32, device=inputs.device)
        if value.ndim and value.shape != inputs.shape[:1]:
            raise UsageError(
                f"theta {name!r} must be a number or one for each of {len(inputs)}, got {list(value.shape)}"
            )
        outside = value.detach()[(value < np.float32(low)) | (value > np.float32(high))].reshape(-1)
        if len(outside):
            lowest, highest = parameter.limits
            raise UsageError(
                f"theta {name!r} of {perturbation.name!r} must lie in {low:g}..{high:g}, got {float(outside[0]):g}: "
                f"widen its range in the brackets of its name, as in rain(angle=LOW:HIGH), within "
                f"{lowest:g}..{highest:g}"
            )
        columns.append(value.expand(len(inputs)))
    return torch.stack(columns, 1)
