"""Levels: fixed strengths of a perturbation, at which seeds are graded once, as benchmarks of corruptions do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.compute import rng
from themis.errors import UsageError, nearest
from themis.measure.tests import Floats, Ints
from themis.perturb import Perturbation

FOR_LEVEL = 70
"""The purpose of random numbers that choose the theta of a level."""
Value = float | tuple[float, float]
"""A fixed theta, or the ends of the range that it is drawn from."""


@dataclass(frozen=True)
class Level:
    """Where in the range of theta a perturbation is graded: a share of it, or a value for each of some theta.

    strength: every theta goes this share of the way from its identity to one of its bounds, which is chosen at random
    if there are two. theta: values, or ranges to draw from; a theta that is not named is drawn from its whole range.
    """

    strength: float | None = None
    theta: tuple[tuple[str, Value], ...] = ()

    @staticmethod
    def read(value: Any, place: str) -> Level:
        """A level as a user writes it: 0.5, or {sigma: 0.08, angle: [-45, 45]}."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 < value <= 1:
                raise UsageError(f"{place} must be a strength above 0 and up to 1, got {value:g}: 1 is the whole range")
            return Level(strength=float(value))
        if not isinstance(value, Mapping) or not value:
            raise UsageError(
                f"{place} must be a strength such as 0.5, or values of theta such as {{sigma: 0.08}}, got {value!r}"
            )
        return Level(theta=tuple((str(name), _read_value(item, f"{place}.{name}")) for name, item in value.items()))

    def check(self, perturbation: Perturbation, place: str) -> None:
        """Refuse a theta that the perturbation does not have, or a value outside of its range."""
        known = {theta.name: theta for theta in perturbation.theta}
        for name, value in self.theta:
            if name not in known:
                raise UsageError(
                    f"{place} must name a theta of {perturbation.name!r}, got {name!r}: {nearest(name, known)}"
                )
            low, high = known[name].low, known[name].high
            ends = value if isinstance(value, tuple) else (value, value)
            if not low <= ends[0] <= ends[1] <= high:
                plain = perturbation.name.partition("(")[0]
                raise UsageError(
                    f"{place}.{name} must lie in {low:g}..{high:g}, the range of {perturbation.name!r}, got "
                    f"{_format(value)}: widen the range with {plain}({name}=LOW:HIGH), or lower the level"
                )

    def draw(self, perturbation: Perturbation, seed_id: Ints, random_seed: int) -> Floats:
        """The theta of one test per seed, `[seeds, dimensions]`: a function of the seed's id and the random seed."""
        named = dict(self.theta)
        columns = []
        for k, theta in enumerate(perturbation.theta):
            draw = rng.uniform(random_seed, FOR_LEVEL, k, seed_id)
            if self.strength is not None:
                columns.append(_at_strength(theta.low, theta.high, theta.identity, self.strength, draw))
                continue
            value = named.get(theta.name, (theta.low, theta.high))
            low, high = value if isinstance(value, tuple) else (value, value)
            columns.append(low + draw * (high - low))
        bounds = np.array([[theta.low, theta.high] for theta in perturbation.theta], dtype=np.float32)
        drawn: Floats = np.stack(columns, 1).astype(np.float32).clip(bounds[:, 0], bounds[:, 1])
        return drawn

    def plain(self) -> float | dict[str, Any]:
        """The level as a user writes it."""
        if self.strength is not None:
            return self.strength
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.theta}

    def __str__(self) -> str:
        if self.strength is not None:
            return f"strength {self.strength:g}"
        return ", ".join(f"{name} {_format(value)}" for name, value in self.theta)


def read_levels(value: Any, place: str) -> tuple[Level, ...]:
    """A list of levels, or a number of levels of equal distance: 5 is 0.2, 0.4, 0.6, 0.8 and 1."""
    if value is None:
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= 100:
            raise UsageError(
                f"{place} must be 1 to 100 levels, got {value}: 5 grades at a fifth of the range and so on"
            )
        return tuple(Level(strength=(k + 1) / value) for k in range(value))
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            f"{place} must be a number of levels such as 5, or a list such as [0.5, 1] or [{{sigma: 0.08}}], got "
            f"{value!r}"
        )
    return tuple(Level.read(item, f"{place}[{k}]") for k, item in enumerate(value))


def _read_value(value: Any, place: str) -> Value:
    ends = value if isinstance(value, list | tuple) else [value]
    is_number = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if not is_number or len(ends) not in (1, 2) or ends[0] > ends[-1]:
        raise UsageError(f"{place} must be a number, or [LOW, HIGH] to draw from, got {value!r}")
    return float(ends[0]) if not isinstance(value, list | tuple) else (float(ends[0]), float(ends[-1]))


def _at_strength(
    low: float, high: float, identity: float, strength: float, draw: NDArray[np.float64]
) -> NDArray[np.float64]:
    up = np.full(len(draw), low == identity) if identity in (low, high) else draw < 0.5
    reached: NDArray[np.float64] = identity + strength * (np.where(up, high, low) - identity)
    return reached


def _format(value: Value) -> str:
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else f"{value:g}"
