"""`themis compare` as a user types it: on a tiny net, in processes, interrupted, killed, and resumed."""

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from torch import nn
from user_module import go_to

from themis import UsageError
from themis.cli import main
from themis.errors import ModelError
from themis.experiments import Listener
from themis.runs.source import Origin
from themis_lab.comparison.api import compare
from themis_lab.comparison.cells import CellRunner

MODULE = """
import multiprocessing
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
        with torch.no_grad():
            self.net[-1].bias -= self.net(torch.full((1, 1, 4, 4), 0.5))[0]  # no class is the usual one

    def forward(self, x):
        if multiprocessing.parent_process() and os.path.exists("die"):
            os.remove("die")
            os._exit(9)
        return self.net(x)

def data():
    return torch.rand(150, 1, 4, 4, generator=torch.Generator().manual_seed(0))

def childless():
    if multiprocessing.parent_process():
        raise ZeroDivisionError("no children")
    return Net()
"""
pytestmark = pytest.mark.xdist_group("compare_end_to_end")
COMMAND = ["compare", "--model", "tiny_net:Net", "--data", "tiny_net:data", "--perturb", "gaussian"]
SMALL = ["--techniques", "nc,scheduled", "--magnitudes", "0.1,0.3,0.8", "--max-passes", "400", "--campaigns", "2"]
FILES = ("compare.json", "table.md", "faults-given.png", "correlation-given.png")


@pytest.fixture
def here(tmp_path, monkeypatch):
    return go_to(tmp_path, monkeypatch, MODULE, "tiny_net")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a comparison that one process ran, and what was printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        folder = go_to(tmp_path_factory.mktemp("whole"), patch, MODULE, "tiny_net")
        assert main([*COMMAND, *SMALL, "--workers", "1", "--out", "out"]) == 0
    return folder / "out", printed.getvalue()


def timeless(value):
    """Plain data without times."""
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if "seconds" not in name}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def result(folder):
    return timeless(json.loads((folder / "compare.json").read_text()))


def cells(folder):
    stored = {str(each): json.loads(each.read_text()) for each in sorted(folder.glob("cells/*/*.json"))}
    return {name: timeless({**cell, "sha256": None}) for name, cell in stored.items()}


def test_it_prints_tables_and_writes_everything(whole):
    out, said = whole
    assert "24 campaigns" in said
    assert "Faults found, the given magnitudes" in said
    assert "Correlation of faults with the error rate" in said
    assert max(map(len, said.splitlines()[:-1])) <= 100
    assert said.splitlines()[-1].startswith("Results in out: compare.json, table.md, ")
    assert all((out / name).stat().st_size > 100 for name in FILES)
    found = result(out)
    assert found["failed_cells"] == found["degenerate_grids"] == 0
    assert found["criteria"] == {"nc": "nc(threshold=0.5)"}
    (grid,) = found["grids"]
    order = [row["technique"] for row in grid["rows"]]
    assert sorted(order) == ["corners", "nc", "random", "scheduled"]
    assert list(grid["counts"]) == order
    assert list(found["seeds"]) == ["search", "judge"]
    assert found["seeds"]["search"] == found["cells"][0]["seeds"]
    assert f"{found['seeds']['search']} search, {found['seeds']['judge']} judge." in said
    assert grid["rates"] == sorted(grid["rates"])
    for row in grid["rows"]:
        assert row["n_cells"] == 6
        assert row["total"]["passes"][0] <= 3 * 400
        assert row["r"]["distinct"][1] <= row["r"]["distinct"][0] <= row["r"]["distinct"][2]
        assert ("selected_distinct" in row["r"]) == (row["technique"] == "nc")
    by_hand = [each["distinct_faults"] for each in found["cells"] if each["technique"] == "corners"]
    corners = grid["rows"][order.index("corners")]
    assert corners["total"]["distinct_faults"][0] == sum(by_hand) / 2
    assert grid["counts"]["corners"] == [sum(by_hand[k : k + 2]) / 2 for k in (0, 2, 4)]
    rates = np.array(grid["rates"])
    assert corners["r"]["distinct"][0] == pytest.approx(np.corrcoef(rates, grid["counts"]["corners"])[0, 1])
    assert "| corners |" in (out / "table.md").read_text()


