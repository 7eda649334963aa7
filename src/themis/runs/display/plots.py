"""Figures of a campaign, made without pyplot: showing and saving them is up to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Blank
from matplotlib.layout_engine import ConstrainedLayoutEngine

from themis.errors import UsageError
from themis.runs.display.figure import INK, QUIET, RIGHT, WRONG, save_figure
from themis.runs.display.text import RANDOM, UNBROKEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from themis.runs.analysis.robustness import Robustness
    from themis.runs.run import Run

BLUE = "#1f5f99"
STREAMS = ("uniform", "search")
MAX_LAYERS, MAX_CLASSES = 40, 30
"""The most that is still readable in a figure."""
BEST = "best"
"""Where a legend hides the least. It is passed although it is the default: otherwise Matplotlib warns if finding that
place takes a second, as it may on a busy machine.
"""


class Figure(Blank):
    """A figure that a notebook displays even if pyplot was not imported."""

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()


def coverage_figure(run: Run) -> Figure:
    """Coverage of the sampled and of all neurons over tests, with the final interval."""
    figure, axes = _blank("Coverage by tests")
    x = [0, *(round.tests for round in run.rounds)]
    sampled, of_all = ([0, *(getattr(round.coverage, name) for round in run.rounds)] for name in ("sampled", "all"))
    axes.plot(x, sampled, color=BLUE, marker=".", label="sampled neurons")
    axes.plot(x, of_all, color=RIGHT, marker=".", label="all neurons")
    interval = run.coverage_interval
    if interval is not None:
        axes.vlines(x[-1], interval.low, interval.high, color=RIGHT, linewidth=5, alpha=0.35, label="95% interval")
    goal = run.start.settings.coverage
    if goal is not None:
        axes.axhline(goal, color=QUIET, linewidth=0.8, linestyle="--", label="goal")
    axes.set_ylim(-0.02, 1.04)
    axes.set_xlabel("tests")
    axes.set_ylabel("share of neurons")
    axes.legend(frameon=False, fontsize=9, loc=BEST)
    return figure


def faults_figure(run: Run) -> Figure:
    """Distinct faults and failing seeds over tests."""
    figure, axes = _blank("Faults by tests")
    x = [0, *(round.tests for round in run.rounds)]
    axes.plot(
        x, [0, *(round.distinct_faults for round in run.rounds)], color=WRONG, marker=".", label="distinct faults"
    )
    axes.plot(x, [0, *(round.failing_seeds for round in run.rounds)], color=BLUE, marker=".", label="failing seeds")
    axes.set_xlabel("tests")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc=BEST)
    return figure


def layers_figure(run: Run) -> Figure:
    """By layer: the share of neurons covered, and the share of the sensitivity in faults."""
    names = list(run.judged.by_layer)
    shares = run.faults.columns["signature"].mean(axis=0) if len(run.faults) else np.zeros(len(names))
    n_omitted = max(0, len(names) - MAX_LAYERS)
    names = names[:MAX_LAYERS]
    figure, axes = _blank("Layers, from input to output", height=1.6 + 0.24 * len(names))
    at = np.arange(len(names))
    axes.barh(at - 0.2, [run.judged.by_layer[name] for name in names], 0.36, color=BLUE, label="neurons covered")
    axes.barh(at + 0.2, shares[: len(names)], 0.36, color=WRONG, label="mean share of the sensitivity in faults")
    axes.set_yticks(at, [_short(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("share" if not n_omitted else f"share ({n_omitted} more layers omitted)")
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def matrix_figure(run: Run, classes: Sequence[str] | None = None) -> Figure:
    """Distinct faults by clean and wrong answer."""
    distinct = [fault for fault in run.faults.distinct() if fault.clean_answer is not None]
    if not distinct:
        raise UsageError(
            "a matrix needs faults of a task whose answers are classes, but there are none: use plot_theta"
        )
    n_by_answer: dict[int, int] = {}
    for fault in distinct:
        for answer in (fault.clean_answer, fault.answer):
            if answer is not None:
                n_by_answer[answer] = n_by_answer.get(answer, 0) + 1
    kept = sorted(sorted(n_by_answer, key=lambda answer: -n_by_answer[answer])[:MAX_CLASSES])
    place = {answer: k for k, answer in enumerate(kept)}
    counts = np.zeros((len(kept), len(kept)), dtype=np.int64)
    n_omitted = 0
    for fault in distinct:
        if fault.clean_answer in place and fault.answer in place:
            counts[place[fault.clean_answer], place[fault.answer]] += 1
        else:
            n_omitted += 1
    side = max(3.6, 1.6 + 0.3 * len(kept))
    figure, axes = _blank("Distinct faults by answer", width=side + 0.6, height=side)
    axes.imshow(counts, cmap="Reds", vmin=0)
    names = [_class(answer, classes) for answer in kept]
    axes.set_xticks(range(len(kept)), names, rotation=0 if max(map(len, names)) < 4 else 90)
    axes.set_yticks(range(len(kept)), names)
    for row, column in zip(*np.nonzero(counts), strict=True):
        n = counts[row, column]
        colour = "white" if n > counts.max() / 2 else INK
        axes.text(column, row, str(n), ha="center", va="center", fontsize=8, color=colour)
    rare = f" ({n_omitted:,} faults of rarer classes omitted)" if n_omitted else ""
    axes.set_xlabel(f"answer to the disturbed input{rare}")
    axes.set_ylabel("answer to the clean input")
    return figure


def theta_figure(run: Run) -> Figure:
    """Faults over the range of each dimension of theta, and the distance at which half of the failing seeds break."""
    theta = run.start.theta
    if not len(run.faults):
        raise UsageError("there is no fault to draw: raise the magnitude or the budget")
    values, seeds, streams = (run.faults.columns[name] for name in ("theta", "seed_id", "stream"))
    rows = -(-len(theta) // 3)
    columns = min(3, len(theta))
    size = {"width": max(4.6, 3.1 * columns), "height": 0.6 + 2.6 * rows}
    figure, axes = _blank("Faults by theta", **size, grid=(rows, columns))
    for k, dimension in enumerate(theta):
        ax = axes.flat[k]
        parts = [values[streams == stream, k] for stream in STREAMS]
        style = {"color": (BLUE, WRONG), "label": [f"{stream} stream" for stream in STREAMS]}
        ax.hist(parts, bins=24, range=(dimension.low, dimension.high), stacked=True, **style)
        ax.axvline(dimension.identity, color=QUIET, linewidth=0.8, linestyle="--")
        nearest = _nearest(values[:, k] - dimension.identity, seeds)
        ax.set_xlabel(f"{_short(dimension.name)}\n{_short(dimension.unit or '')}".rstrip())
        half = f"broke within {np.median(nearest):.3g} of {dimension.identity:g}"
        ax.set_title(f"half of {len(nearest):,} failing seeds\n{half}", fontsize=8, color=QUIET)
    for ax in axes.flat[len(theta) :]:
        ax.set_visible(False)
    axes.flat[0].set_ylabel("faults")
    axes.flat[0].legend(frameon=False, fontsize=8, loc=BEST)
    return figure


def time_figure(run: Run) -> Figure:
    """Seconds by phase."""
    figure, axes = _blank("Time by phase", height=2.2)
    phases = ("measure", "judge", "search")
    seconds = [getattr(run.seconds, phase) for phase in phases]
    axes.barh(phases, seconds, color=BLUE)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds, of {run.seconds.total:.1f} in total")
    return figure


def robustness_figure(curve: Robustness, title: str = "Robustness") -> Figure:
    """A robustness curve with its 95% interval."""
    figure, axes = _blank(title, height=4.2)
    first, is_inside = curve.at(0.0), curve.strengths > 0
    last = max(1.0, float(curve.strengths[-1]))
    x = np.array([0.0, *curve.strengths[is_inside], last])

    def steps(start: float, values: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = np.array([start, *values[is_inside]])
        return np.array([*inside, inside[-1]])

    low, high = steps(first.low, curve.low), steps(first.high, curve.high)
    axes.fill_between(x, low, high, step="post", color=RIGHT, alpha=0.18, linewidth=0, label="95% interval")
    axes.step(x, steps(first.value, curve.share), where="post", color=RIGHT, linewidth=1.8, label=UNBROKEN)
    if curve.random:
        middle = [(part.low + part.high) / 2 for part in curve.random]
        value, least, most = (
            np.array([getattr(part.correct, end) for part in curve.random]) for end in ("value", "low", "high")
        )
        spread = (np.maximum(value - least, 0), np.maximum(most - value, 0))
        axes.errorbar(middle, value, spread, fmt="o", color=BLUE, markersize=4, capsize=3, linewidth=1.2, label=RANDOM)
    if curve.median is not None:
        axes.plot([0, curve.median, curve.median], [0.5, 0.5, 0], color=QUIET, linewidth=0.9, linestyle="--")
        text = f"half at {curve.median:.3g}"
        axes.annotate(text, (curve.median, 0.5), xytext=(6, 4), textcoords="offset points", fontsize=9, color=QUIET)
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.02)
    unit = f": 1 is {curve.full_strength}" if curve.full_strength else ", in the furthest dimension"
    axes.set_xlabel(f"strength, as a share of the range of theta{unit}")
    axes.set_ylabel(f"share, of {curve.n_seeds:,} seeds")
    axes.legend(frameon=False, fontsize=9, loc="best")
    figure.text(
        0.02, 0.01, "The steps are an upper bound: weaker disturbances may break seeds too.", fontsize=8.5, color=QUIET
    )
    return figure


def draw_robustness(curve: Robustness, file: str | Path | BinaryIO, *, title: str = "Robustness") -> None:
    """Draw the curve as steps, with its band."""
    save_figure(robustness_figure(curve, title), file, dpi=130, format="png")


def _blank(
    title: str, *, width: float = 6.4, height: float = 3.6, grid: tuple[int, int] | None = None
) -> tuple[Figure, Any]:
    """A figure with a title, and its axes: one, or a grid of them."""
    figure = Figure(figsize=(width, height), facecolor="white", layout=ConstrainedLayoutEngine(rect=(0, 0.05, 1, 0.95)))
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK)
    axes = figure.subplots(*(grid or (1, 1)), squeeze=False)
    for ax in axes.flat:
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.tick_params(colors=QUIET, labelsize=9)
    return figure, axes[0, 0] if grid is None else axes


def _nearest(offsets: NDArray[Any], seeds: NDArray[Any]) -> NDArray[Any]:
    """For each failing seed, the distance of its nearest fault from the identity."""
    order = np.argsort(np.abs(offsets), kind="stable")
    first = np.unique(seeds[order], return_index=True)[1]
    nearest: NDArray[Any] = np.abs(offsets)[order][first]
    return nearest


def _class(answer: int, classes: Sequence[str] | None) -> str:
    if answer < 0:
        return "not finite"
    return _short(classes[answer]) if classes is not None and answer < len(classes) else str(answer)


def _short(name: str) -> str:
    """A name that fits and that matplotlib does not parse as a formula."""
    cut = name if len(name) <= 28 else f"{name[:12]}...{name[-13:]}"
    return cut.replace("$", r"\$")
