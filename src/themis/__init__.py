"""Themis tests deep-learning models: it finds the inputs that break them and says how much was covered."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from themis.version import __version__

if TYPE_CHECKING:
    from themis.campaign.api import resume, run
    from themis.campaign.callback import Callback
    from themis.compute.cluster import RayExecutor
    from themis.data.features import Features
    from themis.errors import DataError, MissingExtraError, ModelError, StoreError, ThemisError, UsageError
    from themis.judge.coverage import Coverage
    from themis.measure.moments import Moments
    from themis.oracle import Compare
    from themis.perturb import Perturbation, Theta
    from themis.retraining.api import retrain
    from themis.runs.fault import Fault
    from themis.runs.open import open_run
    from themis.runs.run import Run
    from themis.suites.api import resume_suite, run_suite
    from themis.suites.diff import diff
    from themis.suites.result import SuiteRun, open_suite
    from themis.target.blackbox import BlackBox
    from themis.target.detections import Detections
    from themis.target.target import Normalize, Target

# On a GPU, what the host waits for must not queue behind the tests in flight. CUDA reads this when it is first used.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# MKL rounds by where arrays lie in memory unless it is told not to. It reads this when it is first used.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Where each public name lives; imported when first used, so that `import themis` costs nothing.
_HOMES = {
    "BlackBox": "target.blackbox",
    "Callback": "campaign.callback",
    "Compare": "oracle",
    "Coverage": "judge.coverage",
    "DataError": "errors",
    "Detections": "target.detections",
    "Fault": "runs.fault",
    "Features": "data.features",
    "MissingExtraError": "errors",
    "ModelError": "errors",
    "Moments": "measure.moments",
    "Normalize": "target.target",
    "Perturbation": "perturb",
    "RayExecutor": "compute.cluster",
    "Run": "runs.run",
    "StoreError": "errors",
    "SuiteRun": "suites.result",
    "Target": "target.target",
    "ThemisError": "errors",
    "Theta": "perturb",
    "UsageError": "errors",
    "diff": "suites.diff",
    "open_run": "runs.open",
    "open_suite": "suites.result",
    "resume": "campaign.api",
    "resume_suite": "suites.api",
    "retrain": "retraining.api",
    "run": "campaign.api",
    "run_suite": "suites.api",
}
__all__ = [
    "BlackBox",
    "Callback",
    "Compare",
    "Coverage",
    "DataError",
    "Detections",
    "Fault",
    "Features",
    "MissingExtraError",
    "ModelError",
    "Moments",
    "Normalize",
    "Perturbation",
    "RayExecutor",
    "Run",
    "StoreError",
    "SuiteRun",
    "Target",
    "ThemisError",
    "Theta",
    "UsageError",
    "__version__",
    "diff",
    "open_run",
    "open_suite",
    "resume",
    "resume_suite",
    "retrain",
    "run",
    "run_suite",
]


_FOLDERS = ("criteria", "perturb")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"themis.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"themis.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'themis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
