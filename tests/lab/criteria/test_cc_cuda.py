"""The GPU kernels of CC keep the tests that torch keeps, on random inputs."""

import pytest
import torch
from kernels import DEVICE, HAS_GPU, needs_triton

from themis_lab.criteria import cc, cc_cuda
from themis_lab.criteria.cc import CC

pytestmark = needs_triton
SIZES = (1, 300, 7, 1024, 1500) if HAS_GPU else (1, 30, 7, 50)
THRESHOLDS = (0.0, 0.5, 3.0, 10.0, 200.0, 1e6) if HAS_GPU else (0.0, 0.5, 10.0)


def test_the_kernels_pass_their_own_check(monkeypatch):
    monkeypatch.setattr(cc_cuda, "works_on", lambda device, check: check())
    assert cc_cuda.can_keep.__wrapped__(DEVICE)


def compare(batches, threshold, monkeypatch):
    """Update a criterion in torch and one by the kernels; returns the number of tests that both keep."""
    here, there = CC(threshold), CC(threshold)
    for layers in batches:
        layers = {name: values.to(DEVICE) for name, values in layers.items()}
        monkeypatch.setattr(cc, "can_keep", lambda device: False)
        expected = here.update(layers)
        monkeypatch.setattr(cc, "can_keep", lambda device: True)
        assert torch.equal(there.update(layers), expected)
    for key, counts in here.state.items():
        if not key.startswith("counts/"):
            continue
        assert torch.equal(there.state[key], counts)
        kept, squares, longest = (f"{name}/{key.partition('/')[2]}" for name in ("kept", "squares", "longest"))
        torch.testing.assert_close(there.state[longest], here.state[longest])
        for layer, n in enumerate(counts.tolist()):
            assert torch.equal(there.state[kept][layer, :n], here.state[kept][layer, :n])
            torch.testing.assert_close(there.state[squares][layer, :n], here.state[squares][layer, :n])
            assert there.state[squares][layer, n:].isinf().all()
    return here.score()


@pytest.mark.parametrize("widths", [(1,), (3, 3, 6, 6, 6, 3), (16, 16, 20), (70, 70, 130)])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_random_tests(widths, threshold, monkeypatch):
    batches = []
    for n in SIZES:
        layers = {f"layer{k}": torch.randn(n, width) for k, width in enumerate(widths)}
        for values in layers.values():
            values[n // 2] = values[0]  # repeated
        odd = layers["layer0"]
        odd[0, 0], odd[-1, -1], odd[n // 3] = torch.nan, torch.inf, odd[n // 3] * 1e6
        batches.append(layers)
    assert compare(batches, threshold, monkeypatch) > 0


@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.0, 4.0, 25.0])
def test_distances_equal_to_the_threshold(threshold, monkeypatch):
    batches = [{name: torch.randint(-6, 7, (n, 2)).float() + 1e4 for name in ("a", "b")} for n in SIZES]
    assert compare(batches, threshold, monkeypatch) > 0
