"""The server: a page, its data, and refusals. No path of a request reaches the file system."""

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
from themis.report.watch.folder import Folder, Read
from themis.report.watch.guard import judge

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
"""The content security policy of an answer that needs nothing."""
WAITING = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="refresh" content="2"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>Themis: waiting</title></head>
<body><main><h1>Waiting</h1><p role="status">{message}</p></main></body>
</html>
"""
"""Shown until there is a view; the browser asks again by itself."""

Draw = Callable[..., str]
"""What makes a page of a view, as `render` does."""


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    status: int
    kind: str = TEXT
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_text(cls, status: int, text: str, **headers: str) -> Answer:
        return cls(status, body=f"{status} {HTTPStatus(status).phrase}: {text}\n".encode(), headers=headers)


def serve(run: str | Path, *, port: int = 0, read: Read | None = None, draw: Draw | None = None) -> Server:
    """A server over a run folder, which need not exist yet; port 0 is any free one.

    It listens at `.url` from now on and answers in `.serve_forever()`; `read` and `draw` are the report's by default.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port must lie in 0..65535, got {port}")
    if Path(run).is_file():
        raise UsageError(f"a run must be a folder, {run} is a file: check the path")
    from themis.report.page import render
    from themis.report.view import read_view

    try:
        return Server(Folder(run, read or read_view), draw or render, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port must be a free one, {port} is in use: choose another, or leave it out") from error
        text = f"port must be one that can be listened to, {port} cannot: {error.strerror or error}; choose another"
        raise UsageError(text) from error


class Server(ThreadingHTTPServer):
    """Answers this machine's browser, a thread a request."""

    allow_reuse_address = os.name == "posix"  # elsewhere it would share the port with whoever has it

    def __init__(self, folder: Folder, draw: Draw, port: int) -> None:
        self.folder, self.draw, self.token = folder, draw, token_urlsafe(32)
        super().__init__((HOST, port), Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the parent's asks the network for a name, which may take long
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{HOST}:{self.server_port}{PAGE}?token={self.token}"

    def answer(self, path: str, known: str) -> Answer:
        """The answer to a request that may be answered; `known` names the contents that the page has already."""
        if path == PAGE:
            return self._page()
        if path == VIEW:
            return self._view(known)
        return Answer.of_text(404, f"there is {PAGE} and {VIEW}")

    def _page(self) -> Answer:
        shown = self.folder.look()
        if shown.message:
            page = WAITING.format(message=escape(shown.message))
        else:
            page = self.draw(json.loads(shown.body), live=f"{VIEW}?token={self.token}")
        return Answer(200, HTML, page.encode("utf-8", "replace"), {"Content-Security-Policy": policy(page)})

    def _view(self, known: str) -> Answer:
        shown = self.folder.look()
        if shown.message:
            return Answer(503, JSON, json.dumps({"message": shown.message}).encode(), {"Retry-After": "2"})
        tag = f'"{shown.tag}"'
        if tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
            return Answer(304, headers={"ETag": tag})
        return Answer(200, JSON, shown.body, {"ETag": tag})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; anything else is one line."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"themis watch: unexpected {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """Reads a request and sends its answer."""

    server: Server
    timeout = 20  # of a connection on which nothing comes
    default_request_version = "HTTP/1.0"  # so that the headers are sent whatever came

    def do_GET(self) -> None:
        refusal = judge(self.path, self.headers, self.server.server_port, self.server.token)
        if refusal is not None:
            self._send(Answer.of_text(*refusal))
            return
        try:
            answer = self.server.answer(self.path.partition("?")[0], self.headers.get("If-None-Match", ""))
        except Exception as error:  # a page that cannot be drawn must not end in a closed connection
            answer = Answer.of_text(500, f"unexpected {type(error).__name__}: {error}")
        self._send(answer)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the parent refuses: requests it cannot read, and methods there are none for."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(Answer.of_text(405, f"a run can be looked at, not changed: {METHODS}", Allow=METHODS))
        else:
            self._send(Answer.of_text(code, "the request cannot be read"))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        sent = {**HEADERS, "Content-Security-Policy": NOTHING, **answer.headers}
        if answer.status != HTTPStatus.NOT_MODIFIED:
            sent |= {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "themis"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal would show the token."""


def policy(page: str) -> str:
    """What a page may do: run and look as it says itself, by hashes, show its own pictures, and ask this server."""
    scripts, styles = (_hashes(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)) for tag in ("script", "style"))
    return f"{NOTHING}; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'"


def _hashes(texts: list[str]) -> str:
    found = [f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in texts]
    return " ".join(found) or "'none'"
