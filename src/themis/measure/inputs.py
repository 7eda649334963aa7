"""Clean inputs: where they are stored while they are tested, and whether they lie in the target's bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.data.rows import RowCache, Rows
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.target.blackbox import BlackBox
from themis.target.target import AnyTarget, Target


def place(inputs: Tensor | Rows, device: torch.device) -> Tensor | Rows:
    """Inputs on the device: all of them if they fit into half of its free memory, else row by row on request."""
    if not isinstance(inputs, Tensor) or device.type != "cuda" or inputs.is_cuda:
        return inputs.to(device)
    if inputs.nbytes <= torch.cuda.mem_get_info(device)[0] // 2:
        return inputs.to(device)
    tensor = inputs
    return Rows(
        lambda k: tensor[k], torch.arange(len(tensor)), tuple(tensor.shape[1:]), device=device, cache=RowCache(0)
    )


def place_others(target: AnyTarget, seeds: Seeds, rows: Tensor) -> None:
    """Give the target the other inputs of the seeds `rows`, which it runs next, if there are several per example."""
    if isinstance(target, Target | BlackBox):
        target.side_inputs.others = None if seeds.others is None else seeds.others.part(rows.cpu()).to(target.device)


ROUNDING = 1e-6
"""Share of the range by which an input may be outside the bounds: as much as rounding does. It is clamped."""


LEAST_OF_BYTES = 16
"""Pictures whose largest value is above this are taken for bytes: the digits of scikit-learn reach 16."""


def within_bounds(inputs: Tensor, bounds: tuple[float, float], seed_id: Tensor) -> Tensor:
    """The inputs, clamped if rounding took them outside the bounds; refuses inputs that are further outside.

    Common mistakes get a remedy of their own.
    """
    low, high = bounds
    least, most = (float(extreme) for extreme in inputs.aminmax())
    if low <= least and most <= high:
        return inputs
    slack = ROUNDING * (high - low)
    if low - slack <= least and most <= high + slack:
        return inputs.clamp(low, high)
    is_outside = ((inputs < low) | (inputs > high)).flatten(1).any(1)
    first = int(seed_id[min(int(is_outside.nonzero()[0]), len(seed_id) - 1)])
    remedy = "rescale the inputs or pass their true bounds"
    if inputs.ndim == 2:
        remedy += "; --bounds auto, or bounds=(-inf, inf), takes those of a table"
    elif high <= 1 and LEAST_OF_BYTES < most <= 255 and least >= 0:
        remedy = (
            "divide by 255 or pass bounds=(0, 255), which is --bounds 0,255; a model that expects 0..1 then needs "
            "Normalize(0, 255), which is --mean 0 --std 255"
        )
    elif inputs.ndim == 3 and -1 <= least < 0 <= low and most <= 1:
        remedy = "sound in -1..1 needs bounds=(-1, 1), which is --bounds -1,1"
    elif least < 0 <= low:
        remedy = "give raw inputs, and pass the normalisation as preprocess=Normalize(mean, std)"
    raise DataError(
        f"inputs must lie in bounds ({low:g}, {high:g}), got {least:g} to {most:g}, first in seed {first}: {remedy}"
    )
