"""Themis tests deep-learning models: it finds the inputs that break them and says how much was covered."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from themis.version import __version__

if TYPE_CHECKING:
    from themis.campaign.api import resume as resume
    from themis.campaign.api import run as run
    from themis.campaign.callback import Callback as Callback
    from themis.data.features import Features as Features
    from themis.errors import DataError as DataError
    from themis.errors import MissingExtraError as MissingExtraError
    from themis.errors import ModelError as ModelError
    from themis.errors import StoreError as StoreError
    from themis.errors import ThemisError as ThemisError
    from themis.errors import UsageError as UsageError
    from themis.judge.coverage import Coverage as Coverage
    from themis.measure.moments import Moments as Moments
    from themis.oracle import Compare as Compare
    from themis.perturb import Perturbation as Perturbation
    from themis.perturb import Theta as Theta
    from themis.retraining.api import retrain as retrain
    from themis.runs.fault import Fault as Fault
    from themis.runs.replay import open_run as open_run
    from themis.runs.run import Run as Run
    from themis.suites.api import resume_suite as resume_suite
    from themis.suites.api import run_suite as run_suite
    from themis.suites.diff import diff as diff
    from themis.suites.result import SuiteRun as SuiteRun
    from themis.suites.result import open_suite as open_suite
    from themis.target.against import Against as Against
    from themis.target.blackbox import BlackBox as BlackBox
    from themis.target.detections import Detections as Detections
    from themis.target.target import Normalize as Normalize
    from themis.target.target import Target as Target

# On a GPU, what the host waits for must not queue behind the tests in flight. CUDA reads this when it is first used.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# MKL rounds by where arrays lie in memory unless it is told not to. It reads this when it is first used.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Where the public names live; imported when first used, so that `import themis` costs nothing.
_HOMES = {
    "campaign.api": ("resume", "run"),
    "campaign.callback": ("Callback",),
    "data.features": ("Features",),
    "errors": ("DataError", "MissingExtraError", "ModelError", "StoreError", "ThemisError", "UsageError"),
    "judge.coverage": ("Coverage",),
    "measure.moments": ("Moments",),
    "oracle": ("Compare",),
    "perturb": ("Perturbation", "Theta"),
    "retraining.api": ("retrain",),
    "runs.fault": ("Fault",),
    "runs.replay": ("open_run",),
    "runs.run": ("Run",),
    "suites.api": ("resume_suite", "run_suite"),
    "suites.diff": ("diff",),
    "suites.result": ("SuiteRun", "open_suite"),
    "target.against": ("Against",),
    "target.blackbox": ("BlackBox",),
    "target.detections": ("Detections",),
    "target.target": ("Normalize", "Target"),
}
__all__ = ["__version__", *(name for names in _HOMES.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name in ("criteria", "perturb"):
        return importlib.import_module(f"themis.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"themis.{module}"), name)
            return value
    raise AttributeError(f"module 'themis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
