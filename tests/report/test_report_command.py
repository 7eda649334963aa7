"""`themis report`, and the report at the end of a run."""

import json
import shutil

import pytest
import torch
from user_module import SMALL, go_to

import themis
from themis.cli import main

pytestmark = pytest.mark.xdist_group("report_command")

MODULE = (
    SMALL
    + """
class WornOut(nn.Module):
    left, error = 12, ZeroDivisionError("worn out")

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        type(self).left -= 1
        if self.left == 0:
            raise self.error
        return self.net(x)

class Stopped(WornOut):
    left, error = 12, KeyboardInterrupt
"""
)
BASE = ["--data", "mine:data", "--perturb", "gaussian", "--magnitude", "0.5", "--tolerance", "1e-9"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    return go_to(tmp_path, monkeypatch, MODULE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "run"
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    data = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert len(themis.run(net, data, "gaussian", magnitude=0.5, max_tests=300, out=out).faults) > 10
    return out


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made, tmp_path / "a run")


def test_report_writes_one_file_and_names_it(copied, tmp_path, capsys):
    assert main(["report", str(copied)]) == 0
    assert capsys.readouterr().out.startswith(f"Report: {copied / 'report.html'} (")
    assert (copied / "report.html").read_text().startswith("<!DOCTYPE html>")
    other = tmp_path / "other.html"
    assert main(["report", str(copied), "--out", str(other), "--most-pictures", "0", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert other.stat().st_size < (copied / "report.html").stat().st_size
    assert main(["report", str(copied), "--out", str(other), "--quiet"]) == 0, "an earlier report is replaced"
    other.write_text("<!DOCTYPE html><title>mine</title>")
    assert main(["report", str(copied), "--out", str(other)]) == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert main(["report", str(copied), "--out", str(other), "--force"]) == 0
    assert main(["report", str(copied), "--out", str(tmp_path / "diff.md")]) == 2
    assert "--out must end in .html or .htm, got " in capsys.readouterr().err


def test_a_run_ends_with_its_report(here, capsys):
    assert main(["run", "--model", "mine:net", *BASE, "--max-tests", "300", "--out", "one"]) == 0
    assert "Report: one/report.html\n" in capsys.readouterr().out
    before = (here / "one/report.html").read_text()
    assert main(["resume", "one", "--max-tests", "600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == "one/report.html"
    assert (here / "one/report.html").read_text() != before
    assert main(["run", "--model", "mine:net", *BASE, "--max-tests", "300", "--out", "two", "--no-report"]) == 0
    assert "Report" not in capsys.readouterr().out
    assert not (here / "two/report.html").exists()


def test_a_run_that_fails_or_is_stopped_also_has_a_report(here, capsys):
    assert main(["run", "--model", "mine:WornOut", *BASE, "--out", "failed", "--quiet"]) == 3
    assert "worn out" in (here / "failed/report.html").read_text()
    assert main(["run", "--model", "mine:Stopped", *BASE, "--out", "stopped", "--quiet"]) == 130
    assert "the user stopped it" in (here / "stopped/report.html").read_text()


def test_a_report_that_cannot_be_written_does_not_lose_the_result(here, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr("themis.report.page.write_report", fail)
    assert main(["run", "--model", "mine:net", *BASE, "--max-tests", "300", "--out", "one"]) == 0
    said = capsys.readouterr()
    assert "Results in one" in said.out
    message = "themis: could not write the report: no space left; themis report one tries again"
    assert said.err.splitlines() == [f"themis run: imported mine from {here / 'mine.py'}", message]


@pytest.mark.parametrize(
    ("name", "content", "code", "text"),
    [
        ("run.sqlite", b"not a database at all" * 99, 3, "cannot be read"),
        ("run.sqlite", None, 2, "must be a folder with run.sqlite"),
        ("summary.json", b"{half", 3, "is damaged"),
        ("shrunk.json", b"{half", 3, "write it again with themis shrink"),
        ("tensors", b"\x00" * 64, 3, "is damaged"),
    ],
)
def test_a_corrupted_folder_is_one_line_and_an_exit_code(copied, capsys, name, content, code, text):
    for each in copied.glob("run.sqlite-*"):
        each.unlink()
    at = next((copied / "tensors").iterdir()) if name == "tensors" else copied / name
    at.unlink() if content is None else at.write_bytes(content)
    assert main(["report", str(copied)]) == code
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
    assert not (copied / "report.html").exists()


def test_usage_errors(copied, capsys):
    assert main(["report", str(copied / "nowhere")]) == 2
    assert main(["report"]) == 2
    assert main(["report", str(copied), "--most-pictures", "-1"]) == 2
    assert "--most-pictures must be 0 or more, got -1" in capsys.readouterr().err
