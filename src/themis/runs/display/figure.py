"""Figures drawn with Matplotlib: pictures of faults with the model's answers, and robustness curves."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from themis.errors import UsageError
from themis.runs.display.fault import WIDE_RATIO, answers, describe_theta, pictures
from themis.runs.display.text import RANDOM_LABEL, UNBROKEN_LABEL

if TYPE_CHECKING:
    from themis.runs.analysis.shrink import Robustness
    from themis.runs.fault import Fault, FaultInputs

BLACK, GREEN, RED, GREY, BLUE = "#1a1a1a", "#1b7f4b", "#b3261e", "#6b6b6b", "#1f5f99"


def draw_pairs(pairs: Sequence[tuple[Fault, FaultInputs]], file: str | Path | BinaryIO, title: str) -> None:
    """Draw each fault with its clean and its disturbed input: pictures, clips or signals."""
    if not pairs:
        raise UsageError("there is no fault to draw: raise the magnitude or the budget")
    drawn = [pictures(shown)[:2] for _, shown in pairs]
    if not drawn[0]:
        raise UsageError(
            "only pictures [channels, height, width], clips of them and signals [channels, samples] can be drawn, got "
            f"inputs of shape {list(pairs[0][1].inputs.shape)}: export a table as .csv or .parquet"
        )
    high, wide = drawn[0][0].shape[:2]
    is_strip, has_boxes = wide > WIDE_RATIO * high, pairs[0][1].boxes is not None
    is_large = is_strip or has_boxes
    columns = min(2 if is_large else 4, len(pairs))
    rows = -(-len(pairs) // columns)
    letters = 57 if is_large else 34  # that fit in a title over one column
    captions = [fill(f"seed {fault.seed_id}, {describe_theta(fault)}", 3 * letters // 2) for fault, _ in pairs]
    breaks = max(caption.count("\n") for caption in captions)
    row_height = (3.1 if has_boxes else 2.05) + 0.13 * breaks
    figure = blank_figure((5.2 if is_large else 3.1) * columns, row_height * rows + 0.5)
    figure.set_layout_engine("constrained")
    figure.suptitle(fill(title, letters * columns), x=0.01, ha="left", fontsize=13, color=BLACK)
    cells = figure.subfigures(rows, columns, squeeze=False).flat
    for cell, (fault, _), shown, caption in zip(cells, pairs, drawn, captions, strict=False):
        aligned = caption + "\n" * (breaks - caption.count("\n"))
        cell.supxlabel(aligned, x=0.02, ha="left", fontsize=8, color=GREY)
        places = cell.subplots(*((2, 1) if is_strip else (1, 2)))
        for axes, pixels, text, colour in zip(places, shown, answers(fault, named=True), (GREEN, RED), strict=True):
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="antialiased")
            axes.set_anchor("S")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set(edgecolor=colour, linewidth=1.6)
            axes.set_title(text, fontsize=10.5, color=colour, pad=3)
    save_figure(figure, file, dpi=110)


def save_figure(figure: Any, file: str | Path | BinaryIO, *, dpi: int, format: str | None = None) -> None:
    """Write a figure atomically, with the mark of Themis, by default in the format of the file's suffix."""
    from themis.runs.store.files import SOFTWARE_MARK, TEXT_MARK, explained, write_file

    suffix = "" if not isinstance(file, str | Path) else Path(file).suffix.lstrip(".").lower()
    kind, picture = format or suffix or "png", BytesIO()
    metadata = {"png": {"Software": SOFTWARE_MARK}, "pdf": {"Creator": SOFTWARE_MARK}}.get(kind)
    figure.savefig(picture, dpi=dpi, format=kind, metadata=metadata)
    content = picture.getvalue()
    if kind == "svg":
        content = content.replace(b"?>", f"?>\n{TEXT_MARK}".encode(), 1)
    if not isinstance(file, str | Path):
        file.write(content)
        return
    with explained(Path(file)):
        write_file(Path(file), content)


def blank_figure(width: float, height: float) -> Any:
    """An empty Matplotlib figure, with its size in inches. It is made without pyplot, but notebooks display it too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class DisplayedFigure(Figure):
        def _repr_png_(self) -> bytes:
            content = BytesIO()
            self.savefig(content, format="png", dpi=100)
            return content.getvalue()

    figure = DisplayedFigure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def robustness_figure(curve: Robustness, title: str = "Robustness") -> Any:
    """A robustness curve as steps from strength 0 to 1, with its 95% interval."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = blank_figure(6.4, 4.2)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0.05, 1, 0.95)))
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=BLACK)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9)
    steps = {0.0: curve.at(0.0), **curve.steps}
    x, share, low, high = np.array([(at, step.value, step.low, step.high) for at, step in steps.items()]).T
    axes.fill_between(x, low, high, step="post", color=GREEN, alpha=0.17, linewidth=0, label="95% interval")
    axes.step(x, share, where="post", color=GREEN, linewidth=1.8, label=UNBROKEN_LABEL)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    if curve.random:
        middle = [(part.low + part.high) / 2 for part in curve.random]
        value, least, most = (
            np.array([getattr(part.correct, end) for part in curve.random]) for end in ("value", "low", "high")
        )
        spread = (np.maximum(value - least, 0), np.maximum(most - value, 0))
        axes.errorbar(
            middle, value, spread, fmt="o", color=BLUE, markersize=4, capsize=3, linewidth=1.2, label=RANDOM_LABEL
        )
    if curve.median is not None:
        axes.plot([0, curve.median, curve.median], [0.5, 0.5, 0], color=GREY, linewidth=0.9, linestyle="--")
        text = f"half at {curve.median:.3g}"
        axes.annotate(text, (curve.median, 0.5), xytext=(6, 4), textcoords="offset points", fontsize=9, color=GREY)
    unit = f": 1 is {curve.full_strength}" if curve.full_strength else ", in the furthest dimension"
    axes.set_xlabel(f"strength, as a share of the range of theta{unit}")
    # "best" is the default, but unless it is passed, Matplotlib warns if finding the place takes a second.
    axes.legend(frameon=False, fontsize=9, loc="best")
    axes.set_ylabel(f"share, of {curve.n_seeds:,} seeds")
    text = "The steps are an upper bound: weaker disturbances may break seeds too."
    figure.text(0.02, 0.01, text, fontsize=8.5, color=GREY)
    return figure
