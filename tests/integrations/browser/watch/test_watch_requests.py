"""The responses of the watch server to the browser of the user and to other requests."""

import json
import re
import socket
import sys
from base64 import b64encode
from hashlib import sha256

import pytest
from asking import ALWAYS, ask

import themis
from themis.report.page import read_view
from themis_integrations.browser.server import serve

pytestmark = pytest.mark.xdist_group("watch")

OTHERS = [
    ({"Host": None}, 403),
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example:{port}"}, 403),
    ({"Host": "127.0.0.1"}, 403),
    ({"Host": "127.0.0.1:1"}, 403),
    ({"Host": "127.0.0.1.evil.example:{port}"}, 403),
    ({"Host": "127.0.0.1:{port}@evil.example"}, 403),
    ({"Host": "0.0.0.0:{port}"}, 403),
    ({"Host": ["127.0.0.1:{port}", "evil.example"]}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "https://127.0.0.1:{port}"}, 403),
    ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": ""}, 403),
    ({"Referer": "http://evil.example/?http://127.0.0.1:{port}/"}, 403),
    ({"Referer": "http://127.0.0.1:{port}@evil.example/"}, 403),
    ({"Referer": "http://[evil"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"target": "/view.json"}, 403),
    ({"target": "/view.json?token="}, 403),
    ({"target": "/view.json?token=wrong"}, 403),
    ({"target": "/view.json?token={token}x"}, 403),
    ({"target": "/view.json?token=%C3%A9%FF"}, 403),
    ({"target": "/view.json?token={token}&token={token}"}, 403),
    ({"target": "/view.json?Token={token}"}, 403),
    ({"target": "/"}, 403),
    ({"target": "/favicon.ico"}, 403),
    ({"target": "http://127.0.0.1:{port}/view.json?token={token}"}, 400),
    ({"target": "/view.json?token={token}", "Cookie": "token={token}", "Host": "evil.example"}, 403),
]
OWN = [
    {},
    {"Host": "localhost:{port}"},
    {"Host": "LOCALHOST:{port}"},
    {"Origin": "http://127.0.0.1:{port}"},
    {"Host": "localhost:{port}", "Origin": "http://localhost:{port}"},
    {"Referer": "http://127.0.0.1:{port}/"},
    {"Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]


def test_the_page_embeds_the_view_of_the_report_and_fetches_it_again(server, made):
    status, headers, body = ask(server)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == json.loads(json.dumps(read_view(made).as_json()))
    assert json.loads(body)["counts"]["faults"] > 0
    status, headers, page = ask(server, "/?token={token}")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    embedded = re.search(r'<script type="application/json" id="view">(.*?)</script>', page.decode(), re.S)[1]
    assert json.loads(embedded) == json.loads(body)
    assert f'data-live="/view.json?token={server.token}"' in page.decode()


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page(server):
    _, headers, page = ask(server, "/?token={token}")
    rules = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
    for tag in ("script", "style"):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", page.decode(), re.S)
        assert texts
        hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]
        assert rules.pop(f"{tag}-src").split() == hashes
    nothing = dict.fromkeys(["default-src", "base-uri", "form-action", "frame-ancestors"], "'none'")
    assert rules == {**nothing, "img-src": "data:", "connect-src": "'self'"}


@pytest.mark.parametrize(("request_", "status"), OTHERS, ids=[str(each[0])[:60] for each in OTHERS])
def test_a_request_that_the_user_did_not_make_is_refused(server, request_, status):
    found, headers, body = ask(server, **request_)
    assert found == status
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert ALWAYS.items() <= dict(headers).items()
    assert len(body) < 200
    assert server.token.encode() not in body
    assert headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_a_request_of_the_user_is_answered(server, headers):
    assert ask(server, **headers)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_a_run_cannot_be_changed(server, method):
    status, headers, body = ask(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert ALWAYS.items() <= dict(headers).items()
    assert body == b"405 Method Not Allowed: the run can only be read: use GET, HEAD\n"


@pytest.mark.parametrize("target", ["/?token={token}", "/view.json?token={token}", "/none?token={token}", "/"])
def test_head_has_the_headers_of_get_and_no_body(server, target):
    status, headers, body = ask(server, target, "GET")
    head_status, head_headers, nothing = ask(server, target, "HEAD")
    del headers["Date"], head_headers["Date"]
    assert (head_status, dict(head_headers), nothing) == (status, dict(headers), b"")
    assert int(headers["Content-Length"]) == len(body)


@pytest.mark.parametrize(
    "path",
    [
        *("/run.sqlite", "/summary.json", "/tensors/", "/report.html", "/../run.sqlite", "/%2e%2e/run.sqlite"),
        *("//etc/passwd", "/../../../../etc/passwd", "/view.json/", "/./view.json", "/%2Fview.json", "/index.html"),
    ],
)
def test_no_path_reaches_the_file_system(server, path):
    status, headers, body = ask(server, f"{path}?token={{token}}")
    assert (status, body) == (404, b"404 Not Found: only / and /view.json exist\n")
    assert ALWAYS.items() <= dict(headers).items()


def talk(server, sent):
    """Send raw bytes and return the response."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_malformed_requests_are_refused_and_the_server_continues(server, capfd):
    assert talk(server, b"\x16\x03\x01\x02\x00\x01\r\n\r\n").startswith(b"HTTP/1.0 400 Bad Request\r\n")
    assert talk(server, b"GET / HTTP/9.9\r\n\r\n").startswith(b"HTTP/1.0 505 ")
    assert talk(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 414 ")
    many = b"".join(b"X-%d: a\r\n" % k for k in range(300))
    assert talk(server, b"GET / HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.0 431 ")
    assert b"<html" not in talk(server, b"GET /nothing\r\n\r\n").lower()
    socket.create_connection(("127.0.0.1", server.server_port)).close()  # one that says nothing
    assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_browser_that_disconnects_during_a_response_is_not_an_error(server, capfd):
    asked = f"GET /?token={server.token} HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n\r\n".encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not closed
            connection.sendall(asked)
            connection.recv(100)
    assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_each_server_listens_to_this_machine_only_and_has_its_own_token(server, made):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    if sys.platform == "linux":  # where all of 127/8 is this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.server_port), timeout=10)
    assert server.url == f"http://127.0.0.1:{server.server_port}/?token={server.token}"
    with serve(made) as other:
        assert other.token != server.token
        assert len(other.token) >= 43
        assert ask(server, f"/view.json?token={other.token}")[0] == 403


def test_data_that_the_page_already_has_is_not_sent_again(server):
    _, headers, _ = ask(server)
    tag = headers["ETag"]
    for known in (tag, f"W/{tag}", f'"old", {tag}'):
        status, headers, body = ask(server, **{"If-None-Match": known})
        assert (status, headers["ETag"], body) == (304, tag, b"")
        assert ALWAYS.items() <= dict(headers).items()
    assert ask(server, **{"If-None-Match": '"old"'})[0] == 200


@pytest.mark.parametrize(("port", "text"), [(-1, "0..65535"), (65536, "0..65535"), (None, "is in use: choose another")])
def test_an_unavailable_port_is_refused(server, made, port, text):
    with pytest.raises(themis.errors.UsageError, match=re.escape(text)):
        serve(made, port=server.server_port if port is None else port)


def test_a_file_is_not_a_run(made):
    with pytest.raises(themis.errors.UsageError, match=r"a run must be a folder, but .*summary\.json is a file"):
        serve(made / "summary.json")
