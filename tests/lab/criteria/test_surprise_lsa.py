"""LSA, compared with scipy's kernel density and a slow one, also for classes with too few traces."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import gaussian_kde

from themis.errors import DataError, UsageError
from themis_lab.criteria.readings import Batch
from themis_lab.criteria.surprise import LSA


def training(n=200, width=5, classes=3, seed=0):
    random = np.random.default_rng(seed)
    predicted = random.integers(0, classes, n)
    mix = random.normal(size=(classes, width, width))
    values = np.stack([mix[c] @ random.normal(size=width) + c for c in predicted])
    return values, predicted


def fitted(values, predicted, **options):
    return LSA(**options).fit([Batch(torch.from_numpy(values), predicted=torch.from_numpy(predicted))])


def surprise(criterion, values, predicted):
    return criterion.surprise(torch.from_numpy(values), predicted=torch.as_tensor(predicted)).numpy()


def slow(test, traces, covariance):
    """Minus the log of the mean Gaussian kernel, trace by trace."""
    inverse, width = np.linalg.inv(covariance), len(test)
    logs = [-0.5 * (test - each) @ inverse @ (test - each) for each in traces]
    top = max(logs)
    log_sum = top + math.log(sum(math.exp(each - top) for each in logs))
    return -(log_sum - math.log(len(traces)) - 0.5 * (width * math.log(2 * math.pi) + np.linalg.slogdet(covariance)[1]))


def scott(traces):
    n, d = traces.shape
    return n ** (-2 / (d + 4)) * np.cov(traces.T).reshape(d, d)


@pytest.mark.parametrize("width", [1, 5, 12])
@pytest.mark.parametrize("spread", [1.0, 50.0])
def test_agrees_with_scipy_and_with_the_definition(width, spread):
    values, predicted = training(width=width)
    tests = np.random.default_rng(1).normal(size=(40, width)) * spread
    classes = np.arange(40) % 3
    found = surprise(fitted(values, predicted), tests, classes)
    for test, c, each in zip(tests, classes, found, strict=True):
        traces = values[predicted == c]
        assert each == pytest.approx(-gaussian_kde(traces.T).logpdf(test)[0], rel=1e-6)
        assert each == pytest.approx(slow(test, traces, scott(traces)), rel=1e-9)


def test_chunks_do_not_matter(monkeypatch):
    values, predicted = training()
    tests, classes = values[:50] + 0.3, predicted[:50]
    criterion = fitted(values, predicted)
    whole = surprise(criterion, tests, classes)
    monkeypatch.setattr("themis_lab.criteria.surprise.NUMBERS_AT_ONCE", 1)
    np.testing.assert_allclose(surprise(criterion, tests, classes), whole, rtol=1e-12)


def test_neurons_that_vary_little_are_dropped():
    values, predicted = training(width=4)
    still = np.full((len(values), 1), 3.0)
    faint = np.random.default_rng(2).normal(size=(len(values), 1)) * 1e-3  # variance 1e-6
    in_one = np.where(predicted == 1, 0.0, np.random.default_rng(3).normal(size=len(values)))[:, None]
    padded = np.hstack([still, values[:, :2], faint, values[:, 2:], in_one])
    criterion = fitted(padded, predicted)
    assert criterion.learnt["columns"].tolist() == [[1, 2, 4, 5]] * 3
    tests = padded[:20] * 1.1
    want = surprise(fitted(values, predicted), tests[:, [1, 2, 4, 5]], predicted[:20])
    np.testing.assert_allclose(surprise(criterion, tests, predicted[:20]), want, rtol=1e-9)
    assert fitted(padded, predicted, min_variance=1e-7).learnt["columns"].shape == (3, 5)


def test_a_class_with_few_traces_borrows_from_the_others():
    values, predicted = training(n=120, width=6)
    keep = np.concatenate([np.flatnonzero(predicted != 2), np.flatnonzero(predicted == 2)[:4]])
    values, predicted = values[keep], predicted[keep]
    with pytest.warns(RuntimeWarning, match="class 2 are too few") as caught:
        criterion = fitted(values, predicted)
    assert len(caught) == 1
    pooled = sum(np.cov(values[predicted == c].T) * ((predicted == c).sum() - 1) for c in range(3)) / (len(values) - 3)
    few = values[predicted == 2]
    weight = 3 / (3 + 6)
    covariance = (weight * np.cov(few.T) + (1 - weight) * pooled) * 4 ** (-2 / 10)
    test = values[:1] + 0.1
    assert surprise(criterion, test, [2])[0] == pytest.approx(slow(test[0], few, covariance), rel=1e-9)
    full = values[predicted == 0]  # the others are unchanged
    assert surprise(criterion, test, [0])[0] == pytest.approx(-gaussian_kde(full.T).logpdf(test[0])[0], rel=1e-6)


def test_a_class_with_one_trace_has_the_pooled_covariance():
    values, predicted = training(n=90, width=3, classes=2)
    values, predicted = np.vstack([values, [[4.0, 5.0, 6.0]]]), np.append(predicted, 9)
    with pytest.warns(RuntimeWarning, match="class 9 "):
        criterion = fitted(values, predicted)
    pooled = sum(np.cov(values[predicted == c].T) * ((predicted == c).sum() - 1) for c in range(2)) / (91 - 3)
    test = np.array([[4.0, 5.5, 6.0]])
    assert surprise(criterion, test, [9])[0] == pytest.approx(slow(test[0], values[-1:], pooled), rel=1e-9)


def test_fewer_traces_than_neurons_in_every_class():
    values, predicted = training(n=9, width=8)
    with pytest.warns(RuntimeWarning, match=r"class 0, 1, 2 are"):
        criterion = fitted(values, predicted)
    found = surprise(criterion, np.vstack([values, values + 1e3]), np.tile(predicted, 2))
    assert np.isfinite(found).all()
    assert found[:9].max() < found[9:].min()


def test_neurons_that_depend_on_one_another():
    values, predicted = training()
    doubled = np.hstack([values, values[:, :1] * 2])
    with pytest.warns(RuntimeWarning, match="too alike"):
        criterion = fitted(doubled, predicted)
    assert np.isfinite(surprise(criterion, doubled, predicted)).all()


def test_there_is_no_warning_with_enough_traces():
    values, predicted = training(n=300, width=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted(values, predicted).learnt["whiteners"].shape == (3, 8, 8)


def test_traces_without_any_spread_are_rejected():
    with pytest.raises(DataError, match="min_variance"):
        fitted(np.ones((6, 2)), np.arange(6) % 2)
    with pytest.raises(DataError, match="that differ"):
        fitted(np.array([[0.0, 1.0], [5.0, 3.0]]), np.arange(2))


def test_dnn_tip_takes_the_widest_neurons_of_each_class():
    values, predicted = training(width=6)
    criterion = fitted(values, predicted, variant="dnn-tip", max_features=2)
    tests = values[:10] * 1.3
    for test, c, each in zip(tests, predicted[:10], surprise(criterion, tests, predicted[:10]), strict=True):
        traces = values[predicted == c]
        columns = sorted(np.argsort(traces.var(0))[-2:])
        assert each == pytest.approx(-gaussian_kde(traces[:, columns].T).logpdf(test[columns])[0], rel=1e-6)
    assert fitted(values, predicted, variant="dnn-tip").learnt["columns"].shape == (3, 6)


def test_neural_coverage_has_a_fixed_bandwidth():
    values, predicted = training(width=3)
    values = np.hstack([values, np.ones((len(values), 1))])
    criterion = fitted(values, predicted, variant="neural-coverage")
    tests = values[:10] + 0.05
    for test, c, each in zip(tests, predicted[:10], surprise(criterion, tests, predicted[:10]), strict=True):
        traces = values[predicted == c][:, :3]
        assert each == pytest.approx(slow(test[:3], traces, 0.04 * np.eye(3)), rel=1e-9)


@pytest.mark.parametrize("at_once", [1, 2**22])
def test_negative_surprise_is_not_dropped(monkeypatch, at_once):
    monkeypatch.setattr("themis_lab.criteria.surprise.NUMBERS_AT_ONCE", at_once)
    values, predicted = training(n=60, width=4)
    values *= 0.02  # densities over 1
    criterion = fitted(values, predicted, upper=1.0, buckets=50)
    found = surprise(criterion, values, predicted)
    assert (found < 0).all()
    lower = float(criterion.learnt["lower"])
    assert lower == pytest.approx(found.min(), rel=1e-6)
    assert lower < found.min()
    raised = criterion.update(torch.from_numpy(values), predicted=torch.from_numpy(predicted))
    want = {math.ceil((each - lower) / (1 - lower) * 50) for each in found}
    assert criterion.score() == len(want) / 50 == int(raised.sum()) / 50 > 0.1
    assert LSA(**criterion.options()).options() == criterion.options()


def test_if_no_surprise_is_negative_the_range_is_that_of_sadl():
    values, predicted = training(width=4)
    values *= 50
    default, sadl = fitted(values, predicted), fitted(values, predicted, variant="sadl")
    assert (surprise(sadl, values, predicted) > 0).all()
    assert float(default.learnt["lower"]) == 0
    tests, classes = torch.from_numpy(values * 1.5), torch.from_numpy(predicted)
    assert default.update(tests, predicted=classes).tolist() == sadl.update(tests, predicted=classes).tolist()
    assert default.score() == sadl.score() > 0


def test_sadl_drops_negative_surprise_unless_a_lower_bound_is_given():
    values, predicted = training(width=4)
    values *= 0.02  # densities over 1
    tests, classes = torch.from_numpy(values), torch.from_numpy(predicted)
    plain = fitted(values, predicted, variant="sadl")
    assert (plain.surprise(tests, predicted=classes) < 0).all()
    lowered = fitted(values, predicted, lower=-20.0, upper=0.0, buckets=40)
    plain.update(tests, predicted=classes)
    lowered.update(tests, predicted=classes)
    assert plain.score() == 0
    want = {math.ceil((each + 20) * 2) for each in surprise(lowered, values, predicted) if -20 < each <= 0}
    assert lowered.score() == len(want) / 40 > 0


def test_a_training_input_is_less_surprising_than_a_far_one():
    values, predicted = training()
    criterion = fitted(values, predicted)
    assert surprise(criterion, values, predicted).max() < surprise(criterion, values + 1e4, predicted).min()


@pytest.mark.parametrize(
    "options",
    [
        {"min_variance": -1.0},
        {"min_variance": math.nan},
        {"max_features": 0},
        {"max_features": 2.5},
        {"lower": math.inf},
        {"lower": 2000.0},
    ],
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(UsageError, match=next(iter(options)) if options != {"lower": 2000.0} else "upper"):
        LSA(**options)


def test_too_many_covariances_are_rejected(monkeypatch):
    values, predicted = training()
    monkeypatch.setattr("themis_lab.criteria.surprise.MAX_COVARIANCE_NUMBERS", 70)
    with pytest.raises(UsageError, match="narrower"):
        fitted(values, predicted)


def test_options_create_an_equal_criterion():
    made = LSA(100.0, 10, min_variance=0.1, lower=-3.0, variant="dnn-tip", layers="fc")
    assert LSA(**made.options()).options() == made.options()
