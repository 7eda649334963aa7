"""Models of Ultralytics, such as `YOLO("yolo11n.pt")`: the module inside, and the form of what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from themis.errors import UsageError


def without_wrapper(module: nn.Module) -> nn.Module:
    """The module inside an object such as `YOLO(...)`, whose `eval()` would start a training; others unchanged."""
    inner = getattr(module, "model", None)
    return inner if _is_of(module, "engine.model") and isinstance(inner, nn.Module) else module


def own_output(module: nn.Module) -> str | Callable[[Any], Tensor] | None:
    """The option `output` that suits a model of Ultralytics; None for other models."""
    if not _is_of(module, "nn.tasks"):
        return None
    name = type(module).__name__
    if name not in OUTPUTS:
        raise UsageError(
            f"a model of Ultralytics must be a {' or a '.join(OUTPUTS)}, got a {name}: pass Target(yolo.model, "
            "output=function) with a function that picks its scores, or its boxes as rows"
        )
    return OUTPUTS[name]


def _is_of(module: nn.Module, name: str) -> bool:
    return any(kind.__module__ == f"ultralytics.{name}" for kind in type(module).__mro__)


def _logits(result: Any) -> Tensor:
    """What a classifier returns beside its probabilities; old versions return only these."""
    scores: Tensor = result[-1] if isinstance(result, tuple | list) else result
    return scores


OUTPUTS: dict[str, str | Callable[[Any], Tensor]] = {"DetectionModel": "yolo", "ClassificationModel": _logits}
