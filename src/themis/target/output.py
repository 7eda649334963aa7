"""Finding the scores in a model's result."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from themis.errors import ModelError, UsageError

SCORE_ENTRIES = ("logits", "out")
"""Entries that hold the scores by convention, in transformers and in torchvision's segmentation models."""

Output = Callable[[Any], Tensor] | str | int
"""Picks the scores: a function of the result, the name of a key or attribute, or an index."""


def pick_scores(result: Any, output: Output | None) -> tuple[Tensor, str | None]:
    """Return the scores in a model's result, and a description of their entry; None for a tensor or a function.

    Without `output`, the scores are the result itself, its entry `logits` or `out`, or its only tensor; otherwise an
    error is raised.
    """
    if output is not None and not isinstance(output, str | int):
        picked = output(result)
        if not isinstance(picked, Tensor):
            raise ModelError(f"output=... must pick a tensor from the model's result, got {type(picked).__name__}")
        return picked, None
    if isinstance(result, Tensor) and output is None:
        return result, None
    entries = tensors_in(result)
    if output is not None:
        return _named(entries, output, result)
    for name in SCORE_ENTRIES:
        if name in entries:
            return entries[name], describe_entry(name, entries)
    if len(entries) == 1:
        [(only, tensor)] = entries.items()
        return tensor, describe_entry(only, entries)
    if not entries:
        raise ModelError(
            "the model must return a tensor, a tuple, a dict or an object with .logits, got "
            f"{type(result).__name__}: pass output=... to Target to pick the scores"
        )
    listed = ", ".join(f"{name!r} {list(tensor.shape)}" for name, tensor in entries.items())
    first = next(iter(entries))
    raise ModelError(
        f"the model must return one tensor, got {len(entries)}: {listed}; name the one with the scores, such as "
        f"output={first!r} (--output {first})"
    )


def in_label_order(scores: Tensor, order: Sequence[int] | None) -> Tensor:
    """Reorder the outputs of scores `[inputs, outputs]` by their labels."""
    if order is None:
        return scores
    if scores.ndim < 2 or scores.shape[1] != len(order):
        raise UsageError(f"label_order must have a label per output, got {len(order)} for {list(scores.shape[1:])}")
    places = sorted(range(len(order)), key=order.__getitem__)
    return scores[:, torch.tensor(places, device=scores.device)]


def tensors_in(result: Any) -> dict[str | int, Tensor]:
    """The floating-point tensors in a dict, a tuple or an object, by name or index; a named tuple has names."""
    fields: Any
    if isinstance(result, Mapping):
        fields = result.items()
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        fields = zip(result._fields, result, strict=True)
    elif isinstance(result, tuple | list):
        fields = enumerate(result)
    else:
        fields = getattr(result, "__dict__", {}).items()
        logits = getattr(result, "logits", None)  # may be a property
        fields = [("logits", logits), *fields] if isinstance(logits, Tensor) else fields
    return {
        name: value
        for name, value in fields
        if isinstance(value, Tensor) and value.ndim and (value.is_floating_point() or value.is_complex())
    }


def _named(entries: dict[str | int, Tensor], output: str | int, result: Any) -> tuple[Tensor, str]:
    is_index = isinstance(output, str) and output.isdecimal() and output not in entries
    key = int(output) if is_index else output
    if isinstance(key, int) and isinstance(result, tuple | list):
        tensor = result[key] if -len(result) <= key < len(result) else None
    else:
        tensor = entries.get(key, getattr(result, str(key), None))
    if isinstance(tensor, Tensor):
        return tensor, describe_entry(key, entries)
    listed = ", ".join(map(repr, entries)) or f"a {type(result).__name__}"
    raise ModelError(f"output={output!r} must name an entry of the model's result, which has {listed}")


def describe_entry(name: str | int | None, entries: Iterable[str | int]) -> str:
    """Describe which entry of a result holds the scores."""
    others = [repr(other) for other in entries if other != name]
    text = f"entry {name!r} of what the model returns"
    return f"{text}, beside {', '.join(others)}" if others else text


def without_wrapper(module: nn.Module) -> nn.Module:
    """The module in an object such as `YOLO(...)`, whose `eval()` would start training; other modules unchanged."""
    inner = getattr(module, "model", None)
    return inner if _is_of(module, "engine.model") and isinstance(inner, nn.Module) else module


def own_output(module: nn.Module) -> str | Callable[[Any], Tensor] | None:
    """The option `output` that suits a model of Ultralytics; None for other models."""
    if not _is_of(module, "nn.tasks"):
        return None
    name = type(module).__name__
    if name not in YOLO_OUTPUTS:
        raise UsageError(
            f"a model of Ultralytics must be a {' or a '.join(YOLO_OUTPUTS)}, got a {name}: pass "
            "Target(yolo.model, output=function) with a function that picks its scores, or its boxes as rows"
        )
    return YOLO_OUTPUTS[name]


def _is_of(module: nn.Module, name: str) -> bool:
    return any(kind.__module__ == f"ultralytics.{name}" for kind in type(module).__mro__)


def _logits(result: Any) -> Tensor:
    """The logits that an Ultralytics classifier returns beside probabilities; old versions return only the latter."""
    scores: Tensor = result[-1] if isinstance(result, tuple | list) else result
    return scores


YOLO_OUTPUTS: dict[str, str | Callable[[Any], Tensor]] = {"DetectionModel": "yolo", "ClassificationModel": _logits}
