"""The watch server on real runs: what it answers, whom it refuses, when it reads, and a campaign seen as it grows."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPConnection
from itertools import pairwise

import pytest
import torch

import themis
from themis.report.view import read_view
from themis.watch import folder, serve

DEADLINE = 120
HOLD = "import sys, time; from themis.store.files import Lock; from pathlib import Path; lock = Lock(Path(sys.argv[1]))"
MODULE = """
import torch
from themis.zoo import lenet5

def net():
    model = lenet5()
    model.load_state_dict(torch.load("lenet.pt", weights_only=True))
    return model
"""
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
ALWAYS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """A finished run: LeNet-5 on real digits."""
    net, held_out = trained
    path = tmp_path_factory.mktemp("watched") / "run"
    themis.run(net, held_out, "gaussian", magnitude=0.6, max_tests=1500, random_seed=0, out=path)
    return path


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run, to write to."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@contextmanager
def served(path, **how):
    with serve(path, **how) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(made):
    with served(made) as server:
        yield server


def ask(server, target="/view.json?token={token}", method="GET", **headers):
    """Status, headers and body of an answer; `{port}` and `{token}` are the server's."""

    def filled(text):
        return text.replace("{port}", str(server.server_port)).replace("{token}", server.token)

    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, filled(target), skip_host=True, skip_accept_encoding=True)
    for name, values in {"Host": "127.0.0.1:{port}", **headers}.items():
        for value in [] if values is None else [values] if isinstance(values, str) else values:
            connection.putheader(name, filled(value))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def wait_for(find, what):
    """What `find` gives once it is true."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        if found := find():
            return found
        time.sleep(0.05)
    pytest.fail(f"waited in vain for {what}")


def test_the_view_is_the_reports_and_the_page_has_it_and_asks_for_it_anew(server, made):
    status, headers, body = ask(server)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == json.loads(json.dumps(read_view(made)))
    assert json.loads(body)["counts"]["faults"] > 0
    status, headers, page = ask(server, "/?token={token}")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    embedded = re.search(r'<script type="application/json" id="view">(.*?)</script>', page.decode(), re.S)[1]
    assert json.loads(embedded) == json.loads(body)
    assert f'data-live="/view.json?token={server.token}"' in page.decode()


def test_the_policy_lets_the_pages_own_scripts_and_styles_run_and_nothing_else(server):
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
def test_a_request_that_is_not_the_users_own_is_refused(server, request_, status):
    found, headers, body = ask(server, **request_)
    assert found == status
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert ALWAYS.items() <= dict(headers).items()
    assert len(body) < 200
    assert server.token.encode() not in body
    assert headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_users_own_request_is_answered(server, headers):
    assert ask(server, **headers)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_a_run_cannot_be_changed(server, method):
    status, headers, body = ask(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert ALWAYS.items() <= dict(headers).items()
    assert body == b"405 Method Not Allowed: a run can be looked at, not changed: GET, HEAD\n"


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
    assert (status, body) == (404, b"404 Not Found: there is / and /view.json\n")
    assert ALWAYS.items() <= dict(headers).items()


def talk(server, sent):
    """What comes back for some bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_what_is_no_request_is_refused_plainly_and_the_server_goes_on(server, capfd):
    assert talk(server, b"\x16\x03\x01\x02\x00\x01\r\n\r\n").startswith(b"HTTP/1.0 400 Bad Request\r\n")
    assert talk(server, b"GET / HTTP/9.9\r\n\r\n").startswith(b"HTTP/1.0 505 ")
    assert talk(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 414 ")
    many = b"".join(b"X-%d: a\r\n" % k for k in range(300))
    assert talk(server, b"GET / HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.0 431 ")
    assert b"<html" not in talk(server, b"GET /nothing\r\n\r\n").lower()
    socket.create_connection(("127.0.0.1", server.server_port)).close()  # one that says nothing
    assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_browser_that_goes_away_in_mid_answer_is_no_error(server, capfd):
    asked = f"GET /?token={server.token} HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n\r\n".encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not closed
            connection.sendall(asked)
            connection.recv(100)
    assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_it_listens_to_this_machine_alone_with_a_token_of_its_own(server, made):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    if sys.platform == "linux":  # where all of 127/8 is this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.server_port), timeout=10)
    assert server.url == f"http://127.0.0.1:{server.server_port}/?token={server.token}"
    with serve(made) as other:
        assert other.token != server.token
        assert len(other.token) >= 43
        assert ask(server, f"/view.json?token={other.token}")[0] == 403


def test_what_the_page_has_already_is_not_sent_again(server):
    _, headers, _ = ask(server)
    tag = headers["ETag"]
    for known in (tag, f"W/{tag}", f'"old", {tag}'):
        status, headers, body = ask(server, **{"If-None-Match": known})
        assert (status, headers["ETag"], body) == (304, tag, b"")
        assert ALWAYS.items() <= dict(headers).items()
    assert ask(server, **{"If-None-Match": '"old"'})[0] == 200


def contents(path):
    """Every file with its content and time."""
    kept = [each for each in path.rglob("*") if each.is_file()]
    return {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in kept}


def test_a_folder_is_read_again_only_when_it_has_changed_and_never_written_to(run, monkeypatch):
    monkeypatch.setattr(folder, "REST", 0)
    readings = []

    def read(reader):
        readings.append(reader.path)
        return read_view(reader)

    before = contents(run)
    with served(run, read=read) as server:
        first = ask(server)
        for _ in range(5):
            assert ask(server)[2] == first[2]
        ask(server, "/?token={token}")
        assert len(readings) == 1
        assert contents(run) == before
        os.utime(run / "summary.json")
        again = ask(server, **{"If-None-Match": first[1]["ETag"]})
        assert (again[0], len(readings)) == (304, 2)  # read, and found to be the same
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "stop": "Stopped because <b>it</b> was told to."}))
        status, _, body = ask(server, **{"If-None-Match": first[1]["ETag"]})
        assert (status, len(readings)) == (200, 3)
        assert json.loads(body)["stop"] == "Stopped because <b>it</b> was told to."
        assert b"<b>it</b>" not in ask(server, "/?token={token}")[2]


