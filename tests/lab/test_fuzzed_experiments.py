"""Folders of experiments that were damaged: the same command resumes them, or refuses them in one line."""

import json
import shutil
from random import Random

import pytest
from fuzzing import check_command, mutate_bytes, mutate_place, mutate_plain
from user_module import go_to

pytestmark = pytest.mark.xdist_group("fuzzed_experiments")

N_MUTATIONS, N_SLOW_MUTATIONS = 12, 300
"""Mutations per experiment, in `make test` and in `make slow`."""
MODULE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

def data():
    inputs = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return inputs, net()(inputs).argmax(1)
"""
RUN = "run --model mine:net --data mine:data --perturb gaussian --magnitude 0.6 --max-tests 200 --split 0.4,0.3,0.3"
RETRAIN = "retrain {run} --epochs 1 --batches 2 --random-seeds 1 --draws 2 --passes 60"
EXPERIMENTS = {
    "compare": (
        "compare --model mine:net --data mine:data --perturb gaussian --techniques random,nc --magnitudes 0.3,0.6 "
        "--max-passes 120 --campaigns 1 --seeds 20 --judge-seeds 20 --workers 1"
    ),
    "retrain": RETRAIN,
    "contest": (
        "contest {run} --techniques random,themis --inputs 5 --epochs 1 --batches 2 --random-seeds 1 --draws 2 "
        "--judge-passes 60"
    ),
    "evaluate": "evaluate --smoke",
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The finished folder of every experiment."""
    folder = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as patch:
        go_to(folder, patch, MODULE)
        from themis.cli import main

        assert main(f"{RUN} --out run --quiet --no-report".split()) == 0
        for name, command in EXPERIMENTS.items():
            assert main([*command.format(run="run").split(), "--out", name, "--quiet"]) == 0
    return folder


def mutate_file(folder, rng):
    """Change a file that the experiment reads; returns the change in words."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".png", "")]
    path = rng.choice(sorted(paths))
    name, choice = path.relative_to(folder), rng.random()
    if choice < 0.15:
        return f"{name}: {mutate_place(path, rng)}"
    if path.suffix == ".json" and choice < 0.8:
        value, change = mutate_plain(json.loads(path.read_text()), rng)
        path.write_text(json.dumps(value))
        return f"{name}: {change}"
    content, change = mutate_bytes(path.read_bytes(), rng)
    path.write_bytes(content)
    return f"{name}: {change}"


def fuzz(originals, tmp_path, monkeypatch, capsys, name, n, seed):
    rng = Random(f"{name} {seed}")
    go_to(tmp_path, monkeypatch, MODULE)
    codes = []
    for k in range(n):
        folder = shutil.copytree(originals / name, tmp_path / f"{name}{k}")
        mutation = f"mutation {k} of {seed}, {name}: {mutate_file(folder, rng)}"
        words = [*EXPERIMENTS[name].format(run=originals / "run").split(), "--out", folder, "--quiet"]
        codes.append(check_command(words, capsys, mutation))
        shutil.rmtree(folder)
    return codes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_damaged_experiments_are_resumed_or_refused(originals, tmp_path, monkeypatch, capsys, name):
    codes = fuzz(originals, tmp_path, monkeypatch, capsys, name, N_MUTATIONS, 0)
    assert {0, 3} <= set(codes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_many_damaged_experiments_are_resumed_or_refused(originals, tmp_path, monkeypatch, capsys, name):
    codes = fuzz(originals, tmp_path, monkeypatch, capsys, name, N_SLOW_MUTATIONS, 1)
    assert {0, 3} <= set(codes)
