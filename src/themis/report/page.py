"""The report: a single HTML file that needs neither a server nor a network connection."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from themis.report.view import MAX_PICTURES, ReportView, read_view

REPORT = "report.html"
"""Name of the report in a run folder."""
SCRIPTS = ("elements.js", "charts.js", "sections.js", "gallery.js", "page.js", "boot.js")
SECTIONS = (
    ("verdict", "Verdict"),
    ("numbers", "Key figures"),
    ("gates", "Gates"),
    ("gallery", "Faults"),
    ("matrix", "Answers"),
    ("strength", "Strength"),
    ("classes", "Classes"),
    ("reproduce", "Reproduce"),
    ("coverage", "Coverage"),
    ("layers", "Layers"),
    ("time", "Time"),
    ("normality", "Normality"),
)
"""The sections of the page: their ids and their names in the navigation."""
_UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(view: ReportView, *, live: str | None = None) -> str:
    """The HTML page of a view. With `live` the page fetches the view again from that address every two seconds."""
    return render_page(f"{view.perturbation} on {view.subject}", view.as_json(), SECTIONS, SCRIPTS, live=live)


def render_page(
    title: str,
    view: dict[str, Any],
    sections: Sequence[tuple[str, str]],
    scripts: tuple[str, ...],
    *,
    live: str | None = None,
) -> str:
    """An HTML page that its scripts draw from a view.

    The view is embedded as JSON and drawn as text by the script of the page. The content security policy of the page
    allows this script and, if `live` is given, requests to the server; nothing else may run or be fetched.
    """
    script = _script(scripts)
    parts = {
        "title": escape(title),
        "policy": escape(_policy(script, live), quote=True),
        "style": _asset("page.css"),
        "script": script,
        "live": "" if live is None else escape(live, quote=True),
        "sections": "\n".join(f'<section id="{id}" aria-labelledby="h-{id}"></section>' for id, _ in sections),
        "links": "".join(f'<li><a href="#{id}">{escape(name)}</a></li>' for id, name in sections),
        "view": json.dumps(view, separators=(",", ":"), allow_nan=False, ensure_ascii=False).translate(_UNSAFE),
    }
    pieces = _asset("page.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def write_report(
    run: str | Path, out: Path | None = None, *, most_pictures: int = MAX_PICTURES, replaces: bool = False
) -> Path:
    """Write the report of a run to `out`, by default into the run folder, and return its path.

    An earlier report is replaced, another file only if `replaces` is set.
    """
    from themis.runs.store.files import REMEDY, check_free, write_fresh

    path = Path(run) / REPORT if out is None else Path(out)
    if out is not None:
        check_free(path, replaces=replaces)  # before the work
    remedy = "remove it, or replace it with --force" if out is None else REMEDY
    content = render(read_view(run, most_pictures=most_pictures)).encode("utf-8", "replace")
    write_fresh(path, content, replaces=replaces, remedy=remedy)
    return path


def _policy(script: str, live: str | None) -> str:
    scripts, styles = (f"'sha256-{_digest(text)}'" for text in (script, _asset("page.css")))
    connect = "" if live is None else " connect-src 'self';"
    return f"default-src 'none'; img-src data:; style-src {styles}; script-src {scripts};{connect} base-uri 'none'"


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


@cache
def _script(names: tuple[str, ...]) -> str:
    return "".join(["(() => {\n'use strict';\n", *map(_asset, names), "})();\n"])


@cache
def _asset(name: str) -> str:
    return (files("themis.report") / name).read_text("utf-8")
