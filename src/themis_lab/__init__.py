"""The laboratory of Themis: what a researcher needs to compare techniques.

It has the criteria of the literature, the policies `fuzz` and `deepxplore`, the models of the paper, comparisons,
contests and the evaluation. Themis never imports it; it adds to Themis by entry points, as any other package can.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis_lab.comparison.api import compare
    from themis_lab.contest.api import contest_run

_HOMES = {"compare": "comparison.api", "contest_run": "contest.api"}
_FOLDERS = ("criteria", "zoo")
__all__ = ["compare", "contest_run"]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"themis_lab.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"themis_lab.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'themis_lab' has no attribute {name!r}")
