"""A run goes on only with the model, the preprocessing and the perturbation that it began with, whatever names say."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from torch import nn

import themis
from themis import ModelError
from themis.cli import main
from themis.runs.store.reader import Reader

MINE = """
import torch
import themis
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.last(torch.{activation}(self.first(x.flatten(1))))

def make_net():
    net = Net()
    net.load_state_dict(torch.load("weights.pt"))
    return themis.Target(net, preprocess=lambda x: {scale} * (x.clamp(min={least}) - 0.5))

def make_data():
    return torch.load("data.pt")

def dim(inputs, theta, rng, context):
    return inputs - {strength} * theta[:, 0, None, None, None] * rng.uniform(*inputs.shape[1:])

DIM = themis.Perturbation("dim", (themis.Theta("much", 0, 0.9),), dim)
"""
OWN = {"activation": "relu", "scale": 1, "strength": 1, "least": 0}
CHANGES = {"activation": "tanh", "scale": 3, "strength": 0.2, "least": 0.49}
MESSAGES = {
    "activation": "the model must answer",
    "scale": "the model must answer",
    "strength": "perturbation 'mine:DIM' must",
    "least": "the model must answer",  # only disturbed inputs have such values
}


def write_code(folder, **changes):
    (folder / "mine.py").write_text(MINE.format(**OWN | changes))
    sys.modules.pop("mine", None)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the user's code, in which the run `run` was made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # code of the same second and size would be taken from it
    write_code(tmp_path)
    torch.manual_seed(0)  # kernels draw different numbers, so that the same ones are kept
    sizes = {"first.weight": (32, 16), "first.bias": (32,), "last.weight": (3, 32), "last.bias": (3,)}
    torch.save({name: torch.randn(size) / 4 for name, size in sizes.items()}, "weights.pt")
    torch.save(0.5 + torch.rand(60, 1, 4, 4) / 2, "data.pt")
    options = "--model mine:make_net --data mine:make_data --perturb mine:DIM --max-tests 200 --split 0.5,0.2,0.3"
    assert main(["run", *options.split(), "--out", "run"]) == 0
    yield tmp_path
    sys.modules.pop("mine", None)


def forget_faults(run):
    """Make a run one that has found no fault whose inputs were stored."""
    with closing(sqlite3.connect(run / "run.sqlite")) as database, database:
        database.execute("UPDATE faults SET tensors = NULL")


RESUME = "resume run --max-tests 300"


@pytest.mark.parametrize("forget", [lambda run: None, forget_faults])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_not_resumed_with_other_code(project, capsys, change, forget):
    forget(project / "run")
    write_code(project, **{change: CHANGES[change]})
    assert main(RESUME.split()) in (2, 3)
    error = capsys.readouterr().err
    assert MESSAGES[change] in error
    assert "undo what has changed in its code" in error
    write_code(project)
    assert main(RESUME.split()) == 0


COMMANDS = {
    "shrink": "shrink run",
    "locate": "locate run",
    "diff": "diff run other --kind versions",
    "gate": "gate other --max-new-faults 0 --baseline run",
    "retrain": "retrain run --out better --epochs 1",
}


def test_no_command_that_makes_the_model_again_takes_other_code(project, capsys):
    other = shutil.copytree(project / "run", project / "other")
    assert other.exists()
    write_code(project, activation="tanh")
    for name, command in COMMANDS.items():
        assert main(command.split()) in (2, 3), name
        assert "the model must answer" in capsys.readouterr().err, name
    write_code(project, strength=0.2)
    for name in ("shrink", "diff", "retrain"):
        assert main(COMMANDS[name].split()) in (2, 3), name
        assert "perturbation 'mine:DIM' must give the inputs" in capsys.readouterr().err, name


def test_a_suite_is_not_resumed_with_other_code(project, capsys):
    command = "suite noise --model mine:make_net --data mine:make_data --out all --max-tests"
    assert main([*command.split(), "700"]) in (0, 1)
    write_code(project, activation="tanh")
    assert main([*command.split(), "1400"]) in (2, 3)
    assert "the model must answer" in capsys.readouterr().err


@pytest.mark.parametrize("forget", [lambda run: None, forget_faults])
def test_unchanged_code_is_taken_with_other_kernels_and_threads(project, forget):
    forget(project / "run")
    kernels = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    environment = {**os.environ, **kernels, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "themis", *RESUME.split()]
    resumed = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.filterwarnings("ignore:resumed in another environment")
def test_on_another_device_outputs_may_be_rounded_to_fewer_bits(tmp_path):
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(40, 4)
    themis.run(net, data, "gaussian", magnitude=1e-6, max_tests=100, out=tmp_path / "run")
    with closing(Reader(tmp_path / "run")) as run:
        environment, samples = run.record["environment"], run.record["samples"]
        assert not run.count()

    def record(folder, factor):
        outputs = [[factor * value for value in row] for row in samples["outputs"]]
        changes = {"environment": {**environment, "device": "cuda:0"}, "samples": {**samples, "outputs": outputs}}
        with closing(sqlite3.connect(shutil.copytree(tmp_path / "run", folder) / "run.sqlite")) as database, database:
            for name, value in changes.items():
                database.execute("UPDATE run SET value = ? WHERE name = ?", (json.dumps(value), name))
        return folder

    assert themis.resume(record(tmp_path / "near", 1.02), net, data, max_tests=200).rounds[-1].tests == 200
    with pytest.raises(ModelError, match="the model must answer"):
        themis.resume(record(tmp_path / "far", 1.3), net, data, max_tests=200)


class BatchNormed(nn.Module):
    """A model whose answers depend on the batch, which a replay does not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(nn.functional.batch_norm(x, None, None, training=True))


@pytest.mark.filterwarnings("ignore:the answer to an input depends")
def test_answers_that_depend_on_the_batch_are_not_taken_for_another_model(tmp_path):
    net, data = BatchNormed(), torch.rand(40, 4)
    themis.run(net, data, "gaussian", magnitude=0.5, max_tests=100, out=tmp_path / "run")
    assert themis.resume(tmp_path / "run", net, data, max_tests=200).rounds[-1].tests == 200
