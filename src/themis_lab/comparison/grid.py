"""Grids of magnitudes: the paper's, and one with error rates from 10 to 90% on seeds that are used for nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from themis.errors import DataError, UsageError
from themis.perturb import Perturbation, Theta
from themis.text import split_list
from themis_lab.comparison.plan import GIVEN, GRID, PAPER, ComparisonPlan

POINTS, LOWEST, HIGHEST = 10, 0.1, 0.9
"""Ten magnitudes, from an error rate of 10% to one of 90%, or to 90% of the error rate of guessing: any large magnitude
reaches the last steps up to that."""
NEAR = 0.01
"""How near to its aim an error rate must be; also the least rise for which the magnitude is doubled once more."""
PATIENCE, MOST_HALVINGS, MOST_BISECTIONS = 5, 30, 14
_TENTHS, _HUNDREDTHS = (0.1, 0.2, 0.3, 0.4, 0.5), (0.01, 0.02, 0.03, 0.04, 0.05)
MAGNITUDES: dict[str, tuple[float, ...]] = {
    "gaussian": _HUNDREDTHS,
    "table_noise": _HUNDREDTHS,
    "fgsm": _TENTHS,
    "pgd": _TENTHS,
    "cw": (10.0, 20.0, 30.0, 40.0, 50.0),
}
"""The paper's magnitudes, by perturbation."""


@dataclass(frozen=True)
class Grid:
    """Magnitudes in ascending order, and a note if some are missing."""

    name: str
    magnitudes: tuple[float, ...]
    note: str = ""


def paper_grid(perturbation: Perturbation) -> Grid:
    """The paper's magnitudes of a perturbation."""
    if perturbation.name not in MAGNITUDES:
        raise UsageError(
            f"the paper has magnitudes for {', '.join(MAGNITUDES)}, but none for {perturbation.name!r}: use "
            f"magnitudes={GRID}, or numbers"
        )
    return Grid(PAPER, MAGNITUDES[perturbation.name])


def fix_grid(rate: Callable[[float], float], start: float, most: float = math.inf, highest: float = HIGHEST) -> Grid:
    """The magnitudes whose error rates are nearest to ten even steps from 10% to `highest`, or as far as they reach.

    rate: the error rate at a magnitude; it should rise, apart from chance. start: a usual magnitude. most: the largest
    valid magnitude.
    """
    curve = _bracket(rate, min(start, most), most, highest)
    low, high = max(LOWEST, min(curve.values())), min(highest, max(curve.values()))
    if high - low < NEAR:
        raise DataError(_refusal(curve, highest))
    near = max(NEAR, (high - low) / (POINTS - 1) / 2)
    rates: dict[float, float] = {}
    for aim in np.linspace(low, high, POINTS).tolist():
        magnitude = _bisect(rate, curve, aim)
        if abs(curve[magnitude] - aim) <= near:
            rates[magnitude] = curve[magnitude]
    if not rates:
        raise DataError(_refusal(curve, highest))
    return Grid(GRID, tuple(sorted(rates)), _note(list(rates.values()), near, highest))


def _refusal(curve: dict[float, float], highest: float) -> str:
    """Why these error rates do not yield a grid."""
    least, most = min(curve.values()), max(curve.values())
    if most < LOWEST + NEAR:
        reason = f"it reaches only {most:.1%}, the grid needs {LOWEST:.0%}"
    elif least > highest - NEAR:
        reason = f"it is at least {least:.1%}, the grid needs at most {highest:.0%}"
    elif most - least < NEAR:
        reason = f"it stays at {most:.1%}"
    else:
        reason = f"it jumps from below {LOWEST:.0%} to above {highest:.0%} ({least:.1%} to {most:.1%})"
    return (
        f"the error rate must change with the magnitude, from {min(curve):g} to {max(curve):g} {reason}: choose "
        "another perturbation, or pass magnitudes as numbers"
    )


