"""Traits of a model that must be detected: its normalisation, channel order, gradients and token ids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from themis.errors import NO_TEXT, DataError, UsageError

if TYPE_CHECKING:
    from themis.target.target import AnyTarget

Statistics = tuple[list[float], list[float]]
"""The means and standard deviations of the channels, for inputs in 0..1."""


def own_statistics(model: Any, *, is_local: bool = False) -> Statistics | None:
    """Return the normalisation in the configuration of a model of timm or transformers; None if there is none.

    transformers stores it with the image processor, which is read from where the model was loaded. is_local: read it
    only if it is on this machine.
    """
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, name, None)
        values = config if isinstance(config, Mapping) else vars(config) if hasattr(config, "__dict__") else {}
        if values.get("mean") and values.get("std"):
            return [float(value) for value in values["mean"]], [float(value) for value in values["std"]]
    folder = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not folder or type(model).__module__.partition(".")[0] != "transformers":
        return None
    from transformers import AutoImageProcessor  # type: ignore[import-not-found, unused-ignore]

    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=is_local)
    except (OSError, ValueError):  # the folder has no image processor
        return None
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if not getattr(processor, "do_normalize", True) or mean is None or std is None:
        return None
    return [float(value) for value in mean], [float(value) for value in std]


Channels = Literal["auto", "first", "last"]
"""Where a model expects the channels; `auto` is what a Keras model says, and `first` for others."""


def choose_channels(channels: str, module: nn.Module | None = None) -> Channels:
    """Return `first` or `last` for the option of a target."""
    if channels not in get_args(Channels):
        raise UsageError(f"channels must be 'auto', 'first' or 'last', got {channels!r}")
    if channels != "auto":
        return "last" if channels == "last" else "first"
    layers: Any = getattr(module, "_flatten_layers", tuple)  # of a Keras model, which are not submodules
    return "last" if any(getattr(layer, "data_format", None) == "channels_last" for layer in layers()) else "first"


def as_expected(inputs: Tensor, channels: Channels) -> Tensor:
    """Move the channels of inputs `[batch, channels, ...]` to where a model expects them."""
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


def is_differentiable(function: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    """Return whether the sum of `function(point)` has a gradient with respect to `point`, even if it is zero.

    `function` is the `forward` of an open target, or a function of theta that ends in it. One forward and one backward
    pass decide. The answer is False if the function detaches its argument, runs under `torch.no_grad`, returns
    integers, raises on the way forward or back, or uses an operator without a gradient of its own. No gradient is
    stored in `.grad`, and the global random state is restored.
    """
    cuda = [point.device] if point.is_cuda else []
    with (
        torch.random.fork_rng(devices=cuda),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # An operator without a gradient of its own, as those of quantised models: what torch returns may be wrong.
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        leaf = point.detach().clone().requires_grad_()
        try:
            # A copy of the leaf, since a model may write to its input and autograd forbids that for leaves.
            total = function(leaf.clone()).sum()
            if not total.requires_grad:
                return False
            return torch.autograd.grad(total, leaf, allow_unused=True)[0] is not None
        except Exception:  # a model, or an operator of its own, may raise anything
            return False


def refuse_tokens(target: AnyTarget, example: Tensor) -> None:
    """Raise an error if the model uses the values of an input `[tokens]` as row numbers of an embedding.

    Only models with embeddings, and inputs of whole numbers from 0, are checked.
    """
    module = getattr(target, "module", None)
    if not isinstance(module, nn.Module) or example.ndim != 1 or len(example) < 2:
        return
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    if not embeddings or not bool(((example >= 0) & (example == example.round())).all()):
        return
    seen: list[Tensor] = []

    def look(part: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.extend(value.detach().cpu() for value in inputs if isinstance(value, Tensor))

    with ExitStack() as stack, torch.no_grad(), suppress(Exception):  # the model may refuse floating-point numbers
        for part in embeddings:
            stack.callback(part.register_forward_pre_hook(look).remove)
        module(example[None].to(target.device))
    rows = example.cpu().double()
    if any(value.numel() == len(rows) and torch.equal(value.flatten().double(), rows) for value in seen):
        raise DataError(
            f"inputs must be numbers that can vary, got token ids such as {rows[:4].int().tolist()}: {NO_TEXT}"
        )
