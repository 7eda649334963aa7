"""Figures: pictures of faults with the answers of the model, and what a campaign has shown, drawn with Matplotlib."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from themis.errors import UsageError
from themis.runs.display.fault import (
    colour_of,
    describe_theta,
    is_clip,
    is_signal,
    plot_signals,
    side_by_side,
    to_pixels,
)
from themis.runs.display.text import RANDOM, UNBROKEN
from themis.runs.fault import STREAMS, name_outcome
from themis.text import percent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from themis.runs.analysis.diff import Diff
    from themis.runs.analysis.shrink import Robustness
    from themis.runs.fault import Fault, FaultInputs
    from themis.runs.run import Run

INK, RIGHT, WRONG, QUIET, FAINT, BLUE = "#1a1a1a", "#1b7f4b", "#b3261e", "#6b6b6b", "#b8c2cc", "#1f5f99"
MAX_DRAWN_LAYERS, MAX_DRAWN_CLASSES = 40, 30
"""The most that is still readable in a figure."""
BEST = "best"
"""Where a legend hides the least. It is passed although it is the default: otherwise Matplotlib warns if finding that
place takes a second, as it may on a busy machine.
"""


def draw_faults(run: Run, path: str | Path, *, n: int = 12, classes: Sequence[str] | None = None) -> list[Fault]:
    """Replay and draw up to `n` of the most telling faults of a campaign; returns the faults that were drawn."""
    faults = run.faults.most_telling(n)
    found = f"{len(run.faults):,} faults in {run.rounds[-1].tests:,} tests ({run.start.perturbation})"
    draw_pairs([(fault, fault.replay()) for fault in faults], path, f"The most telling of {found}", classes)
    return faults


def draw_pairs(
    pairs: Sequence[tuple[Fault, FaultInputs]],
    file: str | Path | BinaryIO,
    title: str,
    classes: Sequence[str] | None = None,
) -> None:
    """Draw each fault with its clean and its disturbed input: pictures, clips or signals."""
    if not pairs:
        raise UsageError("there is no fault to draw: raise the magnitude or the budget")
    bounds, shape = pairs[0][1].bounds, pairs[0][1].inputs.shape
    is_strip = is_clip(tuple(shape))
    if is_strip:
        shape = shape[1:]
    if len(shape) != 3 and not is_signal(tuple(shape)):
        raise UsageError(
            "only pictures [channels, height, width], clips of them and signals [channels, samples] can be drawn, got "
            f"inputs of shape {list(shape)}: export a table as .csv or .parquet"
        )
    has_boxes = not is_strip and any(shown.boxes is not None for _, shown in pairs)
    is_large = is_strip or has_boxes
    columns = min(2 if is_large else 4, len(pairs))
    rows = -(-len(pairs) // columns)
    letters = 57 if is_large else 34  # of a title over one column
    captions = [wrap(f"seed {fault.seed_id}, {describe_theta(fault)}", 3 * letters // 2) for fault, _ in pairs]
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
    for k, (fault, shown) in enumerate(pairs):
        clean, disturbed = shown.clean_inputs, shown.inputs
        if is_strip:
            clean, disturbed = side_by_side(clean, bounds[1]), side_by_side(disturbed, bounds[1])
        places = grid[divmod(k, columns)].subgridspec(*((2, 1) if is_strip else (1, 2)), wspace=0.05, hspace=0.35)
        before, after = _titles(fault, classes)
        for at, (picture, text, colour) in enumerate(((clean, before, RIGHT), (disturbed, after, WRONG))):
            axes = figure.add_subplot(places[at])
            if len(shape) == 2:
                plot_signals(axes, [(clean, FAINT), (picture, colour)] if at else [(picture, colour)])
            else:
                axes.imshow(
                    to_pixels(picture[None], bounds, None)[0], cmap="gray", vmin=0, vmax=255, interpolation="nearest"
                )
            if has_boxes and shown.boxes is not None:
                _draw_boxes(axes, shown.boxes[at], classes)
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


def blank_figure(width: float, height: float) -> Any:
    """An empty Matplotlib figure of a size in inches, made without pyplot; a notebook displays it all the same."""
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
    other = fault.reference_answer
    reference = "" if other is None else f", reference {_class(other, classes)}"
    return f"says {_class(fault.clean_answer, classes)}", f"says {wrong}{confidence}{reference}"


def _class(answer: int, classes: Sequence[str] | None) -> str:
    if answer < 0:
        return "nothing finite"
    return str(answer) if classes is None or answer >= len(classes) else classes[answer]


def coverage_figure(run: Run) -> Any:
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


def faults_figure(run: Run) -> Any:
    """Distinct faults and failing seeds over tests."""
    figure, axes = _blank("Faults by tests")
    x = [0, *(round.tests for round in run.rounds)]
    for name, colour in (("distinct_faults", WRONG), ("failing_seeds", BLUE)):
        counts = [0, *(getattr(round, name) for round in run.rounds)]
        axes.plot(x, counts, color=colour, marker=".", label=name.replace("_", " "))
    axes.set_xlabel("tests")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc=BEST)
    return figure


def layers_figure(run: Run) -> Any:
    """By layer: the share of neurons covered, and the share of the sensitivity in faults."""
    names = list(run.judged.by_layer)
    shares = run.faults.columns["signature"].mean(axis=0) if len(run.faults) else np.zeros(len(names))
    n_omitted = max(0, len(names) - MAX_DRAWN_LAYERS)
    names = names[:MAX_DRAWN_LAYERS]
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


def matrix_figure(run: Run, classes: Sequence[str] | None = None) -> Any:
    """Distinct faults by clean and wrong answer."""
    faults = run.faults.distinct()
    pairs = [(fault.clean_answer, fault.answer) for fault in faults if fault.clean_answer is not None]
    if not pairs:
        raise UsageError("a matrix needs faults of a task whose answers are classes, but has none: use plot_theta")
    kept = sorted(answer for answer, _ in Counter(chain(*pairs)).most_common(MAX_DRAWN_CLASSES))
    place = {answer: k for k, answer in enumerate(kept)}
    shown = [(place[before], place[after]) for before, after in pairs if before in place and after in place]
    counts = np.zeros((len(kept), len(kept)), dtype=np.int64)
    np.add.at(counts, tuple(np.array(shown, dtype=np.int64).reshape(-1, 2).T), 1)
    n_omitted = len(pairs) - len(shown)
    side = max(3.6, 1.6 + 0.3 * len(kept))
    figure, axes = _blank("Distinct faults by answer", width=side + 0.6, height=side)
    axes.imshow(counts, cmap="Reds", vmin=0)
    names = [_short(name_outcome("wrong", answer, classes)) for answer in kept]
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


def theta_figure(run: Run) -> Any:
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


def time_figure(run: Run) -> Any:
    """Seconds by phase."""
    figure, axes = _blank("Time by phase", height=2.2)
    phases = ("measure", "judge", "search")
    seconds = [getattr(run.seconds, phase) for phase in phases]
    axes.barh(phases, seconds, color=BLUE)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds, of {run.seconds.total:.1f} in total")
    return figure


def robustness_figure(curve: Robustness, title: str = "Robustness") -> Any:
    """A robustness curve with its 95% interval."""
    figure, axes = _blank(title, height=4.2)
    _draw_curve(axes, curve, RIGHT, UNBROKEN, band="95% interval")
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
    _label_strength(axes, curve)
    axes.set_ylabel(f"share, of {curve.n_seeds:,} seeds")
    text = "The steps are an upper bound: weaker disturbances may break seeds too."
    figure.text(0.02, 0.01, text, fontsize=8.5, color=QUIET)
    return figure


def draw_robustness(curve: Robustness, file: str | Path | BinaryIO, *, title: str = "Robustness") -> None:
    """Draw the curve as steps, with its band."""
    save_figure(robustness_figure(curve, title), file, dpi=130, format="png")


def draw_diff(diff: Diff, file: str | Path | BinaryIO) -> None:
    """Draw both curves as steps with their bands, below the verdict."""
    if diff.curves is None:
        raise UsageError("a difference must have robustness curves to be drawn, but it has none: pass curves=True")
    figure, axes = _blank(fill(diff.sentence, 92), width=7.2, height=4.8, size=9.5)
    words = ("before", "after") if diff.kind == "versions" else ("first", "second")
    styles = zip(diff.curves, (diff.before, diff.after), words, (QUIET, BLUE), ("--", "-"), strict=True)
    for curve, facts, word, colour, line in styles:
        _draw_curve(axes, curve, colour, f"{word}: {facts['run']}".replace("$", r"\$"), line)
    _label_strength(axes, diff.curves[0])
    axes.set_ylabel("seeds that the search could not break")
    text = "Upper bounds, with 95% bands: weaker disturbances may break seeds too."
    figure.text(0.02, 0.01, text, fontsize=8.5, color=QUIET)
    save_figure(figure, file, dpi=130, format="png")


def _draw_curve(
    axes: Any, curve: Robustness, colour: str, label: str, line: str = "-", band: str | None = None
) -> None:
    """Draw a robustness curve as steps with its band, from strength 0 to 1."""
    start, is_inside = curve.at(0.0), curve.strengths > 0
    x = np.array([0.0, *curve.strengths[is_inside], max(1.0, float(curve.strengths[-1]))])
    columns = ((start.value, curve.share), (start.low, curve.low), (start.high, curve.high))
    inside = np.array([[first, *values[is_inside]] for first, values in columns])
    share, low, high = np.concatenate([inside, inside[:, -1:]], 1)
    axes.fill_between(x, low, high, step="post", color=colour, alpha=0.17, linewidth=0, label=band)
    axes.step(x, share, where="post", color=colour, linewidth=1.8, linestyle=line, label=label)
    axes.set_xlim(0, x[-1])
    axes.set_ylim(0, 1.02)


def _label_strength(axes: Any, curve: Robustness) -> None:
    unit = f": 1 is {curve.full_strength}" if curve.full_strength else ", in the furthest dimension"
    axes.set_xlabel(f"strength, as a share of the range of theta{unit}")
    axes.legend(frameon=False, fontsize=9, loc=BEST)


def _blank(
    title: str, *, width: float = 6.4, height: float = 3.6, size: float = 12, grid: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """A figure with a title, and its axes: one, or a grid of them."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = blank_figure(width, height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0.05, 1, 0.95)))
    figure.suptitle(title, x=0.02, ha="left", fontsize=size, color=INK)
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
    return np.asarray(np.abs(offsets)[order][first])


def _short(name: str) -> str:
    """A name that fits and that matplotlib does not parse as a formula."""
    cut = name if len(name) <= 28 else f"{name[:12]}...{name[-13:]}"
    return cut.replace("$", r"\$")
