"""A fault as text and as pictures, for notebooks, trackers and messages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from themis.runs.display.clip import is_clip, side_by_side
from themis.runs.display.signal import is_signal, separate_curves
from themis.text import percent

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.fault import Fault, FaultInputs, Replay

Pixels = NDArray[np.uint8]
GAP = 2
"""Pixels between the pictures of a strip, before they are enlarged."""
WIDE = 3
"""Ratio of width to height from which pictures are put one below the other, such as the frames of a clip."""


def answers(fault: Fault) -> tuple[str, str]:
    """The answers to the clean and to the disturbed input."""
    confidence = "" if math.isnan(fault.confidence) else f" ({percent(fault.confidence, 0)})"
    after = "not finite" if fault.answer < 0 else f"{fault.answer}{confidence}"
    if fault.outcome is not None and not fault.is_number:
        return "as expected", fault.outcome
    if fault.clean_answer is not None:
        return str(fault.clean_answer), after
    if fault.clean_value is None:
        return "as expected", after if fault.answer < 0 else f"outcome {after}"
    return f"{fault.clean_value:.4g}", after if fault.value is None else f"{fault.value:.4g}"


def describe_answer(answer: int, value: float | None, confidence: float, outcome: str | None = None) -> str:
    """The number of an answer, or the outcome in words, with the value and the confidence if they are known."""
    if answer < 0:
        return "not finite"
    details = [] if value is None else [f"{value:.6g}"]
    details += [] if math.isnan(confidence) else [percent(confidence)]
    shown = outcome or str(answer)
    return f"{shown} ({', '.join(details)})" if details else shown


def describe_theta(fault: Fault) -> str:
    """The values of theta with their names."""
    return ", ".join(f"{name} {value:.4g}" for name, value in fault.theta.items())


def caption(fault: Fault) -> str:
    """One line on the fault."""
    before, after = answers(fault)
    theta = f"{fault.perturbation} {describe_theta(fault)}"
    return f"fault {fault.id}, seed {fault.seed_id}: {before} becomes {after}; {theta}"


def pictures(shown: FaultInputs | Replay) -> list[Pixels]:
    """The clean input, the disturbed one and their amplified difference, `[height, width(, 3)]`; none for tables."""
    clean, disturbed = shown.clean_inputs.float().cpu(), shown.inputs.float().cpu()
    if is_signal(tuple(clean.shape)):
        return separate_curves(clean, disturbed)
    low, high = shown.bounds or _guess_bounds(clean, disturbed)
    if is_clip(tuple(clean.shape)):
        clean, disturbed = side_by_side(clean, high), side_by_side(disturbed, high)
    if clean.ndim != 3 or min(clean.shape[1:]) < 2:
        return []
    from themis.runs.display.boxes import with_boxes

    change = disturbed - clean
    largest = float(change.abs().nan_to_num(0.0).max()) or 1.0
    scaled = ((clean - low) / (high - low), (disturbed - low) / (high - low), 0.5 + change / (2 * largest))
    drawn = [_pixels(picture) for picture in scaled]
    if shown.boxes is not None and shown.inputs.ndim == 3:
        height, width = clean.shape[1:]
        drawn[:2] = [with_boxes(*pair, (height, width)) for pair in zip(drawn, shown.boxes, strict=False)]
    return drawn


def strip(drawn: list[Pixels], least: int = 112) -> Pixels:
    """Pictures side by side in colour, `[height, width, 3]`, or wide ones one below the other.

    Small ones are enlarged to a height of `least` pixels.
    """
    is_wide = drawn[0].shape[1] > WIDE * drawn[0].shape[0]
    factor = max(1, -(-(least // 2 if is_wide else least) // drawn[0].shape[0]))
    parts = []
    for picture in drawn:
        colour = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2)
        enlarged = colour.repeat(factor, axis=0).repeat(factor, axis=1)
        height, width = enlarged.shape[:2]
        between = (GAP * factor, width, 3) if is_wide else (height, GAP * factor, 3)
        parts += [enlarged, np.full(between, 255, np.uint8)]
    return np.concatenate(parts[:-1], axis=0 if is_wide else 1)


def _pixels(picture: Tensor) -> Pixels:
    if len(picture) not in (1, 3):
        picture = picture.mean(0, keepdim=True)
    pixels: Pixels = picture.nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().movedim(0, -1).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def _guess_bounds(*pictures: Tensor) -> tuple[float, float]:
    """0 to 1 if all values lie in it, otherwise the range of the values."""
    low = min(float(picture.nan_to_num(0.0).min()) for picture in pictures)
    high = max(float(picture.nan_to_num(0.0).max()) for picture in pictures)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, max(high, low + 1e-6))
