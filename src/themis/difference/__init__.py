"""Two runs against each other: versions of a model by the same tests on both, or techniques by what they found."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.difference.diff import diff
    from themis.difference.result import Diff

_HOMES = {"Diff": "result", "diff": "diff"}
__all__ = ["Diff", "diff"]


def __getattr__(name: str) -> Any:
    """Imported when first used."""
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"themis.difference.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'themis.difference' has no attribute {name!r}")
