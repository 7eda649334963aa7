"""The most active neurons of wide layers and of spans of layers, compared with sorted lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from themis_lab.criteria import topk
from themis_lab.criteria.readings import Layout, Readings
from themis_lab.criteria.topk import most_active, top_neurons


def ranked(row, k):
    """Neurons of the k largest, the first of equal ones first; -1 for missing ones."""
    finite = [(-a, neuron) for neuron, a in enumerate(row) if math.isfinite(a)]
    return ([neuron for _, neuron in sorted(finite)] + [-1] * k)[:k]


def draw(shape, seed, share):
    """Values with many ties and zeros of both signs; a share of them is not finite."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=rng).mul(4).round().relu() * torch.randn(shape, generator=rng).sign()
    odd = torch.rand(shape, generator=rng) / max(share, 1e-9)
    values[odd < 0.3], values[(odd > 0.3) & (odd < 0.6)], values[(odd > 0.6) & (odd < 1)] = (
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    return values


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.995, 1])
@pytest.mark.parametrize("n", [128, 129, 1000, 3001])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_wide_layer(n, share, kind):
    for k in (1, 2, 7):
        values = draw((4, 3, n), k, share).to(kind)
        values[0, 0], values[0, 1], values[1, 0] = 0, -1, torch.arange(n)
        found = most_active(values, k)
        assert found.tolist() == [[ranked(row, k) for row in rows] for rows in values.tolist()]


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf, -math.inf]), min_size=8, max_size=40))
def test_blocks_of_any_values(row):
    before, topk.BLOCK_NEURONS = topk.BLOCK_NEURONS, 2
    try:
        for k in (1, 2, 3):
            assert most_active(torch.tensor([row]), k).tolist() == [ranked(row, k)]
    finally:
        topk.BLOCK_NEURONS = before


@pytest.mark.parametrize("widths", [(5,), (3, 3, 3, 8, 8, 3), (2, 700, 700, 1)])
@pytest.mark.parametrize("k", [1, 4, 900])
@pytest.mark.parametrize("share", [0, 0.02])
def test_spans_of_layers(widths, k, share):
    layout = Layout(tuple(map(str, range(len(widths)))), widths)
    readings = Readings(draw((9, sum(widths)), k, share), layout)
    top, is_finite = top_neurons(readings, k)
    k = min(k, max(widths))
    assert top.shape == (9, len(widths), k)
    for number, layer in enumerate(readings.layers().values()):
        assert top[:, number].tolist() == [ranked(row, k) for row in layer.tolist()]
        assert is_finite[:, number].tolist() == [all(map(math.isfinite, row)) for row in layer.tolist()]
