"""A run in the browser, live: the page of the report, served to this machine only and read-only.

folder.py   the view of the folder, read again when the folder has changed
guard.py    which requests are answered: the right host, the right origin, the token
server.py   the server, its responses and their headers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.report.watch.server import Server, serve

__all__ = ["Server", "serve"]


def __getattr__(name: str) -> Any:
    """Import the server on first use: the help of the command line does not need it."""
    if name in __all__:
        return getattr(import_module("themis.report.watch.server"), name)
    raise AttributeError(f"module 'themis.report.watch' has no attribute {name!r}")
