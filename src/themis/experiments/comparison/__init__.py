"""Techniques at equal cost: the same seeds, passes and random seeds for each, judged on seeds that none has used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.experiments.comparison.comparing import Comparison, Listener, compare
    from themis.experiments.comparison.plan import Plan

_HOMES = {"Comparison": "comparing", "Listener": "comparing", "Plan": "plan", "compare": "comparing"}
__all__ = ["Comparison", "Listener", "Plan", "compare"]


def __getattr__(name: str) -> Any:
    """Imported when first used: the command line reads the options of a plan, and nothing heavy with them."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"themis.experiments.comparison.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'themis.experiments.comparison' has no attribute {name!r}")
