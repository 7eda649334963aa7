"""CC, compared with keeping tests one by one."""

import math

import numpy as np
import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria import cc
from themis_lab.criteria.cc import CC


def slow(layers, threshold):
    """Which tests were kept in some layer, test by test, and how many in total."""
    kept = {name: [] for name in layers}
    raised = []
    for i in range(len(next(iter(layers.values())))):
        is_new = False
        for name, values in layers.items():
            x = values[i].numpy().astype(np.float64)
            if not np.isfinite(x).all():
                continue
            if all(np.sum(np.square(x - each)) > threshold for each in kept[name]):
                kept[name].append(x)
                is_new = True
        raised.append(is_new)
    return raised, sum(len(each) for each in kept.values())


def drawn(n=60, widths=(3, 3, 6, 6, 6, 3), seed=0):
    random = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(n, width, generator=random) for i, width in enumerate(widths)}


def some(layers, rows):
    return {name: each[rows] for name, each in layers.items()}


@pytest.mark.parametrize("threshold", [0.0, 0.5, 3.0, 10.0, 1e6])
def test_it_agrees_with_keeping_tests_one_by_one(threshold):
    layers = drawn()
    want, count = slow(layers, threshold)
    at_once, alone, parts = CC(threshold), CC(threshold), CC(threshold)
    assert at_once.update(layers).tolist() == want
    assert [bool(alone.update(some(layers, slice(i, i + 1)))) for i in range(60)] == want
    in_parts = [parts.update(some(layers, slice(i, j))) for i, j in ((0, 7), (7, 8), (8, 60))]
    assert torch.cat(in_parts).tolist() == want
    assert at_once.score() == alone.score() == parts.score() == count


@pytest.mark.parametrize(("tests", "chunk"), [(1, 2**24), (4, 2**24), (1024, 1), (1024, 500), (7, 150)])
def test_chunks_do_not_matter(monkeypatch, tests, chunk):
    monkeypatch.setattr(cc, "COMPARED_TESTS", tests)
    monkeypatch.setattr(cc, "NUMBERS_AT_ONCE", chunk)
    layers = drawn()
    want, count = slow(layers, 3.0)
    criterion = CC(3.0)
    assert criterion.update(layers).tolist() == want
    assert criterion.score() == count


@pytest.mark.parametrize(
    "stream",
    [
        [[0.1, 0.7]] * 5,
        [[float(i), 0.0] for i in range(8, 0, -1)],
        [[0.0, 0.0]] * 6 + [[9.0, 9.0]],
        [[0.0, 0.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0]],  # the third is near two, the fourth near one
        [[float(i * i), -float(i)] for i in range(9)],
    ],
)
@pytest.mark.parametrize("threshold", [0.0, 1.0, 4.0])
def test_ordered_streams(stream, threshold):
    values = torch.tensor(stream)
    want, count = slow({"layer": values}, threshold)
    criterion = CC(threshold)
    assert criterion.update(values).tolist() == want
    assert criterion.score() == count
    assert not criterion.update(values).any()  # a test is new only once


def test_a_distance_equal_to_the_threshold_is_not_far():
    criterion = CC(25.0)
    assert criterion.update(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.001]])).tolist() == [True, False, True]


def test_equal_tests_far_from_zero_are_kept_once():
    values = (torch.randn(1, 50) * 1e6).expand(20, -1)
    criterion = CC(0.0)
    criterion.update(values)
    criterion.update(values)
    assert criterion.score() == 1


def test_non_finite_tests_are_not_kept():
    layers = drawn(10)
    layers["layer0"][0, 1] = math.nan
    for values in layers.values():
        values[3, 0] = -math.inf
    layers["layer1"][3] = math.inf
    want, count = slow(layers, 1.0)
    criterion = CC(1.0)
    assert criterion.update(layers).tolist() == want
    assert not want[3]
    assert want[0]
    assert criterion.score() == count
    assert all(each.isfinite().all() for key, each in criterion.state.items() if key.startswith("kept/"))
    only = CC()
    assert not only.update(torch.full((3, 2), math.nan)).any()
    assert only.score() == 0


