"""An evaluation as figures: correlations and faults over all cells, and what coverage of 100% had found."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from themis.runs.display.figure import BLACK, GREY, save_figure
from themis_lab.comparison.figures import DPI, add_axes, remove_figure, titled_figure
from themis_lab.comparison.summary import GRID_TITLES
from themis_lab.evaluation.plans import PAPER_FAULTS
from themis_lab.evaluation.summary import OURS, STRONG_R, Evaluation, name_cell
from themis_lab.evaluation.tables import BUDGET_TITLES, DEFINITIONS, fault_ratios, list_ratios, median_interval
from themis_lab.evaluation.theory import WAYS_TO_STOP

DEFINITION_COLOURS = {"r": "#0072B2", "r_box": "#D55E00"}
MARKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"))
"""Colours and markers of the ways to stop."""
BAND_COLOUR = "#f3f3f3"
LEFT_MARGIN = 0.15
"""Left edge of rows of techniques, as a share of the width."""
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8.5}
LOWEST_RATIO = 0.1
"""Lower ratios of faults are drawn here."""


def draw_evaluation(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Draw all figures that have data; return their paths."""
    paths = []
    for name, draw in (
        ("correlations", draw_correlation_strip),
        ("faults-over-baselines", draw_ratios),
        ("shares-at-full-coverage", draw_shares),
    ):
        path = folder / f"{name}.png"
        remove_figure(path)
        if draw(evaluation, path):
            paths.append(path)
    return paths


def draw_correlation_strip(evaluation: Evaluation, path: Path) -> bool:
    """The r of distinct faults in every scored cell at equal passes: a panel per grid, a row per technique."""
    values: dict[str, dict[tuple[str, str], list[float]]] = {}
    for pair in evaluation.content["pairs"]:
        for grid in pair["budgets"].get("passes", []):
            for row in grid["rows"]:
                for key in DEFINITIONS:
                    r = (row[key].get("distinct") or [None])[0]
                    if r is not None:
                        values.setdefault(grid["name"], {}).setdefault((row["technique"], key), []).append(r)
    if not values:
        return False
    found_names = {technique for found in values.values() for technique, _ in found}
    names = sorted(found_names, key=lambda name: (name not in OURS, name), reverse=True)
    grids = [name for name in GRID_TITLES if name in values]
    height = 1.9 + 0.42 * len(names)
    figure = titled_figure(
        8.4, height, f"Correlation of faults and error rate, {BUDGET_TITLES['passes']}, all scored cells"
    )
    width = (0.97 - LEFT_MARGIN) / len(grids)
    for column, grid_name in enumerate(grids):
        axes = add_axes(figure, _place(height, LEFT_MARGIN + column * width, width - 0.03, 0.95), "x")
        axes.set_title(GRID_TITLES[grid_name], fontsize=9.5, color=BLACK)
        _shade(axes, len(names))
        for key, offset in (("r", 0.15), ("r_box", -0.15)):
            points = [(r, y + offset) for y, name in enumerate(names) for r in values[grid_name].get((name, key), [])]
            style: dict[str, Any] = {"s": 18, "alpha": 0.55, "color": DEFINITION_COLOURS[key], "linewidths": 0}
            label = f"error rate {DEFINITIONS[key][1]}"
            axes.scatter([r for r, _ in points], [y for _, y in points], label=label, **style)
        axes.axvline(STRONG_R, color=GREY, linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(names)), names if column == 0 else [])
        axes.set_xlim(-1.05, 1.05)
    figure.text(
        LEFT_MARGIN, 0.16 / height, "Pearson's r; dashed: what the paper calls strong", color=BLACK, fontsize=10
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.0, 1 - 0.3 / height), ncol=2, **LEGEND)
    save_figure(figure, path, dpi=DPI)
    return True


def draw_ratios(evaluation: Evaluation, path: Path) -> bool:
    """Distinct faults relative to the mean of the four baselines, a mark per cell, with the interval of the median."""
    rows = [
        (f"{technique}, {when}", values)
        for technique in reversed(OURS)
        for when, ratios in reversed(fault_ratios(evaluation.content).items())
        if (values := [max(ratio, LOWEST_RATIO) for ratio in list_ratios(ratios, technique, "over_four")])
    ]
    if not rows:
        return False
    height = 1.5 + 0.42 * len(rows)
    figure = titled_figure(8.4, height, "Distinct faults, relative to the mean of the four baselines")
    axes = add_axes(figure, _place(height, 0.28, 0.69, 0.4), "x")
    _shade(axes, len(rows))
    for y, (_, values) in enumerate(rows):
        axes.scatter(values, [y] * len(values), s=24, alpha=0.5, color=DEFINITION_COLOURS["r"], linewidths=0, zorder=3)
        if (interval := median_interval(values)) is not None:
            axes.plot(interval, [y, y], color=BLACK, linewidth=1.4, zorder=4)
        axes.plot([median(values)] * 2, [y - 0.28, y + 0.28], color=BLACK, linewidth=1.8, zorder=4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.axvline(PAPER_FAULTS, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    where = f"a mark per cell; black: the median and its 95% interval; dashed: the paper, when done ({PAPER_FAULTS})"
    figure.text(0.02, 0.16 / height, where, color=BLACK, fontsize=10)
    save_figure(figure, path, dpi=DPI)
    return True


def draw_shares(evaluation: Evaluation, path: Path) -> bool:
    """The share of the reference run's distinct faults that each way to stop had found, by cell.

    Cells in which no campaign could stop are left out.
    """
    theory = [
        record
        for record in evaluation.content["theory"]
        if record["reference"]["distinct_faults"] and any(record.get(way) for way in WAYS_TO_STOP)
    ]
    if not theory:
        return False
    height = 1.7 + 0.42 * len(theory)
    figure = titled_figure(8.4, height, "Share of the reference's distinct faults found when a campaign could stop")
    axes = add_axes(figure, _place(height, 0.38, 0.59, 0.7), "x")
    _shade(axes, len(theory))
    for k, (way, label) in enumerate(WAYS_TO_STOP.items()):
        colour, marker = MARKS[k]
        rows = [(y + 0.27 - 0.18 * k, record.get(way)) for y, record in enumerate(reversed(theory))]
        found = [(stop["of_faults"], y) for y, stop in rows if stop]
        style: dict[str, Any] = {"s": 34, "color": colour, "marker": marker, "zorder": 3, "label": label}
        axes.scatter([share for share, _ in found], [y for _, y in found], **style)
    labels = [f"{name_cell(record)} ({record['reference']['distinct_faults']:,})" for record in reversed(theory)]
    axes.set_yticks(range(len(theory)), labels)
    axes.set_xlim(-0.03, 1.03)
    where = "share of the reference's distinct faults (their number); without cells in which no campaign could stop"
    figure.text(0.02, 0.16 / height, where, color=BLACK, fontsize=10)
    figure.legend(loc="upper left", bbox_to_anchor=(0.0, 1 - 0.3 / height), ncol=4, **LEGEND)
    save_figure(figure, path, dpi=DPI)
    return True


def _place(height: float, left: float, width: float, top: float) -> tuple[float, float, float, float]:
    """The place of axes; `height` and `top` are inches, `left` and `width` shares of the figure."""
    return left, 0.62 / height, width, 1 - (0.62 + top) / height


def _shade(axes: Any, n_rows: int) -> None:
    """Shade every second row, which makes rows easier to follow."""
    for y in range(0, n_rows, 2):
        axes.axhspan(y - 0.5, y + 0.5, color=BAND_COLOUR, zorder=0)
    axes.set_ylim(-0.5, n_rows - 0.5)
