"""How normal the differences are: a check of the judges' model on the panel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from themis.measure.panel import Shape

MIN_NORMALITY_TESTS = 20
TELLING_TESTS = 200
"""Tests from which a half-normal variable, which sensitivities often are, is told apart from a normal one."""
CLOSE_SKEWNESS, CLOSE_KURTOSIS = 0.5, 1.0
"""Skewness and excess kurtosis up to which the normal distribution fits well; sampling error is added."""


@dataclass(frozen=True)
class Normality:
    """Medians over the panel's neurons, and the share of them that are compatible with a normal distribution."""

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

    Neurons without spread (never moved, or always by the same amount) are left out and counted as `n_unmoved`.
    """
    signed_shape, absolute_shape = shape.signed(), shape.absolute()
    has_spread = ~(signed_shape[0].isnan() | absolute_shape[0].isnan())
    n_neurons = int(has_spread.sum())
    if shape.n_tests < MIN_NORMALITY_TESTS or n_neurons == 0:
        return None
    signed = _figures(signed_shape[0][has_spread], signed_shape[1][has_spread], shape.n_tests)
    absolute = _figures(absolute_shape[0][has_spread], absolute_shape[1][has_spread], shape.n_tests)
    return Normality(
        skewness_signed=signed[0],
        kurtosis_signed=signed[1],
        skewness_absolute=absolute[0],
        kurtosis_absolute=absolute[1],
        compatible_signed=signed[2],
        compatible_absolute=absolute[2],
        n_neurons=n_neurons,
        n_unmoved=len(has_spread) - n_neurons,
        verdict=_verdict(absolute, shape.n_tests),
        sentence=_sentence(signed, absolute, shape.n_tests),
    )


def _figures(skewness: Tensor, kurtosis: Tensor, n_tests: int) -> tuple[float, float, float]:
    """Median skewness, median excess kurtosis, share compatible with a normal."""
    close_skewness = CLOSE_SKEWNESS + 2 * (6 / n_tests) ** 0.5
    close_kurtosis = CLOSE_KURTOSIS + 2 * (24 / n_tests) ** 0.5
    is_close = (skewness.abs() <= close_skewness) & (kurtosis.abs() <= close_kurtosis)
    return float(skewness.median()), float(kurtosis.median()), float(is_close.double().mean())


def _verdict(absolute: tuple[float, float, float], n_tests: int) -> str:
    if n_tests < TELLING_TESTS:
        return f"{n_tests} uniform tests are too few to tell how normal the sensitivities are"
    return f"{_fit(absolute)}: sensitivities are close to normal for {absolute[2]:.0%} of the neurons"


def _sentence(signed: tuple[float, float, float], absolute: tuple[float, float, float], n_tests: int) -> str:
    def figures(of: tuple[float, float, float]) -> str:
        return f"median skewness {of[0]:.1f}, excess kurtosis {of[1]:.1f}, close to normal for {of[2]:.0%} of neurons"

    fit = _fit(absolute) if n_tests >= TELLING_TESTS else f"{n_tests} uniform tests are too few to tell"
    return f"Signed differences: {figures(signed)}; sensitivities: {figures(absolute)}; {fit}."


def _fit(absolute: tuple[float, float, float]) -> str:
    return "the normal model fits most neurons" if absolute[2] > 0.5 else "the normal model is an approximation here"
