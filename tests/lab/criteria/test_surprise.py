"""What the surprise criteria have in common: buckets, classes, and what they reject."""

import math

import numpy as np
import pytest
import torch

from themis.errors import DataError, UsageError
from themis_lab.criteria.readings import Batch
from themis_lab.criteria.surprise import DSA, LSA, MDSA, Surprise, Traces

ALL = [LSA, DSA, MDSA]


class Given(Surprise):
    """Its surprise is the first neuron."""

    name = "given"

    def _condense(self, traces):
        return {"upper": torch.tensor(3.0, dtype=torch.float64)}

    def _surprise_of(self, values, place, groups):
        return values[:, 0]


def given(upper=2.0, buckets=10):
    return Given(upper, buckets).fit([Batch(torch.zeros(2, 1), predicted=torch.tensor([0, 1]))])


def bucket_of(surprise, lower, upper, buckets):
    """The bucket of one surprise, from the definition: the k-th is `(lower + width (k - 1), lower + width k]`."""
    if not lower < surprise <= upper:
        return None
    return next(k for k in range(buckets) if surprise <= lower + (upper - lower) * (k + 1) / buckets)


def training(n=60, width=3, classes=3, seed=0):
    random = torch.Generator().manual_seed(seed)
    predicted = torch.arange(n) % classes
    return torch.randn(n, width, generator=random) + predicted[:, None], predicted


@pytest.mark.parametrize("upper", [2.0, 0.5, None])
def test_buckets_agree_with_the_definition(upper):
    criterion = given(upper, 16)
    values = np.random.default_rng(1).uniform(-1, 4, 300).astype(np.float64)
    want = {bucket_of(each, 0.0, 3.0 if upper is None else upper, 16) for each in values} - {None}
    criterion.update(torch.from_numpy(values)[:, None], predicted=torch.zeros(300, dtype=torch.int64))
    assert criterion.n_covered() == len(want)
    assert criterion.score() == len(want) / 16


@pytest.mark.parametrize(
    ("surprise", "bucket"),
    [
        (0.0, -1),
        (-1.0, -1),
        (5e-324, 0),
        (0.2, 0),
        (0.25, 1),
        (2.0, 9),
        (math.nextafter(2.0, 3.0), -1),
        (math.inf, -1),
        (math.nan, -1),
    ],
)
def test_edges_of_the_buckets(surprise, bucket):
    criterion = given()
    values = torch.tensor([[surprise]], dtype=torch.float64)
    readings = criterion.read(Batch(values, predicted=torch.tensor([0])))
    assert criterion.items(readings).tolist() == [[bucket]]


def test_raised_is_the_same_as_for_single_tests():
    values = torch.tensor([0.1, 0.1, 1.9, 5.0, 1.9, math.nan, 1.0, 0.9, 0.1, 0.0, 2.0])[:, None]
    predicted = torch.tensor([0, 1, 0, 1, 0, 1, 7, 0, 1, 0, 1])
    at_once, alone = given(), given()
    raised = at_once.update(values, predicted=predicted)
    one_by_one = [bool(alone.update(values[i : i + 1], predicted=predicted[i : i + 1])) for i in range(len(values))]
    assert raised.tolist() == one_by_one
    assert raised.tolist() == [i in (0, 2, 7) for i in range(11)]
    assert at_once.score() == alone.score() == 0.3


@pytest.mark.parametrize("kind", ALL)
def test_merged_halves_equal_the_whole(kind):
    values, predicted = training()
    tests = torch.randn(40, 3, generator=torch.Generator().manual_seed(3)) * 2
    whole = kind(upper=50.0, buckets=64).fit([Batch(values, predicted=predicted)])
    one, other = whole.fresh(), whole.fresh()
    classes = torch.arange(40) % 3
    whole.update(tests, predicted=classes)
    one.update(tests[:13], predicted=classes[:13])
    other.update(tests[13:], predicted=classes[13:])
    merged = one.merge(other)
    assert 0 < merged.score() == whole.score() <= 1
    assert merged.tests == 40


@pytest.mark.parametrize("kind", ALL)
def test_fitting_in_batches_equals_fitting_all_at_once(kind):
    values, predicted = training()
    tests, classes = torch.randn(9, 3), torch.arange(9) % 3
    at_once = kind().fit([Batch(values, predicted=predicted)])
    in_parts = kind().fit([Batch(values[i : i + 1], predicted=predicted[i : i + 1]) for i in range(60)])
    assert torch.equal(at_once.surprise(tests, predicted=classes), in_parts.surprise(tests, predicted=classes))


@pytest.mark.parametrize("kind", ALL)
def test_a_reused_buffer_does_no_harm(kind):
    values, predicted = training()
    buffer, classes = torch.zeros(20, 3), torch.zeros(20, dtype=torch.int64)

    def batches():
        for start in (0, 20, 40):
            buffer.copy_(values[start : start + 20])
            classes.copy_(predicted[start : start + 20])
            yield Batch(buffer, predicted=classes)

    reused, fresh = kind().fit(batches()), kind().fit([Batch(values, predicted=predicted)])
    assert torch.equal(reused.surprise(values, predicted=predicted), fresh.surprise(values, predicted=predicted))


