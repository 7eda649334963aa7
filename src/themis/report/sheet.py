"""A contact sheet: what perturbations do to a picture, a row each, stronger from left to right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from torch import Tensor

from themis.errors import UsageError
from themis.measure.distance import ssim
from themis.perturb.disturb import disturb
from themis.perturb.perturbation import Perturbation, check_fits
from themis.runs.display.figure import INK, QUIET, blank_figure, pixels

STRENGTHS = (0.25, 0.5, 0.75, 1.0)


def strengthened(perturbation: Perturbation, strength: float) -> dict[str, float]:
    """Theta on the way from its identity to the end that is further away, of two the upper one."""
    theta = {}
    for each in perturbation.theta:
        end = max((each.high, each.low), key=lambda end: abs(end - each.identity))
        theta[each.name] = each.identity + strength * (end - each.identity)
    return theta


def can_draw(perturbation: Perturbation, shape: tuple[int, ...]) -> bool:
    """Whether it disturbs such a picture, and needs no model for it."""
    try:
        check_fits(perturbation, shape)
    except UsageError:
        return False
    return not perturbation.needs_gradient


def draw_sheet(
    picture: Tensor,
    perturbations: Sequence[Perturbation],
    file: str | Path,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    strengths: Sequence[float] = STRENGTHS,
    noise_seed: int = 0,
) -> None:
    """Draw a picture `[channels, height, width]` under each perturbation; below each its theta and its SSIM."""
    if not perturbations:
        raise UsageError("there is no perturbation to draw: name some that disturb pictures by themselves")
    names = [wrap(each.name, 24) for each in perturbations]
    thetas = [wrap(", ".join(theta.name for theta in each.theta), 42) for each in perturbations]
    lines = max(len(name) * 1.6 + len(theta) for name, theta in zip(names, thetas, strict=True))
    tall, below = picture.shape[1] / picture.shape[2], 0.13 * max(lines, 3) + 0.1
    columns, rows = len(strengths) + 1, len(perturbations)
    wide, high = 1.75, 1.75 * tall + below  # inches a cell
    width, height = wide * columns + 0.1, high * rows + 0.35
    figure = blank_figure(width, height)

    def draw(row: int, column: int, shown: Tensor) -> None:
        left, bottom = (0.05 + wide * column) / width, (height - 0.3 - high * (row + 1) + below) / height
        axes = figure.add_axes((left, bottom, (wide - 0.06) / width, (high - below) / height))
        axes.imshow(pixels(shown, bounds), cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.axis("off")

    def write(row: int, column: int, text: str, down: float = 0.0, **style: Any) -> None:
        x, y = (0.05 + wide * column) / width, (height - 0.3 - high * (row + 1) + below - 0.04 - down) / height
        figure.text(x, y, text, va="top", **style)

    for k, perturbation in enumerate(perturbations):
        draw(k, 0, picture)
        write(k, 0, "\n".join(names[k]), fontsize=9.5, color=INK, weight="bold")
        write(k, 0, "\n".join(thetas[k]), 0.165 * len(names[k]), fontsize=6, color=QUIET)
        for column, strength in enumerate(strengths, 1):
            theta = strengthened(perturbation, strength)
            shown = disturb(perturbation, picture[None], theta, noise_seed=noise_seed, bounds=bounds)
            draw(k, column, shown[0])
            similar = float(ssim(picture[None], shown, bounds)[0])
            said = wrap(", ".join(f"{each:.2g}" for each in theta.values()), 40)
            said += [] if math.isnan(similar) else [f"SSIM {similar:.2f}"]
            write(k, column, "\n".join(said), fontsize=6, color=QUIET)
    for column, head in enumerate(("clean", *(f"strength {each:g}" for each in strengths))):
        figure.text((0.05 + wide * column) / width, 1 - 0.2 / height, head, fontsize=9, color=QUIET)
    figure.savefig(file, dpi=100)
