"""The contract that every perturbation in the table must fulfil."""

import itertools
from dataclasses import replace

import pytest
import torch
from perturbation_cases import (
    ATTACKS,
    EXEMPT,
    NAMES,
    SIGNALS,
    SMOOTH,
    TABLES,
    apply,
    context_for,
    ends,
    inner,
    inputs_for,
    strongest,
)
from torch.utils._python_dispatch import TorchDispatchMode

from themis import Target, UsageError
from themis.perturb import PERTURBATIONS, perturb
from themis.perturb.perturbation import check_fits


@pytest.mark.parametrize("name", NAMES)
def test_it_describes_itself(name):
    perturbation = PERTURBATIONS[name]
    assert perturbation.name == name
    assert perturbation.about.endswith("."), "a sentence"
    assert perturbation.family in ("noise", "weather", "camera", "geometry", "attack", "table", "signal", "corruption")
    assert all(each.unit for each in perturbation.theta), "every theta has a unit"


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TABLES])
def test_results_stay_inside_the_bounds_and_change(name, bounds):
    inputs = inputs_for(name, bounds=bounds)
    before = inputs.clone()
    disturbed = apply(name, inputs, strongest(name, 4), bounds=bounds)
    assert bounds[0] <= disturbed.min()
    assert disturbed.max() <= bounds[1]
    assert (disturbed - inputs).flatten(1).abs().amax(1).min() > 0.01 * (bounds[1] - bounds[0]), "each picture changes"
    assert torch.equal(inputs, before), "the seeds are left alone"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*TABLES, *ATTACKS)])
def test_the_bounds_change_only_the_unit(name):
    inputs = inputs_for(name)
    theta = inner(name, 4)
    plain = apply(name, inputs, theta)
    scaled = apply(name, inputs * 255, theta, bounds=(0.0, 255.0)) / 255
    torch.testing.assert_close(scaled, plain, atol=2e-4, rtol=0)


class Waits(TorchDispatchMode):
    """Lists the operations that wait for a GPU or copy from the host, so that a CUDA graph cannot hold them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name in ("lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "_unique2"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


WAITING = ("gaussian_blur", "defocus", "square", "square_label")
"""Blurs choose kernels by their size on a CPU only; attacks without a gradient are run test by test."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*TABLES, *WAITING)])
def test_a_chunk_with_it_can_be_captured(name):
    inputs, theta = inputs_for(name), inner(name, 4)
    with torch.no_grad():
        apply(name, inputs, theta)  # constants are kept from the first call on
        with Waits() as waits:
            apply(name, inputs, theta)
    assert not waits.seen


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXEMPT])
def test_the_identity_is_the_identity(name):
    inputs = inputs_for(name)
    torch.testing.assert_close(apply(name, inputs, ends(name, "identity", 4)), inputs, atol=2e-5, rtol=0)


def test_there_are_at_most_three_exemptions_and_they_are_declared():
    assert {name for name in NAMES if not PERTURBATIONS[name].has_identity} <= EXEMPT
    assert len(EXEMPT) <= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_test_is_the_same_in_any_batch(name):
    inputs, theta, seeds = inputs_for(name, 5), inner(name, 5), torch.arange(5) * 10**12 + 5
    if name in ATTACKS:  # the model's kernels round differently for other batch sizes, here in the last digits
        inputs = inputs.double()
    reference = context_for(name, inputs).reference
    whole = apply(name, inputs, theta, seeds)
    for rows in ([0], [1], [4], [3, 2], [4, 3, 1]):
        part = apply(name, inputs[rows], theta[rows], seeds[rows], rows=reference[rows])
        if name in ATTACKS:
            torch.testing.assert_close(part, whole[rows], atol=1e-4, rtol=0)
        else:
            assert torch.equal(part, whole[rows]), rows


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ATTACKS])
def test_many_tests_at_once_are_rounded_as_a_few_are(name):
    """Functions such as `exp2` round differently where they are computed by vectors."""
    columns = inputs_for(name, 96), inner(name, 96), torch.arange(96)
    few = [apply(name, *part) for part in zip(*(column.split(6) for column in columns), strict=True)]
    assert torch.equal(apply(name, *columns), torch.cat(few))


@pytest.mark.parametrize("name", NAMES)
def test_randomness_depends_only_on_the_noise_seed(name):
    inputs, theta = inputs_for(name), inner(name, 4)
    one, again = (apply(name, inputs, theta, torch.arange(4)) for _ in range(2))
    other = apply(name, inputs, theta, torch.arange(4) + 2**40)
    assert torch.equal(one, again)
    differs = (one != other).flatten(1).any(1)
    assert bool(differs.all()) if PERTURBATIONS[name].is_random else not bool(differs.any())


