"""A picture of two robustness curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from themis.errors import UsageError

if TYPE_CHECKING:
    from themis.runs.analysis.robustness import Robustness
    from themis.runs.diff.result import Diff

AFTER = "#1f5fa8"


def draw_diff(diff: Diff, file: str | Path | BinaryIO) -> None:
    """Draw both curves as steps with their bands, and the verdict over them."""
    from textwrap import fill

    from themis.runs.display.figure import INK, QUIET, blank_figure

    if diff.curves is None:
        raise UsageError("a difference must have robustness curves to be drawn, it has none: pass curves=True")
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
    whole = diff.curves[0].whole
    unit = f": 1 is {whole}" if whole else ", of the dimension that goes furthest"
    axes.set_xlabel(f"strength, share of theta's range{unit}", color=INK)
    axes.set_ylabel("share of seeds still right", color=INK)
    for end in ("top", "right"):
        axes.spines[end].set_visible(False)
    axes.tick_params(colors=QUIET, labelsize=9)
    axes.legend(frameon=False, fontsize=9, loc="best")
    figure.text(0.02, 0.02, "Upper bounds, with 95% bands: weaker disturbances may break seeds too.", fontsize=8.5)
    figure.savefig(file, dpi=130, format="png")


def _steps(curve: Robustness) -> tuple[np.ndarray, ...]:
    first, is_inside = curve.at(0.0), curve.strengths > 0
    x = np.array([0.0, *curve.strengths[is_inside], 1.0])

    def column(start: float, values: np.ndarray) -> np.ndarray:
        inside = [start, *values[is_inside]]
        return np.array([*inside, inside[-1]])

    limits = ((first.value, curve.share), (first.low, curve.low), (first.high, curve.high))
    return (x, *(column(*each) for each in limits))
