"""Whether a model can be differentiated, decided once by trying it on real inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def is_differentiable(function: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    """Return whether the sum of `function(point)` has a gradient with respect to `point`, even if it is zero.

    `function` is the `forward` of an open target, or a function of theta that ends in it. One forward and one backward
    pass decide. The answer is False if the function detaches its argument, runs under `torch.no_grad`, returns
    integers, raises on the way forward or back, or uses an operator without a gradient of its own. No gradient is
    stored in `.grad`, and the global random state is restored.
    """
    cuda = [point.device] if point.is_cuda else []
    with (
        torch.random.fork_rng(devices=cuda),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # An operator without a gradient of its own, as those of quantised models: what torch returns may be wrong.
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        leaf = point.detach().clone().requires_grad_()
        try:
            # A copy of the leaf, since a model may write to its input and autograd forbids that for leaves.
            total = function(leaf.clone()).sum()
            if not total.requires_grad:
                return False
            return torch.autograd.grad(total, leaf, allow_unused=True)[0] is not None
        except Exception:  # a model, or an operator of its own, may raise anything
            return False
