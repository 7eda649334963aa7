"""A figure with its interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval: of a hundred campaigns, about 95 or more have one that holds the truth."""

    value: float
    low: float
    high: float
