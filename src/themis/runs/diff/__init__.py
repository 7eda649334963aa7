"""Two runs against each other: versions of a model by the same tests on both, or techniques by what they found."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.runs.diff.diff import diff
    from themis.runs.diff.result import Diff

_HOMES = {"Diff": "result", "diff": "diff"}
__all__ = ["Diff", "diff"]


def __getattr__(name: str) -> Any:
    """Imported when first used."""
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"themis.runs.diff.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'themis.runs.diff' has no attribute {name!r}")
