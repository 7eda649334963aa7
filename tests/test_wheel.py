"""A wheel has everything: it is built, installed into an empty environment and used there, with the C extension."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("themis", "themis_integrations", "themis_lab")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

CAMPAIGN = """
import json
import torch
import themis
from themis.compute.native import library

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
run = themis.run(net, torch.rand(50, 1, 8, 8), "gaussian", magnitude=0.5, max_tests=500, out="run")
print(json.dumps({
    "package": themis.__file__,
    "has_library": library() is not None,
    "tests": run.rounds[-1].tests,
    "faults": len(run.faults),
}))
"""


def run(*command, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, without anything that an earlier build has left."""
    folder = tmp_path_factory.mktemp("wheel")
    left_over = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=left_over)
        else:
            shutil.copy(source, folder / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".", cwd=folder)
    [path] = (folder / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of commands of a new environment with the wheel; its dependencies are borrowed from this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    commands = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", str(commands / "python"))
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel))
    # A path in a .pth file adds packages, but not the editable installation of Themis, which is a .pth file itself.
    [packages] = (folder / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands


def test_it_has_every_file_of_the_packages(wheel):
    tracked = {
        path.relative_to(ROOT / "src").as_posix()
        for package in PACKAGES
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".c", ".js", ".css", ".html", ".json", ".md", ".in", ".typed")
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.partition("/")[0] in PACKAGES}
    extension = f"themis/compute/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert packed == tracked | {extension}


def test_doctor_is_content(environment, tmp_path):
    said = run(str(environment / "themis"), "doctor", cwd=tmp_path)
    assert "one replay in" in said


def test_a_campaign_runs_with_the_extension(environment, tmp_path):
    found = json.loads(run(str(environment / "python"), "-c", CAMPAIGN, cwd=tmp_path).splitlines()[-1])
    assert Path(found["package"]).is_relative_to(environment.parent)
    assert found["has_library"]
    assert found["tests"] == 500
    assert found["faults"] > 0
