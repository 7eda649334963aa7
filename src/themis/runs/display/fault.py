"""A fault as text and as pictures, for notebooks, trackers and messages."""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from themis.text import percent

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.fault import Fault, FaultInputs, Replay
    from themis.runs.store.tensors import Tensors

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


MAX_SIDE = 80
"""Pixels of the longer side; larger pictures are scaled down."""


def data_uri(pixels: Pixels) -> str:
    """A picture `[height, width]` or `[height, width, 3]` as a `data:` URI."""
    return "data:image/png;base64," + b64encode(png(pixels)).decode()


def png(pixels: Pixels) -> bytes:
    """The bytes of a PNG file, with the smaller of two row filters."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    up = rows.copy()
    up[1:] -= rows[:-1]
    filtered = (np.insert(lines, 0, kind, axis=1).tobytes() for kind, lines in ((0, rows), (2, up)))
    body = min((zlib.compress(content, 9) for content in filtered), key=len)
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether an input can be drawn: `[channels, height, width]`."""
    return len(shape) == 3 and min(shape[1:]) > 1


def to_pixels(pictures: Tensor, bounds: tuple[float, float], max_side: int = MAX_SIDE) -> Pixels:
    """Pictures `[n, channels, height, width]` as bytes `[n, height, width(, 3)]`, large ones scaled down.

    Pictures with other than one or three channels are shown as their mean, values that are not finite as black.
    """
    import torch.nn.functional as F

    scaled = (pictures.float() - bounds[0]) / (bounds[1] - bounds[0])
    if scaled.shape[1] not in (1, 3):
        scaled = scaled.mean(1, keepdim=True)
    longest = max(scaled.shape[2:])
    if longest > max_side:
        size = [max(1, round(side * max_side / longest)) for side in scaled.shape[2:]]
        scaled = F.interpolate(scaled, size, mode="area")
    pixels = scaled.nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().movedim(1, -1).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


FRAMES = 6
"""Frames that are shown at most: the first, the last, and some between them."""
FRAME_GAP = 1
"""Pixels between two frames."""


def is_clip(shape: tuple[int, ...]) -> bool:
    """Whether an input is a clip that can be drawn."""
    return len(shape) == 4 and min(shape[2:]) > 1


def side_by_side(clip: Tensor, gap: float) -> Tensor:
    """Frames of a clip as one picture `[channels, height, width]`; gap: the value between them."""
    import torch
    import torch.nn.functional as F

    chosen = torch.linspace(0, len(clip) - 1, min(FRAMES, len(clip))).round().long()
    frames = F.pad(clip[chosen.to(clip.device)], (0, FRAME_GAP), value=gap)
    return torch.cat(list(frames), 2)[..., :-FRAME_GAP]


WIDTH, HEIGHT = 300, 72
"""Pixels of the curve of one channel."""
MAX_CHANNELS = 4
"""Channels that are drawn, the first ones."""
CLEAN, DISTURBED, BOTH = (148, 163, 178), (214, 60, 48), (84, 40, 60)
"""Colours of the pixels that one of two curves passes through, or both."""


def is_signal(shape: tuple[int, ...]) -> bool:
    """Whether an input is drawn as a curve: `[channels, samples]`."""
    return len(shape) == 2 and shape[1] > 1


def curves(clean: Tensor, disturbed: Tensor) -> Pixels:
    """The clean and the disturbed signal `[channels, samples]` in one picture, with the channels below one another."""
    pair = [_shown(signal) for signal in (clean, disturbed)]
    masks = []
    for channels in zip(*pair, strict=True):
        limits = _limits(*channels)
        masks.append([_mask(values, limits) for values in channels])
    is_clean, is_disturbed = (np.concatenate(parts) for parts in zip(*masks, strict=True))
    pixels = np.full((*is_clean.shape, 3), 255, np.uint8)
    pixels[is_clean], pixels[is_disturbed], pixels[is_clean & is_disturbed] = CLEAN, DISTURBED, BOTH
    return pixels


def separate_curves(clean: Tensor, disturbed: Tensor) -> list[Pixels]:
    """The clean signal, the disturbed one on the same axes, and their difference on axes of its own."""
    before, after = _shown(clean), _shown(disturbed)
    limits = [_limits(*pair) for pair in zip(before, after, strict=True)]
    change = after - before
    rows = ((before, limits), (after, limits), (change, [_limits(values) for values in change]))
    return [
        np.where(np.concatenate([_mask(*row) for row in zip(values, ranges, strict=True)]), 40, 255).astype(np.uint8)
        for values, ranges in rows
    ]


def plot_signals(axes: Any, signals: list[tuple[Tensor, str]]) -> None:
    """Draw signals `[channels, samples]`, each in its colour, with the channels below one another."""
    shown = [(_shown(signal), colour) for signal, colour in signals]
    limits = [_limits(*(values[k] for values, _ in shown)) for k in range(len(shown[0][0]))]
    for values, colour in shown:
        for k, (channel, (low, high)) in enumerate(zip(values, limits, strict=True)):
            axes.plot((channel - low) / (high - low) - 1.15 * k, color=colour, linewidth=0.8)
    axes.set_xlim(0, shown[0][0].shape[1] - 1)
    axes.set_ylim(-1.15 * (len(limits) - 1) - 0.05, 1.05)


