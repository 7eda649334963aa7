"""A run in the browser, live: the page of the report, served to this machine only and read-only."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from email.message import Message
from hashlib import sha256
from hmac import compare_digest
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from socketserver import TCPServer
from threading import Lock
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from themis.errors import ThemisError, UsageError
from themis.runs.store.schema import DATABASE
from themis.suites.folder import is_running, is_suite
from themis.text import print_text

if TYPE_CHECKING:
    from themis.report.suite import SuiteView
    from themis.report.view import ReportView
    from themis.runs.store.reader import Reader

ReadView = Callable[["Reader"], "ReportView"]
"""Makes the view of a run, such as `read_view`."""
REST, MAX_REST = 4, 30.0
"""After reading the folder, leave it alone for `REST` times the processor time that took, and for at most `MAX_REST`
seconds: the campaign needs the machine too.
"""


@dataclass(frozen=True)
class Snapshot:
    """A view, its JSON form and a tag of that content; or, if there is no view, a message that says why."""

    view: ReportView | SuiteView | None = None
    body: bytes = b""
    tag: str = ""
    message: str = ""


class WatchedFolder:
    """A run folder that may not exist yet, may grow, and may disappear."""

    def __init__(self, path: str | Path, read: ReadView) -> None:
        self.path, self._read = Path(path), read
        self._lock = Lock()  # one thread reads at a time, however many requests wait
        self._state: tuple[object, bool] = (None, False)
        self._snapshot = Snapshot()
        self._rests_until = 0.0

    def look(self) -> Snapshot:
        """The view of the folder as it is now, or as it was a moment ago."""
        with self._lock:
            if not self._is_there():
                self._state, self._rests_until = (None, False), 0.0
                message = f"{self.path} does not contain a run yet: it is shown as soon as a campaign starts there"
                return Snapshot(message=message)
            if monotonic() >= self._rests_until:
                began = thread_time()
                self._refresh()
                self._rests_until = monotonic() + min(MAX_REST, REST * (thread_time() - began))
            return self._snapshot

    def _refresh(self) -> None:
        try:
            state = self._look_at_files()  # before reading: changes made meanwhile are noticed the next time
            if state == self._state:
                return
            view = self._view()
            body = json.dumps(view.as_json(), allow_nan=False, separators=(",", ":")).encode()
            self._state, self._snapshot = state, Snapshot(view, body, sha256(body).hexdigest()[:32])
        except Exception as error:  # whatever a damaged folder causes; the next look tries again
            text = str(error) if isinstance(error, ThemisError) else f"unexpected {type(error).__name__}: {error}"
            self._state, self._snapshot = (None, False), Snapshot(message=f"{self.path} cannot be shown now: {text}")

    def _is_there(self) -> bool:
        return (self.path / DATABASE).is_file()

    def _view(self) -> ReportView | SuiteView:
        with closing(_open(self.path)) as run:
            return self._read(run)

    def _look_at_files(self) -> tuple[object, bool]:
        """A value that changes with the folder: its files, and whether a running campaign is still running.

        A campaign that is killed changes no file. One that starts does, so a stopped run is not asked again.
        """
        files = _stamp(self.path)
        if files == self._state[0] and not self._state[1]:
            return self._state
        with closing(_open(self.path)) as run:
            return files, run.is_running()


class WatchedSuite(WatchedFolder):
    """The folder of a suite; its page has no links to the reports of members, which are not served."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, _no_run)

    def _is_there(self) -> bool:
        return is_suite(self.path)

    def _view(self) -> ReportView | SuiteView:
        from themis.report.suite import read_suite_view
        from themis.suites.result import SuiteRun

        return replace(read_suite_view(SuiteRun(self.path)), reports={})

    def _look_at_files(self) -> tuple[object, bool]:
        members = [entry for entry in sorted(os.listdir(self.path)) if (self.path / entry / DATABASE).is_file()]
        stamps = tuple(_stamp(self.path / folder) for folder in (".", *members))
        return (stamps, is_running(self.path)), False


