"""A contact sheet of an input: one row per perturbation, with the strength increasing from left to right."""

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, BinaryIO

from torch import Tensor

from themis.errors import UsageError
from themis.measure.distance import ssim
from themis.perturb.names import disturb
from themis.perturb.perturbation import Perturbation, check_fits
from themis.runs.display.fault import curves, is_signal, to_pixels
from themis.runs.display.figure import BLACK, GREY, blank_figure, save_figure

STRENGTHS = (0.25, 0.5, 0.75, 1.0)


def strengthened(perturbation: Perturbation, strength: float) -> dict[str, float]:
    """Theta at a share of the way from its identity to the bound that is further away, or to the upper one if equal."""
    theta = {}
    for dimension in perturbation.theta:
        identity = dimension.identity
        bound = max((dimension.high - identity, dimension.low - identity), key=abs)
        theta[dimension.name] = identity + strength * bound
    return theta


def can_draw(perturbation: Perturbation, shape: tuple[int, ...]) -> bool:
    """Whether the perturbation can disturb a picture or a signal of this shape without a model."""
    try:
        check_fits(perturbation, shape)
    except UsageError:
        return False
    return not perturbation.needs_gradient


def draw_sheet(
    picture: Tensor,
    perturbations: Sequence[Perturbation],
    file: str | Path | BinaryIO,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    strengths: Sequence[float] = STRENGTHS,
    noise_seed: int = 0,
    format: str | None = None,
) -> None:
    """Draw a picture `[channels, height, width]`, or a signal, under each perturbation, with theta and SSIM."""
    if not perturbations:
        raise UsageError("there is no perturbation to draw: choose perturbations of pictures that need no model")
    perturbations = [perturbation.fitted(tuple(picture.shape)) for perturbation in perturbations]
    names = [wrap(perturbation.name, 24) for perturbation in perturbations]
    thetas = [wrap(", ".join(theta.name for theta in perturbation.theta), 42) for perturbation in perturbations]
    n_lines = max(len(name) * 1.6 + len(theta) for name, theta in zip(names, thetas, strict=True))
    is_curve = is_signal(tuple(picture.shape))
    tall = 0.5 if is_curve else picture.shape[1] / picture.shape[2]
    below = 0.13 * max(n_lines, 3) + 0.1
    columns, rows = len(strengths) + 1, len(perturbations)
    wide, high = 1.75, 1.75 * tall + below  # inches per cell
    width, height = wide * columns + 0.1, high * rows + 0.35
    figure = blank_figure(width, height)

    def draw(row: int, column: int, drawn: Tensor) -> None:
        left, bottom = (0.05 + wide * column) / width, (height - 0.3 - high * (row + 1) + below) / height
        axes = figure.add_axes((left, bottom, (wide - 0.06) / width, (high - below) / height))
        pixels = curves(picture, drawn) if is_curve else to_pixels(drawn[None], bounds, None)[0]
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="antialiased", aspect="auto")
        axes.axis("off")

    def write(row: int, column: int, text: str, down: float = 0.0, **style: Any) -> None:
        x, y = (0.05 + wide * column) / width, (height - 0.3 - high * (row + 1) + below - 0.04 - down) / height
        figure.text(x, y, text, va="top", **style)

    for k, perturbation in enumerate(perturbations):
        draw(k, 0, picture)
        write(k, 0, "\n".join(names[k]), fontsize=9.5, color=BLACK, weight="bold")
        write(k, 0, "\n".join(thetas[k]), 0.165 * len(names[k]), fontsize=6, color=GREY)
        for column, strength in enumerate(strengths, 1):
            theta = strengthened(perturbation, strength)
            disturbed = disturb(perturbation, picture[None], theta, noise_seed=noise_seed, bounds=bounds)
            draw(k, column, disturbed[0])
            similarity = float(ssim(picture[None], disturbed, bounds)[0])
            lines = wrap(", ".join(f"{value:.2g}" for value in theta.values()), 40)
            lines += [] if math.isnan(similarity) else [f"SSIM {similarity:.2f}"]
            write(k, column, "\n".join(lines), fontsize=6, color=GREY)
    for column, head in enumerate(("clean", *(f"strength {strength:g}" for strength in strengths))):
        figure.text((0.05 + wide * column) / width, 1 - 0.2 / height, head, fontsize=9, color=GREY)
    save_figure(figure, file, dpi=100, format=format)
