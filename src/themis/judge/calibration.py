"""Calibration: whether a model is right as often as it is confident, as the expected calibration error (ECE).

Confidence and the share of correct answers are compared in bins of the confidence; the ECE is the mean difference,
weighted by the tests in each bin. Noise in a bin counts as a difference, so that the ECE of a sample is too high on
average. Its interval therefore has two sources. The upper end is that of the sample's ECE. The lower end takes the sign
of each bin from one half of the seeds and its size from the other, which is too low on average, because a wrong sign
subtracts. Both ends allow for tests that share seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.judge.estimate import Estimate

BINS = 15
"""Bins of equal width, as in Guo et al. (2017)."""
BLOCKS = 100
"""Blocks that seeds are divided into: their spread says how far the sums may be off."""
TAIL = 0.025
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """The expected calibration error of a classifier with labels."""

    clean: Estimate | None
    """On all labelled inputs."""
    disturbed: Estimate | None
    """On the tests of the uniform stream; None without one."""


def sum_gaps(seed: NDArray[np.int64], confidence: NDArray[np.float32], is_correct: NDArray[np.bool_]) -> Numbers:
    """The sums of confidence minus correctness by block of seeds and bin of confidence, `[blocks, bins]`.

    All arguments are `[tests]`; an answer that is not finite counts as certain.
    """
    sureness = np.nan_to_num(confidence.astype(np.float64), nan=1.0)
    place = seed % BLOCKS * BINS + np.minimum((sureness * BINS).astype(np.int64), BINS - 1)
    sums = np.bincount(place, sureness - is_correct, BLOCKS * BINS)
    return sums.astype(np.float64).reshape(BLOCKS, BINS)


def calibration_error(gaps: Numbers, tests_by_seed: NDArray[np.int64]) -> Estimate | None:
    """The ECE from such sums and the tests of each seed, `[seeds]`; None if fewer than four blocks have tests."""
    tests = np.bincount(np.arange(len(tests_by_seed)) % BLOCKS, tests_by_seed, BLOCKS)
    gaps, tests = gaps[tests > 0], tests[tests > 0]
    if len(tests) < 4:
        return None
    from scipy.special import stdtrit  # scipy.stats takes long to import

    value, error = _mean(gaps @ np.sign(gaps.sum(0)), tests)
    high = value - stdtrit(len(tests) - 1, TAIL) * error
    one, other = slice(0, None, 2), slice(1, None, 2)
    first, of_first = _mean(gaps[one] @ np.sign(gaps[other].sum(0)), tests[one])
    second, of_second = _mean(gaps[other] @ np.sign(gaps[one].sum(0)), tests[other])
    low = (first + second) / 2 + stdtrit(len(tests) - 2, TAIL) * np.hypot(of_first, of_second) / 2
    return Estimate(value, float(np.clip(low, 0, value)), float(min(1.0, high)))


def _mean(sums: Numbers, tests: NDArray[Any]) -> tuple[float, float]:
    """The mean per test of the sums of blocks, and its standard error."""
    mean, n = float(sums.sum() / tests.sum()), len(tests)
    return mean, float(np.sqrt(n / max(1, n - 1) * ((sums - mean * tests) ** 2).sum()) / tests.sum())
