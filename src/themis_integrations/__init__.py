"""Adapters of Themis to third-party software and file formats.

Each module is for one package or format, is added to Themis by entry points, as any other package can do it, and is
loaded when it is named. Themis never imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis_integrations.evidence.evidence import write_evidence
    from themis_integrations.evidence.statement import verify_evidence
    from themis_integrations.maite import as_augmentation
    from themis_integrations.models.onnx import OnnxModel
    from themis_integrations.ray.executor import RayExecutor
    from themis_integrations.trackers import MLflow, TensorBoard, Wandb

_HOMES = {
    "MLflow": "trackers",
    "OnnxModel": "models.onnx",
    "RayExecutor": "ray.executor",
    "TensorBoard": "trackers",
    "Wandb": "trackers",
    "as_augmentation": "maite",
    "verify_evidence": "evidence.statement",
    "write_evidence": "evidence.evidence",
}
__all__ = [
    "MLflow",
    "OnnxModel",
    "RayExecutor",
    "TensorBoard",
    "Wandb",
    "as_augmentation",
    "verify_evidence",
    "write_evidence",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"themis_integrations.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'themis_integrations' has no attribute {name!r}")
