"""Spans of layers."""

import pytest
import torch

from themis_lab.criteria import spans
from themis_lab.criteria.readings import Layout
from themis_lab.criteria.spans import layer_spans


def layout(*widths):
    return Layout(tuple(f"layer{i}" for i in range(len(widths))), widths)


def test_neighbours_of_equal_width_form_one_span():
    layers = layout(2, 2, 3, 2, 2, 2)
    found = layer_spans(layers)
    assert [(span.start, len(span), span.width) for span in found] == [(0, 2, 2), (4, 1, 3), (7, 3, 2)]
    assert sum((span.names for span in found), ()) == layers.names
    values = torch.arange(26).view(2, 13)
    for span in found:
        for k, name in enumerate(span.names):
            assert torch.equal(span.of(values)[:, k], values[:, layers.slices()[name]])


@pytest.mark.parametrize(
    ("max_neurons", "sizes"), [(1, [1, 1, 1, 1, 1]), (4, [2, 1, 1, 1]), (6, [3, 2]), (100, [3, 2])]
)
def test_spans_are_not_too_long(monkeypatch, max_neurons, sizes):
    monkeypatch.setattr(spans, "MAX_SPAN_NEURONS", max_neurons)
    found = layer_spans(layout(2, 2, 2, 3, 3))
    assert [len(span) for span in found] == sizes
    assert [span.start for span in found] == [sum(len(s) * s.width for s in found[:k]) for k in range(len(found))]
