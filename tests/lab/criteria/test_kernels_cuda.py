"""The GPU kernels of the criteria agree with torch to the bit."""

import pytest
import torch
from kernels import DEVICE, HAS_GPU, needs_gpu, needs_triton

from themis_lab.criteria import NC, Readings, kernels_cuda
from themis_lab.criteria.boundary import NBC, SNAC
from themis_lab.criteria.nc import row_range, scale_rows
from themis_lab.criteria.readings import Layout
from themis_lab.criteria.topk import top_neurons

pytestmark = needs_triton
CHECKS = [
    kernels_cuda.can_cross,
    kernels_cuda.can_scale_rows,
    kernels_cuda.can_cover_sections,
    kernels_cuda.can_top_neurons,
    kernels_cuda.can_converge,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels_pass_their_own_check(check, monkeypatch):
    monkeypatch.setattr(kernels_cuda, "works_on", lambda device, check: check())
    assert check.__wrapped__(DEVICE)


def draw(n_tests, n, seed=0):
    """Values with many ties and zeros of both signs, and some that are not finite."""
    rng = torch.Generator().manual_seed(seed)
    values = (torch.randn(n_tests, n, generator=rng) * 8).round() / 8
    values = torch.where(torch.rand(n_tests, n, generator=rng) < 0.3, values * 0, values)
    odd = torch.rand(n_tests, n, generator=rng)
    values[odd < 0.001], values[odd > 0.999], values[(odd > 0.4) & (odd < 0.401)] = torch.nan, torch.inf, -torch.inf
    return values


@pytest.mark.parametrize(("kind", "variant"), [(kind, variant) for kind in (NBC, SNAC) for variant in kind.variants])
@pytest.mark.parametrize("n", [1, 127, 129, 5000 if HAS_GPU else 300])
def test_crossing(kind, variant, n):
    here = kind(variant=variant).fit([draw(20, n).nan_to_num(0, 0, 0)])
    low, high = (None if bound is None else bound.to(DEVICE) for bound in here.bounds(draw(1, n)))
    covered = torch.zeros(here.n_sides(), n, dtype=torch.bool, device=DEVICE)
    for seed, n_tests in enumerate([1, 15, 16, 37, 1]):
        values = draw(n_tests, n, seed) * (1 + seed / 4)
        raised = kernels_cuda.cross(values.to(DEVICE), low, high, covered, here.includes_bound())
        assert torch.equal(raised.cpu(), here.update(values))
        assert torch.equal(covered.flatten().cpu(), here.state["covered"])
    assert n == 1 or here.score() > 0


@needs_gpu
@pytest.mark.parametrize(
    ("variant", "threshold"),
    [(variant, 0.1) for variant in NC.variants]
    + [(variant, threshold) for variant in ("deepxplore", "neural-coverage") for threshold in (0.0, 0.99)]
    + [("mindarmour", threshold) for threshold in (-1.0, 1e300)],  # the only variant that does not scale to 0..1
)
def test_neuron_coverage(variant, threshold):
    here, there = (NC(threshold, neurons="element", variant=variant) for _ in range(2))
    for seed in range(3):
        values = draw(33, 700, seed)
        assert torch.equal(there.update(values.cuda()).cpu(), here.update(values))
    assert torch.equal(there.state["covered"].cpu(), here.state["covered"])


@pytest.mark.parametrize("n", [1, 3, 2047, 2048, 2049, 20_000])
def test_scaling(n):
    values = draw(40, n) * 10.0 ** torch.randint(-40, 38, (40, 1), generator=torch.Generator().manual_seed(1))
    values[:30] = values[:30].nan_to_num(0, 0, 0)
    values[0] = 0.25
    values = values.to(DEVICE)
    around = torch.full((40, n + 5), 7.0, device=DEVICE)
    kernels_cuda.scale_rows(values, around[:, 2 : n + 2])
    expected = scale_rows(values, *row_range(values), torch.empty_like(values))
    torch.testing.assert_close(around[:, 2 : n + 2], expected, rtol=0, atol=0, equal_nan=True)
    assert (around[:, :2] == 7).all()
    assert (around[:, n + 2 :] == 7).all()


@pytest.mark.parametrize("widths", [(1,), (10, 33, 33, 64), (4096, 4096, 16_385, 7), (70_000, 100)])
@pytest.mark.parametrize("k", [1, 10, 50, 128, 200])
def test_ranks(widths, k):
    layout, n_tests = Layout(tuple(map(str, range(len(widths)))), widths), 21 if HAS_GPU else 7
    values = draw(n_tests, layout.n_neurons)
    values[:5] = values[:5].nan_to_num(0, 0, 0)
    values[0], values[1, 3:], values[5, : widths[0]] = 0, -0.0, torch.nan
    assert kernels_cuda.fits_top_neurons(n_tests, layout, k) == (k <= 128)
    if k <= (128 if HAS_GPU else 10):
        there = kernels_cuda.top_neurons(values.to(DEVICE), layout, min(k, max(widths)))
    else:
        there = top_neurons(Readings(values.to(DEVICE), layout), k)
    here = top_neurons(Readings(values, layout), k)
    assert torch.equal(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1])
