"""What is shown of a fault, in a notebook or a tracker: a line of words, and its pictures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.faults import Fault, Replay

Pixels = NDArray[np.uint8]
GAP = 2
"""Pixels between two pictures of a strip."""


def answers(fault: Fault) -> tuple[str, str]:
    """What the model says to the clean input and to the disturbed one."""
    sure = "" if math.isnan(fault.confidence) else f" ({fault.confidence:.0%})"
    after = "nothing finite" if fault.answer < 0 else f"{fault.answer}{sure}"
    if fault.clean_answer is not None:
        return str(fault.clean_answer), after
    if fault.clean_value is None:
        return "as expected", after if fault.answer < 0 else f"outcome {after}"
    return f"{fault.clean_value:.4g}", after if fault.value is None else f"{fault.value:.4g}"


def describe_theta(fault: Fault) -> str:
    """Theta by name."""
    return ", ".join(f"{name} {value:.4g}" for name, value in fault.theta.items())


def line(fault: Fault) -> str:
    """A fault in a line."""
    before, after = answers(fault)
    theta = f"{fault.perturbation} {describe_theta(fault)}"
    return f"fault {fault.id}, seed {fault.seed_id}: {before} becomes {after}; {theta}"


def pictures(replay: Replay) -> list[Pixels]:
    """Clean, disturbed and their amplified difference, `[height, width(, 3)]`; none where inputs are no pictures."""
    clean, disturbed = replay.clean_inputs.float().cpu(), replay.inputs.float().cpu()
    if clean.ndim != 3 or min(clean.shape[1:]) < 2:
        return []
    low, high = replay.bounds or _guess_bounds(clean, disturbed)
    change = disturbed - clean
    largest = float(change.abs().nan_to_num(0.0).max()) or 1.0
    shown = ((clean - low) / (high - low), (disturbed - low) / (high - low), 0.5 + change / (2 * largest))
    return [_pixels(each) for each in shown]


def strip(shown: list[Pixels], least: int = 112) -> Pixels:
    """Pictures side by side in colour, `[height, width, 3]`; small ones are enlarged to `least` pixels."""
    times = max(1, -(-least // shown[0].shape[0]))
    rows = []
    for each in shown:
        colour = each if each.ndim == 3 else np.repeat(each[..., None], 3, axis=2)
        large = colour.repeat(times, axis=0).repeat(times, axis=1)
        rows += [large, np.full((len(large), GAP * times, 3), 255, np.uint8)]
    return np.concatenate(rows[:-1], axis=1)


def _pixels(picture: Tensor) -> Pixels:
    if len(picture) not in (1, 3):
        picture = picture.mean(0, keepdim=True)
    whole: Pixels = picture.nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().movedim(0, -1).numpy()
    return whole[..., 0] if whole.shape[-1] == 1 else whole


def _guess_bounds(*pictures: Tensor) -> tuple[float, float]:
    """0 to 1 where that holds them, else what they span."""
    low = min(float(each.nan_to_num(0.0).min()) for each in pictures)
    high = max(float(each.nan_to_num(0.0).max()) for each in pictures)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, max(high, low + 1e-6))