def _no_run(run: Reader) -> ReportView:
    raise UsageError("a suite must be read as a whole, not as a run")


def _open(path: Path) -> Reader:
    from themis.runs.store.reader import Reader

    return Reader(path, is_brief=True)


def _stamp(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """Name, time, size and inode of each file, without the index of SQLite's log and empty logs: readers make those."""
    stamps = []
    for name in os.listdir(folder):
        try:
            status = os.stat(folder / name)
        except OSError:  # renamed or removed in the meantime, or a link to nowhere
            continue
        if status.st_size and not name.endswith("-shm"):
            stamps.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
    return frozenset(stamps)


ALLOWED = ("127.0.0.1", "localhost")
"""Host names that a request may use. Any other name that leads here belongs to another site (DNS rebinding)."""
OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site that are accepted: requests of the page itself, and addresses that the user has typed."""


class Refusal(NamedTuple):
    """The status and the reason of a request that is refused."""

    status: int
    text: str


def check_request(target: str, headers: Message, port: int, token: str) -> Refusal | None:
    """Refuse a request that the user did not make; None if it may be answered. `target` is from the request line."""
    hosts = {f"{host}:{port}" for host in ALLOWED} | (set(ALLOWED) if port == 80 else set())
    origins = {f"http://{host}" for host in hosts}
    if not _is_one_of(headers.get_all("Host", []), hosts):
        return Refusal(403, f"the host must be one of {', '.join(sorted(hosts))}")
    if not target.startswith("/"):
        return Refusal(400, "a request must name a path")
    if "Origin" in headers and not _is_one_of(headers.get_all("Origin", []), origins):
        return Refusal(403, "requests from other sites are refused")
    if "Referer" in headers and not _is_one_of(
        [_origin(referer) for referer in headers.get_all("Referer", [])], origins
    ):
        return Refusal(403, "requests from other sites are refused")
    if "Sec-Fetch-Site" in headers and not _is_one_of(headers.get_all("Sec-Fetch-Site", []), set(OWN_SITES)):
        text = "requests from other sites are refused: paste the address into the browser instead of following a link"
        return Refusal(403, text)
    tokens = parse_qs(target.partition("?")[2]).get("token", [])
    if len(tokens) != 1 or not compare_digest(tokens[0].encode(), token.encode()):
        return Refusal(403, "the address must contain the token that `themis watch` has printed")
    return None


def _is_one_of(values: Sequence[str], known: set[str]) -> bool:
    """Whether there is exactly one value, and it is known."""
    return len(values) == 1 and values[0].strip().lower() in known


def _origin(address: str) -> str:
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}"


HOST = "127.0.0.1"
PAGE, VIEW = "/", "/view.json"
METHODS = "GET, HEAD"
TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The content security policy of a response that loads nothing."""
WAITING = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="refresh" content="2"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>Themis: waiting</title></head>
<body><main><h1>Waiting</h1><p role="status">{message}</p></main></body>
</html>
"""
"""Shown until there is a view; the browser reloads it by itself."""

DrawPage = Callable[..., str]
"""Makes the page of a view, such as `render`."""


@dataclass(frozen=True)
class Response:
    """The status, content and headers that are sent back."""

    status: int
    kind: str = TEXT
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_text(cls, status: int, text: str, **headers: str) -> Response:
        return cls(status, body=f"{status} {HTTPStatus(status).phrase}: {text}\n".encode(), headers=headers)


def serve(run: str | Path, *, port: int = 0, read: ReadView | None = None, draw: DrawPage | None = None) -> Server:
    """A server for a run folder, which may not exist yet. Port 0 picks a free port.

    The server listens at `.url` and answers requests in `.serve_forever()`. By default `read` and `draw` are those of
    the report.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port must lie in 0..65535, got {port}")
    if Path(run).is_file():
        raise UsageError(f"a run must be a folder, but {run} is a file: check the path")
    from themis.report.page import render
    from themis.report.suite import render_suite
    from themis.report.view import read_view

    is_of_suite = read is None and is_suite(run)
    folder = WatchedSuite(run) if is_of_suite else WatchedFolder(run, read or read_view)
    try:
        return Server(folder, draw or (render_suite if is_of_suite else render), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port must be free, but {port} is in use: choose another, or leave it out") from error
        reason = error.strerror or error
        raise UsageError(f"port must be available, but {port} is not ({reason}): choose another") from error


class Server(ThreadingHTTPServer):
    """Answers the browsers of this machine, in one thread per request."""

    allow_reuse_address = os.name == "posix"  # on other systems this would share a port that is in use

    def __init__(self, folder: WatchedFolder, draw: DrawPage, port: int) -> None:
        self.folder, self.draw, self.token = folder, draw, token_urlsafe(32)
        super().__init__((HOST, port), Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the parent looks up the host name, which may be slow
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page, including the token."""
        return f"http://{HOST}:{self.server_port}{PAGE}?token={self.token}"

    def respond(self, path: str, known_tags: str) -> Response:
        """The response to an accepted request; `known_tags` are the tags of the contents that the page already has."""
        if path == PAGE:
            return self._page()
        if path == VIEW:
            return self._view(known_tags)
        return Response.of_text(404, f"only {PAGE} and {VIEW} exist")

    def _page(self) -> Response:
        snapshot = self.folder.look()
        if snapshot.message:
            page = WAITING.format(message=escape(snapshot.message))
        else:
            page = self.draw(snapshot.view, live=f"{VIEW}?token={self.token}")
        return Response(200, HTML, page.encode("utf-8", "replace"), {"Content-Security-Policy": policy(page)})

    def _view(self, known_tags: str) -> Response:
        snapshot = self.folder.look()
        if snapshot.message:
            return Response(503, JSON, json.dumps({"message": snapshot.message}).encode(), {"Retry-After": "2"})
        tag = f'"{snapshot.tag}"'
        if tag in [known.strip().removeprefix("W/") for known in known_tags.split(",")]:
            return Response(304, headers={"ETag": tag})
        return Response(200, JSON, snapshot.body, {"ETag": tag})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line, unless the browser has only closed the connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print_text(f"themis watch: unexpected {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """Reads a request and sends the response."""

    server: Server
    timeout = 20  # seconds that a connection may be idle
    default_request_version = "HTTP/1.0"  # so that headers are sent in response to any request

    def do_GET(self) -> None:
        refusal = check_request(self.path, self.headers, self.server.server_port, self.server.token)
        if refusal is not None:
            self._send(Response.of_text(*refusal))
            return
        try:
            response = self.server.respond(self.path.partition("?")[0], self.headers.get("If-None-Match", ""))
        except Exception as error:  # without a response the browser would only see a closed connection
            response = Response.of_text(500, f"unexpected {type(error).__name__}: {error}")
        self._send(response)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond to requests that the parent class refuses: malformed requests and other methods."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(Response.of_text(405, f"the run can only be read: use {METHODS}", Allow=METHODS))
        else:
            self._send(Response.of_text(code, "malformed request"))

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        headers = {**HEADERS, "Content-Security-Policy": NOTHING, **response.headers}
        if response.status != HTTPStatus.NOT_MODIFIED:
            headers |= {"Content-Type": response.kind, "Content-Length": str(len(response.body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def version_string(self) -> str:
        return "themis"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a log would show the token."""


def policy(page: str) -> str:
    """What a page may do: use its own scripts and styles, by hash, show embedded pictures and ask this server."""
    scripts, styles = (_hashes(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)) for tag in ("script", "style"))
    return f"{NOTHING}; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'"


def _hashes(texts: list[str]) -> str:
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]
    return " ".join(hashes) or "'none'"
