"""Themis tests deep-learning models: it finds the inputs that break them and says how much was covered."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from themis.version import __version__

if TYPE_CHECKING:
    from themis.begin import resume, run
    from themis.blackbox import BlackBox
    from themis.callback import Callback
    from themis.comparison import compare
    from themis.data.features import Features
    from themis.difference.diff import diff
    from themis.errors import DataError, MissingExtraError, ModelError, StoreError, ThemisError, UsageError
    from themis.faults import Fault
    from themis.judge.coverage import Coverage
    from themis.measure.moments import Moments
    from themis.opening import open_run
    from themis.oracle import Compare
    from themis.perturb import Perturbation, Theta
    from themis.result import Run
    from themis.retraining.retrain import retrain
    from themis.target import Normalize, Target

# Where each public name lives; imported when first used, so that `import themis` costs nothing.
_HOMES = {
    "BlackBox": "blackbox",
    "Callback": "callback",
    "Compare": "oracle",
    "Coverage": "judge.coverage",
    "DataError": "errors",
    "Fault": "faults",
    "Features": "data.features",
    "MissingExtraError": "errors",
    "ModelError": "errors",
    "Moments": "measure.moments",
    "Normalize": "target",
    "Perturbation": "perturb",
    "Run": "result",
    "StoreError": "errors",
    "Target": "target",
    "ThemisError": "errors",
    "Theta": "perturb",
    "UsageError": "errors",
    "compare": "comparison",
    "diff": "difference.diff",
    "open_run": "opening",
    "resume": "begin",
    "retrain": "retraining.retrain",
    "run": "begin",
}
__all__ = [
    "BlackBox",
    "Callback",
    "Compare",
    "Coverage",
    "DataError",
    "Fault",
    "Features",
    "MissingExtraError",
    "ModelError",
    "Moments",
    "Normalize",
    "Perturbation",
    "Run",
    "StoreError",
    "Target",
    "ThemisError",
    "Theta",
    "UsageError",
    "__version__",
    "compare",
    "diff",
    "open_run",
    "resume",
    "retrain",
    "run",
]


_FOLDERS = ("criteria", "perturb", "zoo")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"themis.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"themis.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'themis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
