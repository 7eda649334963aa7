"""Neuron coverage, compared with loops over its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from themis.errors import UsageError
from themis_lab.criteria import NC


def reference(batches, threshold, variant, neurons):
    """Which neurons each test covers, and thus which tests were the first to cover one."""
    covered, raised = {}, []
    for layers in batches:
        for k in range(len(next(iter(layers.values())))):
            is_first = False
            for name, layer in layers.items():
                values = layer[k].double().numpy()
                if variant == "deepxplore":
                    low, high = values.min(), values.max()
                    values = np.zeros_like(values) if high == low else (values - low) / (high - low)
                if values.ndim > 1:
                    values = values.reshape(-1) if neurons == "element" else values.reshape(len(values), -1).mean(1)
                if variant == "neural-coverage":
                    low, high = values.min(), values.max()
                    values = np.zeros_like(values) if high == low else (values - low) / (high - low)
                for j, value in enumerate(values):
                    if np.isfinite(value) and value > threshold and not covered.setdefault((name, j), False):
                        covered[name, j] = is_first = True
                    covered.setdefault((name, j), False)
            raised.append(is_first)
    return sum(covered.values()) / len(covered), raised


def draw(seed, n):
    g = torch.Generator().manual_seed(seed)
    layers = {"conv": torch.randn(n, 3, 2, 4, generator=g), "fc": torch.randn(n, 5, generator=g).relu()}
    layers["conv"][0] = 0.25  # constant on an input
    return layers


@pytest.mark.parametrize("neurons", ["channel", "element"])
@pytest.mark.parametrize("variant", NC.variants)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), threshold=st.floats(0.05, 0.95))
def test_it_agrees_with_its_definition(variant, neurons, seed, threshold):
    batches = [draw(seed, 4), draw(seed + 1, 1), draw(seed + 2, 3)]
    criterion = NC(threshold, variant=variant, neurons=neurons)
    raised = [flag for batch in batches for flag in criterion.update(batch).tolist()]
    score, expected = reference(batches, threshold, variant, neurons)
    assert criterion.score() == pytest.approx(score, abs=1e-12)
    assert raised == expected


def test_non_finite_values_cover_nothing():
    layers = {"a": torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [torch.inf, 0.0], [-torch.inf, 2.0]])}
    for variant, expected in (("deepxplore", [True] + 3 * [False]), ("mindarmour", [True, False, False, False])):
        criterion = NC(0.5, variant=variant)
        assert criterion.update(layers).tolist() == expected
        assert criterion.score() == 0.5


def test_silent_neurons_and_values_equal_to_the_threshold_are_not_covered():
    criterion = NC(0.5, variant="mindarmour")
    assert criterion.update(torch.tensor([[0.0, 0.5, 0.50001]])).tolist() == [True]
    assert criterion.n_covered() == 1


def test_each_layer_of_an_input_is_scaled_separately():
    criterion = NC(0.5)
    criterion.update({"small": torch.tensor([[0.0, 1e-3]]), "large": torch.tensor([[0.0, 1e3]])})
    assert criterion.score() == 0.5


def test_a_threshold_that_is_not_a_number_is_rejected():
    with pytest.raises(UsageError, match="threshold must be a number"):
        NC(float("nan"))
