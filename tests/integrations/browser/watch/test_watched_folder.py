"""The watched folder: when it is read, and how it follows a campaign until it ends or is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from asking import ALWAYS, ask, served
from warm_python import warm_python

from themis.report.page import read_view
from themis_integrations.browser import server as folder

pytestmark = pytest.mark.xdist_group("watch")
DEADLINE = 120
HOLD = (
    "import sys, time; from pathlib import Path; from themis.runs.store.files import Lock; "
    "lock = Lock(Path(sys.argv[1]))"
)
MODULE = """
import torch
from themis_lab.cli.demo import lenet5

def net():
    model = lenet5()
    model.load_state_dict(torch.load("lenet.pt", weights_only=True))
    return model
"""


def wait_for(find, what):
    """Wait until `find` returns something true, and return it."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        if found := find():
            return found
        time.sleep(0.05)
    pytest.fail(f"waited in vain for {what}")


def contents(path):
    """The content and the time of every file."""
    kept = [each for each in path.rglob("*") if each.is_file()]
    return {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in kept}


def test_a_folder_is_read_again_only_if_it_has_changed_and_is_never_written_to(run, monkeypatch):
    monkeypatch.setattr(folder, "REST_FACTOR", 0)
    readings = []

    def read(path):
        readings.append(path)
        return read_view(path)

    monkeypatch.setattr(folder, "read_view", read)
    before = contents(run)
    with served(run) as server:
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
def test_after_a_slow_reading_the_folder_is_left_alone_for_longer(run, monkeypatch, takes, rests):
    now = [100]
    for clock in ("monotonic", "thread_time"):
        monkeypatch.setattr(folder, clock, lambda: now[0])
    readings = []

    def read(path):
        readings.append(now[0])
        now[0] += takes
        return SimpleNamespace(as_json=lambda: {"n": len(readings)})

    monkeypatch.setattr(folder, "read_view", read)
    watched = folder.WatchedFolder(run)
    for _ in range(100):
        os.utime(run / "summary.json", (0, now[0]))  # it changes all the time
        assert json.loads(watched.look().body)["n"] == len(readings)
        now[0] += 1
    assert {after - before for before, after in pairwise(readings)} == {takes + rests}


def test_the_server_waits_for_a_missing_run_which_may_disappear_and_return(run, made):
    elsewhere = run.with_name("<elsewhere>")
    with served(elsewhere) as server:
        for _ in range(2):
            status, headers, page = ask(server, "/?token={token}")
            assert (status, ALWAYS.items() <= dict(headers).items()) == (200, True)
            assert b"&lt;elsewhere&gt; does not contain a run yet" in page
            assert b'http-equiv="refresh"' in page
            assert b"<script" not in page
            status, headers, body = ask(server)
            assert (status, headers["Content-Type"]) == (503, "application/json")
            assert "does not contain a run yet" in json.loads(body)["message"]
            elsewhere.mkdir(exist_ok=True)
        elsewhere.rmdir()
        run.rename(elsewhere)
        assert json.loads(ask(server)[2])["state"] == "ended"
        shutil.rmtree(elsewhere)
        assert ask(server)[0] == 503
        shutil.copytree(made, elsewhere)
        assert ask(server)[0] == 200


@pytest.mark.parametrize("name", ["run.sqlite", "summary.json"])
def test_a_damaged_run_is_a_plain_message_until_it_is_repaired(run, name, monkeypatch):
    monkeypatch.setattr(folder, "REST_FACTOR", 0)
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


def test_a_page_that_cannot_be_drawn_is_a_plain_response(run, monkeypatch):
    def draw(view, *, live):
        raise KeyError("subject")

    monkeypatch.setattr(folder, "render", draw)
    with served(run) as server:
        assert ask(server, "/?token={token}")[::2] == (
            500,
            b"500 Internal Server Error: unexpected KeyError: 'subject'\n",
        )
        assert ask(server)[0] == 200


def test_a_killed_campaign_is_noticed_although_no_file_changes(run, monkeypatch):
    monkeypatch.setattr(folder, "REST_FACTOR", 0)
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


def test_a_campaign_in_another_process_is_followed_from_start_to_end(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "REST_FACTOR", 0)
    torch.save(trained[0].state_dict(), tmp_path / "lenet.pt")
    (tmp_path / "watched.py").write_text(MODULE)
    words = ["--model", "watched:net", "--data", "digits", "--perturb", "gaussian", "--magnitude", "0.3", "--quiet"]
    limits = ["--max-tests", "1000000", "--max-seeds", "200", "--tolerance", "1e-9", "--plateau", "none"]
    command = [warm_python(), "-m", "themis", "run", *words, *limits, "--out", "run"]
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
