"""Who may ask. The server listens to this machine alone, but any page in its browser can send requests to it."""

from __future__ import annotations

from collections.abc import Sequence
from email.message import Message
from hmac import compare_digest
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

ALLOWED = ("127.0.0.1", "localhost")
"""Hosts by which the server may be called. Another name that leads here is another site's (DNS rebinding)."""
OWN = ("same-origin", "none")
"""Where a browser may say that a request comes from: the page itself, or the user's own hand."""


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    text: str


def judge(target: str, headers: Message, port: int, token: str) -> Refusal | None:
    """Refuse a request that is not the user's own; None for one that is. `target` is what the request line asks for."""
    hosts = {f"{host}:{port}" for host in ALLOWED} | (set(ALLOWED) if port == 80 else set())
    origins = {f"http://{host}" for host in hosts}
    if not _is_one_of(headers.get_all("Host", []), hosts):
        return Refusal(403, f"the host must be one of {', '.join(sorted(hosts))}")
    if not target.startswith("/"):
        return Refusal(400, "a request must name a path")
    if "Origin" in headers and not _is_one_of(headers.get_all("Origin", []), origins):
        return Refusal(403, "requests of other sites are refused")
    if "Referer" in headers and not _is_one_of([_origin(each) for each in headers.get_all("Referer", [])], origins):
        return Refusal(403, "requests of other sites are refused")
    if "Sec-Fetch-Site" in headers and not _is_one_of(headers.get_all("Sec-Fetch-Site", []), set(OWN)):
        text = "requests of other sites are refused; paste the address into the browser instead of following a link"
        return Refusal(403, text)
    given = parse_qs(target.partition("?")[2]).get("token", [])
    if len(given) != 1 or not compare_digest(given[0].encode(), token.encode()):
        return Refusal(403, "the address must end with the token that `themis watch` has printed")
    return None


def _is_one_of(values: Sequence[str], known: set[str]) -> bool:
    """Whether there is exactly one value, and a known one."""
    return len(values) == 1 and values[0].strip().lower() in known


def _origin(address: str) -> str:
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}"
