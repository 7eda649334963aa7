"""Which passes the tests of a campaign run in on a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.measure.captured import (
    MAX_FEW_ASCENTS,
    OCCUPYING_ACTIVATIONS,
    SMALL_PASS,
    SMALL_PASS_SHARE,
    Graphs,
    rows_of_pass,
)
from themis.measure.tests import Tests


@pytest.mark.parametrize(
    ("n_tests", "chunk", "wide_chunk", "of_small_model", "of_large_model"),
    [
        (3, 256, 0, 256, 32),
        (160, 256, 0, 256, 32),
        (161, 256, 0, 256, 256),
        (5000, 256, 0, 256, 256),
        (5000, 256, 1024, 1024, 1024),
        (1023, 256, 1024, 256, 256),
        (3, 64, 0, 64, 64),  # too small a chunk for another graph to pay
        (3, 8, 0, 8, 8),
    ],
)
def test_few_tests_of_a_large_model_run_in_a_small_pass(n_tests, chunk, wide_chunk, of_small_model, of_large_model):
    assert rows_of_pass(n_tests, chunk, wide_chunk, ascends=False, few_occupy=False) == of_small_model
    assert rows_of_pass(n_tests, chunk, wide_chunk, ascends=False, few_occupy=True) == of_large_model


@pytest.mark.parametrize(("chunk", "small"), [(256, 32), (64, 32), (8, 8)])
def test_few_ascents_run_in_a_small_pass_and_all_ascents_of_a_large_model(chunk, small):
    for n_tests in (1, MAX_FEW_ASCENTS):
        assert rows_of_pass(n_tests, chunk, 0, ascends=True, few_occupy=False) == small
    assert rows_of_pass(MAX_FEW_ASCENTS + 1, chunk, 0, ascends=True, few_occupy=False) == chunk
    assert rows_of_pass(5000, chunk, 0, ascends=True, few_occupy=True) == small


def passes_of(n_tests, chunk, n_activations, wide_chunk):
    """The rows and the tests of each pass that a campaign takes for so many tests."""
    numbers, most_chunks = np.arange(n_tests), 3
    tests = Tests(numbers, numbers, np.zeros((n_tests, 1), np.float32), numbers, np.full(n_tests, "uniform"))
    graphs, passes = Graphs(chunk, n_activations, wide_chunk), []

    def capture(rows, ascends):
        return SimpleNamespace(chunk=rows, ascends=ascends, most_tests=most_chunks * rows)

    while len(tests):
        graph = graphs.choose(len(tests), chunk, capture, ascends=False)
        first = graphs.first(graph, tests)
        assert np.array_equal(first.number, tests.number[: len(first)])
        passes += [(graph.chunk, min(graph.chunk, len(first) - k)) for k in range(0, len(first), graph.chunk)]
        tests = tests[len(first) :]
    return passes


@given(st.integers(1, 9000), st.sampled_from([16, 64, 256, 1000]), st.booleans(), st.booleans())
def test_every_test_is_run_once_and_little_is_padding(n_tests, chunk, is_large, has_wide):
    wide_chunk = 4 * chunk if has_wide else 0
    passes = passes_of(n_tests, chunk, OCCUPYING_ACTIVATIONS // SMALL_PASS if is_large else 1, wide_chunk)
    rows, tests = np.array(passes).T
    assert tests.sum() == n_tests
    assert (rows[tests < rows] <= chunk).all()  # a wide pass is full
    padding = rows.sum() - n_tests
    assert padding < chunk
    if is_large and chunk >= 256:
        assert padding < max(SMALL_PASS, (1 - SMALL_PASS_SHARE) * chunk)
    if not is_large:
        assert set(rows.tolist()) <= {chunk, wide_chunk}