@pytest.mark.parametrize("kind", ALL)
def test_tests_without_a_surprise_cover_nothing(kind):
    values, predicted = training()
    criterion = kind(upper=1000.0).fit([Batch(values, predicted=predicted)])
    tests = torch.zeros(5, 3)
    tests[0, 1], tests[1, 2], tests[2, 0] = math.nan, math.inf, -math.inf
    classes = torch.tensor([0, 1, 2, 3, -4])  # two classes that no training input was predicted as
    surprise = criterion.surprise(tests, predicted=classes)
    assert surprise[:3].isnan().all()
    assert surprise[3:].tolist() == [math.inf, math.inf]
    assert not criterion.update(tests, predicted=classes).any()
    assert criterion.score() == 0
    # A valid test among invalid ones counts as usual.
    mixed, classes[4] = torch.cat([tests[:4], torch.full((1, 3), 0.7)]), 1
    alone = criterion.surprise(mixed[4:], predicted=classes[4:])
    assert criterion.surprise(mixed, predicted=classes)[4] == alone[0]
    assert criterion.update(mixed, predicted=classes).tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("kind", ALL)
def test_huge_values_do_not_fail(kind):
    values, predicted = training()
    criterion = kind().fit([Batch(values, predicted=predicted)])
    surprise = criterion.surprise(torch.full((2, 3), 1e300, dtype=torch.float64), predicted=torch.tensor([0, 1]))
    assert not (surprise <= 2000).any()


@pytest.mark.parametrize("kind", ALL)
def test_the_predicted_class_is_read_from_the_output(kind):
    values, predicted = training()
    scores = torch.nn.functional.one_hot(predicted, 3).float()
    criterion = kind().fit([{"hidden": values, "output": scores}])
    assert list(criterion.layout.names) == ["hidden"]
    other = kind().fit([Batch(values, predicted=predicted)])
    asked = criterion.surprise({"hidden": values + 1, "output": scores})
    assert torch.equal(asked, other.surprise(values + 1, predicted=predicted.int()))


@pytest.mark.parametrize("kind", ALL)
def test_empty_batches_and_different_layers(kind):
    values, predicted = training()
    criterion = kind().fit([Batch(values, predicted=predicted)])
    assert criterion.surprise(values[:0], predicted=predicted[:0]).shape == (0,)
    assert all(each.is_contiguous() for each in criterion.learnt.values())
    with pytest.raises(DataError, match="same layers"):
        criterion.surprise(torch.zeros(2, 4), predicted=predicted[:2])


@pytest.mark.parametrize("kind", ALL)
def test_computing_the_surprise_changes_nothing(kind):
    values, predicted = training()
    criterion = kind().fit([Batch(values, predicted=predicted)])
    before = {name: each.clone() for name, each in criterion.learnt.items()}
    criterion.surprise(values, predicted=predicted)
    criterion.update(values + 1, predicted=predicted)
    assert criterion.learnt.keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in criterion.learnt.items())


@pytest.mark.parametrize("kind", ALL)
def test_invalid_use_is_rejected(kind):
    values, predicted = training()
    with pytest.raises(UsageError, match="fit"):
        kind().surprise(values, predicted=predicted)
    with pytest.raises(UsageError, match="predicted"):
        kind().fit([values])
    with pytest.raises(UsageError, match="upper"):
        kind(upper=0.0)
    with pytest.raises(UsageError, match="upper"):
        kind(upper=math.nan)
    with pytest.raises(UsageError, match="buckets"):
        kind(buckets=0)
    with pytest.raises(UsageError, match="one layer"):
        kind(layers=["a", "b"])
    with pytest.raises(DataError, match="finite"):
        kind().fit([Batch(torch.full((2, 3), math.nan), predicted=predicted[:2])])


def test_a_failed_fit_leaves_nothing_learnt():
    criterion = DSA()
    with pytest.raises(DataError, match="two classes"):
        criterion.fit([Batch(torch.randn(4, 2), predicted=torch.zeros(4))])
    assert not criterion.learnt


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_inputs_are_processed_class_by_class(monkeypatch, chunk):
    monkeypatch.setattr("themis_lab.criteria.surprise.NUMBERS_AT_ONCE", chunk)
    shown = []

    class Shown(Given):
        def _surprise_of(self, values, place, groups):
            shown.append([(at, values[rows, 0].tolist(), place[rows].tolist()) for at, rows in groups])
            return values[:, 0] * 10

    criterion = Shown(2.0, 10).fit([Batch(torch.zeros(3, 1), predicted=torch.tensor([4, 5, 7]))])
    values = torch.tensor([0.0, math.nan, 2.0, 3.0, 4.0, 5.0])[:, None]
    found = criterion.surprise(values, predicted=torch.tensor([7, 4, 4, 7, 4, 6]))
    assert found[[0, 2, 3, 4]].tolist() == [0, 20, 30, 40]
    assert found[1].isnan()
    assert found[5] == math.inf
    want = {
        1: [[(2, [0.0], [2])], [(0, [2.0], [0])], [(2, [3.0], [2])], [(0, [4.0], [0])]],
        2: [[(2, [0.0], [2])], [(0, [2.0], [0]), (2, [3.0], [2])], [(0, [4.0], [0])]],
        100: [[(0, [2.0, 4.0], [0, 0]), (2, [0.0, 3.0], [2, 2])]],
    }
    assert shown == want[chunk]


def test_traces_are_sorted_by_class():
    traces = Traces.of(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([5, 1, 5, 1]))
    assert traces.values[:, 0].tolist() == [2.0, 4.0, 1.0, 3.0]
    assert traces.classes.tolist() == [1, 5]
    assert traces.sizes == [2, 2]
    assert traces.place.tolist() == [0, 0, 1, 1]
    assert traces.groups == [(0, slice(0, 2)), (1, slice(2, 4))]
    assert traces.means[:, 0].tolist() == [3.0, 2.0]
    assert traces.variances[:, 0].tolist() == [1.0, 1.0]