def _note(rates: list[float], near: float, highest: float) -> str:
    """What the grid lacks; empty if it is complete."""
    missing = [aim for aim in (LOWEST, highest) if min(abs(rate - aim) for rate in rates) > near]
    if len(rates) == POINTS and not missing:
        return ""
    note = f"{len(rates)} magnitude{'s' if len(rates) > 1 else ''} of {POINTS}, error rates {min(rates):.0%}"
    note += f" to {max(rates):.0%}" if len(rates) > 1 else ""
    return f"{note}: none near {' or '.join(f'{aim:.0%}' for aim in missing)}" if missing else note


def usual_magnitude(perturbation: Perturbation) -> float:
    """The magnitude of the default range of theta."""
    return perturbation.theta[0].high if perturbation.theta_is_magnitude else 1.0


def largest_magnitude(perturbation: Perturbation) -> float:
    """The magnitude at which the first theta reaches its limit, slightly less because products are rounded."""
    if perturbation.theta_is_magnitude:
        return perturbation.theta[0].limits[1]
    return (1 - 1e-6) * min(_headroom(theta) for theta in perturbation.theta)


def _headroom(theta: Theta) -> float:
    """By how much the range of a theta can be multiplied within its limits."""
    sides = zip(theta.limits, (theta.low, theta.high), strict=True)
    return min(
        ((limit - theta.identity) / (end - theta.identity) for limit, end in sides if end != theta.identity),
        default=math.inf,
    )


def _bracket(rate: Callable[[float], float], start: float, most: float, highest: float) -> dict[float, float]:
    """Error rates by magnitude, which is doubled up to `highest` and halved down to 10%, as long as that helps."""
    curve = {start: rate(start)}
    magnitude, idle = start, 0
    while curve[magnitude] < highest and magnitude < most and idle < PATIENCE:
        best = max(curve.values())
        magnitude = min(2 * magnitude, most)
        curve[magnitude] = rate(magnitude)
        idle = 0 if curve[magnitude] > best + NEAR else idle + 1
    magnitude = start
    for _ in range(MOST_HALVINGS):
        if min(curve.values()) <= LOWEST:
            break
        magnitude /= 2
        curve[magnitude] = rate(magnitude)
    return curve


def _bisect(rate: Callable[[float], float], curve: dict[float, float], aim: float) -> float:
    """A magnitude whose error rate is near `aim`; the error rates measured on the way are added to the curve.

    Among magnitudes with equal error rates, the one next to where the rate begins to change is chosen: the largest of
    those too weak to have an effect, the smallest of those that have the full effect.
    """

    def gap(magnitude: float) -> float:
        return abs(curve[magnitude] - aim)

    for _ in range(MOST_BISECTIONS):
        known = sorted(curve)
        crossings = [(a, b) for a, b in pairwise(known) if curve[a] < aim <= curve[b]]
        if gap(min(known, key=gap)) <= NEAR / 2 or not crossings:
            break
        a, b = crossings[0]
        middle = float(f"{math.sqrt(a * b):.4g}")
        if middle in curve or not a < middle < b:
            break
        curve[middle] = rate(middle)
    centre = min(curve, key=lambda magnitude: abs(curve[magnitude] - (min(curve.values()) + max(curve.values())) / 2))
    return min(curve, key=lambda magnitude: (gap(magnitude), abs(math.log(magnitude / centre)), magnitude))


def list_grids(plan: ComparisonPlan, perturbation: Perturbation) -> tuple[Grid, ...]:
    """The grids of magnitudes; the one that is chosen on separate seeds is still empty."""
    grids: list[Grid] = []
    numbers: list[float] = []
    for word in dict.fromkeys(split_list(plan.magnitudes)):
        if word == GRID:
            grids.append(Grid(GRID, ()))
        elif word == PAPER:
            grids.append(paper_grid(perturbation))
        else:
            numbers.append(_magnitude(word))
    if numbers:
        grids.append(Grid(GIVEN, tuple(sorted(set(numbers)))))
    if not grids:
        raise UsageError(
            "magnitudes must name at least one, got none: write grid, paper or numbers such as 0.1,0.2,0.3"
        )
    for grid in grids:
        for magnitude in grid.magnitudes:
            perturbation.at(magnitude)  # raises if the magnitude is out of range
    return tuple(grids)


def _magnitude(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"magnitudes must be positive numbers, {GRID} or {PAPER}, got {word!r}")
    return value
