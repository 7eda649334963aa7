"""The sentence on normality agrees with the figures."""

import numpy as np
import pytest
import torch

from themis.judge.normality import describe_normality
from themis.measure.moments import Shape


def shape_of(signed):
    shape = Shape.empty(signed.shape[1])
    shape.add(torch.as_tensor(signed, dtype=torch.float32))
    return shape


def test_normal_differences_are_normal_but_their_sizes_are_half_normal():
    normality = describe_normality(shape_of(np.random.default_rng(0).standard_normal((5000, 100))))
    assert abs(normality.skewness_signed) < 0.05
    assert abs(normality.kurtosis_signed) < 0.1
    assert normality.compatible_signed == 1
    assert normality.skewness_absolute == pytest.approx(0.995, abs=0.05)
    assert normality.kurtosis_absolute == pytest.approx(0.869, abs=0.1)
    assert normality.compatible_absolute == 0
    assert normality.sentence.startswith("Signed differences: median skewness")
    assert "close to normal for 100% of neurons; sensitivities: median skewness 1.0" in normality.sentence
    assert normality.sentence.endswith("for 0% of neurons; the normal model is an approximation here.")


def test_sizes_far_from_zero_can_be_normal():
    signed = np.random.default_rng(1).normal(10, 1, (2000, 50))
    normality = describe_normality(shape_of(signed))
    assert normality.compatible_absolute == 1
    assert normality.sentence.endswith("the normal model fits most neurons.")


def test_heavy_tails_are_reported():
    normality = describe_normality(shape_of(np.random.default_rng(2).standard_t(3, (5000, 100))))
    assert normality.kurtosis_signed > 3
    assert normality.compatible_signed < 0.1


def test_fewer_tests_allow_larger_deviations():
    signed = np.random.default_rng(3).standard_normal((25, 400))
    assert describe_normality(shape_of(signed)).compatible_signed > 0.9


def test_neurons_that_never_moved_are_left_out_and_counted():
    signed = np.random.default_rng(4).standard_normal((100, 10))
    signed[:, 3:7] = 0
    normality = describe_normality(shape_of(signed))
    assert (normality.n_neurons, normality.n_unmoved) == (6, 4)


def test_without_tests_there_is_no_verdict():
    assert describe_normality(Shape.empty(5)) is None
    assert describe_normality(shape_of(np.zeros((100, 5)))) is None
    signed = np.random.default_rng(5).standard_normal((20, 5))
    assert describe_normality(shape_of(signed[:19])) is None
    assert describe_normality(shape_of(signed)) is not None
