"""A value with its interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval: in at least about 95 of 100 campaigns, the interval contains the true value."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if the whole interval is above 0, -1 if it is below, 0 if it includes 0."""
        return int(self.low > 0) - int(self.high < 0)
