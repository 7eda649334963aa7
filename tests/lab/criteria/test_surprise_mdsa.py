"""MDSA, compared with the distance by an inverse matrix."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis

from themis.errors import UsageError
from themis_lab.criteria.readings import Batch
from themis_lab.criteria.surprise import MDSA


def training(n=200, width=5, classes=3, seed=0):
    random = np.random.default_rng(seed)
    predicted = random.integers(0, classes, n)
    mix = random.normal(size=(classes, width, width))
    return np.stack([mix[c] @ random.normal(size=width) + c for c in predicted]), predicted


def fitted(values, predicted, **options):
    return MDSA(**options).fit([Batch(torch.from_numpy(values), predicted=torch.from_numpy(predicted))])


def surprise(criterion, values, predicted):
    return criterion.surprise(torch.from_numpy(values), predicted=torch.as_tensor(predicted)).numpy()


def slow(test, traces):
    covariance = sum(np.outer(each - traces.mean(0), each - traces.mean(0)) for each in traces) / len(traces)
    return mahalanobis(test, traces.mean(0), np.linalg.inv(covariance))


@pytest.mark.parametrize("width", [1, 5, 20])
def test_agrees_with_the_definition(width):
    values, predicted = training(width=width)
    tests, classes = np.random.default_rng(1).normal(size=(40, width)) * 3, np.arange(40) % 3
    found = surprise(fitted(values, predicted), tests, classes)
    want = np.array([slow(test, values[predicted == c]) for test, c in zip(tests, classes, strict=True)])
    np.testing.assert_allclose(found, want, rtol=1e-8)
    squared = surprise(fitted(values, predicted, variant="dnn-tip"), tests, classes)
    np.testing.assert_allclose(squared, want**2, rtol=1e-8)


def test_the_mean_has_no_surprise():
    values, predicted = training()
    mean = values[predicted == 1].mean(0, keepdims=True)
    assert surprise(fitted(values, predicted), mean, [1])[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("variant", ["neural-coverage", "dnn-tip"])
def test_upper_is_twice_the_largest_training_surprise(variant):
    values, predicted = training()
    criterion = fitted(values, predicted, variant=variant, buckets=100)
    largest = surprise(criterion, values, predicted).max()
    assert float(criterion.learnt["upper"]) == pytest.approx(2 * largest, rel=1e-8)
    raised = criterion.update(torch.from_numpy(values), predicted=torch.from_numpy(predicted))
    buckets = {math.ceil(each * 100 / (2.000000001 * largest)) for each in surprise(criterion, values, predicted)}
    assert criterion.n_covered() == raised.sum() == len(buckets)
    assert max(buckets) == 50
    far = criterion.update(torch.from_numpy(values[:1] + 1e3), predicted=torch.from_numpy(predicted[:1]))
    assert not far.any()


def test_neurons_that_vary_little_are_dropped():
    values, predicted = training()
    padded = np.hstack([np.zeros((len(values), 1)), values, np.where(predicted == 0, 2.0, values[:, 0])[:, None]])
    want = surprise(fitted(values, predicted), values, predicted)
    np.testing.assert_allclose(surprise(fitted(padded, predicted), padded + 0.0, predicted), want, rtol=1e-9)


def test_classes_with_few_traces_borrow_with_a_warning():
    values, predicted = training(n=100)
    values, predicted = np.vstack([values, values[:1]]), np.append(predicted, 8)
    with pytest.warns(RuntimeWarning, match="class 8 "):
        criterion = fitted(values, predicted)
    pooled = sum(np.cov(values[predicted == c].T) * ((predicted == c).sum() - 1) for c in range(3)) / (101 - 4)
    test = values[3:4]
    want = mahalanobis(test[0], values[-1], np.linalg.inv(pooled))
    assert surprise(criterion, test, [8])[0] == pytest.approx(want, rel=1e-8)
    with pytest.warns(RuntimeWarning, match="mixed"):
        few = fitted(values[:7], predicted[:7])
    assert np.isfinite(surprise(few, values[:7], predicted[:7])).all()


def test_raised_is_the_same_as_for_single_tests():
    values, predicted = training()
    tests = torch.from_numpy(np.concatenate([values[:40], values[:40], values[:5] * 2]))
    classes = torch.from_numpy(np.concatenate([predicted[:40], predicted[:40], predicted[:5]]))
    at_once = fitted(values, predicted, buckets=30)
    alone = at_once.fresh()
    raised = at_once.update(tests, predicted=classes)
    assert raised.tolist() == [bool(alone.update(tests[i : i + 1], predicted=classes[i : i + 1])) for i in range(85)]
    assert not raised[40:80].any()


def test_invalid_options_are_rejected():
    with pytest.raises(UsageError, match="min_variance"):
        MDSA(min_variance=math.inf)