def _shown(signal: Tensor) -> NDArray[np.float64]:
    """The channels that are drawn; values that are not finite are drawn as zeros."""
    values: NDArray[np.float64] = signal[:MAX_CHANNELS].double().cpu().nan_to_num(0.0, 0.0, 0.0).numpy()
    return values


def _limits(*channels: NDArray[np.float64]) -> tuple[float, float]:
    low, high = min(float(values.min()) for values in channels), max(float(values.max()) for values in channels)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _mask(values: NDArray[np.float64], limits: tuple[float, float]) -> NDArray[np.bool_]:
    """The pixels `[height, width]` of a curve: in each column, from its lowest value to its highest."""
    steps = max(2, -(-len(values) // WIDTH))
    places = np.linspace(0, len(values) - 1, WIDTH * steps + 1)
    fine = np.interp(places, np.arange(len(values)), values)
    rows = np.rint((limits[1] - fine) / (limits[1] - limits[0]) * (HEIGHT - 1 - 8)).astype(int) + 4
    spans = rows[np.arange(WIDTH)[:, None] * steps + np.arange(steps + 1)]
    down = np.arange(HEIGHT)[:, None]
    is_curve: NDArray[np.bool_] = (down >= spans.min(1)) & (down <= spans.max(1))
    return is_curve


COLOURS = ("#e6194b", "#3cb44b", "#4d8dff", "#ffb000", "#d05ce3", "#00c2c7", "#b5e61d", "#ff7f50")
MAX_SIDE_WITH_BOXES = 160
"""Pixels of the longer side of a picture with boxes in a report."""


def colour_of(number: int) -> str:
    """The colour of a class."""
    return COLOURS[number % len(COLOURS)]


def answered_boxes(clean_outputs: Tensor, outputs: Tensor, oracle: str) -> tuple[Tensor, Tensor] | None:
    """The answers to a clean and a disturbed input, `[n, 6]`, given detections `[n, 6]`; None if it is another task.

    Key points become squares as large as the tolerance, without a score. oracle: its name as recorded, which tells the
    score from which a detection is an answer.
    """
    from themis.oracle.boxes import CLASS, SCORE
    from themis.oracle.detection import Detection
    from themis.oracle.keypoints import KeyPoints

    task, _, text = oracle.partition(":")
    if task == "keypoints":
        reach = KeyPoints.parse(text).reach(clean_outputs[None])
        return _squares(clean_outputs, reach), _squares(outputs, reach)
    if task != "detection":
        return None
    least = Detection.parse(text).least_score
    clean, disturbed = (rows[(rows[:, SCORE] >= least) & (rows[:, CLASS] >= 0)] for rows in (clean_outputs, outputs))
    return clean, disturbed


def _squares(points: Tensor, reach: Tensor) -> Tensor:
    """Squares around points `[n, 2]` that reach as far to all sides."""
    import torch

    numbers = torch.arange(len(points), dtype=points.dtype, device=points.device)[:, None]
    return torch.cat([points[:, :2] - reach, points[:, :2] + reach, torch.full_like(numbers, torch.nan), numbers], 1)


def stored_boxes(tensors: Tensors, oracle: str) -> tuple[Tensor, Tensor] | None:
    """The same for the stored tensors of one fault."""
    clean_outputs = tensors.clean_outputs
    return None if clean_outputs is None else answered_boxes(clean_outputs[0], tensors.outputs[0], oracle)


def with_boxes(pixels: Pixels, boxes: Tensor, size: tuple[int, int]) -> Pixels:
    """A picture `[height, width(, 3)]` in colour with the outlines of boxes `[n, 6]` in a picture of another size."""
    drawn = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels.copy()
    height, width = drawn.shape[:2]
    thick = max(1, round(max(height, width) / 120))
    down, across = height / size[0], width / size[1]
    for left, top, right, bottom, _, number in boxes.nan_to_num(0.0).tolist():
        x0, x1 = (min(max(round(x * across), 0), width - 1) for x in (left, right - 0.5))
        y0, y1 = (min(max(round(y * down), 0), height - 1) for y in (top, bottom - 0.5))
        colour = [int(colour_of(int(number))[k : k + 2], 16) for k in (1, 3, 5)]
        for rows, columns in (
            (slice(y0, y0 + thick), slice(x0, x1 + 1)),
            (slice(max(y1 - thick + 1, 0), y1 + 1), slice(x0, x1 + 1)),
            (slice(y0, y1 + 1), slice(x0, x0 + thick)),
            (slice(y0, y1 + 1), slice(max(x1 - thick + 1, 0), x1 + 1)),
        ):
            drawn[rows, columns] = colour
    return drawn
