"""A run in the browser, live: the report's page over a run folder, served to this machine alone and read only.

folder.py   the folder's view, read again when the folder has changed
guard.py    who may ask: the right host, no other site, the token
server.py   the server, its three answers and their headers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.report.watch.server import Server, serve

__all__ = ["Server", "serve"]


def __getattr__(name: str) -> Any:
    """Imported when first used: the command's help needs no server."""
    if name in __all__:
        return getattr(import_module("themis.report.watch.server"), name)
    raise AttributeError(f"module 'themis.report.watch' has no attribute {name!r}")
