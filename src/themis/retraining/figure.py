"""A retraining as a figure: scores and faults before and after, the frontier, and the fault rate by round."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from themis.retraining.changes import Shift
from themis.retraining.result import Retrained, inputs_of
from themis.runs.display.figure import INK, QUIET, blank_figure
from themis.text import counted

BEFORE, AFTER, CLEAN = "#D55E00", "#0072B2", "#009E73"
"""Colours of the palette of Okabe and Ito, which colour-blind readers can tell apart."""
GREY = "#bbbbbb"
DPI = 130
LONGEST = 20
"""The number of letters of a name that fit."""


def draw(result: Retrained) -> bytes:
    """The figure as PNG."""
    rows = [(shorten(outcome.name), outcome.change.disturbed) for outcome in reversed(result.outcomes)]
    rows.append(("clean", result.outcomes[0].change.clean))
    has_rounds = len(result.stages) > 1
    height = max(3.4, 1.8 + 0.55 * len(rows))
    width = 17.0 if has_rounds else 14.0
    figure = blank_figure(width, height)
    seeds = counted(result.seeds["judge"], "judge seed")
    title = f"Before and after retraining on {inputs_of(result)}, on {seeds}"
    figure.suptitle(title, x=0.15 / width, y=1 - 0.1 / height, ha="left", va="top", fontsize=11, color=INK)
    bottom, top = 0.65 / height, 1 - 1.35 / height
    _scores(_axes(figure, (1.7 / width, bottom, 3.8 / width, top)), rows)
    _faults(_axes(figure, (7.1 / width, bottom, 2.9 / width, top)), result)
    _frontier(_axes(figure, (10.9 / width, bottom, 2.9 / width, top)), result)
    if has_rounds:
        _rounds(_axes(figure, (14.4 / width, bottom, 2.4 / width, top)), result)
    content = BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    return content.getvalue()


def _scores(axes: Any, rows: list[tuple[str, Shift]]) -> None:
    """Scores before and after, with the interval of the difference."""
    for y, (_, shift) in enumerate(rows):
        over = shift.combined
        axes.annotate(
            "",
            (100 * shift.after, y),
            (100 * shift.before, y),
            arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 1.0, "linestyle": ":"},
        )
        if over is not None:
            ends = [100 * min(max(shift.before + end, 0.0), 1.0) for end in (over.low, over.high)]
            axes.plot(ends, [y, y], color=AFTER, linewidth=1.6)
        before = {"marker": "o", "color": BEFORE, "markerfacecolor": "white", "linestyle": ""}
        axes.plot([100 * shift.before], [y], markersize=9, label=None if y else "before", **before)  # a ring if equal
        after = {"marker": "o", "color": AFTER, "linestyle": ""}
        axes.plot([100 * shift.after], [y], markersize=6, label=None if y else "after", **after)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], color=INK, fontsize=8)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("score in %, with the 95% interval of the difference", color=INK, fontsize=8.5)
    position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2, "borderaxespad": 0.2}  # above all rows
    axes.legend(frameon=False, fontsize=8, **position)


def _faults(axes: Any, result: Retrained) -> None:
    """Distinct faults that a campaign finds with the same number of passes."""
    outcomes = list(reversed(result.outcomes))
    for y, outcome in enumerate(outcomes):
        shift = outcome.change.distinct_faults
        if shift is None:
            continue
        for offset, value, colour in ((0.2, shift.before, BEFORE), (-0.2, shift.after, AFTER)):
            axes.barh(y + offset, value, height=0.36, color=colour, alpha=0.85)
            style = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
            end = value if colour == BEFORE else shift.most  # beyond the spread
            axes.annotate(f"{value:,.0f}", (end, y + offset), xytext=(5, 0), **style)
        axes.plot([shift.least, shift.most], [y - 0.2] * 2, color=INK, linewidth=1.2, marker="|", markersize=6)
    axes.set_yticks(range(len(outcomes)), [shorten(outcome.name) for outcome in outcomes], color=INK, fontsize=8)
    axes.set_ylim(-0.6, len(outcomes) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.15)
    axes.set_xlabel("distinct faults of a campaign (with least and most)", color=INK, fontsize=8.5)


def _frontier(axes: Any, result: Retrained) -> None:
    """Gained disturbed score over lost clean score on the seeds held out: the mean, and each random seed in grey."""
    stage = result.stage
    for frontier in (*(model.frontier for model in stage.models), stage.frontier):
        lost = [100 * point.lost for point in frontier]
        gained = [100 * (point.disturbed - frontier[0].disturbed) for point in frontier]
        is_mean = frontier is stage.frontier
        style = {"color": AFTER, "marker": "o", "zorder": 3} if is_mean else {"color": GREY, "linewidth": 0.8}
        axes.plot(lost, gained, markersize=4, **style)
    place, share = (lost[stage.model.chosen], gained[stage.model.chosen]), stage.model.point.share
    axes.plot(*place, color=CLEAN, marker="o", markersize=10, zorder=4)
    is_end = stage.model.chosen == len(lost) - 1  # the curve leads up to it, and otherwise goes on to the right
    where = {"xytext": (0, 8), "ha": "center"} if is_end else {"xytext": (7, -3), "ha": "left", "va": "top"}
    style = {"textcoords": "offset points", "fontsize": 8, "color": INK, "zorder": 5, **where}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # legible where it lies on a line
    axes.annotate(f"{100 * share:.0f}% of the way", place, bbox=box, **style)
    limit = 100 * result.recipe.tolerance
    has_limit = result.recipe.share is None and limit < 100
    if has_limit:
        axes.axvline(limit, color=QUIET, linewidth=0.8, linestyle=":")
    axes.margins(x=0.3, y=0.1)
    axes.set_xlabel(f"clean score lost, points{' (dotted: tolerance)' * has_limit}", color=INK, fontsize=8.5)
    axes.set_ylabel("disturbed score gained, points", color=INK, fontsize=8.5)


def _rounds(axes: Any, result: Retrained) -> None:
    """The fault rate after each round."""
    original = result.stages[0].outcomes[0].before
    rates = [1 - original.disturbed_score, *(stage.fault_rate for stage in result.stages)]
    axes.plot(range(len(rates)), [100 * rate for rate in rates], color=AFTER, marker="o")
    axes.plot([result.kept + 1], [100 * rates[result.kept + 1]], color=CLEAN, marker="o", markersize=10, zorder=3)
    axes.set_xticks(range(len(rates)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round (green: the one whose model is returned)", color=INK, fontsize=8.5)
    axes.set_ylabel("fault rate, %", color=INK, fontsize=8.5)


def shorten(name: str) -> str:
    """As much of a name as fits."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


def _axes(figure: Any, position: tuple[float, float, float, float]) -> Any:
    axes = figure.add_axes(position)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=8)
    return axes
