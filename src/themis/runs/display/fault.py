"""Faults as text and pictures, for messages, reports and trackers, and results as HTML, for notebooks."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from themis.text import percent

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.fault import Fault, FaultInputs, Replay
    from themis.runs.faults import Faults
    from themis.runs.run import Run
    from themis.runs.store.tensors import Tensors

Pixels = NDArray[np.uint8]
EXPECTED = "as expected"
"""Stands for the clean answer in tasks whose outcomes say what changed."""
PICTURE_GAP = 2
"""Pixels between the pictures of a strip, before they are enlarged."""
WIDE_RATIO = 3
"""Ratio of width to height above which pictures are stacked, such as the frames of a clip."""


def answers(fault: Fault, *, named: bool = False) -> tuple[str, str]:
    """The answers to the clean and to the disturbed input; `named`: as class names."""
    show = fault.name if named else str
    if fault.outcome is not None and not fault.is_number:
        return EXPECTED, fault.outcome
    other = fault.reference_answer
    beside = "" if other is None else f" against {'not finite' if other < 0 else other}"
    confidence = "" if math.isnan(fault.confidence) else f" ({percent(fault.confidence)})"
    after = "not finite" if fault.answer < 0 else f"{show(fault.answer)}{confidence}"
    if fault.is_number:
        return f"{fault.clean_value:.6g}", f"{fault.value:.6g}"
    return EXPECTED if fault.clean_answer is None else show(fault.clean_answer), after + beside


def answered(fault: Fault, replay: Replay) -> Fault:
    """The fault with the answer that the model gave in a replay."""
    return replace(fault, answer=replay.answer, value=replay.value, confidence=replay.confidence)


def describe_theta(fault: Fault) -> str:
    """The values of theta with their names."""
    return ", ".join(f"{name} {value:.4g}" for name, value in fault.theta.items())


def describe_change(before: object, after: object) -> str:
    """The change of an answer, such as `1 answered as 7`; before: None if there is no clean answer."""
    return f"answered as {after}" if before in (None, EXPECTED) else f"{before} answered as {after}"


def describe_fault(fault: Fault) -> str:
    """One line: the test, the answer of the model and the size of the disturbance."""
    label = "" if fault.label is None or fault.label == fault.clean_answer else f", label {fault.label}"
    ssim = "" if fault.ssim is None else f", SSIM {fault.ssim:.3f}"
    size = f"{describe_theta(fault)}{ssim}, L2 {fault.distance:.3g}"
    return f"fault {fault.id}: seed {fault.seed_id}, {describe_change(*answers(fault))}{label}; {size}"


def pictures(shown: FaultInputs) -> list[Pixels]:
    """The clean input, the disturbed one and their amplified difference, each `[height, width(, 3)]`; empty for tables.

    The curve of a disturbed signal is drawn over that of the clean one.
    """
    clean, disturbed = shown.clean_inputs.float().cpu(), shown.inputs.float().cpu()
    if is_signal(tuple(clean.shape)):
        return [curves(clean, clean), curves(clean, disturbed), curves(disturbed - clean, disturbed - clean)]
    low, high = shown.bounds
    if is_clip(tuple(clean.shape)):
        clean, disturbed = side_by_side(clean, high), side_by_side(disturbed, high)
    if clean.ndim != 3 or min(clean.shape[1:]) < 2:
        return []
    change = disturbed - clean
    largest = float(change.abs().nan_to_num(0.0).max()) or 1.0
    ranges = ((clean, (low, high)), (disturbed, (low, high)), (change, (-largest, largest)))
    drawn = [to_pixels(picture[None], bounds, None)[0] for picture, bounds in ranges]
    if shown.boxes is not None and shown.inputs.ndim == 3:
        height, width = clean.shape[1:]
        drawn[:2] = [with_boxes(*pair, (height, width)) for pair in zip(drawn, shown.boxes, strict=False)]
    return drawn


def strip(drawn: list[Pixels], least: int = 112) -> Pixels:
    """Pictures side by side as one, `[height, width, 3]`, enlarged to a height of `least`; wide ones are stacked."""
    is_wide = drawn[0].shape[1] > WIDE_RATIO * drawn[0].shape[0]
    factor = max(1, -(-(least // 2 if is_wide else least) // drawn[0].shape[0]))
    parts = []
    for picture in drawn:
        colour = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2)
        enlarged = colour.repeat(factor, axis=0).repeat(factor, axis=1)
        height, width = enlarged.shape[:2]
        between = (PICTURE_GAP * factor, width, 3) if is_wide else (height, PICTURE_GAP * factor, 3)
        parts += [enlarged, np.full(between, 255, np.uint8)]
    return np.concatenate(parts[:-1], axis=0 if is_wide else 1)


MAX_PICTURE_SIDE = 80
"""Pixels of the longer side; larger pictures are scaled down."""


def data_uri(pixels: Pixels) -> str:
    """A picture `[height, width]` or `[height, width, 3]` as a `data:` URI."""
    return "data:image/png;base64," + b64encode(png(pixels)).decode()


def png(pixels: Pixels) -> bytes:
    """The bytes of a PNG file."""
    from PIL import Image

    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG", optimize=True)
    return content.getvalue()


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether an input can be drawn: `[channels, height, width]`."""
    return len(shape) == 3 and min(shape[1:]) > 1


