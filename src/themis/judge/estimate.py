"""A value with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

from themis.text import percent

Z2 = 1.959963984540054**2


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval, which contains the true value in about 95 or more of 100 campaigns."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if the whole interval is above 0, -1 if it is below, 0 if it includes 0."""
        return int(self.low > 0) - int(self.high < 0)


def share(part: int, whole: int) -> Estimate:
    """A share with its 95% Wilson interval, which assumes independent tests."""
    value, z2 = part / whole, Z2 / whole
    centre = (value + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (value * (1 - value) + z2 / 4)) / (1 + z2)
    return Estimate(value, max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half)))


def describe_share(estimate: Estimate, about: str = "") -> str:
    """A share with its 95% interval, for a sentence."""
    value, low, high = (percent(end, 2) for end in (estimate.value, estimate.low, estimate.high))
    return f"{value}{f' {about}' * bool(about)} (95%: {low} to {high})"


def show_interval(estimate: Estimate, places: int = 1) -> str:
    """A share with its 95% interval, for a cell of a table."""
    value, low, high = (percent(share, places) for share in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"
