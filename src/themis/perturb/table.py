"""Tables: features of a row take other valid values, or get noise that makes the row invalid.

`Features.place` maps a row to the inputs, where a feature moves by a share of its range. The change is discrete, but
the gradient in theta is that of a change without rounding and therefore only a guide: the next feature in the order
fades in as `count` grows, and an integer moves like a real number.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.data.features import Features
from themis.errors import UsageError
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector, columns


class FeatureSteps(NamedTuple):
    """The result of a step of each feature of each row, `[tests, features]`."""

    place: Tensor
    is_open: Tensor  # whether the step is permitted and changes the row


COUNT_THETA = Theta("count", 0.0, 10.0, unit="features", limits=(0, torch.inf))
AMOUNT_THETA = Theta("amount", 0.02, 0.3, identity=0.02, unit="share of a feature's range", limits=(0, 1))
TABLE: list[Perturbation] = []
_table = collector(TABLE, inputs="table", family="table", moves=False)


@_table(COUNT_THETA, AMOUNT_THETA, is_smooth=False)
def edit(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Some features of a table row, chosen at random, take another valid value, in a direction they may change.

    Binary features flip, and categories take any other value, whatever the amount; integers move by at least one.
    """
    features = _features(context)
    order, coin = rng.uniform(inputs.shape[1]), rng.uniform(inputs.shape[1])
    up, down = _steps(inputs, theta, features)
    rises = up.is_open & (~down.is_open | (coin < 0.5))
    place = torch.where(rises, up.place, down.place)
    if "category" in features.kind:
        place = _other_category(inputs, features, rng.uniform(inputs.shape[1]), place)
    return _change(inputs, theta, features, place, torch.where(up.is_open | down.is_open, order, torch.inf))


@_table(COUNT_THETA, AMOUNT_THETA, is_random=False, passes=3, needs_gradient=True, is_smooth=False)
def edit_worst(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The features of a table row whose change is expected to raise the model's loss most take another valid value.

    The expected increase is the gradient of the loss times the step. Features without one are left unchanged.
    """
    features = _features(context)
    slope = context.loss_gradient(inputs).to(inputs.dtype)
    up, down = _steps(inputs, theta, features)
    gain_up, gain_down = (slope * (step.place - inputs.detach()) * step.is_open for step in (up, down))
    gain, place = torch.maximum(gain_up, gain_down), torch.where(gain_up >= gain_down, up.place, down.place)
    return _change(inputs, theta, features, place, torch.where(gain > 0, 1 / gain, torch.inf))


@_table(Theta("sigma", 0.0, 0.1, unit="share of a feature's range", limits=(0, 10)), theta_is_magnitude=True)
def table_noise(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Normal noise on every feature of a table, in units of its range: continuous, so that the rows are not valid.

    This is the paper's noise. Values stay in their ranges, but integers become fractional, and features that must not
    change are disturbed too.
    """
    low, high = _ends(inputs, _features(context))
    (sigma,) = columns(theta, inputs)
    return (inputs + rng.normal(inputs.shape[1]) * sigma * (high - low)).clamp(low, high)


def _features(context: Context) -> Features:
    if context.features is None:
        raise UsageError("the features of the table must be known, got none: pass features=themis.Features.of(inputs)")
    return context.features


def _ends(inputs: Tensor, features: Features) -> tuple[Tensor, Tensor]:
    """The ends of the valid ranges."""
    limits = features.limits(inputs.device, inputs.dtype if features.axes is None else torch.float64)
    return features.place(limits.low).to(inputs.dtype), features.place(limits.high).to(inputs.dtype)


def _steps(inputs: Tensor, theta: Tensor, features: Features) -> tuple[FeatureSteps, FeatureSteps]:
    """The valid value of each feature that is `amount` of its range above the current one, and the one below."""
    dtype = inputs.dtype if features.axes is None else torch.float64
    limits = features.limits(inputs.device, dtype)
    here, low, high = inputs.detach().to(dtype), features.place(limits.low), features.place(limits.high)
    value, reach = features.value(here).round(), theta.detach()[:, 1:] * (high - low)

    def step(sign: int, further: Callable[[Tensor, Tensor], Tensor], may_change: Tensor) -> FeatureSteps:
        moved = (here + sign * reach).clamp_(low, high)
        reached = further(features.value(moved).round(), value + sign).clamp_(limits.low, limits.high)
        place = further(torch.where(limits.is_number, moved, features.place(reached)), here).to(inputs.dtype)
        is_open = may_change & (place != inputs)
        if features.axes is not None:  # a place on an axis may differ from that of its value by rounding
            is_open &= limits.is_number | (reached != value)
        return FeatureSteps(place, is_open)

    return step(1, torch.maximum, limits.may_rise), step(-1, torch.minimum, limits.may_fall)


def _other_category(inputs: Tensor, features: Features, share: Tensor, place: Tensor) -> Tensor:
    """The place of another category, chosen by a share in 0..1; for features without categories, `place`."""
    limits = features.limits(inputs.device, torch.float64)
    n_others = limits.high - limits.low
    value = features.value(inputs.detach().double()).round() - limits.low
    further = 1 + (share * n_others).floor().clamp(max=n_others - 1)
    other = features.place(limits.low + (value + further) % (n_others + 1)).to(place.dtype)
    return torch.where(limits.is_category & (n_others > 0), other, place)


def _change(inputs: Tensor, theta: Tensor, features: Features, place: Tensor, order: Tensor) -> Tensor:
    """Move the first `count` features by `order` to `place`; `order` is infinite for features that do not change."""
    count, amount = columns(theta, inputs)
    first = _first(order, count)
    rank = torch.arange(first.shape[1], device=first.device)
    weight = (count - rank).clamp(0, 1) * (order.gather(1, first) < torch.inf)
    before, after = inputs.detach().gather(1, first), place.gather(1, first)
    changed = inputs.detach().scatter(1, first, torch.where(weight.detach() >= 0.5, after, before))
    if not (weight.requires_grad or inputs.requires_grad):
        return changed
    low, high = (ends[first] for ends in _ends(inputs, features))
    moved = (before + (after - before).sign() * amount * (high - low)).clamp(low, high)
    limits = features.limits(inputs.device)
    is_free = ~(limits.is_binary | limits.is_category)[first]
    step = weight * (after - before + is_free * (moved - moved.detach()))
    relaxed = inputs + torch.zeros_like(inputs, dtype=step.dtype).scatter(1, first, step)
    return changed - (relaxed.detach() - relaxed).to(inputs.dtype)  # subtracts a zero with the gradient


def _first(order: Tensor, count: Tensor) -> Tensor:
    """The first features by `order`, leftmost first if equal, `[tests, n]`, where n is enough for every `count`."""
    n = order.shape[1]
    n_first = n if count.is_cuda else min(n, int(count.detach().max()) + 1)  # reading count would wait for the GPU
    bits = order.float().view(torch.int32).long()  # the bits of positive floats have the same order
    key = (bits << 32) + torch.arange(n, device=order.device)
    return key.topk(n_first, dim=1, largest=False).indices
