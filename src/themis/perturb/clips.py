"""Perturbations of clips `[frames, channels, height, width]` whose theta changes steadily over time.

A perturbation of pictures disturbs every frame of a clip with the same theta; `over_time` gives it two, one for the
first frame and one for the last.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.errors import UsageError
from themis.perturb.context import Context
from themis.perturb.perturbation import OVER_TIME, Perturbation, Theta, apply_to_frames, combine


def over_time(perturbation: Perturbation) -> Perturbation:
    """The perturbation with two values of each theta, for the first and for the last frame; between, it is linear."""
    if perturbation.parts:
        return combine(*map(over_time, perturbation.parts))
    _check(perturbation)
    size = len(perturbation.theta)

    def apply(clips: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        share = torch.linspace(0, 1, clips.shape[1], dtype=theta.dtype, device=theta.device)[:, None]
        by_frame = torch.lerp(theta[:, None, :size], theta[:, None, size:], share)
        wide = perturbation.reaching(tuple(map(max, context.highest[:size], context.highest[size:])))
        return apply_to_frames(wide, clips, by_frame, rng, context)

    apply.__qualname__ = f"{OVER_TIME}({perturbation.code})"
    apply.__doc__ = f"{perturbation.about.rstrip('.')}; it changes steadily from the first frame to the last."
    return replace(
        perturbation,
        name=f"{OVER_TIME}({perturbation.name})",
        theta=tuple(_at_end(theta, end) for end in ("first", "last") for theta in perturbation.theta),
        apply=apply,
        inputs="clip",
        parts=(),
    )


def _at_end(theta: Theta, end: str) -> Theta:
    unit = f"{theta.unit}, in the {end} frame" if theta.unit else f"in the {end} frame"
    return replace(theta, name=f"{theta.name}_{end}", unit=unit)


def _check(perturbation: Perturbation) -> None:
    name = perturbation.name
    if perturbation.inputs not in ("any", "picture"):
        raise UsageError(
            f"{OVER_TIME} needs a perturbation of pictures, got {name!r}, which disturbs a {perturbation.inputs}: "
            "choose another, see themis perturbations"
        )
    if perturbation.passes or perturbation.needs_gradient:
        raise UsageError(
            f"{OVER_TIME} needs a perturbation that disturbs one frame at a time, got {name!r}, which asks the model "
            "about the whole clip: use it without over_time, as it changes every frame differently anyway"
        )
    if perturbation.is_combination:
        raise UsageError(f"{OVER_TIME} must be applied to {name!r} before its range is changed: call .at() afterwards")