def test_the_same_command_resumes_and_another_is_refused(whole, here, capsys):
    shutil.copytree(whole[0], here / "out")
    times = {path: path.stat().st_mtime_ns for path in here.glob("out/cells/*/*.json")}
    assert len(times) == 24
    assert main([*COMMAND, *SMALL, "--workers", "1", "--out", "out", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert timeless({**printed, "out": None}) == {**result(here / "out"), "out": None}
    assert main([*COMMAND, *SMALL, "--workers", "1", "--out", "out", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in here.glob("out/cells/*/*.json")} == times
    assert main([*COMMAND, *SMALL, "--max-passes", "300", "--out", "out"]) == 2
    assert "max_passes 400 then, 300 now" in capsys.readouterr().err
    assert main([*COMMAND, *SMALL, "--perturb", "fgsm", "--out", "out"]) == 2
    assert "another comparison" in capsys.readouterr().err


def test_a_folder_grows_and_is_summarised_again(here, capsys):
    first = ["--techniques", "nc", "--magnitudes", "0.1,0.8", "--max-passes", "200", "--campaigns", "1"]
    more = ["--techniques", "scheduled,NC", "--magnitudes", "0.8,0.1,0.3,grid", "--resamples", "50", "--campaigns", "2"]
    assert main([*COMMAND, *first, "--workers", "1", "--out", "out", "--quiet"]) == 0
    times = {path: path.stat().st_mtime_ns for path in here.glob("out/cells/*/*.json")}
    rates = json.loads((here / "out" / "rates.json").read_text())
    for out in ("out", "whole"):
        assert main([*COMMAND, "--max-passes", "200", *more, "--workers", "1", "--out", out, "--quiet"]) == 0
    assert len(times) == 6
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert result(here / "out") == result(here / "whole")
    grown = json.loads((here / "out" / "rates.json").read_text())
    assert rates["errors"].items() < grown["errors"].items()
    fewer = ["--techniques", "nc", "--magnitudes", "grid", "--max-passes", "200", "--campaigns", "1"]
    assert main([*COMMAND, *fewer, "--workers", "1", "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert "choosing the grid" not in said
    assert "measuring error rates" not in said
    assert not (here / "out" / "faults-given.png").exists()
    assert json.loads((here / "out" / "rates.json").read_text())["errors"] == grown["errors"]


def test_a_folder_in_the_place_of_a_figure_is_refused(whole, here, capsys):
    shutil.copytree(whole[0], here / "out")
    (here / "out/faults-given.png").unlink()
    (here / "out/faults-given.png").mkdir()
    assert main([*COMMAND, *SMALL, "--out", "out", "--quiet"]) == 2
    message = "out/faults-given.png must be a file, but it is a folder: move it to another place"
    assert f"themis compare: {message}\n" in capsys.readouterr().err


def test_what_fails_before_the_first_campaign_leaves_no_folder(here, capsys):
    assert main([*COMMAND, *SMALL, "--max-passes", "10", "--out", "out"]) == 2
    assert not (here / "out").exists()


def test_a_criterion_that_cannot_be_fitted_is_reported_once(here, capsys):
    assert main([*COMMAND, *SMALL, "--techniques", "lsa(layers=nope)", "--workers", "1", "--out", "out"]) == 3
    said = capsys.readouterr().out
    assert said.count("layers must be among those given") == 3  # as it happens, and below both tables
    assert "lsa(layers=['nope'])" in said or "lsa(layers=nope)" in said


def test_ctrl_c_keeps_finished_campaigns_and_the_result_is_the_same(whole, here, capsys, monkeypatch):
    run, left = CellRunner.run, iter(range(7))

    def interrupted(runner, cell):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run(runner, cell)

    with monkeypatch.context() as patched:
        patched.setattr(CellRunner, "run", interrupted)
        assert main([*COMMAND, *SMALL, "--workers", "1", "--out", "out"]) == 130
    said = capsys.readouterr().out
    assert "Interrupted; 7 of 24 campaigns are kept. To resume, use the same command with --out out" in said
    assert len(cells(here / "out")) == 7
    assert main([*COMMAND, *SMALL, "--workers", "1", "--out", "out"]) == 0
    assert "24 campaigns, 7 already finished" in capsys.readouterr().out
    assert result(here / "out") == result(whole[0])


def test_two_workers_find_what_one_finds_even_after_a_kill(whole, here):
    code = "import sys; from themis import cli; sys.exit(cli.main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *COMMAND, *SMALL, "--workers", "2", "--out", "two", "--quiet"]
    process = subprocess.Popen(words)
    while process.poll() is None and len(list(here.glob("two/cells/*/*.json"))) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(cells(here / "two")) >= 3
    assert main([*COMMAND, *SMALL, "--workers", "2", "--out", "two", "--quiet"]) == 0
    assert result(here / "two") == result(whole[0])
    assert [*cells(here / "two").values()] == [*cells(whole[0]).values()]


def test_a_worker_that_dies_costs_its_cell_and_the_others_continue(here, capsys):
    (here / "die").touch()
    assert main([*COMMAND, *SMALL, "--workers", "2", "--out", "out"]) == 3
    said = capsys.readouterr().out
    assert "failed: its process ended with exit code 9" in said
    found = result(here / "out")
    assert found["failed_cells"] == 1
    rows = {row["technique"]: row for row in found["grids"][0]["rows"]}
    assert sum(bool(row["errors"]) for row in rows.values()) == 1
    assert sum(bool(row["r"]) for row in rows.values()) == 3
    assert main([*COMMAND, *SMALL, "--workers", "1", "--out", "out", "--quiet"]) == 0
    assert result(here / "out")["failed_cells"] == 0


def test_a_worker_that_cannot_make_the_target_is_explained(here):
    origin = Origin(model="tiny_net:childless", data="tiny_net:data")
    with pytest.raises(ModelError, match=r"ZeroDivisionError: no children.*__main__"):
        compare(origin=origin, workers=2, techniques="scheduled", magnitudes="0.2,0.3", campaigns=1, max_passes=300)


class Fragile(nn.Module):
    """Fails while `is_broken` is set."""

    is_broken = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
        with torch.no_grad():
            self.net[-1].bias -= self.net(torch.full((1, 1, 4, 4), 0.5))[0]

    def forward(self, x):
        if self.is_broken:
            raise ZeroDivisionError("worn out")
        return self.net(x)


def test_a_failing_cell_is_reported_and_the_others_continue(here):
    net, told = Fragile(), []

    class Breaking(Listener):
        def on_cell_end(self, end):
            told.append("error" in end.result)
            net.is_broken = end.n_done in (3, 4)  # the fourth and fifth to run: corners, at two magnitudes

    inputs = torch.rand(150, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    options = {"magnitudes": [0.1, 0.3, 0.8], "campaigns": 1, "max_passes": 300, "techniques": ["scheduled"]}
    found = compare(net, inputs, "gaussian", listener=Breaking(), out=here / "out", **options)
    assert told == [False] * 3 + [True] * 2 + [False] * 4
    assert [each["technique"] for each in found.failed] == ["corners", "corners"]
    assert "worn out" in found.failed[0]["error"]
    rows = {row.technique: row for row in found.grids[0].rows}
    assert rows["corners"].total == rows["corners"].r == {}
    assert rows["random"].r["rivals"] == rows["random"].total["rivals"] == ["scheduled"]
    text = (here / "out" / "table.md").read_text()
    assert "| corners | failed | - |" in text
    assert "worn out" in text


def test_in_memory_with_the_grid_and_nothing_on_disk(here):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    notes = []

    class Notes(Listener):
        def on_note(self, text):
            notes.append(text)

    found = compare(
        net, torch.rand(200, 1, 4, 4), "gaussian", techniques="nc", campaigns=1, max_passes=200, listener=Notes()
    )
    (grid,) = found.grids
    assert grid.name == "grid"
    assert "choosing the grid" in notes[0]
    assert len(grid.magnitudes) >= 3
    assert list(here.iterdir()) == [here / "tiny_net.py"]
    assert found.seeds["judge"] + found.seeds["grid"] < 200


def test_what_cannot_be_made_again_stays_in_one_process(here):
    net, inputs = nn.Linear(4, 3), torch.rand(50, 4)
    with pytest.raises(UsageError, match="workers must be 1"):
        compare(net, inputs, "gaussian", workers=2)
    with pytest.raises(UsageError, match="target and data must be given"):
        compare(perturbation="gaussian")
    with pytest.raises(UsageError, match="max_passes must leave room"):
        compare(net, inputs, "gaussian", max_passes=10, magnitudes="0.1")
    with pytest.raises(UsageError, match="rivals"):
        compare(net, inputs, "gaussian", techniques="deepxplore")
    origin = Origin(model="tiny_net:Net", data="tiny_net:data")
    options = {"techniques": "nc", "magnitudes": "0.1,0.2", "max_passes": 200, "campaigns": 1}
    with pytest.raises(UsageError, match="training data"):
        compare(origin=origin, workers=2, train=inputs, perturbation="gaussian", **options)


def test_wrong_options_are_one_line(here, capsys):
    assert main([*COMMAND[:-2]]) == 2
    assert "--perturb must be given" in capsys.readouterr().err
    assert main([*COMMAND, "--techniques", "kmmc"]) == 2
    assert "policies or criteria, got 'kmmc'" in capsys.readouterr().err
    assert main([*COMMAND, "--workers", "0"]) == 2
    assert "workers must be at least 1" in capsys.readouterr().err
    assert main([*COMMAND, *SMALL, "--print-config"]) == 0
    assert "max_passes: 400" in capsys.readouterr().out