@pytest.mark.parametrize(("takes", "rests"), [(2, 8), (20, 30)])
def test_after_a_long_reading_the_folder_is_left_alone_for_longer(run, monkeypatch, takes, rests):
    now = [100]
    for clock in ("monotonic", "thread_time"):
        monkeypatch.setattr(folder, clock, lambda: now[0])
    readings = []

    def read(reader):
        readings.append(now[0])
        now[0] += takes
        return {"n": len(readings)}

    watched = folder.Folder(run, read)
    for _ in range(100):
        os.utime(run / "summary.json", (0, now[0]))  # it changes all the time
        assert json.loads(watched.look().body)["n"] == len(readings)
        now[0] += 1
    assert {after - before for before, after in pairwise(readings)} == {takes + rests}


def test_a_run_that_is_not_there_is_waited_for_and_may_go_and_come_back(run, made):
    elsewhere = run.with_name("<elsewhere>")
    with served(elsewhere) as server:
        for _ in range(2):
            status, headers, page = ask(server, "/?token={token}")
            assert (status, ALWAYS.items() <= dict(headers).items()) == (200, True)
            assert b"&lt;elsewhere&gt; holds no run yet" in page
            assert b'http-equiv="refresh"' in page
            assert b"<script" not in page
            status, headers, body = ask(server)
            assert (status, headers["Content-Type"]) == (503, "application/json")
            assert "holds no run yet" in json.loads(body)["message"]
            elsewhere.mkdir(exist_ok=True)
        elsewhere.rmdir()
        run.rename(elsewhere)
        assert json.loads(ask(server)[2])["state"] == "ended"
        shutil.rmtree(elsewhere)
        assert ask(server)[0] == 503
        shutil.copytree(made, elsewhere)
        assert ask(server)[0] == 200