@pytest.mark.parametrize("threshold", [0.0, 1e-9, 2.0])
def test_pairs_that_a_product_cannot_decide_are_measured(threshold):
    random = torch.Generator().manual_seed(5)
    near = torch.randn(1, 40, generator=random, dtype=torch.float64) * 1e4
    steps = torch.randint(0, 4, (50, 2), generator=random) * math.sqrt(threshold / 2 or 1e-9)
    layers = {"a": near + torch.cat([steps, torch.zeros(50, 38)], 1), "b": torch.zeros(50, 40).double()}
    layers["b"][::7, 3] = 1e3
    want, count = slow(layers, threshold)
    criterion = CC(threshold)
    assert torch.cat([criterion.update(some(layers, slice(i, i + 10))) for i in range(0, 50, 10)]).tolist() == want
    assert criterion.score() == count


def test_layers_that_keep_different_numbers_of_tests():
    layers = drawn(60, (5, 5, 5, 5))
    for values, scale in zip(layers.values(), (0.0, 0.1, 1.0, 30.0), strict=True):
        values *= scale
    want, count = slow(layers, 2.0)
    criterion = CC(2.0)
    assert torch.cat([criterion.update(some(layers, slice(i, i + 9))) for i in range(0, 60, 9)]).tolist() == want
    assert criterion.score() == count
    counts = criterion.state["counts/layer0"].tolist()
    assert counts[0] == counts[1] == 1 < counts[2] < counts[3] == 60


def test_keeping_too_much_is_rejected(monkeypatch):
    monkeypatch.setattr(cc, "MAX_KEPT_BYTES", 1000)
    criterion = CC()
    criterion.update(torch.arange(10.0)[:, None] * 10)
    with pytest.raises(UsageError, match="neurons='channel', a larger threshold"):
        criterion.update(torch.arange(10.0, 200.0)[:, None] * 10)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_parallel_selection_equals_sequential_selection(share):
    random = torch.Generator().manual_seed(2)
    is_near, is_open = torch.rand(3, 50, 50, generator=random) < share, torch.rand(3, 50, generator=random) < 0.8
    is_near[1] = torch.eye(50).roll(-1, 0).bool()  # each near the one before it
    want = torch.zeros_like(is_open)
    for layer in range(3):
        for i in range(50):
            is_apart = not any(is_near[layer, i, j] and want[layer, j] for j in range(i))
            want[layer, i] = is_open[layer, i] and is_apart
    assert torch.equal(cc.first_apart(is_near, is_open), want)


def test_huge_values():
    values = torch.tensor([[1e300], [1e300], [-1e300], [0.0]], dtype=torch.float64)
    criterion = CC()
    assert criterion.update(values).tolist() == [True, False, True, True]


def test_a_double_precision_batch_after_a_single_precision_one():
    criterion = CC(1.0)
    criterion.update(torch.zeros(1, 2))
    assert criterion.update(torch.tensor([[0.5, 0.0], [2.0, 0.0]], dtype=torch.float64)).tolist() == [False, True]


def test_it_grows_and_depends_on_the_order():
    ordered, other = CC(1.0), CC(1.0)
    ordered.update(torch.tensor([[0.0], [0.9], [1.8]]))
    other.update(torch.tensor([[0.9], [0.0], [1.8]]))
    assert (ordered.score(), other.score()) == (2, 1)
    assert CC.laws.monotone
    assert not CC.laws.order_free
    with pytest.raises(UsageError, match="merged"):
        ordered.merge(other)


@pytest.mark.parametrize("threshold", [-1.0, math.nan, math.inf])
def test_invalid_options_are_rejected(threshold):
    with pytest.raises(UsageError, match="threshold"):
        CC(threshold)
