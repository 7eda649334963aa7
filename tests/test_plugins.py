"""Another package adds to Themis by entry points; a broken one is named, and breaks nothing else."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(1))
"""
BROKEN = """[project]
name = "shipwreck"
version = "1.0"
[project.entry-points."themis.policies"]
sunk = "shipwreck:Sunk"
[project.entry-points."themis.commands"]
sink = "shipwreck"
[project.entry-points."themis.readers"]
coco = "shipwreck:Coco"
[tool.setuptools]
py-modules = []
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a virtual environment that sees this one's packages, and has two packages of its own."""
    folder = tmp_path_factory.mktemp("plugins")
    environment, broken = folder / "environment", folder / "broken"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    own = next(environment.glob("lib/python*/site-packages"))
    seen = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), sysconfig.get_path("purelib")]
    (own / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen if path))
    broken.mkdir()
    (broken / "pyproject.toml").write_text(BROKEN)
    for package in (ROOT / "examples" / "plugin", broken):
        source = folder / f"source-{package.name}"
        subprocess.run(["cp", "-r", package, source], check=True)  # the build writes into it
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
        pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", *options, source]
        subprocess.run(pip, check=True)
    return environment / "bin" / "python"


@pytest.fixture
def themis(python, tmp_path):
    """Run a command in a folder with a project."""
    (tmp_path / "mine.py").write_text(PROJECT)

    def run(*words):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [python, "-m", "themis", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_a_package_adds_a_perturbation_a_policy_a_criterion_and_a_command(themis):
    options = ("--model", "mine:net", "--data", "mine:data", "--max-tests", "300", "--quiet", "--out")
    chosen = ("--perturb", "mist + gaussian(sigma=0:0.3)", "--policy", "strongest", "--criterion", "peaks")
    finished = themis("run", *chosen, *options, "first")
    assert finished.returncode == 0, finished.stderr
    told = themis("seas", "first")
    assert told.stdout.endswith("% of the tests broke the model\n"), told.stderr
    fault = json.loads(themis("faults", "first", "--json").stdout)[0]
    replayed = themis("replay", "first", str(fault["id"]))
    assert replayed.returncode == 0, replayed.stderr


def test_the_overview_describes_added_commands_without_loading_them(themis):
    overview = themis("--help")
    assert "  seas           print the share of the tests of a ... (added by sea_trials)\n" in overview.stdout
    assert "  sink           (added by shipwreck)\n" in overview.stdout
    assert "  completion     print a script that completes options in the shell\n" in overview.stdout
    assert overview.stderr == ""


def test_a_broken_package_is_named_and_breaks_nothing_else(themis):
    broken = themis("sink")
    assert broken.returncode == 2
    assert "'sink' of the package shipwreck cannot be loaded: ModuleNotFoundError" in broken.stderr
    unknown = themis("run", "--model", "mine:net", "--data", "mine:data", "--perturb", "mist", "--policy", "strong")
    assert "did you mean 'strongest'?" in unknown.stderr


def test_a_package_cannot_replace_what_comes_with_themis(themis):
    finished = themis("run", "--model", "mine:net", "--data", "coco:nowhere", "--perturb", "gaussian")
    assert finished.returncode == 3
    assert "the file of annotations must exist" in finished.stderr
