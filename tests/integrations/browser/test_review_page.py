"""The page that shows faults one by one and stores marks: its server, and the page in a browser."""

import json
import shutil
import sys
import threading
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import pytest
import torch
from torch import nn

import themis
from themis import DataError, UsageError
from themis.cli import main
from themis.runs.analysis.review import REVIEW_FILE, read_review
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader
from themis_integrations.browser.marking import Session, serve_review

pytestmark = pytest.mark.xdist_group("review")
OPTIONS = {"coverage": None, "uniform_share": 0.5, "max_tests": 400, "plateau": None}


def tiny_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


DATA = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("reviewed") / "run"
    themis.run(themis.Target(tiny_net(), bounds=(0, 1)), DATA, "gaussian(sigma=0:0.5)", out=path, **OPTIONS)
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def open_session(run, reviewer="ann", number=5, data=DATA):
    with closing(Reader(run)) as reader:
        return Session(Replayer(reader, themis.Target(tiny_net(), bounds=(0, 1)), data), reviewer, number)


@contextmanager
def served(session):
    with serve_review(session) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, body=None, **headers):
    """Status and content of an answer; with a body, of a mark that the page sends."""
    own = f"http://127.0.0.1:{server.server_port}"
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    headers = {"Origin": own, **headers}
    target = path if "?" in path else f"{path}?token={server.token}"
    given = {name: value for name, value in headers.items() if value is not None}
    connection.request("GET" if body is None else "POST", target, body, given)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, json.loads(content) if content.startswith("{") else content


def test_a_mark_is_in_the_run_folder_before_it_is_answered(run):
    with served(open_session(run)) as server:
        status, fault = ask(server, "/fault/0")
        assert (status, fault["n"], fault["marked"], fault["mark"]) == (200, 5, 0, None)
        assert all(fault[name].startswith("data:image/png;base64,") for name in ("clean", "disturbed"))
        assert fault["clean"] != fault["disturbed"]
        assert all(fault[name] for name in ("before", "after"))
        assert "sigma" in fault["facts"]
        assert ask(server, "/fault/0", "valid") == (200, {"n": 5, "marked": 1, "first": 1, "reviewer": "ann"})
        assert json.loads((run / REVIEW_FILE).read_text())["mark"] == "valid"
        assert ask(server, "/fault/0", "undone")[1]["marked"] == 0
        for k in range(5):
            ask(server, f"/fault/{k}", "invalid")
        assert ask(server, "/fault/5")[1]["result"] == ["valid fault rate: unknown: 5 of at least 30 faults marked"]
    assert read_review(run).invalid == 5
    assert open_session(run).first == 5
    assert open_session(run, "bob").first == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Referer": "http://evil.example/"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Length": "x"}, 413),
        ({"Content-Length": "100000"}, 413),
    ],
    ids=str,
)
def test_a_mark_that_the_page_did_not_send_is_refused(run, headers, status):
    with served(open_session(run)) as server:
        assert ask(server, "/fault/0", "valid", **headers)[0] == status
        assert ask(server, "/fault/0?token=wrong", "valid")[0] == 403
        assert ask(server, "/fault/0?", "valid")[0] == 403
    assert not (run / REVIEW_FILE).exists()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/fault/5", "valid", 404),
        ("/fault/6", None, 404),
        ("/fault/-1", None, 404),
        ("/fault/../../run.sqlite", None, 404),
        ("/run.sqlite", None, 404),
        ("/", "valid", 404),
        ("/fault/0", "good", 400),
        ("/fault/0", "", 400),
    ],
)
def test_nothing_else_can_be_read_or_stored(run, path, body, status):
    with served(open_session(run)) as server:
        assert ask(server, path, body)[0] == status
    assert not (run / REVIEW_FILE).exists()


def test_inputs_that_were_not_kept_are_made_again(run, made, tmp_path):
    themis.run(
        themis.Target(tiny_net(), bounds=(0, 1)),
        DATA,
        "gaussian(sigma=0:0.5)",
        out=tmp_path / "bare",
        max_stored=0,
        **OPTIONS,
    )
    with served(open_session(run)) as kept, served(open_session(tmp_path / "bare")) as again:
        assert [ask(again, f"/fault/{k}") for k in range(5)] == [ask(kept, f"/fault/{k}") for k in range(5)]
    with pytest.raises(DataError, match=r"must be shown as it was, but it is not reproduced: .*data"):
        open_session(tmp_path / "bare", data=DATA.flip(0))


def test_only_pictures_are_reviewed(tmp_path):
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    data = torch.rand(30, 64, generator=torch.Generator().manual_seed(0))
    themis.run(themis.Target(net, bounds=(0, 1)), data, "gaussian(sigma=0:0.5)", out=tmp_path / "run", **OPTIONS)
    with pytest.raises(UsageError, match=r"only pictures can be reviewed, but the inputs .* have shape \[64\]"):
        open_session(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--reviewer", "a}"], "the reviewer's name must be"),
        (["--sample", "0"], "the sample must have at least 1 fault"),
        (["--port", "99999"], "port must lie in 0..65535"),
    ],
)
def test_wrong_options_are_refused_in_one_line(run, capsys, options, reason):
    assert main(["review", str(run), "--no-browser", *options]) == 2
    assert reason in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_a_run_without_random_faults_is_refused(tmp_path):
    themis.run(
        themis.Target(tiny_net(), bounds=(0, 1)), DATA, "gaussian(sigma=0:1e-6)", out=tmp_path / "run", **OPTIONS
    )
    with pytest.raises(DataError, match="must have faults of the uniform stream"):
        open_session(tmp_path / "run")


@pytest.fixture
def page(run, request):
    """The page for reviews in a browser."""
    from browsing import PHONE, need_browser, visited

    need_browser()
    browser = request.getfixturevalue("browser")
    with served(open_session(run)) as server, visited(browser, server.url, viewport=PHONE) as page:
        yield page


def test_the_keys_mark_undo_and_go_back(run, page):
    from browsing import is_as_wide_as_the_window, violations

    def at(page, number):
        page.wait_for_selector(f"h2:text-is('Fault {number} of 5')")

    at(page, 1)
    assert violations(page) == []
    assert is_as_wide_as_the_window(page)
    for number, key in enumerate("vi?", 2):
        page.keyboard.press(key)
        at(page, number)
    page.keyboard.press("u")
    at(page, 3)
    page.keyboard.press("ArrowLeft")
    at(page, 2)
    assert page.inner_text("[aria-pressed=true]") == "Invalid (i)"
    page.keyboard.press("v")
    at(page, 3)
    page.get_by_role("button", name="Valid (v)", exact=True).click()
    at(page, 4)
    assert page.inner_text("#state") == "3 of 5 marked by ann"
    page.keyboard.press("v")
    at(page, 5)
    page.keyboard.press("i")
    page.wait_for_selector("text=valid fault rate: unknown")
    review = read_review(run)
    assert (review.valid, review.invalid, review.unsure) == (4, 1, 0)


def test_help_imports_neither_torch_nor_numpy():
    import subprocess

    code = "import sys, themis.cli; themis.cli.main(['review', '--help']); print({'torch', 'numpy'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    assert "themis review runs/first --results" in printed
    assert printed.splitlines()[-1] == "set()"