@pytest.mark.parametrize("name", SMOOTH)
def test_theta_gradients_agree_with_finite_differences(name):
    inputs = inputs_for(name, 3).double()
    weights = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    size = ends(name, "high", 3, torch.float64) - ends(name, "low", 3, torch.float64)
    reference = context_for(name, inputs).reference
    has_slope = torch.zeros(size.shape[1], dtype=torch.bool)
    for seed in range(3):
        middle = inner(name, 3, seed, torch.float64)

        def value(theta):
            return (apply(name, inputs, theta, rows=reference) * weights).flatten(1).sum(1)

        theta = middle.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(value(theta).sum(), theta)
        for k in range(size.shape[1]):
            step = torch.zeros_like(middle)
            step[:, k] = 1e-5 * size[:, k]
            slope = (value(middle + step) - value(middle - step)) / 2e-5  # for the whole range
            torch.testing.assert_close(gradient[:, k] * size[:, k], slope, rtol=2e-2, atol=2e-3)
            has_slope[k] |= bool((slope.abs() > 1e-6).any())
    assert bool(has_slope.all()), "every theta does something"


@pytest.mark.parametrize("name", NAMES)
def test_results_are_finite_at_the_ends_of_theta(name):
    spans = [(each.low, each.high) for each in PERTURBATIONS[name].theta]
    corners = torch.tensor(list(itertools.islice(itertools.product(*spans), 64)))
    corners = torch.cat([corners, ends(name, "identity", 1)])
    inputs = inputs_for(name, 1).expand(len(corners), *inputs_for(name, 1).shape[1:]).contiguous()
    if name not in TABLES:
        inputs[0], inputs[-2] = 0.0, 1.0
    theta = corners.requires_grad_()
    disturbed = apply(name, inputs, theta)
    assert bool(disturbed.isfinite().all())
    if disturbed.requires_grad:
        (gradient,) = torch.autograd.grad(disturbed.sum(), theta)
        assert bool(gradient.isfinite().all())
    else:
        assert not PERTURBATIONS[name].is_smooth, "the result must depend on theta"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name, dtype):
    inputs = inputs_for(name).to(dtype)
    context = context_for(name, inputs.float())
    context = replace(context, target=Target(context.target.module.to(dtype)))
    seeds = torch.arange(4)
    disturbed = perturb(PERTURBATIONS[name], inputs, inner(name, 4), seeds, context)
    assert disturbed.dtype == dtype
    assert bool(disturbed.isfinite().all())
    if name not in ATTACKS:
        full = perturb(PERTURBATIONS[name], inputs.float(), inner(name, 4), seeds, context)
        torch.testing.assert_close(disturbed.float(), full, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "shape", [(3, 1, 1), (1, 24, 20), (3, 5, 40), (4, 9, 9), (3, 256, 256)], ids=lambda shape: "x".join(map(str, shape))
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*TABLES, *SIGNALS)])
def test_any_picture(name, shape):
    perturbation = PERTURBATIONS[name]
    if perturbation.channels not in (None, shape[0]):
        with pytest.raises(UsageError, match=f"needs pictures with {perturbation.channels} channels"):
            check_fits(perturbation, shape)
        return
    inputs = inputs_for(name, 1, shape=shape)
    theta = strongest(name, 1).requires_grad_()
    disturbed = apply(name, inputs, theta)
    assert disturbed.shape == inputs.shape
    assert bool(disturbed.isfinite().all())
    assert disturbed.detach().min() >= 0
    assert disturbed.detach().max() <= 1
    if disturbed.requires_grad:
        assert bool(torch.autograd.grad(disturbed.sum(), theta)[0].isfinite().all())
    if shape[-1] > 1:
        assert not torch.equal(disturbed, inputs)


@pytest.mark.parametrize("shape", [(1, 2), (12, 40), (1, 5000)], ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", SIGNALS)
def test_any_signal(name, shape):
    check_fits(PERTURBATIONS[name], shape)
    inputs = inputs_for(name, 2, shape=shape)
    theta = strongest(name, 2).requires_grad_()
    disturbed = apply(name, inputs, theta)
    assert disturbed.shape == inputs.shape
    assert bool(disturbed.isfinite().all())
    assert bool(torch.autograd.grad(disturbed.sum(), theta)[0].isfinite().all())
    if shape[-1] > 2:
        assert not torch.equal(disturbed, inputs)
