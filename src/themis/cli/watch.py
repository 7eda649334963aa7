"""`themis watch`: a run in the browser, while it runs and afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from themis.cli import DONE
from themis.cli.options import Parser, add_option

if TYPE_CHECKING:
    from argparse import Namespace

HELP = (
    "Show a run in the browser, live: the page of its report, brought up to date while a campaign writes to the "
    "folder. A run that has not begun is waited for. The page is served to this machine alone, at an address with a "
    "secret in it, and changes nothing. Ctrl-C ends it."
)
EXAMPLES = """
themis watch runs/first
themis watch runs/first --port 8765 --no-browser
"""
IN_A_TERMINAL = ("www-browser", "links", "elinks", "lynx", "w3m")
"""Browsers that would take the terminal, and run no script."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    where = parser.add_argument_group("where")
    add_option(where, "port", int, 0, "port to listen to, on 127.0.0.1; 0 is any free one")
    where.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")


def execute(arguments: Namespace, said: set[str]) -> int:
    from themis.report.watch.server import serve
    from themis.runs.store.schema import DATABASE

    with serve(arguments.run, port=arguments.port) as server:
        if not (Path(arguments.run) / DATABASE).is_file():
            print(f"{arguments.run} holds no run yet: it is shown as soon as a campaign begins there")
        print(f"{arguments.run} is shown at {server.url} (Ctrl-C ends this)", flush=True)
        if not arguments.no_browser:
            Thread(target=_open_browser, args=(server.url,), daemon=True).start()  # some wait until they are closed
        server.serve_forever()
    return DONE


def _open_browser(url: str) -> None:
    import webbrowser

    try:
        browser = webbrowser.get()
        if getattr(browser, "name", "") in IN_A_TERMINAL or not browser.open(url):
            raise webbrowser.Error
    except webbrowser.Error:
        print("themis watch: no browser could be opened: open the address in one", file=sys.stderr)
