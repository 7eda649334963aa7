"""Which requests are answered. The server listens to this machine only, but any page in a browser can send requests."""

from __future__ import annotations

from collections.abc import Sequence
from email.message import Message
from hmac import compare_digest
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

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
