"""`themis shrink`: from a run folder, in another process, with what it writes beside the run."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from warm_python import warm_python

from themis.cli import main
from themis.runs.store.reader import Reader

MODULE = '''
import torch
from torch import nn

class Mean(nn.Module):
    """Answers 1 if the mean of an input is above one half."""

    def __init__(self, over=0.5):
        super().__init__()
        self.relu, self.over = nn.ReLU(), over

    def forward(self, x):
        over = self.relu(x).flatten(1).mean(1) - self.over
        return torch.stack([-over, over], 1)
'''
OPTIONS = ["--max-tests", "600", "--policy", "random", "--tolerance", "1e-9", "--quiet"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, its data, and a run: seeds break at shifts of 0.1 to 0.2, the last ones not at all."""
    home, before = tmp_path_factory.mktemp("home"), os.getcwd()
    (home / "averaging.py").write_text(MODULE)
    os.chdir(home)
    means = torch.cat([torch.linspace(0.3, 0.4, 30), torch.full((10,), 0.1)])
    inputs = means.view(-1, 1, 1, 1) + 0.02 * (torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    np.savez("data.npz", inputs=inputs, labels=torch.zeros(40, dtype=torch.long))
    sys.path.insert(0, str(home))
    run = ["run", "--model", "averaging:Mean", "--data", "npz:data.npz", "--perturb", "brightness + contrast", *OPTIONS]
    assert main([*run, "--out", "run"]) == 0
    yield home
    os.chdir(before)
    sys.path.remove(str(home))


@pytest.fixture
def run(home, tmp_path):
    """A copy of the run, to write to."""
    shutil.copytree(home / "run", tmp_path / "run")
    return tmp_path / "run"


def shrunk(run, *arguments):
    """The output of another process."""
    command = [warm_python(), "-m", "themis", "shrink", str(run), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run.parent)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if ": imported averaging from " not in line] == []
    return done.stdout


def refused(capsys, *arguments):
    """Exit code and error message, which must be one line."""
    code = main(["shrink", *map(str, arguments)])
    [line] = capsys.readouterr().err.splitlines()
    return code, line


def needed(home, seed_id):
    return 0.5 - float(np.load(home / "data.npz")["inputs"][seed_id].mean())


def test_the_most_telling_faults_are_shrunk_in_another_process(home, run):
    printed = shrunk(run)  # after lines of progress, if it is slow
    lines = printed[printed.index("fault  seed") :].splitlines()
    assert lines[0].split() == ["fault", "seed", "strength", "distance", "answer", "change"]
    found = json.loads((run / "shrunk.json").read_text())
    assert len(found["faults"]) == 20
    assert (found["no_longer_faults"], found["robustness"], found["changes"]) == ([], None, [])
    for line, each in zip(lines[1:21], found["faults"], strict=True):
        assert line.split()[:2] == [str(each["id"]), str(each["seed_id"])]
        assert line.endswith(each["sentence"])
        assert "change is not needed" in each["sentence"]
        assert each["after"]["change"] == 0
        assert each["after"]["shift"] == pytest.approx(needed(home, each["seed_id"]), rel=0.02)
        assert each["strength"] == pytest.approx(each["after"]["shift"] / 0.25, rel=1e-5)
    passes = sum(each["passes"] for each in found["faults"])
    assert lines[21:] == [f"Shrank 20 faults in {passes:,} passes", f"Details: {run / 'shrunk.json'}"]


def test_named_faults_are_printed_in_their_order_and_as_json(run):
    ids = [id for (id,) in Reader(run).select("id", order="id DESC", limit=3)]
    printed = json.loads(shrunk(run, *ids, "--simplest", "--json"))
    assert [each["id"] for each in printed["faults"]] == ids
    assert all(each["not_needed"] == ["change"] for each in printed["faults"])
    stored = json.loads((run / "shrunk.json").read_text())
    assert stored.pop("made_by").startswith("themis ")
    assert stored == printed


def test_the_curve_is_written_and_described(run):
    printed = shrunk(run, "--most", 2, "--curve")
    assert "30 of 40 seeds broke." in printed
    assert "correct under a random disturbance  seeds that the search could not break up to it" in printed
    assert re.search(r"0\.8 to 1 +\d\d\.\d% \(.* to .*\) +25\.0% \(.* to .*\)", printed)
    assert "the curve is an upper bound on the model's robustness" in printed
    curve = json.loads((run / "shrunk.json").read_text())["robustness"]
    assert (curve["seeds"], curve["failed"]) == (40, 30)
    assert curve["share"] == sorted(curve["share"], reverse=True)
    assert (run / "robustness.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run.glob("*.part"))


def test_the_run_is_left_unchanged(run, capsys):
    before = Reader(run).select()
    assert main(["shrink", str(run), "--most", "3", "--curve"]) == 0
    capsys.readouterr()
    assert Reader(run).select() == before
    assert main(["replay", str(run), str(before[0][0])]) == 0
    assert main(["resume", str(run), "--max-tests", "700", "--quiet"]) == 0
    assert Reader(run).rounds()[-1].tests == 700


def test_a_repaired_model_has_no_faults_to_shrink(run, capsys):
    some = [str(id) for (id,) in Reader(run).select("id", limit=2)]
    assert main(["shrink", str(run), *some, "--model", "averaging:Mean(over=2)"]) == 0
    printed = capsys.readouterr().out
    assert f"2 faults no longer break the model: {some[0]}, {some[1]}" in printed


def test_a_run_without_faults_says_so(home, run, capsys):
    quiet = ["run", "--model", "averaging:Mean(over=2)", "--data", "npz:data.npz", "--perturb", "brightness"]
    before = os.getcwd()
    os.chdir(home)
    assert main([*quiet, "--max-tests", "50", "--quiet", "--out", str(run.parent / "none")]) == 0
    os.chdir(before)
    capsys.readouterr()
    assert main(["shrink", str(run.parent / "none"), "--curve"]) == 0
    printed = capsys.readouterr().out
    assert "has no faults to shrink" in printed
    assert "0 of 40 seeds broke." in printed
    assert "strength (1 is shift -0.25 or 0.25)" in printed


def test_wrong_uses_are_rejected(run, capsys):
    assert refused(capsys, run, "--most", "0") == (2, "themis shrink: most must be a whole number of at least 1, got 0")
    assert refused(capsys, run, "9999999")[1].startswith("themis shrink: the run has no fault 9999999")
    code, line = refused(capsys, run, "1", "--most", "3")
    assert (code, line) == (
        2,
        "themis shrink: --most and fault numbers cannot be combined: leave one of them out",
    )
    assert refused(capsys, run.parent)[0] == 2
