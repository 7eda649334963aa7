"""The compiled fold gives the results of torch."""

import numpy as np
import pytest
import torch

from themis.compute import native as native_module
from themis.compute.native import FOLD_BLOCK, CompiledFold, addresses, library, verdict
from themis.measure import fold as fold_module
from themis.measure import moments as panel_module
from themis.measure.moments import Panel, Shape, choose_panel
from themis.oracle import Wrong
from themis.oracle import classes as classes_module

pytestmark = [pytest.mark.quick, pytest.mark.skipif(library() is None, reason="not compiled on this machine")]


@pytest.mark.parametrize("n", [1, 7, FOLD_BLOCK - 1, FOLD_BLOCK, 3 * FOLD_BLOCK + 5])
@pytest.mark.parametrize("n_tests", [1, 33])
def test_sums_agree_with_torch(n, n_tests):
    rng = torch.Generator().manual_seed(n)
    activations, clean = torch.randn(n_tests, n, generator=rng), torch.randn(50, n, generator=rng)
    rows, shift = torch.randint(0, 50, (n_tests,), generator=rng), torch.rand(n, generator=rng)
    sums, squares = torch.empty(n), torch.empty(n)
    fold = CompiledFold(library(), 1, n_tests, shift, sums, squares)
    blocks = fold.add(activations, clean, rows, 0, slice(0, 0))
    sensitivity = (activations - clean[rows]).abs()
    torch.testing.assert_close(fold.by_block[blocks].sum(0), sensitivity.sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, (sensitivity - shift).sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares, (sensitivity - shift).square().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [1, 7, FOLD_BLOCK, 3 * FOLD_BLOCK + 5])