def to_pixels(pictures: Tensor, bounds: tuple[float, float], max_side: int | None = MAX_PICTURE_SIDE) -> Pixels:
    """Pictures `[n, channels, height, width]` as bytes `[n, height, width(, 3)]`; large ones are scaled down.

    If there are not one or three channels, their mean is shown. Values that are not finite become black.
    """
    import torch.nn.functional as F

    scaled = (pictures.float() - bounds[0]) / (bounds[1] - bounds[0])
    if scaled.shape[1] not in (1, 3):
        scaled = scaled.mean(1, keepdim=True)
    longest = max(scaled.shape[2:])
    if max_side is not None and longest > max_side:
        size = [max(1, round(side * max_side / longest)) for side in scaled.shape[2:]]
        scaled = F.interpolate(scaled, size, mode="area")
    pixels = scaled.nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().movedim(1, -1).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


MAX_FRAMES = 6
"""Frames of a clip that are shown: the first, the last, and some in between."""
FRAME_GAP = 1


def is_clip(shape: tuple[int, ...]) -> bool:
    """Whether an input is a clip that can be drawn."""
    return len(shape) == 4 and min(shape[2:]) > 1


def side_by_side(clip: Tensor, gap: float) -> Tensor:
    """Frames of a clip as one picture `[channels, height, width]`; gap: the value between them."""
    import torch
    import torch.nn.functional as F

    chosen = torch.linspace(0, len(clip) - 1, min(MAX_FRAMES, len(clip))).round().long()
    frames = F.pad(clip[chosen.to(clip.device)], (0, FRAME_GAP), value=gap)
    return torch.cat(list(frames), 2)[..., :-FRAME_GAP]


CURVE_WIDTH, CURVE_HEIGHT = 300, 72
"""Pixels of the curve of one channel."""
MAX_CHANNELS = 4
"""Channels that are drawn, starting from the first."""
CLEAN_COLOUR, DISTURBED_COLOUR, BOTH_COLOUR = (148, 163, 178), (214, 60, 48), (84, 40, 60)
"""Colours of pixels on the clean curve, on the disturbed curve and on both."""


def is_signal(shape: tuple[int, ...]) -> bool:
    """Whether an input is drawn as a curve: `[channels, samples]`."""
    return len(shape) == 2 and shape[1] > 1


def curves(clean: Tensor, disturbed: Tensor) -> Pixels:
    """The clean and the disturbed signal `[channels, samples]` in one picture, one channel below the other."""
    pair = zip(_shown(clean), _shown(disturbed), strict=True)
    masks = [[_mask(values, _limits(*channels)) for values in channels] for channels in pair]
    is_clean, is_disturbed = (np.concatenate(parts) for parts in zip(*masks, strict=True))
    pixels = np.full((*is_clean.shape, 3), 255, np.uint8)
    pixels[is_clean], pixels[is_disturbed] = CLEAN_COLOUR, DISTURBED_COLOUR
    pixels[is_clean & is_disturbed] = BOTH_COLOUR
    return pixels


