"""Pictures of robustness curves: the curve of one run, or those of two runs that are compared."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from themis.errors import UsageError
from themis.runs.analysis.robustness import Robustness
from themis.runs.diff.result import Diff
from themis.runs.display.figure import INK, QUIET, blank_figure, save_figure

AFTER = "#1f5fa8"


def draw_robustness(curve: Robustness, file: str | Path | BinaryIO, *, title: str = "Robustness") -> None:
    """Draw the curve as steps, with its band."""
    from themis.runs.display.plots import robustness_figure

    save_figure(robustness_figure(curve, title), file, dpi=130, format="png")


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
