"""Models that expect the channels of a picture last, as those of Keras and TensorFlow do."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor, nn

from themis.errors import UsageError

Channels = Literal["auto", "first", "last"]
"""Where a model expects the channels; `auto` asks a Keras model, and is `first` for others."""


def choose_channels(channels: str, module: nn.Module | None = None) -> Channels:
    """Return `first` or `last` for the option of a target."""
    if channels not in get_args(Channels):
        raise UsageError(f"channels must be 'auto', 'first' or 'last', got {channels!r}")
    if channels != "auto":
        return "last" if channels == "last" else "first"
    layers: Any = getattr(module, "_flatten_layers", tuple)  # of a Keras model, which are not submodules
    return "last" if any(getattr(layer, "data_format", None) == "channels_last" for layer in layers()) else "first"


def as_expected(inputs: Tensor, channels: Channels) -> Tensor:
    """Inputs `[batch, channels, ...]` as a model expects them."""
    return inputs.movedim(1, -1).contiguous() if channels == "last" and inputs.ndim > 2 else inputs


def has_channels_last(shape: tuple[int, ...], expected: object = None) -> bool:
    """Whether the shape of one input has the channels last.

    expected: the shape `[batch, ...]` that a Keras model expects, with None for any size. Otherwise pictures have up to
    four channels, and signals have fewer channels than samples.
    """
    if isinstance(expected, tuple) and len(expected) == len(shape) + 1:
        return all(size in (None, actual) for size, actual in zip(expected[1:], shape, strict=True))
    if len(shape) == 2:
        return shape[1] < shape[0]
    return len(shape) == 3 and shape[-1] <= 4 < shape[0]
