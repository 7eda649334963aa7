"""A check of the judges' model on the panel: how normal the differences of activations are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from themis.measure.moments import Shape

MIN_NORMALITY_TESTS = 20
MIN_CONCLUSIVE_TESTS = 200
"""Tests needed to distinguish a half-normal variable, which sensitivities often are, from a normal one."""
MAX_SKEWNESS, MAX_KURTOSIS = 0.5, 1.0
"""Largest skewness and excess kurtosis at which a normal distribution fits well, before sampling error is added."""


@dataclass(frozen=True)
class Normality:
    """Medians over the panel's neurons, and the share of neurons that are compatible with a normal distribution."""

    skewness_signed: float
    kurtosis_signed: float
    skewness_absolute: float
    kurtosis_absolute: float
    compatible_signed: float
    compatible_absolute: float
    n_neurons: int
    n_unmoved: int
    verdict: str
    sentence: str


def describe_normality(shape: Shape) -> Normality | None:
    """How normal signed differences and sensitivities are; None with fewer than 20 tests or if no neuron moved.

    Neurons that never moved, or always by the same amount, are left out and counted as `n_unmoved`.
    """
    shapes = shape.signed(), shape.absolute()
    has_spread = ~(shapes[0][0].isnan() | shapes[1][0].isnan())
    n, n_neurons = shape.n_tests, int(has_spread.sum())
    if n < MIN_NORMALITY_TESTS or n_neurons == 0:
        return None
    signed, absolute = (_figures(skewness[has_spread], kurtosis[has_spread], n) for skewness, kurtosis in shapes)
    fit = "the normal model fits most neurons" if absolute[2] > 0.5 else "the normal model is an approximation here"
    verdict = f"{fit}: sensitivities are close to normal for {absolute[2]:.0%} of the neurons"
    if n < MIN_CONCLUSIVE_TESTS:
        fit = f"{n} uniform tests are too few to tell"
        verdict = f"{fit} how normal the sensitivities are"
    texts = [
        f"median skewness {skewness:.1f}, excess kurtosis {kurtosis:.1f}, close to normal for {share:.0%} of neurons"
        for skewness, kurtosis, share in (signed, absolute)
    ]
    return Normality(
        skewness_signed=signed[0],
        kurtosis_signed=signed[1],
        skewness_absolute=absolute[0],
        kurtosis_absolute=absolute[1],
        compatible_signed=signed[2],
        compatible_absolute=absolute[2],
        n_neurons=n_neurons,
        n_unmoved=len(has_spread) - n_neurons,
        verdict=verdict,
        sentence=f"Signed differences: {texts[0]}; sensitivities: {texts[1]}; {fit}.",
    )


def _figures(skewness: Tensor, kurtosis: Tensor, n_tests: int) -> tuple[float, float, float]:
    """The median skewness, the median excess kurtosis, and the share compatible with a normal distribution."""
    close_skewness = MAX_SKEWNESS + 2 * (6 / n_tests) ** 0.5
    close_kurtosis = MAX_KURTOSIS + 2 * (24 / n_tests) ** 0.5
    is_close = (skewness.abs() <= close_skewness) & (kurtosis.abs() <= close_kurtosis)
    return float(skewness.median()), float(kurtosis.median()), float(is_close.double().mean())
