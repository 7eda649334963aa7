"""A picture of the most telling faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import UsageError
from themis.faults import Fault
from themis.result import Run

INK, RIGHT, WRONG, QUIET = "#1a1a1a", "#1b7f4b", "#b3261e", "#6b6b6b"


def draw_faults(run: Run, path: str | Path, *, n: int = 12, classes: Sequence[str] | None = None) -> list[Fault]:
    """Draw up to n faults as pairs, clean and disturbed, with what the model said to each; returns those drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    faults = run.faults.most_telling(n)
    if not faults:
        raise UsageError("there is no fault to draw: raise the magnitude or the budget")
    columns = min(4, len(faults))
    rows = -(-len(faults) // columns)
    width, height = 3.1 * columns, 1.95 * rows + 0.6  # inches
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    title = f"{len(run.faults):,} faults in {run.rounds[-1].tests:,} tests ({run.start.perturbation}): the most telling"
    figure.suptitle(title, x=0.1 / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=13, color=INK)
    grid = figure.add_gridspec(
        rows, columns, left=0.01, right=0.99, top=1 - 0.72 / height, bottom=0.25 / height, wspace=0.1, hspace=0.32
    )
    for k, fault in enumerate(faults):
        replay = fault.replay()
        if replay.inputs.ndim != 3:
            raise UsageError(f"only pictures [channels, height, width] can be drawn, got {list(replay.inputs.shape)}")
        pair = grid[divmod(k, columns)].subgridspec(1, 2, wspace=0.05)
        said = (
            (replay.clean_inputs, f"says {_class(fault.clean_answer, classes)}", RIGHT),
            (replay.inputs, f"says {_class(fault.answer, classes)}, {fault.confidence:.0%}", WRONG),
        )
        for at, (picture, text, colour) in enumerate(said):
            axes = figure.add_subplot(pair[at])
            axes.imshow(_pixels(picture, run.start.bounds), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            for side in axes.spines.values():
                side.set_edgecolor(colour)
                side.set_linewidth(1.6)
            axes.set_title(text, fontsize=10.5, color=colour, pad=3)
            if at == 0:
                theta = ", ".join(f"{name} {value:.3g}" for name, value in fault.theta.items())
                axes.set_xlabel(f"seed {fault.seed_id}, {theta}", fontsize=8, color=QUIET, loc="left", labelpad=3)
    figure.savefig(path, dpi=110)
    return faults


def _class(answer: int, classes: Sequence[str] | None) -> str:
    if answer < 0:
        return "nothing finite"
    return str(answer) if classes is None else classes[answer]


def _pixels(picture: Tensor, bounds: tuple[float, float]) -> NDArray[np.float32]:
    """`[height, width(, 3)]` in 0..1; pictures of other than one or three channels as their mean."""
    pixels = (picture.float() - bounds[0]) / (bounds[1] - bounds[0])
    if len(pixels) not in (1, 3):
        pixels = pixels.mean(0, keepdim=True)
    return pixels.movedim(0, -1).squeeze(-1).numpy()
