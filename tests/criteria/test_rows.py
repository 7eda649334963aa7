"""What is put among others is what it was, to the bit, wherever it comes to lie."""

import pytest
import torch

from themis.criteria.rows import placed


@pytest.mark.parametrize("width", [1, 2, 7, 8])
@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("total", [12, 13])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_rows_of_any_place_and_width(width, start, total, skipped):
    bits = torch.randint(-(2**31), 2**31 - 1, (5, width), generator=torch.Generator().manual_seed(0)).int()
    values = bits.view(torch.float32)  # NaNs of every kind among them
    around = torch.full((5 * total + skipped,), 7.0)[skipped:].view(5, total)
    found = placed(values, around[:, start : start + width])
    assert torch.equal(found.clone().view(torch.int32), bits)
    assert torch.equal(around[:, start : start + width].clone().view(torch.int32), bits)
    assert (around[:, :start] == 7).all()
    assert (around[:, start + width :] == 7).all()


FORMS = [torch.arange(12.0).view(4, 3).T, torch.arange(4.0).expand(3, 4), torch.arange(24.0).view(3, 8)[:, ::2]]


@pytest.mark.parametrize("values", FORMS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_rows_of_any_form(values, kind):
    out = torch.zeros(3, 6, dtype=kind)
    placed(values, out[:, 2:])
    assert torch.equal(out[:, 2:], values.to(kind))
    assert not out[:, :2].any()
    assert len(placed(torch.zeros(0, 4), torch.zeros(0, 4))) == 0
