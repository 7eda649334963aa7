"""Show a run in the browser, live or finished. It is the page of its report, updated while a campaign writes to the
folder; if the run has not started, the page waits for it. The page is read-only and served only to this machine, at a
secret address. Ctrl-C stops the server. Nothing that the folder names is run.

themis watch runs/first
themis watch runs/first --port 8765 --no-browser
"""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser, add_option
from themis.runs.store.reader import not_a_run, runs_in
from themis.runs.store.schema import DATABASE
from themis.suites.folder import is_suite
from themis.text import print_text

if TYPE_CHECKING:
    from themis_integrations.browser.server import Server

IN_A_TERMINAL = ("www-browser", "links", "elinks", "lynx", "w3m")
"""Browsers that would take over the terminal, and do not run scripts."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run, or of a suite")
    server = parser.add_argument_group("server")
    add_option(server, "port", int, 0, "port to listen on, at 127.0.0.1; 0 chooses a free one")
    server.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")


def execute(arguments: CommandLine) -> int:
    from themis_integrations.browser.server import serve

    folder = Path(arguments.run)
    has_run = (folder / DATABASE).is_file() or is_suite(folder)
    if not has_run and runs_in(folder):
        raise not_a_run(folder)
    with serve(arguments.run, port=arguments.port) as server:
        if not has_run:
            print_text(f"{arguments.run} does not contain a run yet: it is shown as soon as a campaign starts there")
        run_server(server, arguments.run, opens_browser=not arguments.no_browser)
    return DONE


def run_server(server: Server, subject: str, *, opens_browser: bool) -> None:
    """Print the address of a server, open it in the browser, and serve until Ctrl-C."""
    print_text(f"Serving {subject} at {server.url} (press Ctrl-C to stop)", flush=True)
    if opens_browser:  # some browsers block until they are closed
        Thread(target=_open_browser, args=(server.url,), daemon=True).start()
    server.serve_forever()


def _open_browser(url: str) -> None:
    import webbrowser

    try:
        browser = webbrowser.get()
        if getattr(browser, "name", "") in IN_A_TERMINAL or not browser.open(url):
            raise webbrowser.Error
    except webbrowser.Error:
        print_text("themis watch: could not open a browser: open the address yourself", file=sys.stderr)
