"""The plan of a comparison: its options, the grids of magnitudes, and the campaigns that follow from them.

One grid is the paper's; one has error rates from 10 to 90% on seeds that are used for nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import DataError, UsageError
from themis.options import check_count, check_known, option
from themis.text import split_list
from themis_lab.techniques import Technique, choose_technique

if TYPE_CHECKING:
    from themis.perturb import Perturbation, Theta

FIXED_TECHNIQUES = ("random", "corners")
"""Techniques in every comparison."""
GRID, PAPER, GIVEN = "grid", "paper", "given"
"""Grids of magnitudes: chosen on separate seeds, the paper's, and given as numbers."""
FREE_IN_COMPARISON = ("techniques", "magnitudes", "campaigns", "resamples")
"""Options that decide which campaigns are run and how they are summarised, but change no campaign."""


def as_file_name(text: str) -> str:
    """A name that every file system accepts; different texts have different names."""
    slug = re.sub(r"[^\w.-]+", "_", text)
    if slug == text:
        return text
    from themis.target.fingerprint import hash_text

    return f"{slug}-{hash_text(text)[:6]}"


@dataclass(frozen=True)
class CampaignCell:
    """One campaign of a comparison: a technique at a magnitude."""

    technique: str
    magnitude: float
    campaign: int

    @property
    def file(self) -> str:
        """A name that every file system accepts and no other cell has."""
        return f"{as_file_name(self.technique)}/{self.magnitude!r}-{self.campaign}.json"

    @property
    def group(self) -> str:
        """A criterion is fitted once for all campaigns of its technique."""
        return self.technique

    def __str__(self) -> str:
        return f"{self.technique} at {self.magnitude:g}, campaign {self.campaign + 1}"


