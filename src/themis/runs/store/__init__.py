"""The run folder: faults are durable as soon as they are found, readable during the campaign, and can be resumed from.

config.yaml        the options, as `themis run --config` reads them
environment.json   versions, device, and the hashes of model and data
run.sqlite         rounds, faults and the last checkpoint (see schema.py); any SQLite reader opens it
tensors/           inputs and outputs of the most telling faults, as safetensors
state/             the arrays of the last checkpoint
summary.json       the result, once the campaign has stopped
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader
    from themis.runs.store.writer import Writer

__all__ = ["Reader", "Writer"]


def __getattr__(name: str) -> Any:
    """Import a class when it is first used: reading rows does not need torch, writing them does."""
    if name in __all__:
        return getattr(import_module(f"themis.runs.store.{name.lower()}"), name)
    raise AttributeError(f"module 'themis.runs.store' has no attribute {name!r}")
