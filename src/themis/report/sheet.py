"""A contact sheet: what perturbations do to a picture, a row each, stronger from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.measure.distance import ssim
from themis.perturb.disturb import disturb
from themis.perturb.perturbation import Perturbation, check_fits
from themis.report.figure import INK, QUIET, blank_figure, pixels

STRENGTHS = (0.25, 0.5, 0.75, 1.0)


def strengthened(perturbation: Perturbation, strengths: Sequence[float]) -> dict[str, float | Tensor]:
    """Theta on the way from its identity to the end that is further away, so far as the strengths say."""
    share = torch.tensor(strengths)
    theta: dict[str, float | Tensor] = {}
    for each in perturbation.theta:
        end = max((each.high, each.low), key=lambda end: abs(end - each.identity))
        theta[each.name] = each.identity + share * (end - each.identity)
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
    tall = picture.shape[1] / picture.shape[2]
    columns, rows = len(strengths) + 1, len(perturbations)
    wide, high = 1.75, 1.75 * tall + 0.34  # inches a cell
    width, height = wide * columns + 0.1, high * rows + 0.35
    figure = blank_figure(width, height)
    for k, perturbation in enumerate(perturbations):
        theta = strengthened(perturbation, strengths)
        same = picture.expand(len(strengths), *picture.shape)
        seeds = {"noise_seed": noise_seed, "bounds": bounds}
        # One at a time, so that all have the same noise seed: the row then shows the strength alone.
        shown = torch.cat(
            [
                disturb(perturbation, same[:1], {name: value[s] for name, value in theta.items()}, **seeds)  # type: ignore[index,arg-type]
                for s in range(len(strengths))
            ]
        )
        similar = ssim(same, shown, bounds).tolist()
        for column in range(columns):
            left, bottom = (0.05 + wide * column) / width, (height - 0.3 - high * (k + 1) + 0.3) / height
            axes = figure.add_axes((left, bottom, (wide - 0.06) / width, (high - 0.34) / height))
            axes.imshow(
                pixels(picture if column == 0 else shown[column - 1], bounds),
                cmap="gray",
                vmin=0,
                vmax=1,
                interpolation="nearest",
                aspect="auto",
            )
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(False)
            if column == 0:
                axes.set_xlabel(perturbation.name, fontsize=9.5, color=INK, loc="left", labelpad=2, weight="bold")
            else:
                values = ", ".join(f"{float(each[column - 1]):.2g}" for each in theta.values())  # type: ignore[index]
                text = values if len(values) < 26 else values[:25] + "…"
                similarity = "" if similar[column - 1] != similar[column - 1] else f"  ssim {similar[column - 1]:.2f}"
                axes.set_xlabel(text + similarity, fontsize=6, color=QUIET, loc="left", labelpad=2)
    heads = ("clean", *(f"strength {each:g}" for each in strengths))
    for column, head in enumerate(heads):
        figure.text((0.05 + wide * column) / width, 1 - 0.2 / height, head, fontsize=9, color=QUIET)
    figure.savefig(file, dpi=100)
