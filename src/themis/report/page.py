"""The report: one HTML file that needs nothing else, neither a server nor a network."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from themis.report.view import MOST_PICTURES, read_view

REPORT = "report.html"
"""The report's file in a run's folder."""
SCRIPTS = ("elements.js", "charts.js", "sections.js", "gallery.js", "page.js")
_UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(view: dict[str, Any], *, live: str | None = None) -> str:
    """A page that shows a view; with `live` it fetches the view anew from there, every two seconds.

    The view is data in the page, drawn as text by the page's script. The page's own policy lets nothing but that script
    run and nothing be fetched, but the view.
    """
    parts = {
        "title": escape(f"{view['perturbation']} on {view['subject']}"),
        "policy": escape(_policy(live), quote=True),
        "style": _asset("page.css"),
        "script": _script(),
        "live": "" if live is None else escape(live, quote=True),
        "view": json.dumps(view, separators=(",", ":"), allow_nan=False, ensure_ascii=False).translate(_UNSAFE),
    }
    pieces = _asset("page.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[each] if k % 2 else each for k, each in enumerate(pieces))


def write_report(run: str | Path, out: Path | None = None, *, most_pictures: int = MOST_PICTURES) -> Path:
    """Write a run's report, into its folder unless told otherwise; the file's path."""
    from themis.runs.store.files import explained, write_file

    path = Path(run) / REPORT if out is None else Path(out)
    content = render(read_view(run, most_pictures=most_pictures)).encode("utf-8", "replace")
    with explained(path.parent):
        write_file(path, content)
    return path


def _policy(live: str | None) -> str:
    scripts, styles = (f"'sha256-{_digest(each)}'" for each in (_script(), _asset("page.css")))
    connect = "" if live is None else " connect-src 'self';"
    return f"default-src 'none'; img-src data:; style-src {styles}; script-src {scripts};{connect} base-uri 'none'"


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


@cache
def _script() -> str:
    return "".join(["(() => {\n'use strict';\n", *map(_asset, SCRIPTS), "})();\n"])


@cache
def _asset(name: str) -> str:
    return (files("themis.report") / name).read_text("utf-8")
