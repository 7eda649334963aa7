"""A comparison as figures: faults against error rate, and correlations with their intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from themis.errors import UsageError
from themis.report.table import format_number
from themis.runs.display.figure import BLACK, GREY, blank_figure, save_figure
from themis.runs.store.files import explained
from themis_lab.comparison.summary import GRID_TITLES, Comparison, GridSummary, Row

TECHNIQUE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart; grey replaces yellow, too pale on white."""
MARKERS = "osD^vPX*<>hp"
DPI = 130
R_MARGIN = 0.8
"""Beyond the outermost values of r, on Fisher's scale."""
TICKS = (-0.99, -0.9, -0.5, 0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Draw all figures that have data; their paths."""
    drawn = []
    kinds = {"faults": draw_faults, "correlation": draw_correlations}
    for path in (folder / f"{name}-{grid}.png" for name in kinds for grid in GRID_TITLES):
        remove_figure(path)  # an earlier call with other magnitudes may have drawn it
    for grid in comparison.grids:
        for name, draw_kind in kinds.items():
            path = folder / f"{name}-{grid.name}.png"
            if draw_kind(grid, f"{comparison.perturbation}, {GRID_TITLES[grid.name]}", path):
                drawn.append(path)
    return drawn


def remove_figure(path: Path) -> None:
    """Remove a figure that is drawn again, if there is one."""
    if path.is_dir() and not path.is_symlink():
        raise UsageError(f"{path} must be a file, but it is a folder: move it to another place")
    with explained(path):
        path.unlink(missing_ok=True)


def draw_faults(grid: GridSummary, title: str, path: Path) -> bool:
    """Distinct faults against both error rates, one line per technique, with both r in the legend."""
    if not grid.counts:
        return False
    figure = titled_figure(10.4, 4.6, title)
    axes = add_axes(figure, (0.07, 0.72 / 4.6, 0.32, 1 - 1.22 / 4.6))
    second = add_axes(figure, (0.42, 0.72 / 4.6, 0.32, 1 - 1.22 / 4.6), sharey=axes)
    second.tick_params(labelleft=False)
    rows = {row.technique: row for row in grid.rows}
    for panel, rates, label in (
        (axes, grid.rates, "error rate at full strength"),
        (second, grid.box_rates, "error rate over the whole range"),
    ):
        order = sorted(range(len(rates)), key=rates.__getitem__)
        for name, counts in grid.counts.items():
            k = _index(grid, name)
            values = [(r.get("distinct") or [None])[0] for r in (rows[name].r, rows[name].r_box)]
            texts = ["-" if value is None else format_number(value) for value in values]
            panel.plot(
                [rates[position] for position in order],
                [counts[position] for position in order],
                color=TECHNIQUE_COLOURS[k % len(TECHNIQUE_COLOURS)],
                marker=MARKERS[k % len(MARKERS)],
                linestyle="-" if k < len(TECHNIQUE_COLOURS) else "--",
                markersize=5,
                linewidth=1.4,
                label=_shorten(name if values == [None, None] else f"{name}  r = {' / '.join(texts)}", 40),
            )
        panel.set_xlabel(label, color=BLACK)
    axes.set_ylabel("distinct faults per campaign", color=BLACK)
    axes.set_ylim(bottom=0)
    second.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=8.5,
        title="r at full strength / over the range",
        title_fontsize=8,
        alignment="left",
    )
    save_figure(figure, path, dpi=DPI)
    return True


def draw_correlations(grid: GridSummary, title: str, path: Path) -> bool:
    """The r of distinct faults with its interval: filled at full strength, open over the whole range."""
    rows = [row for row in reversed(grid.rows) if any(_r(row, name)[0] is not None for name in ("r", "r_box"))]
    if not rows:
        return False
    values = []
    names = [_shorten(row.technique, 30) for row in rows]
    height, left = 1.6 + 0.4 * len(rows), 0.05 + 0.0115 * max(map(len, names))
    figure = titled_figure(7.6, height, title)
    axes = add_axes(figure, (left, 0.72 / height, 0.97 - left, 1 - 1.22 / height), "x")
    for y, row in enumerate(rows):
        for name, offset, is_filled in (("r", 0.13, True), ("r_box", -0.13, False)):
            value, low, high = _r(row, name)
            if value is None:
                continue
            colour = TECHNIQUE_COLOURS[_index(grid, row.technique) % len(TECHNIQUE_COLOURS)]
            values.append(_fisher(value))
            if low is not None and high is not None:
                ends = [_fisher(low), _fisher(high)]
                axes.plot(ends, [y + offset] * 2, color=colour, linewidth=1.6, zorder=2)
            style = {"color": colour, "markerfacecolor": colour if is_filled else "white", "markersize": 6.5}
            axes.plot([_fisher(value)], [y + offset], marker="o", linestyle="", zorder=3, **style)
    axes.set_yticks(range(len(rows)), names, color=BLACK)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(
        "Pearson's r of error rate and distinct faults, with 95% intervals, on Fisher's scale\n"
        "filled: error rate at full strength; open: over the whole range that techniques search",
        color=BLACK,
    )
    left, right = min(values) - R_MARGIN, max(values) + R_MARGIN  # a wide interval is cut off
    ticks = [tick for tick in TICKS if left <= _fisher(tick) <= right]
    axes.set_xticks([_fisher(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlim(left, right)
    save_figure(figure, path, dpi=DPI)
    return True


def _r(row: Row, name: str) -> list[float | None]:
    """Value, low and high of an r; all None if it is undefined."""
    return getattr(row, name).get("distinct") or [None, None, None]


def titled_figure(width: float, height: float, title: str) -> Any:
    """A figure of this size in inches, with a title at the upper left."""
    figure = blank_figure(width, height)
    figure.suptitle(title, x=0.02, y=1 - 0.1 / height, ha="left", va="top", fontsize=11, color=BLACK)
    return figure


def add_axes(figure: Any, place: tuple[float, float, float, float], grid: str = "both", **options: Any) -> Any:
    """Axes without a frame; `place` is left, bottom, width and height as shares of the figure."""
    axes = figure.add_axes(place, **options)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=9)
    return axes


def _index(grid: GridSummary, technique: str) -> int:
    """A number of the technique that is the same on every grid."""
    return sorted(row.technique for row in grid.rows).index(technique)


def _fisher(r: float) -> float:
    return math.atanh(min(max(r, -TICKS[-1]), TICKS[-1]))


def _shorten(text: str, n: int) -> str:
    return text if len(text) <= n else f"{text[: n - 3]}..."
