"""A run in the browser, live: the page of the report, served to this machine only and read-only."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
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
from typing import Any, TypeVar
from urllib.parse import parse_qs

from themis.errors import ThemisError, UsageError
from themis.report.page import asset, read_view, render, source_of
from themis.report.suite import read_suite_view, render_suite
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.suites.folder import is_running, is_suite
from themis.suites.result import SuiteRun
from themis.text import print_text

WAITING_PAGE = "themis_integrations.browser:waiting.html"
"""The page that is shown until there is a run."""
REST_FACTOR, MAX_REST_SECONDS = 4, 30.0
"""After reading the folder, wait for the processor time of the reading times `REST_FACTOR`, at most `MAX_REST_SECONDS`,
because the campaign needs the machine too."""


@dataclass(frozen=True)
class Snapshot:
    """A view as JSON, a tag of that content, and how its page is drawn; or, if there is no view, why."""

    body: bytes = b""
    tag: str = ""
    draw: Callable[..., str] = str
    message: str = ""


class WatchedFolder:
    """The folder of a run or a suite, which may not exist yet, may grow, and may disappear."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = Lock()  # one thread reads at a time, however many requests wait
        self._state: tuple[object, bool] = (None, False)
        self._snapshot = Snapshot()
        self._rests_until = 0.0

    def look(self) -> Snapshot:
        """The current view of the folder, or a recent one."""
        with self._lock:
            if not (self.path / DATABASE).is_file() and not is_suite(self.path):
                self._state, self._rests_until = (None, False), 0.0
                message = f"{self.path} does not contain a run yet: it is shown as soon as a campaign starts there"
                return Snapshot(message=message)
            if monotonic() >= self._rests_until:
                began = thread_time()
                self._refresh()
                self._rests_until = monotonic() + min(MAX_REST_SECONDS, REST_FACTOR * (thread_time() - began))
            return self._snapshot

    def _refresh(self) -> None:
        try:
            state = self._look_at_files()  # before reading: changes made meanwhile are noticed the next time
            if state == self._state:
                return
            if is_suite(self.path):  # without links to the reports of members, which are not served
                plain = {**read_suite_view(SuiteRun(self.path)), "reports": {}}
                draw = partial(render_suite, plain)
            else:
                view = read_view(self.path)
                plain, draw = view.as_json(), partial(render, view)
            body = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()
            self._state, self._snapshot = state, Snapshot(body, sha256(body).hexdigest()[:32], draw)
        except Exception as error:  # whatever a damaged folder causes; the next look tries again
            text = str(error) if isinstance(error, ThemisError) else f"unexpected {type(error).__name__}: {error}"
            self._state, self._snapshot = (None, False), Snapshot(message=f"{self.path} cannot be shown now: {text}")

    def _look_at_files(self) -> tuple[object, bool]:
        """A value that changes if the files change, or if a running campaign ends.

        A campaign that is killed changes no file. One that starts does, so a stopped run is not asked again.
        """
        members = [entry for entry in sorted(os.listdir(self.path)) if (self.path / entry / DATABASE).is_file()]
        files = tuple(_stamp(self.path / folder) for folder in (".", *members))
        if files == self._state[0] and not self._state[1]:
            return self._state
        if is_suite(self.path):
            return files, is_running(self.path)
        with closing(Reader(self.path, is_brief=True)) as run:
            return files, run.is_running()


