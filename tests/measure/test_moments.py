"""Moments are exact, and merging them obeys its laws."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from moments import moments_of

from themis.measure.moments import Accumulator, Moments

pytestmark = pytest.mark.quick

values = arrays(np.float64, st.tuples(st.integers(1, 30), st.just(3)), elements=st.floats(-1e6, 1e6, width=32))


def assert_same(a: Moments, b: Moments, values: torch.Tensor) -> None:
    scale = values.abs().max().clamp(min=1e-30)
    assert torch.equal(a.count, b.count)
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-12, atol=float(scale) * 1e-12)
    torch.testing.assert_close(a.m2, b.m2, rtol=1e-10, atol=float(scale) ** 2 * 1e-10)


@given(values)
def test_moments_equal_those_of_two_passes_in_numpy(chunk):
    moments = moments_of(torch.from_numpy(chunk))
    expected = Moments(
        torch.tensor(len(chunk)), torch.from_numpy(chunk.mean(0)), torch.from_numpy(chunk.var(0) * len(chunk))
    )
    assert_same(moments, expected, torch.from_numpy(chunk))


@given(values, values, values)
def test_merging_is_associative_commutative_and_equal_to_one_pass_over_all_tests(a, b, c):
    a, b, c = (torch.from_numpy(each) for each in (a, b, c))
    A, B, C = (moments_of(each) for each in (a, b, c))
    every = torch.cat([a, b, c])
    assert_same(A.merge(B).merge(C), moments_of(every), every)
    assert_same(A.merge(B.merge(C)), moments_of(every), every)
    assert_same(B.merge(A), A.merge(B), every)


@given(values)
def test_merging_nothing_changes_nothing(chunk):
    moments, nothing = moments_of(torch.from_numpy(chunk)), Moments.empty(3)
    assert_same(moments.merge(nothing), moments, torch.from_numpy(chunk))
    assert_same(nothing.merge(moments), moments, torch.from_numpy(chunk))


@given(values, st.integers(1, 7))
def test_accumulating_chunks_equals_merging_them(chunk, size):
    tensor = torch.from_numpy(chunk)
    into, merged = Accumulator(3, dtype=torch.float64), Moments.empty(3)
    for part in tensor.split(size):
        into.add(part[:, :2].clone(), 0, 2)
        into.add(part[:, 2:].clone(), 2, 3)
        into.commit(len(part))
        merged = merged.merge(moments_of(part))
    assert_same(into.moments(), merged, tensor)


def test_a_chunk_that_is_not_committed_leaves_no_trace():
    into = Accumulator(2)
    into.add(torch.full((4, 2), 7.0), 0, 2)  # never committed
    into.add(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), 0, 2)
    into.commit(2)
    assert into.moments().mean.tolist() == [2.0, 2.0]
    assert into.moments().m2.tolist() == [2.0, 0.0]


def test_a_constant_neuron_has_exactly_no_variance_in_float32():
    into = Accumulator(1)
    for _ in range(50):
        into.add(torch.full((17, 1), 0.1), 0, 1)
        into.commit(17)
    assert into.moments().m2.item() == 0


def test_a_large_offset_does_not_hide_a_small_spread():
    rng = np.random.default_rng(0)
    data = (1000 + rng.normal(size=(20_000, 1)) * 0.1).astype(np.float32)
    into = Accumulator(1)
    for part in torch.from_numpy(data.copy()).split(64):
        into.add(part.clone(), 0, 1)
        into.commit(len(part))
    np.testing.assert_allclose(into.moments().variance.numpy(), data.astype(np.float64).var(0, ddof=1), rtol=1e-5)
