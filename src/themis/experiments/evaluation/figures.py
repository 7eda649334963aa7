"""An evaluation as figures: correlations by technique over all cells, and what coverage of 100% had found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from themis.experiments.evaluation.page import BUDGETS, DEFINITIONS
from themis.experiments.evaluation.summary import STRONG, THEMIS, Evaluation
from themis.experiments.evaluation.theory import WAYS_TO_STOP
from themis.runs.display.figure import FAINT, INK, QUIET, blank_figure, save_figure

COLOURS = {"r": "#0072B2", "r_box": "#D55E00"}
MARKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"))
"""Colours and markers of the ways to stop."""
DPI = 130


def draw_evaluation(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Draw all figures that have data; their paths."""
    paths = []
    for name, draw in (("correlations", draw_correlation_strip), ("shares-at-full-coverage", draw_shares)):
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)
        if draw(evaluation, path):
            paths.append(path)
    return paths


def draw_correlation_strip(evaluation: Evaluation, path: Path) -> bool:
    """The r of distinct faults in every scored cell, one row per technique, by both definitions, at equal passes."""
    values: dict[str, dict[str, list[float]]] = {}
    for pair in evaluation.content["pairs"]:
        for grid in pair["budgets"].get("passes", []):
            for row in grid["rows"]:
                for key in DEFINITIONS:
                    r = (row[key].get("distinct") or [None])[0]
                    if r is not None:
                        values.setdefault(row["technique"], {}).setdefault(key, []).append(r)
    if not values:
        return False
    names = sorted(values, key=lambda name: (name not in THEMIS, name), reverse=True)
    labelled = set()
    height = 1.7 + 0.42 * len(names)
    figure, axes = _axes(height, f"Correlation of faults and error rate, {BUDGETS['passes']}, all scored cells")
    for y, name in enumerate(names):
        for key, offset in (("r", 0.14), ("r_box", -0.14)):
            found = values[name].get(key, [])
            label = None if key in labelled or not found else f"error rate {DEFINITIONS[key][1]}"
            labelled |= {key} if found else set()
            axes.scatter(
                found, [y + offset] * len(found), s=16, alpha=0.6, color=COLOURS[key], label=label, linewidths=0
            )
    axes.axvline(STRONG, color=QUIET, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.set_xlim(-1.03, 1.03)
    axes.set_xlabel("Pearson's r; dashed: what the paper calls strong", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncol=2, frameon=False, fontsize=8.5)
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
    figure, axes = _axes(height, "Share of a reference run's distinct faults found when a campaign could stop")
    for y in range(len(theory)):
        axes.axhline(y, color=FAINT, linewidth=0.5)
    for k, (way, label) in enumerate(WAYS_TO_STOP.items()):
        colour, marker = MARKS[k]
        rows = [(y + 0.27 - 0.18 * k, record.get(way)) for y, record in enumerate(reversed(theory))]
        found = [(stop["of_faults"], y) for y, stop in rows if stop]
        style: dict[str, Any] = {"s": 34, "color": colour, "marker": marker, "zorder": 3, "label": label}
        axes.scatter([share for share, _ in found], [y for _, y in found], **style)
    labels = [f"{record['model']} {record['perturbation']} {record['magnitude']:.3g}" for record in reversed(theory)]
    axes.set_yticks(range(len(theory)), labels)
    axes.set_ylim(-0.5, len(theory) - 0.5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("share of the distinct faults; cells in which no campaign could stop are left out", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.4, 1.0), ncol=4, frameon=False, fontsize=8.5)
    save_figure(figure, path, dpi=DPI)
    return True


def _axes(height: float, title: str) -> tuple[Any, Any]:
    figure = blank_figure(8.4, height)
    figure.suptitle(title, x=0.02, y=1 - 0.1 / height, ha="left", va="top", fontsize=11, color=INK)
    axes = figure.add_axes((0.31, 0.72 / height, 0.66, 1 - 1.45 / height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=9)
    return figure, axes