def _stamp(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """Name, time, size and inode of each file, except empty logs and the index of the log, which readers create."""
    stamps = []
    for name in os.listdir(folder):
        try:
            status = os.stat(folder / name)
        except OSError:  # renamed or removed in the meantime, or a link to nowhere
            continue
        if status.st_size and not name.endswith("-shm"):
            stamps.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
    return frozenset(stamps)


ALLOWED_HOSTS = ("127.0.0.1", "localhost")
"""Host names that a request may use. Any other name that leads here belongs to another site (DNS rebinding)."""
OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site that are accepted: requests of the page itself, and addresses that the user has typed."""


def check_request(target: str, headers: Message, port: int, token: str) -> Response | None:
    """Refuse a request that the user did not make; None if it is accepted. `target` is from the request line."""
    hosts = {f"{host}:{port}" for host in ALLOWED_HOSTS} | (set(ALLOWED_HOSTS) if port == 80 else set())
    origins = {f"http://{host}" for host in hosts}
    if not _is_one_of(headers.get_all("Host", []), hosts):
        return Response.of_text(403, f"the host must be one of {', '.join(sorted(hosts))}")
    if not target.startswith("/"):
        return Response.of_text(400, "a request must name a path")
    for name, known in (("Origin", origins), ("Referer", origins), ("Sec-Fetch-Site", set(OWN_SITES))):
        values = headers.get_all(name, [])
        if name == "Referer":
            values = ["/".join(value.split("/", 3)[:3]) for value in values]  # its scheme and host
        if values and not _is_one_of(values, known):
            text = "requests from other sites are refused: paste the address into the browser, do not follow a link"
            return Response.of_text(403, text)
    tokens = parse_qs(target.partition("?")[2]).get("token", [])
    if len(tokens) != 1 or not compare_digest(tokens[0].encode(), token.encode()):
        return Response.of_text(403, "the address must contain the token that the command has printed")
    return None


def _is_one_of(values: Sequence[str], known: set[str]) -> bool:
    """Whether there is exactly one value, a known one."""
    return len(values) == 1 and values[0].strip().lower() in known


HOST = "127.0.0.1"
PAGE, VIEW = "/", "/view.json"
METHODS = "GET, HEAD"
MAX_BODY = 1000
"""Bytes that a page may send at a time."""
TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
COMMON_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NOTHING_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The content security policy of a response that loads nothing."""


@dataclass(frozen=True)
class Response:
    """The status, content and headers of a response."""

    status: int
    kind: str = TEXT
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_text(cls, status: int, text: str, **headers: str) -> Response:
        return cls(status, body=f"{status} {HTTPStatus(status).phrase}: {text}\n".encode(), headers=headers)


AnyServer = TypeVar("AnyServer", bound="Server")


def serve(run: str | Path, *, port: int = 0) -> Server:
    """A server at `.url` for the folder of a run or a suite, which may not exist yet; port 0 picks a free port."""
    if Path(run).is_file():
        raise UsageError(f"a run must be a folder, but {run} is a file: check the path")
    return listen(lambda: Server(WatchedFolder(run), port), port)


def listen(make: Callable[[], AnyServer], port: int) -> AnyServer:
    """The server that `make` creates at a port, if the port can be used."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port must lie in 0..65535, got {port}")
    try:
        return make()
    except OSError as error:
        problem = f"available, but {port} is not ({error.strerror or error}): choose another"
        if error.errno == errno.EADDRINUSE:
            problem = f"free, but {port} is in use: choose another, or leave it out"
        raise UsageError(f"port must be {problem}") from error


class Server(ThreadingHTTPServer):
    """Answers browsers on this machine, with one thread per request."""

    allow_reuse_address = os.name == "posix"  # on other systems this would share a port that is in use

    is_writable = False
    """Whether the page may send what `store` stores."""

    def __init__(self, folder: Any, port: int) -> None:
        self.folder, self.token = folder, token_urlsafe(32)
        super().__init__((HOST, port), Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the parent looks up the host name, which may be slow
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page, including the token."""
        return f"http://{HOST}:{self.server_port}{PAGE}?token={self.token}"

    def respond(self, path: str, known_tags: str) -> Response:
        """The response to an accepted request; `known_tags` are the tags of what the page already has."""
        if path not in (PAGE, VIEW):
            return Response.of_text(404, f"only {PAGE} and {VIEW} exist")
        snapshot = self.folder.look()
        if path == PAGE:
            if snapshot.message:
                page = asset(WAITING_PAGE).replace("@@message@@", escape(snapshot.message))
            else:
                page = snapshot.draw(live=f"{VIEW}?token={self.token}")
            return Response(200, HTML, page.encode("utf-8", "replace"), {"Content-Security-Policy": policy(page)})
        if snapshot.message:
            return Response(503, JSON, json.dumps({"message": snapshot.message}).encode(), {"Retry-After": "2"})
        tag = f'"{snapshot.tag}"'
        if tag in [known.strip().removeprefix("W/") for known in known_tags.split(",")]:
            return Response(304, headers={"ETag": tag})
        return Response(200, JSON, snapshot.body, {"ETag": tag})

    def store(self, path: str, body: bytes) -> Response:
        """Store what the page has sent, and respond; only if the server is writable."""
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error on one line, unless the browser has just closed the connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print_text(f"themis watch: unexpected {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """Reads a request and sends the response."""

    server: Server
    timeout = 20  # seconds that a connection may be idle
    default_request_version = "HTTP/1.0"  # so that headers are sent in response to any request

    def do_GET(self) -> None:
        response = check_request(self.path, self.headers, self.server.server_port, self.server.token)
        if response is None:
            try:
                response = self.server.respond(self.path.partition("?")[0], self.headers.get("If-None-Match", ""))
            except Exception as error:  # without a response the browser would only see a closed connection
                response = Response.of_text(500, f"unexpected {type(error).__name__}: {error}")
        self._send(response)

    def do_POST(self) -> None:
        if not self.server.is_writable:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)
            return
        refusal = check_request(self.path, self.headers, self.server.server_port, self.server.token)
        if refusal is None and "Origin" not in self.headers:
            refusal = Response.of_text(403, "only the page itself may store something")
        length = self.headers.get("Content-Length", "")
        if refusal is None and not (length.isdecimal() and int(length) <= MAX_BODY):
            refusal = Response.of_text(413, f"at most {MAX_BODY} bytes can be stored at a time")
        self._send(refusal or self.server.store(self.path.partition("?")[0], self.rfile.read(int(length))))

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond to requests that the parent class refuses: malformed requests and other methods."""
        response = Response.of_text(code, "malformed request")
        if code == HTTPStatus.NOT_IMPLEMENTED:
            response = Response.of_text(405, f"the run can only be read: use {METHODS}", Allow=METHODS)
        self._send(response)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        headers = {**COMMON_HEADERS, "Content-Security-Policy": NOTHING_POLICY, **response.headers}
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
    texts = (re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S) for tag in ("script", "style"))
    scripts, styles = (" ".join(map(source_of, each)) or "'none'" for each in texts)
    return f"{NOTHING_POLICY}; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'"
