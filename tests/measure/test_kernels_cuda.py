"""The kernels that fold a chunk agree with torch."""

import pytest
import torch
from kernels import DEVICE, HAS_GPU, needs_triton

from themis.measure import kernels_cuda
from themis.measure.kernels_cuda import ChunkFolder, slopes
from themis.target.activations import Layer

pytestmark = needs_triton


def test_the_kernels_pass_their_own_check(monkeypatch):
    monkeypatch.setattr(kernels_cuda, "works_on", lambda device, check: check())
    assert kernels_cuda.can_fold.__wrapped__(DEVICE)


@pytest.mark.parametrize("n", [1, 511, 513, 70_001 if HAS_GPU else 1300])
@pytest.mark.parametrize(("chunk", "n_tests"), [(1, 1), (64, 50), *([(256, 256)] if HAS_GPU else [])])
def test_folding_agrees_with_torch(n, chunk, n_tests):
    layers = (Layer("first", (n,), 0, n, None), Layer("second", (7,), n, 7, None))
    activations, clean = torch.randn(chunk, n + 7, device=DEVICE), torch.randn(30, n + 7, device=DEVICE)
    rows, shift = torch.randint(0, 30, (chunk,), device=DEVICE), torch.rand(n + 7, device=DEVICE)
    positions = torch.unique(torch.randint(0, n, (300,), device=DEVICE))
    panel = {"first": positions, "second": torch.tensor([1, 6], device=DEVICE)}
    folder, totals = ChunkFolder(layers, chunk, panel, DEVICE), torch.zeros(2, 2, n + 7, device=DEVICE).double()
    first, second = (torch.tensor([half], device=DEVICE) for half in (0, 1))
    for layer in layers:
        part = slice(layer.start, layer.stop)
        rest = (rows, shift[part], torch.tensor([n_tests], device=DEVICE))
        folder.fold(layer.name, activations[:, part].contiguous(), clean[:, part].contiguous(), *rest)
    for _ in range(3):
        by_layer, differences = folder.finish(second, second, totals)
    folder.finish(first, first, totals)  # is not counted
    difference = (activations - clean[rows])[:n_tests]
    sensitivity = difference.abs().double()
    deviation = sensitivity - shift
    expected = torch.stack([deviation.sum(0), deviation.square().sum(0)])
    torch.testing.assert_close(totals[1], 3 * expected, rtol=1e-4, atol=3e-3)
    assert not totals[0].any()
    by_part = torch.stack([sensitivity[:, :n].sum(1), sensitivity[:, n:].sum(1)], 1)
    torch.testing.assert_close(by_layer[:n_tests].double(), by_part, rtol=1e-4, atol=1e-3)
    watched = torch.cat([positions, torch.tensor([n + 1, n + 6], device=DEVICE)])
    assert torch.equal(differences[:n_tests], difference[:, watched])


@pytest.mark.parametrize("n", [1, 1024, 3000])
def test_slopes_are_those_of_autograd(n):
    activations, clean = torch.randn(5, n, device=DEVICE, requires_grad=True), torch.randn(9, n, device=DEVICE)
    rows, weight = torch.randint(0, 9, (5,), device=DEVICE), torch.rand(n, device=DEVICE)
    by_test = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0], device=DEVICE)
    ((activations - clean[rows]).abs() * weight * by_test[:, None]).sum().backward()
    torch.testing.assert_close(slopes(activations.detach(), clean, rows, weight, by_test), activations.grad)
