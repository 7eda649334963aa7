"""DSA, compared with distances computed one by one."""

import math

import numpy as np
import pytest
import torch

from themis.errors import DataError, UsageError
from themis_lab.criteria.readings import Batch
from themis_lab.criteria.surprise import DSA, evenly_spaced


def training(n=150, width=6, classes=4, seed=0, dtype=np.float32):
    random = np.random.default_rng(seed)
    predicted = random.integers(0, classes, n)
    return (random.normal(size=(n, width)) + predicted[:, None] * 0.5).astype(dtype), predicted


def fitted(values, predicted, **options):
    return DSA(**options).fit([Batch(torch.from_numpy(values), predicted=torch.from_numpy(predicted))])


def surprise(criterion, values, predicted):
    return criterion.surprise(torch.from_numpy(values), predicted=torch.as_tensor(predicted)).numpy()


def slow(test, c, values, predicted, from_test=False):
    """The ratio by its definition."""

    def nearest(x, rows):
        found = [math.dist(x, values[i]) for i in rows]
        return min(found), rows[int(np.argmin(found))]

    own, others = np.flatnonzero(predicted == c), np.flatnonzero(predicted != c)
    first, near = nearest(test, own)
    second, _ = nearest(test if from_test else values[near], others)
    if from_test:
        return first / second if second > 0 else 1e-6
    return 0.0 if first == 0 else first / second if second > 0 else math.inf


