"""Every perturbation produces the same tests on a GPU as on a CPU."""

import pytest
import torch
from perturbation_cases import ATTACKS, NAMES, TABLES, context_for, inner, inputs_for, margin_of

from themis.perturb import PERTURBATIONS, perturb

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def apply(name, device, rows=slice(None), dtype=torch.float32):
    inputs = inputs_for(name, 6).to(device, dtype)
    context = context_for(name, inputs)
    if name in ATTACKS:
        context.reference = context.reference[rows]
        context.margin = margin_of(context.reference)
    theta, seeds = inner(name, 6).to(device), torch.arange(6, device=device) * 10**12 + 5
    return perturb(PERTURBATIONS[name], inputs[rows], theta[rows], seeds[rows], context)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ATTACKS])
def test_a_gpu_produces_the_same_test_as_a_cpu(name):
    there, here = apply(name, "cuda").cpu(), apply(name, "cpu")
    gap = (there - here).abs()
    assert float((gap > 1e-3).float().mean()) < 1e-3, "but for a pixel on an edge"
    assert float(gap.mean()) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_test_is_the_same_in_any_batch(name):
    dtype = torch.float64 if name in ATTACKS else torch.float32
    whole = apply(name, "cuda", dtype=dtype)
    for rows in (slice(0, 1), slice(2, 5)):
        part = apply(name, "cuda", rows, dtype)
        if name in ATTACKS:
            torch.testing.assert_close(part, whole[rows], atol=1e-4, rtol=0)
        else:
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TABLES])
def test_gradients_and_half_precision(name):
    inputs = inputs_for(name).cuda()
    theta = inner(name, 4).cuda().requires_grad_()
    seeds = torch.arange(4, device="cuda")
    disturbed = perturb(PERTURBATIONS[name], inputs, theta, seeds, context_for(name, inputs))
    assert disturbed.requires_grad or not PERTURBATIONS[name].is_smooth
    if disturbed.requires_grad:
        (gradient,) = torch.autograd.grad(disturbed.sum(), theta)
        assert bool(gradient.isfinite().all())
    if name not in ATTACKS:
        half = perturb(PERTURBATIONS[name], inputs.half(), theta.detach(), seeds, context_for(name, inputs))
        assert half.dtype == torch.float16
        torch.testing.assert_close(half.float(), disturbed.detach(), atol=2e-2, rtol=0)
