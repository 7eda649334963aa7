"""The server: the page, its data, and refusals. No path of a request reaches the file system."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from socketserver import TCPServer
from typing import Any

from themis.errors import UsageError
from themis.report.watch.folder import ReadView, WatchedFolder, WatchedSuite
from themis.report.watch.guard import check_request
from themis.suites.folder import is_suite
from themis.text import print_text

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