def test_the_panel_gets_the_signed_differences_to_the_bit(n):
    layers = [(torch.randn(9, size), torch.randn(20, size), torch.randint(0, 20, (9,))) for size in (n, n + 3)]
    panels = [torch.randperm(size)[: max(1, size // 3)].sort().values for size in (n, n + 3)]
    middle, end = len(panels[0]), len(panels[0]) + len(panels[1])
    differences = torch.zeros(9, end)
    fold = CompiledFold(library(), 2, 9, *torch.zeros(3, 2 * n + 3), torch.cat(panels), differences)
    fold.add(*layers[0], 0, slice(0, middle))
    assert not differences[:, middle:].any()
    fold.add(*layers[1], n, slice(middle, end))
    expected = [a[:, panel] - clean[rows][:, panel] for (a, clean, rows), panel in zip(layers, panels, strict=True)]
    assert torch.equal(differences, torch.cat(expected, 1))


def test_layers_are_folded_side_by_side():
    sizes, (shift, sums, squares) = (FOLD_BLOCK + 5, 3, 2 * FOLD_BLOCK), torch.rand(3, 3 * FOLD_BLOCK + 8)
    fold, start = CompiledFold(library(), 3, 6, shift, sums, squares), 0
    for size in sizes:
        activations, clean, rows = torch.randn(6, size), torch.randn(4, size), torch.randint(0, 4, (6,))
        sensitivity, own = (activations - clean[rows]).abs(), slice(start, start + size)
        blocks = fold.add(activations, clean, rows, start, slice(0, 0))
        torch.testing.assert_close(fold.by_block[blocks].sum(0), sensitivity.sum(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums[own], (sensitivity - shift[own]).sum(0), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(squares[own], (sensitivity - shift[own]).square().sum(0), rtol=1e-5, atol=1e-4)
        start += size


def test_what_does_not_fit_is_not_folded():
    clean, rows, none = torch.randn(4, 10), torch.zeros(6, dtype=torch.int64), slice(0, 0)
    fold = CompiledFold(library(), 1, 6, *torch.zeros(3, 15))
    with pytest.raises(TypeError, match="10 numbers and rows one for each of 6 tests"):
        fold.add(torch.randn(5, 10), clean, rows, 0, none)
    with pytest.raises(TypeError, match="room for 10 neurons from 6 on"):
        fold.add(torch.randn(6, 10), clean, rows, 6, none)
    with pytest.raises(TypeError, match="room for 10 neurons"):
        fold.add(torch.randn(6, 10), clean, rows, 0, slice(0, 1))
    fold.add(torch.randn(6, 10), clean, rows, 0, none)
    with pytest.raises(TypeError, match="room for 5 neurons"):
        fold.add(torch.randn(6, 5), clean[:, :5].contiguous(), rows, 10, none)


@pytest.mark.parametrize("n", [1, FOLD_BLOCK + 5])
def test_sums_of_activations_agree_with_torch(n):
    activations, shift = torch.randn(33, n), torch.rand(n)
    sums, squares = torch.empty(2, n)
    library().themis_sums(activations, 33, n, shift, sums, squares)
    torch.testing.assert_close(sums, (activations - shift).sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares, (activations - shift).square().sum(0), rtol=1e-5, atol=1e-4)


def test_the_panel_is_the_same_without_the_library(monkeypatch):
    panels, shapes = [Panel.empty(choose_panel(700)) for _ in range(2)], [Shape.empty(700) for _ in range(2)]
    parts = [(torch.randn(n, 700), torch.randint(0, 9000, (n,))) for n in (1, 300, 800, 40)]
    for panel, shape, is_compiled in zip(panels, shapes, (True, False), strict=True):
        if not is_compiled:
            monkeypatch.setattr(panel_module, "library_for", lambda tensor: None)
        for differences, seed in parts:
            panel.add(differences, seed)
            shape.add(differences)
    compiled, plain = (panel.state() for panel in panels)
    for name, tensor in plain.items():
        assert torch.equal(compiled[name], tensor), name
    assert shapes[0].n_tests == shapes[1].n_tests
    torch.testing.assert_close(shapes[0].sums, shapes[1].sums, rtol=1e-4, atol=1e-2)


def test_values_that_are_not_finite_stay_so():
    activations = torch.tensor([[1.0, float("nan"), float("inf")]])
    sums, squares = torch.empty(3), torch.empty(3)
    fold = CompiledFold(library(), 1, 1, torch.zeros(3), sums, squares)
    blocks = fold.add(activations, torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), 0, slice(0, 0))
    assert sums.isfinite().tolist() == squares.isfinite().tolist() == [True, False, False]
    assert fold.by_block[blocks].isnan().all()


@pytest.mark.parametrize("n_classes", [2, 10, 1000])
def test_the_verdict_is_the_same_without_the_library(n_classes, monkeypatch):
    outputs = torch.randn(300, n_classes).mul_(2).round_()  # with many ties
    outputs[::7, 0], outputs[1::7, -1], outputs[2::7, 1] = torch.nan, torch.inf, -torch.inf
    labels = torch.randint(0, n_classes, (300,))
    compiled = Wrong().compare(outputs, outputs, labels)
    monkeypatch.setattr(classes_module, "library_for", lambda tensor: None)
    for column, plain in zip(compiled, Wrong().compare(outputs, outputs, labels), strict=True):
        assert column is plain is None or torch.equal(column, plain)


def test_a_reference_that_is_no_class_is_refused():
    with pytest.raises(IndexError, match="0 to 3, got 2 of 3"):
        verdict(library(), torch.randn(3, 4), torch.tensor([-1, 3, 4]))


def test_a_library_of_an_earlier_version_is_not_used(monkeypatch):
    monkeypatch.setattr(native_module, "INTERFACE", 0)
    assert native_module.library.__wrapped__() is None


def test_addresses_are_those_of_the_arrays_that_c_expects():
    integer, double = np.dtype(np.int64), np.dtype(np.float64)
    arrays = np.arange(6), np.zeros((2, 3)), np.zeros(0), np.arange(6)[2:]
    expected = [array.__array_interface__["data"][0] for array in arrays]
    types = [integer, double, double, integer]
    assert addresses(types, *arrays) == expected
    arrays[0].flags.writeable = False
    assert addresses(types, *arrays) == expected
    with pytest.raises(TypeError, match="expected arrays of"):
        addresses([double] * 4, *arrays)
    with pytest.raises(TypeError, match="contiguous"):
        addresses([double], np.zeros(6)[::2])


def test_accumulate_adds_in_float64():
    total, part = torch.rand(100_000, dtype=torch.float64), torch.rand(100_000)
    expected = total + part
    library().themis_accumulate(total, part, len(part))
    assert torch.equal(total, expected)


def test_a_campaign_without_the_library_finds_the_same_faults(trained, monkeypatch):
    import themis

    model, digits = trained
    results = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(fold_module, "library_for", lambda tensor: None)
        results.append(themis.run(model, digits, "gaussian", magnitude=0.4, max_tests=1280, max_seeds=200))
    compiled, plain = results
    assert compiled.faults.columns["id"].tolist() == plain.faults.columns["id"].tolist()
    assert compiled.judged.all == pytest.approx(plain.judged.all, abs=2e-3)
