"""Whether a target can be differentiated, decided once by trying it on a real input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from themis.target.target import AnyTarget


def probe_gradient(target: AnyTarget, inputs: Tensor) -> bool:
    """Return whether the outputs of an open target have a gradient with respect to raw `inputs [inputs, ...]`.

    Costs one forward and one backward pass over `inputs`; one input is enough. A black box is not run at all.
    """
    return target.has_gradient and is_differentiable(target.forward, inputs)


def is_differentiable(function: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    """Return whether the sum of `function(point)` has a gradient with respect to `point`, even if it is zero.

    False if the function detaches its argument, runs under `torch.no_grad`, returns integers, or raises on the way
    forward or back. No gradient is stored in `.grad`, and the global random state is as it was.
    """
    cuda = [point.device] if point.is_cuda else []
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()
        try:
            # A copy of the leaf, since a model may write to its input and autograd forbids that for leaves.
            result = function(leaf.clone()).sum()
            if not result.requires_grad:
                return False
            return torch.autograd.grad(result, leaf, allow_unused=True)[0] is not None
        except Exception:  # a model, or an operator of its own, may raise anything
            return False
