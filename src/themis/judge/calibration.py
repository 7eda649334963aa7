"""Calibration: whether a model is right as often as it is confident, as the expected calibration error (ECE).

Confidence and the share of correct answers are compared in bins of the confidence; the ECE is the mean difference,
weighted by the tests in each bin. Noise in a bin counts as a difference, so the ECE of a sample is too high on average.
The two ends of its interval are therefore computed differently. The upper end is that of the sample's ECE. The lower
end takes the sign of each bin from one half of the seeds and its size from the other half; it is too low on average,
because bins with a wrong sign are subtracted. Both ends allow for tests that share seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.judge.estimate import Estimate

N_BINS = 15
"""Bins of equal width, as in Guo et al. (2017)."""
N_BLOCKS = 100
"""Blocks into which seeds are divided; their spread gives the standard error."""
TAIL_PROBABILITY = 0.025
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """The expected calibration error of a classifier with labels."""

    clean: Estimate | None
    """The error on all labelled inputs."""
    disturbed: Estimate | None
    """The error on the tests of the uniform stream; None without one."""


def sum_gaps(seed: NDArray[np.int64], confidence: NDArray[np.float32], is_correct: NDArray[np.bool_]) -> Numbers:
    """The sum of confidence minus correctness by block of seeds and bin of confidence, `[blocks, bins]`.

    All arguments are `[tests]`; an answer that is not finite counts as certain.
    """
    sureness = np.nan_to_num(confidence.astype(np.float64), nan=1.0)
    place = seed % N_BLOCKS * N_BINS + np.minimum((sureness * N_BINS).astype(np.int64), N_BINS - 1)
    sums = np.bincount(place, sureness - is_correct, N_BLOCKS * N_BINS)
    return sums.astype(np.float64).reshape(N_BLOCKS, N_BINS)


def calibration_error(gaps: Numbers, tests_by_seed: NDArray[np.int64]) -> Estimate | None:
    """The ECE from the sums of `sum_gaps` and the number of tests of each seed `[seeds]`.

    None if fewer than four blocks have tests.
    """
    tests = np.bincount(np.arange(len(tests_by_seed)) % N_BLOCKS, tests_by_seed, N_BLOCKS)
    gaps, tests = gaps[tests > 0], tests[tests > 0]
    if len(tests) < 4:
        return None
    from scipy.special import stdtrit  # scipy.stats takes long to import

    value, error = _mean(gaps @ np.sign(gaps.sum(0)), tests)
    high = value - stdtrit(len(tests) - 1, TAIL_PROBABILITY) * error
    one, other = slice(0, None, 2), slice(1, None, 2)
    first, of_first = _mean(gaps[one] @ np.sign(gaps[other].sum(0)), tests[one])
    second, of_second = _mean(gaps[other] @ np.sign(gaps[one].sum(0)), tests[other])
    low = (first + second) / 2 + stdtrit(len(tests) - 2, TAIL_PROBABILITY) * np.hypot(of_first, of_second) / 2
    return Estimate(value, float(np.clip(low, 0, value)), float(min(1.0, high)))


def _mean(sums: Numbers, tests: NDArray[Any]) -> tuple[float, float]:
    """The mean per test of the sums of blocks, and its standard error."""
    mean, n = float(sums.sum() / tests.sum()), len(tests)
    return mean, float(np.sqrt(n / max(1, n - 1) * ((sums - mean * tests) ** 2).sum()) / tests.sum())
