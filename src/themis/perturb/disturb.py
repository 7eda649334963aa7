"""Perturbations outside of a campaign: disturb some inputs and look at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from themis.errors import UsageError, nearest
from themis.perturb.context import Context
from themis.perturb.names import choose_perturbation
from themis.perturb.perturbation import OVER_TIME, Perturbation, check_fits, check_gradient, perturb

if TYPE_CHECKING:
    from themis.data.features import Features
    from themis.target.target import AnyTarget


def disturb(
    perturbation: str | Perturbation,
    inputs: Tensor,
    theta: Mapping[str, float | Tensor],
    *,
    noise_seed: int = 0,
    bounds: tuple[float, float] = (0.0, 1.0),
    target: AnyTarget | None = None,
    labels: Tensor | None = None,
    features: Features | None = None,
) -> Tensor:
    """The `inputs [tests, ...]`, disturbed; each theta is a number or `[tests]`, and its identity if it is left out.

    Input `k` has the noise seed `noise_seed + k`. An attack needs the target; `features` are those of a table.
    """
    perturbation = choose_perturbation(perturbation)
    check_fits(perturbation, tuple(inputs.shape[1:]))
    perturbation = perturbation.fitted(tuple(inputs.shape[1:]))
    if not inputs.is_floating_point():
        raise UsageError(f"inputs must be floating-point numbers, got {inputs.dtype}: write inputs.float() / 255")
    values = _theta_columns(perturbation, theta, inputs)
    seeds = torch.arange(noise_seed, noise_seed + len(inputs), device=inputs.device)
    if target is None:
        return perturb(perturbation, inputs, values, seeds, Context(bounds, features=features))
    check_gradient(perturbation, target)
    with target.opened():
        return perturb(perturbation, inputs, values, seeds, _attack_context(target, inputs, labels, features))


def _theta_columns(perturbation: Perturbation, theta: Mapping[str, float | Tensor], inputs: Tensor) -> Tensor:
    known = [parameter.name for parameter in perturbation.theta]
    for name in theta:
        if name not in known:
            raise UsageError(f"theta {name!r} of {perturbation.name!r} must be one it has: {nearest(name, known)}")
    columns = []
    for parameter in perturbation.theta:
        name, low, high = parameter.name, parameter.low, parameter.high
        value = torch.as_tensor(theta.get(name, parameter.identity), dtype=torch.float32, device=inputs.device)
        if value.ndim and value.shape != inputs.shape[:1]:
            raise UsageError(
                f"theta {name!r} must be a number or one for each of {len(inputs)} inputs, got {list(value.shape)}"
            )
        outside = value.detach()[(value < np.float32(low)) | (value > np.float32(high))]
        if len(outside.reshape(-1)):
            lowest, highest = parameter.limits
            raise UsageError(
                f"theta {name!r} of {perturbation.name!r} must lie in {low:g}..{high:g}, got "
                f"{float(outside.reshape(-1)[0]):g}: widen its range with {_widened(perturbation, name)}, within "
                f"{lowest:g}..{highest:g}"
            )
        columns.append(value.expand(len(inputs)))
    return torch.stack(columns, 1)


def _widened(perturbation: Perturbation, theta: str) -> str:
    """How a user widens the range of theta."""
    plain, bracket, inside = perturbation.name.partition("(")
    if plain != OVER_TIME:
        return f"{plain}({theta}=LOW:HIGH)"
    inner = inside.partition("(")[0].rstrip(")")
    return f"{plain}{bracket}{inner}({theta.rpartition('_')[0]}=LOW:HIGH))"


def _attack_context(target: AnyTarget, inputs: Tensor, labels: Tensor | None, features: Features | None) -> Context:
    from themis.oracle import choose_oracle

    with torch.no_grad():
        clean = target.forward(inputs).float()
    oracle = choose_oracle(target.oracle).settle(clean, labels)

    return Context.of_task(target, oracle, clean, labels, features)
