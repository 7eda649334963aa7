"""Pictures of faults, with the answers of the model, and of robustness curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from themis.errors import MissingExtraError, UsageError
from themis.runs.display.fault import is_clip, is_signal, plot_signals, side_by_side
from themis.text import percent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from themis.runs.analysis.robustness import Robustness
    from themis.runs.diff.result import Diff
    from themis.runs.fault import Fault
    from themis.runs.run import Run

AFTER = "#1f5fa8"
INK, RIGHT, WRONG, QUIET, FAINT = "#1a1a1a", "#1b7f4b", "#b3261e", "#6b6b6b", "#b8c2cc"


def draw_faults(run: Run, path: str | Path, *, n: int = 12, classes: Sequence[str] | None = None) -> list[Fault]:
    """Replay and draw up to `n` of the most telling faults of a campaign; returns the faults that were drawn."""
    faults = run.faults.most_telling(n)
    replays = [fault.replay() for fault in faults]
    pictures = [(fault, replay.clean_inputs, replay.inputs) for fault, replay in zip(faults, replays, strict=True)]
    boxes = [replay.boxes for replay in replays]
    title = (
        f"The most telling of {len(run.faults):,} faults in {run.rounds[-1].tests:,} tests ({run.start.perturbation})"
    )
    draw_pairs(pictures, path, title=title, bounds=run.start.bounds, classes=classes, boxes=boxes)
    return faults


def draw_pairs(
    pictures: Sequence[tuple[Fault, Tensor, Tensor]],
    file: str | Path | BinaryIO,
    *,
    title: str,
    bounds: tuple[float, float],
    classes: Sequence[str] | None = None,
    boxes: Sequence[tuple[Tensor, Tensor] | None] | None = None,
) -> None:
    """Draw each fault with its clean and its disturbed input: pictures, clips or signals.

    boxes: for each fault, the answers of a detector to both inputs, `[n, 6]`.
    """
    if not pictures:
        raise UsageError("there is no fault to draw: raise the magnitude or the budget")
    is_strip = is_clip(tuple(pictures[0][1].shape))
    if is_strip:
        pictures = [
            (fault, side_by_side(clean, bounds[1]), side_by_side(disturbed, bounds[1]))
            for fault, clean, disturbed in pictures
        ]
    shape = pictures[0][1].shape
    if len(shape) != 3 and not is_signal(tuple(shape)):
        raise UsageError(
            "only pictures [channels, height, width], clips of them and signals [channels, samples] can be drawn, got "
            f"inputs of shape {list(shape)}: export a table as .csv or .parquet"
        )
    boxes = None if is_strip else boxes
    has_boxes = boxes is not None and any(answered is not None for answered in boxes)
    is_large = is_strip or has_boxes
    columns = min(2 if is_large else 4, len(pictures))
    rows = -(-len(pictures) // columns)
    letters = 57 if is_large else 34  # of a title over one column
    captions = [_caption(fault, 3 * letters // 2) for fault, _, _ in pictures]
    more = 0.13 * (max(len(lines) for lines in captions) - 1)  # inches per row for further lines
    heading = wrap(title, letters * columns)
    over = 0.2 * (len(heading) - 1)
    row_height = 3.0 if has_boxes else 1.95
    width, height = (5.2 if is_large else 3.1) * columns, (row_height + more) * rows + 0.6 + over
    figure = blank_figure(width, height)
    figure.suptitle("\n".join(heading), x=0.1 / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=13, color=INK)
    grid = figure.add_gridspec(
        rows,
        columns,
        left=0.01,
        right=0.99,
        top=1 - (0.72 + over) / height,
        bottom=(0.25 + more) / height,
        wspace=0.1,
        hspace=(0.47 + more) / (row_height - 0.47),
    )
    for k, (fault, clean, disturbed) in enumerate(pictures):
        places = grid[divmod(k, columns)].subgridspec(*((2, 1) if is_strip else (1, 2)), wspace=0.05, hspace=0.35)
        before, after = _titles(fault, classes)
        for at, (picture, text, colour) in enumerate(((clean, before, RIGHT), (disturbed, after, WRONG))):
            axes = figure.add_subplot(places[at])
            if len(shape) == 2:
                plot_signals(axes, [(clean, FAINT), (picture, colour)] if at else [(picture, colour)])
            else:
                axes.imshow(pixels(picture, bounds), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            answered = None if boxes is None else boxes[k]
            if answered is not None:
                _draw_boxes(axes, answered[at], classes)
            axes.set_xticks([])
            axes.set_yticks([])
            for side in axes.spines.values():
                side.set_edgecolor(colour)
                side.set_linewidth(1.6)
            axes.set_title(text, fontsize=10.5, color=colour, pad=3)
            if at == is_strip:  # below the picture on the left, or the lower one
                axes.set_xlabel("\n".join(captions[k]), fontsize=8, color=QUIET, loc="left", labelpad=3)
                axes.xaxis.label.set_multialignment("left")
    save_figure(figure, file, dpi=110)


def _draw_boxes(axes: Any, boxes: Tensor, classes: Sequence[str] | None) -> None:
    """Draw the answers of a detector, each with its class and score."""
    from matplotlib.patches import Rectangle

    from themis.runs.display.fault import colour_of

    for left, top, right, bottom, score, number in boxes.tolist():
        if not all(map(math.isfinite, (left, top, right, bottom, number))):
            continue
        colour, name = colour_of(int(number)), _class(int(number), classes)
        label = name if math.isnan(score) else f"{name} {score:.2f}"
        corner = (left - 0.5, top - 0.5)  # pixels are drawn around their numbers
        axes.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.3))
        text = axes.text(*corner, label, fontsize=5.5, color="white", va="bottom", clip_on=True)
        text.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 0.6})


def save_figure(figure: Any, file: str | Path | BinaryIO, *, dpi: int, format: str | None = None) -> None:
    """Write a figure with the mark of Themis, completely or not at all; by default in the format of its suffix."""
    from io import BytesIO

    from themis.runs.store.files import COMMENT, SOFTWARE, explained, write_file

    suffix = "" if not isinstance(file, str | Path) else Path(file).suffix.lstrip(".").lower()
    kind, picture = format or suffix or "png", BytesIO()
    metadata = {"png": {"Software": SOFTWARE}, "pdf": {"Creator": SOFTWARE}}.get(kind)
    figure.savefig(picture, dpi=dpi, format=kind, metadata=metadata)
    content = picture.getvalue()
    if kind == "svg":
        content = content.replace(b"?>", f"?>\n{COMMENT}".encode(), 1)
    if not isinstance(file, str | Path):
        file.write(content)
        return
    with explained(Path(file)):
        write_file(Path(file), content)


def _caption(fault: Fault, letters: int) -> list[str]:
    """Seed and theta, in lines no wider than a pair of pictures."""
    theta = ", ".join(f"{name} {value:.3g}" for name, value in fault.theta.items())
    return wrap(f"seed {fault.seed_id}, {theta}", letters)


def blank_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of a size in inches, made without pyplot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures of faults need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _titles(fault: Fault, classes: Sequence[str] | None) -> tuple[str, str]:
    """Titles with the answers to the clean and to the disturbed input."""
    if fault.outcome is not None and not fault.is_number:
        return "clean", fault.outcome
    wrong = _class(fault.answer, classes)
    if fault.answer >= 0 and fault.clean_value is not None and fault.clean_answer is None:
        return f"says {fault.clean_value:.3g}", f"says {fault.value:.3g}"
    if fault.clean_answer is None:
        return "clean", f"says {wrong}" if fault.answer < 0 else f"breaks: {wrong}"
    confidence = "" if math.isnan(fault.confidence) else f", {percent(fault.confidence, 0)}"
    return f"says {_class(fault.clean_answer, classes)}", f"says {wrong}{confidence}"


def _class(answer: int, classes: Sequence[str] | None) -> str:
    if answer < 0:
        return "nothing finite"
    return str(answer) if classes is None or answer >= len(classes) else classes[answer]


def pixels(picture: Tensor, bounds: tuple[float, float]) -> NDArray[np.float32]:
    """`[height, width(, 3)]` in 0..1; pictures with other than one or three channels as their mean."""
    pixels = (picture.float() - bounds[0]) / (bounds[1] - bounds[0])
    if len(pixels) not in (1, 3):
        pixels = pixels.mean(0, keepdim=True)
    return pixels.movedim(0, -1).squeeze(-1).numpy()


def draw_diff(diff: Diff, file: str | Path | BinaryIO) -> None:
    """Draw both curves as steps with their bands, below the verdict."""
    if diff.curves is None:
        raise UsageError("a difference must have robustness curves to be drawn, but it has none: pass curves=True")
    figure = blank_figure(7.2, 4.8)
    figure.suptitle(fill(diff.sentence, 92), x=0.02, y=0.985, ha="left", va="top", fontsize=9.5, color=INK)
    axes = figure.add_axes((0.1, 0.16, 0.87, 0.64))
    words = ("before", "after") if diff.kind == "versions" else ("first", "second")
    for curve, facts, word, colour, line in zip(
        diff.curves, (diff.before, diff.after), words, (QUIET, AFTER), ("--", "-"), strict=True
    ):
        x, share, low, high = _steps(curve)
        axes.fill_between(x, low, high, step="post", color=colour, alpha=0.15, linewidth=0)
        label = f"{word}: {facts['run']}".replace("$", r"\$")
        axes.step(x, share, where="post", color=colour, linewidth=1.8, linestyle=line, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    full_strength = diff.curves[0].full_strength
    unit = f": 1 is {full_strength}" if full_strength else ", of the dimension that goes furthest"
    axes.set_xlabel(f"strength, share of theta's range{unit}", color=INK)
    axes.set_ylabel("seeds that the search could not break", color=INK)
    for end in ("top", "right"):
        axes.spines[end].set_visible(False)
    axes.tick_params(colors=QUIET, labelsize=9)
    axes.legend(frameon=False, fontsize=9, loc="best")
    figure.text(0.02, 0.02, "Upper bounds, with 95% bands: weaker disturbances may break seeds too.", fontsize=8.5)
    save_figure(figure, file, dpi=130, format="png")


def _steps(curve: Robustness) -> tuple[NDArray[np.float64], ...]:
    """Strengths, shares and their limits, from strength 0 to 1."""
    start, is_inside = curve.at(0.0), curve.strengths > 0
    x = np.array([0.0, *curve.strengths[is_inside], 1.0])

    def column(first: float, values: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = [first, *values[is_inside]]
        return np.array([*inside, inside[-1]])

    limits = ((start.value, curve.share), (start.low, curve.low), (start.high, curve.high))
    return (x, *(column(*limit) for limit in limits))
