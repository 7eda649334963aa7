"""The distribution of a theta in operation, truncated to the theta's range."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.errors import DataError, UsageError
from themis.reading import read_regular

Numbers = NDArray[np.float64]
DISTRIBUTIONS = {
    "beta": ("A,B", "two numbers above 0"),
    "normal": ("MEAN,SD", "two numbers, SD above 0"),
    "lognormal": ("MEAN,SD", "two numbers, SD above 0"),
    "triangular": ("LOW,MODE,HIGH", "three ascending numbers"),
    "histogram": ("FILE", "a file with ascending bins, whose counts are not all 0"),
}
"""The arguments of each distribution, and the rule for them.

The range of beta is that of theta; mean and SD of lognormal are those of the logarithm.
"""
MIN_SHARE_INSIDE = 0.01
"""The share of a distribution that must lie in the range of its theta, because tests say nothing about the rest."""
MAX_BINS = 200
MAX_HISTOGRAM_BYTES = 1 << 20
"""Largest size of the file of a histogram."""


@dataclass(frozen=True)
class Distribution:
    """One of `DISTRIBUTIONS` with its arguments; those of a histogram are its edges, followed by its counts."""

    kind: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.kind}({','.join(map(_short, self.numbers))})"

    def check(self, low: float, high: float, name: str) -> None:
        """Raise an error if hardly any values lie in the range of a theta."""
        inside = self.inside(low, high)
        if not inside >= MIN_SHARE_INSIDE:
            raise UsageError(
                f"the distribution of theta {name!r} must have at least {MIN_SHARE_INSIDE:.0%} of its values in the "
                f"range {low:g}..{high:g}, but {self} has {100 * inside:.2g}%: correct it, or widen the range"
            )

    def inside(self, low: float, high: float) -> float:
        """The share of the values that lie in a range."""
        below, above = self._scipy.cdf(self._scaled([low, high], low, high))
        return float(above - below)

    def value_at(self, share: Any, low: float, high: float) -> Numbers:
        """The quantiles at these shares of the distribution truncated to the range."""
        below, above = self._scipy.cdf(self._scaled([low, high], low, high))
        values = self._scipy.ppf(below + np.asarray(share) * (above - below))
        clipped: Numbers = np.clip(low + values * (high - low) if self.kind == "beta" else values, low, high)
        return clipped

    def density(self, values: Any, low: float, high: float) -> Numbers:
        """The density at values in the range, relative to the uniform distribution."""
        density: Numbers = self._scipy.pdf(self._scaled(values, low, high))
        return density if self.kind == "beta" else density * (high - low) / self.inside(low, high)

    def _scaled(self, values: Any, low: float, high: float) -> Numbers:
        values = np.asarray(values, dtype=np.float64)
        scaled: Numbers = (values - low) / (high - low) if self.kind == "beta" else values
        return scaled

    @cached_property
    def _scipy(self) -> Any:
        from scipy import stats

        if self.kind == "histogram":
            n = len(self.numbers) // 2
            return stats.rv_histogram((self.numbers[n + 1 :], self.numbers[: n + 1]), density=False)
        if self.kind == "triangular":
            low, mode, high = self.numbers
            return stats.triang((mode - low) / (high - low), low, high - low)
        a, b = self.numbers
        if self.kind == "lognormal":
            return stats.lognorm(b, scale=math.exp(a))
        return stats.beta(a, b) if self.kind == "beta" else stats.norm(a, b)


def read_distribution(text: str, *, has_files: bool = True) -> Distribution:
    """Read `beta(1,8)`, or `histogram(FILE)` with one line `low,high,count` per bin, or a histogram's numbers."""
    match = re.fullmatch(r"\s*([a-z]+)\s*\((.*)\)\s*", text, re.DOTALL)
    if match is None or match[1] not in DISTRIBUTIONS:
        forms = ", ".join(f"{name}({numbers})" for name, (numbers, _) in DISTRIBUTIONS.items())
        raise UsageError(f"a distribution must be one of {forms}, got {text.strip()!r}: write for instance beta(1,8)")
    kind, inside = match[1], match[2].strip()
    try:
        numbers = tuple(float(number) for number in inside.split(","))
    except ValueError:
        numbers = _read_histogram(inside) if kind == "histogram" and inside and has_files else ()
    if not _are_valid(kind, numbers):
        form, rule = DISTRIBUTIONS[kind]
        raise UsageError(f"a distribution {kind}({form}) must have {rule}, got {text.strip()!r}")
    return Distribution(kind, numbers)


def _are_valid(kind: str, numbers: tuple[float, ...]) -> bool:
    if not all(math.isfinite(number) and abs(number) < 1e30 for number in numbers):
        return False
    if kind == "histogram":
        edges, counts = numbers[: len(numbers) // 2 + 1], numbers[len(numbers) // 2 + 1 :]
        is_ascending = all(a < b for a, b in pairwise(edges))
        return len(numbers) in range(3, 2 * MAX_BINS + 2, 2) and is_ascending and min(counts) >= 0 < sum(counts)
    if len(numbers) != DISTRIBUTIONS[kind][0].count(",") + 1:
        return False
    if kind == "triangular":
        return numbers[0] <= numbers[1] <= numbers[2] and numbers[0] < numbers[2]
    return numbers[1] > 0 and (kind != "beta" or numbers[0] > 0) and (kind != "lognormal" or abs(numbers[0]) < 300)


def _read_histogram(path: str) -> tuple[float, ...]:
    """The edges of the bins in a file, followed by their counts."""
    try:
        lines = read_regular(path, MAX_HISTOGRAM_BYTES).decode().splitlines()
        rows = [line.split(",") for line in lines if line.strip()]
        rows = rows[1:] if rows and rows[0][0].strip().isalpha() else rows
        bins = sorted((float(low), float(high), float(count)) for low, high, count in rows)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"a histogram must be a file with lines low,high,count, got {path!r}: {reason}; correct it"
        ) from error
    if not 1 <= len(bins) <= MAX_BINS or any(a[1] != b[0] for a, b in pairwise(bins)):
        raise DataError(
            f"a histogram must have 1 to {MAX_BINS} bins, each beginning where another ends, but {path!r} has "
            f"{len(bins)} that do not: correct the file"
        )
    return (bins[0][0], *(high for _, high, _ in bins), *(count for _, _, count in bins))


def _short(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
