"""Rows that are copied among others, and spans of layers."""

import pytest
import torch

from themis.criteria import readings
from themis.criteria.readings import Layout, copy_rows, layer_spans


@pytest.mark.parametrize("width", [1, 2, 7, 8])
@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("total", [12, 13])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_rows_are_copied_to_the_bit_at_any_place_and_width(width, start, total, skipped):
    bits = torch.randint(-(2**31), 2**31 - 1, (5, width), generator=torch.Generator().manual_seed(0)).int()
    values = bits.view(torch.float32)  # NaNs of every kind among them
    around = torch.full((5 * total + skipped,), 7.0)[skipped:].view(5, total)
    copied = copy_rows(values, around[:, start : start + width])
    assert torch.equal(copied.clone().view(torch.int32), bits)
    assert torch.equal(around[:, start : start + width].clone().view(torch.int32), bits)
    assert (around[:, :start] == 7).all()
    assert (around[:, start + width :] == 7).all()


FORMS = [torch.arange(12.0).view(4, 3).T, torch.arange(4.0).expand(3, 4), torch.arange(24.0).view(3, 8)[:, ::2]]


@pytest.mark.parametrize("values", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_any_memory_layout_are_copied(values, dtype):
    out = torch.zeros(3, 6, dtype=dtype)
    copy_rows(values, out[:, 2:])
    assert torch.equal(out[:, 2:], values.to(dtype))
    assert not out[:, :2].any()
    assert len(copy_rows(torch.zeros(0, 4), torch.zeros(0, 4))) == 0


def layout(*widths):
    return Layout(tuple(f"layer{i}" for i in range(len(widths))), widths)


def test_neighbours_of_equal_width_form_one_span():
    layers = layout(2, 2, 3, 2, 2, 2)
    spans = layer_spans(layers)
    assert [(span.start, len(span), span.width) for span in spans] == [(0, 2, 2), (4, 1, 3), (7, 3, 2)]
    assert sum((span.names for span in spans), ()) == layers.names
    values = torch.arange(26).view(2, 13)
    for span in spans:
        for k, name in enumerate(span.names):
            assert torch.equal(span.of(values)[:, k], values[:, layers.slices()[name]])


@pytest.mark.parametrize(
    ("max_neurons", "sizes"), [(1, [1, 1, 1, 1, 1]), (4, [2, 1, 1, 1]), (6, [3, 2]), (100, [3, 2])]
)
def test_spans_are_not_too_long(monkeypatch, max_neurons, sizes):
    monkeypatch.setattr(readings, "MAX_SPAN_NEURONS", max_neurons)
    spans = layer_spans(layout(2, 2, 2, 3, 3))
    assert [len(span) for span in spans] == sizes
    assert [span.start for span in spans] == [sum(len(s) * s.width for s in spans[:k]) for k in range(len(spans))]
