"""Signals as curves: small pictures without a plotting library, and axes of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.display.png import Pixels

WIDTH, HEIGHT = 300, 72
"""Pixels of the curve of one channel."""
MAX_CHANNELS = 4
"""Channels that are drawn, the first ones."""
CLEAN, DISTURBED, BOTH = (148, 163, 178), (214, 60, 48), (84, 40, 60)
"""Colours of the pixels that one of two curves passes through, or both."""


def is_signal(shape: tuple[int, ...]) -> bool:
    """Whether an input is drawn as a curve: `[channels, samples]`."""
    return len(shape) == 2 and shape[1] > 1


def curves(clean: Tensor, disturbed: Tensor) -> Pixels:
    """The clean and the disturbed signal `[channels, samples]` in one picture, with the channels below one another."""
    pair = [_shown(signal) for signal in (clean, disturbed)]
    masks = []
    for channels in zip(*pair, strict=True):
        limits = _limits(*channels)
        masks.append([_mask(values, limits) for values in channels])
    is_clean, is_disturbed = (np.concatenate(parts) for parts in zip(*masks, strict=True))
    pixels = np.full((*is_clean.shape, 3), 255, np.uint8)
    pixels[is_clean], pixels[is_disturbed], pixels[is_clean & is_disturbed] = CLEAN, DISTURBED, BOTH
    return pixels


def separate_curves(clean: Tensor, disturbed: Tensor) -> list[Pixels]:
    """The clean signal, the disturbed one on the same axes, and their difference on axes of its own."""
    before, after = _shown(clean), _shown(disturbed)
    limits = [_limits(*pair) for pair in zip(before, after, strict=True)]
    change = after - before
    rows = ((before, limits), (after, limits), (change, [_limits(values) for values in change]))
    return [
        np.where(np.concatenate([_mask(*row) for row in zip(values, ranges, strict=True)]), 40, 255).astype(np.uint8)
        for values, ranges in rows
    ]


def plot_signals(axes: Any, signals: list[tuple[Tensor, str]]) -> None:
    """Draw signals `[channels, samples]`, each in its colour, with the channels below one another."""
    shown = [(_shown(signal), colour) for signal, colour in signals]
    limits = [_limits(*(values[k] for values, _ in shown)) for k in range(len(shown[0][0]))]
    for values, colour in shown:
        for k, (channel, (low, high)) in enumerate(zip(values, limits, strict=True)):
            axes.plot((channel - low) / (high - low) - 1.15 * k, color=colour, linewidth=0.8)
    axes.set_xlim(0, shown[0][0].shape[1] - 1)
    axes.set_ylim(-1.15 * (len(limits) - 1) - 0.05, 1.05)


def _shown(signal: Tensor) -> NDArray[np.float64]:
    """The channels that are drawn; values that are not finite are drawn as zeros."""
    values: NDArray[np.float64] = signal[:MAX_CHANNELS].double().cpu().nan_to_num(0.0, 0.0, 0.0).numpy()
    return values


def _limits(*channels: NDArray[np.float64]) -> tuple[float, float]:
    low, high = min(float(values.min()) for values in channels), max(float(values.max()) for values in channels)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _mask(values: NDArray[np.float64], limits: tuple[float, float]) -> NDArray[np.bool_]:
    """The pixels `[height, width]` of a curve: in each column, from its lowest value to its highest."""
    steps = max(2, -(-len(values) // WIDTH))
    places = np.linspace(0, len(values) - 1, WIDTH * steps + 1)
    fine = np.interp(places, np.arange(len(values)), values)
    rows = np.rint((limits[1] - fine) / (limits[1] - limits[0]) * (HEIGHT - 1 - 8)).astype(int) + 4
    spans = rows[np.arange(WIDTH)[:, None] * steps + np.arange(steps + 1)]
    down = np.arange(HEIGHT)[:, None]
    is_curve: NDArray[np.bool_] = (down >= spans.min(1)) & (down <= spans.max(1))
    return is_curve
