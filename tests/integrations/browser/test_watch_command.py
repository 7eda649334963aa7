"""`themis watch`: in a process of its own, as a user starts and ends it."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from http.client import HTTPConnection

import pytest
import torch
from warm_python import warm_python

import themis
from themis.cli import main

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)(/)\?token=([\w-]{43})")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("watched") / "a run"
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    data = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    themis.run(net, data, "gaussian", magnitude=0.3, max_tests=300, out=path)
    return path


@contextmanager
def watching(run, *options, program=("-m", "themis"), **environment):
    """The command, and what it has printed up to the address."""
    command = [warm_python(), *program, "watch", str(run), *options]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, **how)
    try:
        printed = ""
        while not ADDRESS.search(printed):
            line = process.stdout.readline()
            if not line:
                pytest.fail(f"no address: {printed}{process.stderr.read()}")
            printed += line
        yield process, printed
    finally:
        process.kill()
        process.communicate()


def fetch(printed, path="/view.json"):
    port, _, token = ADDRESS.search(printed).groups()
    connection = HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("GET", f"{path}?token={token}")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_watch_prints_an_address_that_shows_the_run_until_ctrl_c(run):
    with watching(run, "--no-browser") as (process, printed):
        assert printed.startswith(f"Serving {run} at http://127.0.0.1:")
        assert printed.count("\n") == 1
        status, body = fetch(printed)
        assert (status, json.loads(body)["counts"]["tests"]) == (200, 300)
        assert fetch(printed, "/")[1].startswith(b"<!DOCTYPE html>")
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=240)
        assert (process.returncode, rest) == (130, ("", "themis watch: interrupted\n"))
        port = int(ADDRESS.search(printed)[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)


PATIENT = """
import sys
from themis.cli import main
from themis_integrations.browser.server import Handler
Handler.timeout = 3600
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_stops_the_server_even_if_a_browser_is_connected(run):
    with watching(run, "--no-browser", program=("-c", PATIENT)) as (process, printed):
        with socket.create_connection(
            ("127.0.0.1", int(ADDRESS.search(printed)[1]))
        ):  # stays connected without a request
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=240)
        assert process.returncode == 130


def test_a_browser_is_opened_at_the_address_unless_no_browser_is_set(run, tmp_path):
    note = tmp_path / "opened"
    code = f"import sys; open({str(note)!r}, 'a').write(sys.argv[1] + chr(10))"
    browser = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} %s"
    with watching(run, BROWSER=browser) as (process, printed):
        while not note.exists() or not note.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.05)
        assert note.read_text().strip() == ADDRESS.search(printed)[0]
    note.unlink()
    with watching(run, "--no-browser", BROWSER=browser) as (process, printed):
        assert fetch(printed)[0] == 200
        assert not note.exists()


def test_without_a_browser_a_message_is_printed_and_the_server_keeps_running(run):
    with watching(run, BROWSER="/none/such %s") as (process, printed):
        assert "could not open a browser" in process.stderr.readline()
        assert fetch(printed)[0] == 200


def test_watch_waits_for_a_run_that_has_not_started(tmp_path):
    with watching(tmp_path / "later", "--no-browser") as (_, printed):
        assert printed.startswith(
            f"{tmp_path / 'later'} does not contain a run yet: it is shown as soon as a campaign starts there\n"
        )
        assert fetch(printed)[0] == 503
        assert not (tmp_path / "later").exists()


def test_impossible_options_are_reported_in_one_line(run, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["watch", str(run), "--no-browser", "--port", str(port)]) == 2
        text = f"themis watch: port must be free, but {port} is in use: choose another, or leave it out\n"
        assert capsys.readouterr() == ("", text)
    for words, text in (
        ([str(run), "--port", "x"], "port must be a whole number, got 'x'"),
        ([str(run), "--port", "70000"], "port must lie in 0..65535, got 70000"),
        ([str(run / "summary.json")], f"a run must be a folder, but {run / 'summary.json'} is a file: check the path"),
        ([], "RUN must be given: see themis watch --help"),
    ):
        assert main(["watch", *words]) == 2
        assert capsys.readouterr() == ("", f"themis watch: {text}\n")


def free_port():
    """A port that nobody else is given: the system chooses ports from 32768 on, and another test may ask for one."""
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    return pytest.fail("no port is free")


def test_the_port_can_be_chosen(run):
    port = free_port()
    with watching(run, "--no-browser", "--port", str(port)) as (_, printed):
        assert int(ADDRESS.search(printed)[1]) == port
        assert fetch(printed)[0] == 200