def _shown(signal: Tensor) -> NDArray[np.float64]:
    """The channels that are drawn; values that are not finite are drawn as zeros."""
    return np.asarray(signal[:MAX_CHANNELS].double().cpu().nan_to_num(0.0, 0.0, 0.0))


def _limits(*channels: NDArray[np.float64]) -> tuple[float, float]:
    low, high = min(float(values.min()) for values in channels), max(float(values.max()) for values in channels)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _mask(values: NDArray[np.float64], limits: tuple[float, float]) -> NDArray[np.bool_]:
    """The pixels `[height, width]` of a curve; each column is filled from its lowest value to its highest."""
    steps = max(2, -(-len(values) // CURVE_WIDTH))
    places = np.linspace(0, len(values) - 1, CURVE_WIDTH * steps + 1)
    fine = np.interp(places, np.arange(len(values)), values)
    rows = np.rint((limits[1] - fine) / (limits[1] - limits[0]) * (CURVE_HEIGHT - 1 - 8)).astype(int) + 4
    spans = rows[np.arange(CURVE_WIDTH)[:, None] * steps + np.arange(steps + 1)]
    down = np.arange(CURVE_HEIGHT)[:, None]
    return np.asarray((down >= spans.min(1)) & (down <= spans.max(1)))


CLASS_COLOURS = ("#e6194b", "#3cb44b", "#4d8dff", "#ffb000", "#d05ce3", "#00c2c7", "#b5e61d", "#ff7f50")
MAX_SIDE_WITH_BOXES = 160
"""Pixels of the longer side of a picture with boxes in a report."""


def colour_of(number: int) -> str:
    """The colour of a class."""
    return CLASS_COLOURS[number % len(CLASS_COLOURS)]


def answered_boxes(clean_outputs: Tensor, outputs: Tensor, oracle: str) -> tuple[Tensor, Tensor] | None:
    """The boxes `[n, 6]` to draw for the outputs of a clean and a disturbed input; None in tasks without boxes.

    Of detections, those whose score makes them an answer are drawn. Key points become squares as large as the
    tolerance, without a score. oracle: the recorded name, which includes score and tolerance.
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
    """Squares around points `[n, 2]` whose sides are at a distance of `reach`."""
    import torch

    numbers = torch.arange(len(points), dtype=points.dtype, device=points.device)[:, None]
    return torch.cat([points[:, :2] - reach, points[:, :2] + reach, torch.full_like(numbers, torch.nan), numbers], 1)


def stored_boxes(tensors: Tensors, oracle: str) -> tuple[Tensor, Tensor] | None:
    """The boxes to draw for the stored tensors of one fault."""
    clean_outputs = tensors.clean_outputs
    return None if clean_outputs is None else answered_boxes(clean_outputs[0], tensors.outputs[0], oracle)


def with_boxes(pixels: Pixels, boxes: Tensor, size: tuple[int, int]) -> Pixels:
    """Draw the outlines of boxes `[n, 6]` on a picture `[height, width(, 3)]`; size: height and width of the input."""
    from PIL import Image, ImageDraw

    drawn = Image.fromarray(pixels).convert("RGB")
    width, height = drawn.size
    pen, thick = ImageDraw.Draw(drawn), max(1, round(max(height, width) / 120))
    down, across = height / size[0], width / size[1]
    for left, top, right, bottom, _, number in boxes.nan_to_num(0.0).tolist():
        x0, x1 = (min(max(round(x * across), 0), width - 1) for x in (left, right - 0.5))
        y0, y1 = (min(max(round(y * down), 0), height - 1) for y in (top, bottom - 0.5))
        if x0 <= x1 and y0 <= y1:
            pen.rectangle((x0, y0, x1, y1), outline=colour_of(int(number)), width=thick)
    return np.array(drawn)


N_PICTURES = 3
N_ROWS = 10
PICTURE_HEIGHT = 112
"""Height of a picture in a notebook, in pixels."""
PICTURE_TITLES = ("clean", "disturbed", "difference, amplified")


def show_run(run: Run) -> str:
    """The verdict, the figures, why the campaign stopped, the most telling faults, and a folded part with details."""
    from themis.runs.display.text import summary_rows

    faults = "".join(_figure(fault, _pictures(fault)) for fault in run.faults.most_telling(N_PICTURES))
    rows = [(name, escape(text)) for name, text in summary_rows(run, is_verbose=True)]
    n = len(summary_rows(run))
    details = f"<details><summary>How the campaign went</summary>{_pairs(rows[n:])}</details>"
    head = f"<p><b>{escape(run.verdict.text)}</b></p>{_pairs(rows[:n])}<p>{escape(run.stop)}</p>"
    return f"<div>{head}{faults}{details}</div>"


def show_fault(fault: Fault) -> str:
    """The pictures of the fault, the answers of the model, theta, and how to replay it."""
    before, after = answers(fault)
    rows = [
        ("answer", f"{escape(before)} becomes <b>{escape(after)}</b>"),
        *([] if fault.label is None else [("label", str(fault.label))]),
        (escape(fault.perturbation), escape(describe_theta(fault))),
        ("distance", f"{fault.distance:.4g}" + ("" if fault.ssim is None else f", SSIM {fault.ssim:.3f}")),
        ("found in", escape(f"round {fault.round}, {fault.stream} stream, {fault.kind}")),
        ("replay", f"<code>run.faults.by_id({fault.id}).replay()</code>"),
    ]
    title = f"fault {fault.id} of seed {fault.seed_id}"
    return f"<div><p><b>{title}</b></p>{_strip(_pictures(fault))}{_pairs(rows)}</div>"


def show_faults(faults: Faults) -> str:
    """The most telling faults as a table."""
    telling = faults.most_telling(N_ROWS)
    if not telling:
        return "<div><p>No fault was found.</p></div>"
    head = ["id", "seed", "answer", "becomes", *faults.theta, "distance", "SSIM"]
    rows = [
        [
            str(fault.id),
            str(fault.seed_id),
            *answers(fault),
            *(f"{value:.4g}" for value in fault.theta.values()),
            f"{fault.distance:.4g}",
            "" if fault.ssim is None else f"{fault.ssim:.3f}",
        ]
        for fault in telling
    ]
    part = f", of which the {len(telling)} most telling are shown" if len(faults) > len(telling) else ""
    text = f"{len(faults):,} faults by {faults.perturbation}{part}; to_pandas() returns all."
    return f"<div><p>{escape(text)}</p>{html_table(head, rows)}</div>"


def _pictures(fault: Fault) -> list[Pixels]:
    """The pictures of a fault; empty if they are not stored or cannot be drawn, so that a notebook shows the rest."""
    try:
        shown = fault.shown()
        return [] if shown is None else pictures(shown)
    except Exception:
        return []


def _figure(fault: Fault, drawn: Sequence[Pixels]) -> str:
    before, after = answers(fault)
    text = f"seed {fault.seed_id}: {before} becomes {after}; {describe_theta(fault)}"
    return f'<div style="display:inline-block;margin:4px 16px 4px 0">{_strip(drawn)}<small>{escape(text)}</small></div>'


def _strip(drawn: Iterable[Pixels]) -> str:
    style = f"height:{PICTURE_HEIGHT}px;image-rendering:pixelated;margin-right:4px;display:inline"
    images = "".join(
        f'<img src="{data_uri(pixels)}" alt="{title}" title="{title}" style="{style}">'
        for pixels, title in zip(drawn, PICTURE_TITLES, strict=False)
    )
    return f"<div>{images}</div>" if images else ""


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A table with one row per pair of HTML texts."""
    left = 'style="text-align:left;vertical-align:top"'
    lines = "".join(f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in rows)
    return f"<table>{lines}</table>"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text."""
    top = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
