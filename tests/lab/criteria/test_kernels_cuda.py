"""The GPU kernels of the criteria agree with torch to the bit."""

import pytest
import torch

from themis.criteria.readings import Layout
from themis_lab.criteria import NC, Readings, kernels_cuda
from themis_lab.criteria.boundary import NBC, SNAC
from themis_lab.criteria.kernels_cuda import sum_hashes_in_torch
from themis_lab.criteria.nc import row_range, scale_rows
from themis_lab.criteria.topk import top_neurons

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def draw(n_tests, n, seed=0):
    """Values with many ties and zeros of both signs, and some that are not finite."""
    rng = torch.Generator().manual_seed(seed)
    values = (torch.randn(n_tests, n, generator=rng) * 8).round() / 8
    values = torch.where(torch.rand(n_tests, n, generator=rng) < 0.3, values * 0, values)
    odd = torch.rand(n_tests, n, generator=rng)
    values[odd < 0.001], values[odd > 0.999], values[(odd > 0.4) & (odd < 0.401)] = torch.nan, torch.inf, -torch.inf
    return values


@pytest.mark.parametrize(("kind", "variant"), [(kind, variant) for kind in (NBC, SNAC) for variant in kind.variants])
@pytest.mark.parametrize("n", [1, 127, 129, 5000])
def test_crossing(kind, variant, n):
    assert kernels_cuda.can_cross(torch.device("cuda", 0))
    here = kind(variant=variant).fit([draw(20, n).nan_to_num(0, 0, 0)])
    there = kind(variant=variant).fit([draw(20, n).nan_to_num(0, 0, 0).cuda()])
    for seed, n_tests in enumerate([1, 15, 16, 37, 1]):
        values = draw(n_tests, n, seed) * (1 + seed / 4)
        assert torch.equal(there.update(values.cuda()).cpu(), here.update(values))
        assert torch.equal(there.state["covered"].cpu(), here.state["covered"])
    assert n == 1 or here.score() > 0


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
    values = values.cuda()
    assert kernels_cuda.can_scale_rows(values.device)
    around = torch.full((40, n + 5), 7.0, device="cuda")
    kernels_cuda.scale_rows(values, around[:, 2 : n + 2])
    expected = scale_rows(values, *row_range(values), torch.empty_like(values))
    torch.testing.assert_close(around[:, 2 : n + 2], expected, rtol=0, atol=0, equal_nan=True)
    assert (around[:, :2] == 7).all()
    assert (around[:, n + 2 :] == 7).all()


@pytest.mark.parametrize("widths", [(1,), (10, 33, 33, 64), (4096, 4096, 16_385, 7), (70_000, 100)])
@pytest.mark.parametrize("k", [1, 10, 50, 128, 200])
def test_ranks(widths, k):
    layout = Layout(tuple(map(str, range(len(widths)))), widths)
    values = draw(21, layout.n_neurons)
    values[:5] = values[:5].nan_to_num(0, 0, 0)
    values[0], values[1, 3:], values[5, : widths[0]] = 0, -0.0, torch.nan
    assert kernels_cuda.fits_top_neurons(21, layout, k) == (k <= 128)
    assert kernels_cuda.can_top_neurons(torch.device("cuda", 0))
    here, there = (top_neurons(Readings(tensor, layout), k) for tensor in (values, values.cuda()))
    assert torch.equal(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1])


@pytest.mark.parametrize("k", [1, 3, 50, 1000])
@pytest.mark.parametrize("factor", [0, 1000])
def test_hashing(k, factor):
    assert kernels_cuda.can_hash_patterns(torch.device("cuda", 0))
    top = torch.randint(-1, 100_000, (33, 7, k), generator=torch.Generator().manual_seed(k))
    assert torch.equal(kernels_cuda.hash_patterns(top.cuda(), factor).cpu(), sum_hashes_in_torch(top, factor))