@pytest.mark.parametrize("variant", ["sadl", "neural-coverage"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_agrees_with_distances_one_by_one(variant, dtype):
    values, predicted = training(dtype=dtype)
    tests = np.random.default_rng(1).normal(size=(60, 6)).astype(dtype) * 2
    classes = np.arange(60) % 4
    found = surprise(fitted(values, predicted, variant=variant), tests, classes)
    doubles = values.astype(np.float64)
    want = [
        slow(test.astype(np.float64), c, doubles, predicted, variant == "neural-coverage")
        for test, c in zip(tests, classes, strict=True)
    ]
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_no_digits_are_lost_far_from_zero():
    values, predicted = training(n=40, dtype=np.float64)
    values = values * 1e-3 + 1e4
    tests = values[::3] + 1e-6
    found = surprise(fitted(values, predicted), tests, predicted[::3])
    want = [slow(test, c, values, predicted) for test, c in zip(tests, predicted[::3], strict=True)]
    np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.parametrize("variant", ["sadl", "neural-coverage"])
@pytest.mark.parametrize("spread", [1e-9, 1e-4, 1.0])
def test_traces_that_a_product_cannot_tell_apart_are_measured(variant, spread):
    random = np.random.default_rng(6)
    centres = random.normal(size=(3, 30)) * [[1.0], [1e3], [1e6]]
    values = centres[random.integers(0, 3, 80)] + spread * random.integers(0, 3, (80, 30))
    values[40:60] = values[:20]  # equal ones, some in another class
    predicted = random.integers(0, 2, 80)
    tests = np.concatenate([values[::4] + spread * random.integers(-1, 2, (20, 30)), centres * 1e3])
    classes = random.integers(0, 2, len(tests))
    found = surprise(fitted(values, predicted, variant=variant), tests, classes)
    want = [
        slow(test, c, values, predicted, variant == "neural-coverage") for test, c in zip(tests, classes, strict=True)
    ]
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_values_whose_squares_overflow():
    values, predicted = np.array([[1e160, 0.0], [1e160, 3.0], [1e160, 8.0], [0.0, 0.0]]), np.array([0, 0, 1, 1])
    assert surprise(fitted(values, predicted), np.array([[1e160, 4.0]]), [0])[0] == pytest.approx(0.2)


def test_whole_numbers_tie_as_in_the_definition():
    random = np.random.default_rng(4)
    values, predicted = random.integers(0, 3, (60, 2)).astype(np.float64), random.integers(0, 2, 60)
    tests, classes = random.integers(0, 4, (50, 2)).astype(np.float64), random.integers(0, 2, 50)
    found = surprise(fitted(values, predicted), tests, classes)
    want = [slow(test, c, values, predicted) for test, c in zip(tests, classes, strict=True)]
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_a_training_input_has_no_surprise():
    values, predicted = training()
    criterion = fitted(values, predicted)
    assert (surprise(criterion, values, predicted) == 0).all()
    assert not criterion.update(torch.from_numpy(values), predicted=torch.from_numpy(predicted)).any()


def test_equal_traces_in_two_classes():
    values, predicted = np.array([[1.0, 1.0], [1.0, 1.0], [3.0, 1.0]]), np.array([0, 1, 1])
    tests = np.array([[1.0, 1.0], [1.0, 2.0]])
    assert surprise(fitted(values, predicted), tests, [0, 0]).tolist() == [0.0, math.inf]
    assert surprise(fitted(values, predicted, variant="neural-coverage"), tests, [0, 0]).tolist() == [1e-6, 1.0]


def test_a_class_with_one_trace():
    values, predicted = training(n=30)
    values, predicted = np.vstack([values, np.full((1, 6), 9.0, np.float32)]), np.append(predicted, 17)
    test = np.full((1, 6), 8.0, np.float32)
    want = slow(test[0].astype(float), 17, values.astype(float), predicted)
    assert surprise(fitted(values, predicted), test, [17])[0] == pytest.approx(want, rel=1e-12)


def test_chunks_do_not_matter(monkeypatch):
    values, predicted = training()
    criterion = fitted(values, predicted)
    whole = surprise(criterion, values + 1, predicted)
    monkeypatch.setattr("themis_lab.criteria.surprise.NUMBERS_AT_ONCE", 1)
    np.testing.assert_allclose(surprise(criterion, values + 1, predicted), whole, rtol=1e-12)


def test_max_traces_keeps_evenly_spaced_ones():
    values, predicted = training()
    some = fitted(values, predicted, max_traces=10)
    assert len(some.learnt["traces"]) == 40
    rows = np.concatenate(
        [np.flatnonzero(predicted == c)[np.arange(10) * n // 10] for c, n in enumerate(np.bincount(predicted))]
    )
    want = fitted(values[rows], predicted[rows])
    np.testing.assert_array_equal(surprise(some, values, predicted), surprise(want, values, predicted))
    every = fitted(values, predicted, max_traces=1000)
    np.testing.assert_array_equal(
        surprise(every, values + 1, predicted), surprise(fitted(values, predicted), values + 1, predicted)
    )
    assert evenly_spaced(torch.arange(7), 3).tolist() == [0, 2, 4]


def test_raised_is_the_same_as_for_single_tests():
    values, predicted = training()
    tests = torch.from_numpy(np.concatenate([values[:30] + 0.5, values[:30] + 0.5, values[30:60], values[:9] * 1.5]))
    classes = torch.from_numpy(np.concatenate([predicted[:30], predicted[:30], predicted[30:60], predicted[:9]]))
    at_once = fitted(values, predicted, buckets=50)
    alone = at_once.fresh()
    raised = at_once.update(tests, predicted=classes)
    one_by_one = [bool(alone.update(tests[i : i + 1], predicted=classes[i : i + 1])) for i in range(len(tests))]
    assert raised.tolist() == one_by_one
    assert 0 < raised.sum() == at_once.n_covered() == alone.n_covered()


def test_one_class_cannot_be_compared():
    with pytest.raises(DataError, match="class 3"):
        fitted(np.zeros((4, 2)), np.full(4, 3))


@pytest.mark.parametrize("max_traces", [0, -1, 2.0, True])
def test_invalid_options_are_rejected(max_traces):
    with pytest.raises(UsageError, match="max_traces"):
        DSA(max_traces=max_traces)
