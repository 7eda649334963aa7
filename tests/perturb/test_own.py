"""A user's own perturbation, as in the documentation: search, store, resume and replay need no further code."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import themis
from themis.cli import main
from themis.errors import ModelError
from themis.perturb import PERTURBATIONS, columns

DOCUMENT = Path(__file__).parents[2] / "docs" / "own-perturbation.md"
MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 16), nn.ReLU(), nn.Linear(16, 4))

def data():
    return torch.rand(30, 3, 10, 10, generator=torch.Generator().manual_seed(0))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with the example of the documentation."""
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "BAND = " in block
    ]
    (tmp_path / "own_band.py").write_text(example + MODEL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_band", None)
    sys.path[:] = [each for each in sys.path if each != str(tmp_path)]


def test_the_example_is_about_ten_lines(folder):
    lines = (folder / "own_band.py").read_text().partition(MODEL.strip()[:12])[0].splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith(("import", "#", '"""'))]
    assert len(code) <= 14


@pytest.mark.parametrize("words", ["own_band:BAND", "own_band:BAND(depth=0:0.5) + gaussian"])
def test_runs_with_it_are_resumed_and_replayed_by_its_location(folder, words, capsys):
    run = ["--model", "own_band:net", "--data", "own_band:data", "--perturb", words, "--magnitude", "1.5"]
    assert main(["run", *run, "--max-tests", "600", "--out", "run", "--quiet"]) == 0
    sys.modules.pop("own_band")
    assert main(["resume", "run", "--max-tests", "1200", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["faults", "run", "--json"]) == 0
    faults = json.loads(capsys.readouterr().out)
    assert faults
    assert main(["replay", "run", str(faults[0]["id"]), "--json"]) == 0
    (replay,) = json.loads(capsys.readouterr().out)["faults"]
    assert replay["is_same"]
    assert replay["input"] == {"is_kept": True, "gap": 0}


def test_it_can_be_drawn(folder):
    assert main(["perturbations", "own_band:BAND", "--sheet", "own.png"]) == 0
    assert Path("own.png").stat().st_size > 10_000


def add_unseeded(inputs, theta, rng, context):
    return inputs + columns(theta, inputs)[0] * torch.rand_like(inputs)


def scale_by_batch(inputs, theta, rng, context):
    return inputs * (1 - columns(theta, inputs)[0] * inputs.max())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (add_unseeded, "called twice: draw random numbers with rng.uniform and rng.normal, not with torch"),
        (scale_by_batch, "gives an input another result alone than in a batch: treat each input by itself"),
    ],
)
def test_one_whose_faults_could_not_be_replayed_is_refused(function, message, tmp_path):
    own = themis.Perturbation("own", (themis.Theta("by", 0, 0.5),), function)
    net, data = torch.nn.Linear(6, 3), torch.linspace(0, 1, 60).view(10, 6)
    for perturbation in (own, own + PERTURBATIONS["gaussian"]):
        with pytest.raises(ModelError, match=message):
            themis.run(net, data, perturbation, max_tests=20, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