@dataclass(frozen=True)
class ComparisonPlan:
    """What is compared at which cost; the same for every technique."""

    techniques: str = option(
        "nc,kmnc,idc,lsa,paper,scheduled",
        "policies, criteria and paper-preset (the paper's method with all its settings), such as "
        "kmnc,kmnc(k=100),scheduled; random and corners are always included",
    )
    magnitudes: str = option(
        "grid",
        "grid (ten, chosen on separate seeds), paper (the paper's five), numbers such as 0.1,0.2,0.3, or several",
    )
    campaigns: int = option(3, "campaigns per technique and magnitude, each with its own random seed")
    max_passes: int = option(
        5000, "passes per campaign (a forward pass is 1, a backward pass 2), including those over clean seeds"
    )
    round_size: int = option(160, "tests per round, after which a technique learns from their outcomes")
    seeds: int = option(1000, "maximum number of seeds that techniques use")
    judge_seeds: int = option(1000, "maximum number of separate seeds on which error rates are measured")
    grid_seeds: int = option(500, "maximum number of further seeds on which the grid is chosen")
    train_inputs: int = option(10_000, "training inputs that a criterion is fitted to, a random sample")
    uniform_share: float = option(0.2, "share of tests drawn uniformly, the same ones for every technique")
    resamples: int = option(1000, "resamples of seeds and campaigns for the intervals")
    random_seed: int = option(0, "random seed of the first campaign; the following ones count up from it")
    threads: int = option(1, "torch threads per worker; results may depend on it, but never on --workers")

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                check_count(field.name, getattr(self, field.name), 0 if field.name == "random_seed" else 1)
        if not 0 <= self.uniform_share <= 1:
            raise UsageError(f"uniform_share must lie in [0, 1], got {self.uniform_share!r}")

    @staticmethod
    def of(**options: Any) -> ComparisonPlan:
        """A plan from keyword options; techniques and magnitudes may be lists."""
        check_known(ComparisonPlan, options)
        for name in ("techniques", "magnitudes"):
            if name in options and not isinstance(options[name], str):
                values = options[name] if isinstance(options[name], list | tuple) else [options[name]]
                options[name] = ",".join(str(value) for value in values)
        return ComparisonPlan(**options)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques, each of them once even if it is given under several names."""
        return tuple(
            dict.fromkeys(choose_technique(name) for name in (*FIXED_TECHNIQUES, *split_list(self.techniques)))
        )

    def cells(self, grids: tuple[Grid, ...]) -> list[CampaignCell]:
        """Every campaign once, though grids may share magnitudes."""
        magnitudes = sorted({magnitude for grid in grids for magnitude in grid.magnitudes})
        return [
            CampaignCell(technique.name, magnitude, campaign)
            for technique in self.chosen()
            for magnitude in magnitudes
            for campaign in range(self.campaigns)
        ]


GRID_POINTS, LOWEST_RATE, HIGHEST_RATE = 10, 0.1, 0.9
"""Ten magnitudes, for error rates from 10% to 90%, or to 90% of the error rate of guessing, since any large magnitude
reaches the last steps up to guessing."""
RATE_TOLERANCE = 0.01
"""Largest difference between an error rate and its aim; also the least rise for which a magnitude is doubled again."""
MAX_IDLE_DOUBLINGS, MAX_HALVINGS, MAX_BISECTIONS = 5, 30, 14
_TENTHS, _HUNDREDTHS = (0.1, 0.2, 0.3, 0.4, 0.5), (0.01, 0.02, 0.03, 0.04, 0.05)
PAPER_MAGNITUDES: dict[str, tuple[float, ...]] = {
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
    if perturbation.name not in PAPER_MAGNITUDES:
        raise UsageError(
            f"the paper has magnitudes for {', '.join(PAPER_MAGNITUDES)}, but none for {perturbation.name!r}: use "
            f"magnitudes={GRID}, or numbers"
        )
    return Grid(PAPER, PAPER_MAGNITUDES[perturbation.name])


def fix_grid(
    rate: Callable[[float], float], start: float, most: float = math.inf, highest: float = HIGHEST_RATE
) -> Grid:
    """The magnitudes whose error rates are nearest to ten even steps from 10% to `highest`, or as far as they reach.

    rate: the error rate at a magnitude; it should rise, apart from chance. start: a usual magnitude. most: the largest
    valid magnitude.
    """
    curve = _bracket(rate, min(start, most), most, highest)
    low, high = max(LOWEST_RATE, min(curve.values())), min(highest, max(curve.values()))
    if high - low < RATE_TOLERANCE:
        raise DataError(_refusal(curve, highest))
    near = max(RATE_TOLERANCE, (high - low) / (GRID_POINTS - 1) / 2)
    rates: dict[float, float] = {}
    for aim in np.linspace(low, high, GRID_POINTS).tolist():
        magnitude = _bisect(rate, curve, aim)
        if abs(curve[magnitude] - aim) <= near:
            rates[magnitude] = curve[magnitude]
    if not rates:
        raise DataError(_refusal(curve, highest))
    return Grid(GRID, tuple(sorted(rates)), _note(list(rates.values()), near, highest))


def _refusal(curve: dict[float, float], highest: float) -> str:
    """Why these error rates do not yield a grid."""
    least, most = min(curve.values()), max(curve.values())
    if most < LOWEST_RATE + RATE_TOLERANCE:
        reason = f"it reaches only {most:.1%}, the grid needs {LOWEST_RATE:.0%}"
    elif least > highest - RATE_TOLERANCE:
        reason = f"it is at least {least:.1%}, the grid needs at most {highest:.0%}"
    elif most - least < RATE_TOLERANCE:
        reason = f"it stays at {most:.1%}"
    else:
        reason = f"it jumps from below {LOWEST_RATE:.0%} to above {highest:.0%} ({least:.1%} to {most:.1%})"
    return (
        f"the error rate must change with the magnitude, from {min(curve):g} to {max(curve):g} {reason}: choose "
        "another perturbation, or pass magnitudes as numbers"
    )


def _note(rates: list[float], near: float, highest: float) -> str:
    """What the grid lacks; empty if it is complete."""
    missing = [aim for aim in (LOWEST_RATE, highest) if min(abs(rate - aim) for rate in rates) > near]
    if len(rates) == GRID_POINTS and not missing:
        return ""
    note = f"{len(rates)} magnitude{'s' if len(rates) > 1 else ''} of {GRID_POINTS}, error rates {min(rates):.0%}"
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
    while curve[magnitude] < highest and magnitude < most and idle < MAX_IDLE_DOUBLINGS:
        best = max(curve.values())
        magnitude = min(2 * magnitude, most)
        curve[magnitude] = rate(magnitude)
        idle = 0 if curve[magnitude] > best + RATE_TOLERANCE else idle + 1
    magnitude = start
    for _ in range(MAX_HALVINGS):
        if min(curve.values()) <= LOWEST_RATE:
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

    for _ in range(MAX_BISECTIONS):
        known = sorted(curve)
        crossings = [(a, b) for a, b in pairwise(known) if curve[a] < aim <= curve[b]]
        if gap(min(known, key=gap)) <= RATE_TOLERANCE / 2 or not crossings:
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