@pytest.mark.parametrize("name", ["run.sqlite", "summary.json"])
def test_a_damaged_run_is_a_plain_message_until_it_is_mended(run, name, monkeypatch):
    monkeypatch.setattr(folder, "REST", 0)
    with served(run) as server:
        whole = ask(server)
        assert whole[0] == 200
        content = (run / name).read_bytes()
        for damaged in (b"", b"no run\n" * 1000, content[: len(content) // 2]):
            (run / name).write_bytes(damaged)
            status, _, body = ask(server)
            message = json.loads(body)["message"]
            assert (status, "cannot be shown now" in message, "Traceback" in message) == (503, True, False)
            assert b"cannot be shown now" in ask(server, "/?token={token}")[2]
        (run / name).write_bytes(content)
        assert ask(server)[2] == whole[2]


def test_a_page_that_cannot_be_drawn_is_a_plain_answer(run):
    def draw(view, *, live):
        raise KeyError("subject")

    with served(run, draw=draw) as server:
        assert ask(server, "/?token={token}")[::2] == (
            500,
            b"500 Internal Server Error: unexpected KeyError: 'subject'\n",
        )
        assert ask(server)[0] == 200


def test_a_campaign_that_is_killed_is_seen_though_no_file_changes(run, monkeypatch):
    monkeypatch.setattr(folder, "REST", 0)
    (run / "summary.json").unlink()
    code = f"{HOLD}; print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(run / "run.lock")], stdout=subprocess.PIPE)
    with holder, served(run) as server:
        try:
            assert holder.stdout.readline() == b"held\n"
            assert json.loads(ask(server)[2])["state"] == "running"
        finally:
            holder.kill()
        holder.wait()
        assert json.loads(ask(server)[2])["state"] == "killed"


def test_a_campaign_in_another_process_is_seen_to_begin_to_grow_and_to_end(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "REST", 0)
    torch.save(trained[0].state_dict(), tmp_path / "lenet.pt")
    (tmp_path / "watched.py").write_text(MODULE)
    words = ["--model", "watched:net", "--data", "digits", "--perturb", "gaussian", "--magnitude", "0.3", "--quiet"]
    limits = ["--max-tests", "1000000", "--max-seeds", "200", "--tolerance", "1e-9", "--plateau", "none"]
    command = [sys.executable, "-m", "themis", "run", *words, *limits, "--out", "run"]
    with served(tmp_path / "run") as server:
        assert ask(server)[0] == 503
        campaign = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            seen, tags = [], set()

            def grown():
                assert campaign.poll() is None
                status, headers, body = ask(server)
                if status == 200 and headers["ETag"] not in tags:
                    tags.add(headers["ETag"])
                    view = json.loads(body)
                    seen.append((view["state"], view["counts"]["tests"], view["counts"]["faults"]))
                return len({tests for _, tests, _ in seen}) >= 3

            wait_for(grown, "tests to grow")
            campaign.send_signal(signal.SIGINT)
            assert campaign.wait(DEADLINE) == 130
        finally:
            campaign.kill()
            campaign.wait()
        ended = wait_for(lambda: (view := json.loads(ask(server)[2]))["state"] == "interrupted" and view, "its end")
        assert {state for state, _, _ in seen} <= {"running", "interrupted"}
        assert [each[1:] for each in seen] == sorted(each[1:] for each in seen)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (ended["counts"]["tests"], ended["counts"]["faults"]) == (summary["tests"], summary["faults"])
        assert summary["tests"] >= seen[-1][1] > 0
        assert ended["stop"] == summary["stop"]


@pytest.mark.parametrize(("port", "text"), [(-1, "0..65535"), (65536, "0..65535"), (None, "is in use: choose another")])
def test_a_port_that_cannot_be_had_is_refused(server, made, port, text):
    with pytest.raises(themis.errors.UsageError, match=re.escape(text)):
        serve(made, port=server.server_port if port is None else port)


def test_a_file_is_no_run(made):
    with pytest.raises(themis.errors.UsageError, match=r"a run must be a folder, .*summary\.json is a file"):
        serve(made / "summary.json")
