"""The contract on the direction of imports (in pyproject.toml) holds, and fails when a module breaks it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

pytest.importorskip("importlinter")
ROOT = Path(__file__).parents[1]

OFFENDERS = {
    "at the top": ("compute/rng.py", "\nfrom themis.judge import coverage\n", "themis.compute.rng -> themis.judge"),
    "in a function": (
        "target/target.py",
        "\ndef late():\n    from themis.campaign import api\n",
        "themis.target.target -> themis.campaign.api",
    ),
    "for type checking": (
        "search/policy.py",
        "\nfrom typing import TYPE_CHECKING as CHECKING\n\nif CHECKING:\n    from themis.cli import main\n",
        "themis.search.policy -> themis.cli",
    ),
    "of an integration": (
        "data/readers.py",
        "\nimport themis_integrations.data.hub\n",
        "themis.data.readers -> themis_integrations.data.hub",
    ),
    "of the laboratory": (
        "search/boundary.py",
        "\nimport themis_lab.zoo\n",
        "themis.search.boundary -> themis_lab.zoo",
    ),
    "through the package itself": ("data/seeds.py", "\nimport themis\n", "themis.data.seeds -> themis (l."),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source tree."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("themis", "themis_integrations", "themis_lab"):
        shutil.copytree(ROOT / "src" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def lint_imports(source):
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_imports_point_downwards(source):
    finished = lint_imports(source)
    assert finished.returncode == 0, finished.stdout
    assert "5 kept, 0 broken" in finished.stdout


@pytest.mark.parametrize("offender", OFFENDERS)
def test_an_import_that_points_upwards_breaks_the_contract(source, offender):
    name, text, complaint = OFFENDERS[offender]
    path = source / "themis" / name
    original = path.read_text()
    path.write_text(original + text)
    try:
        finished = lint_imports(source)
    finally:
        path.write_text(original)
    assert finished.returncode == 1
    assert complaint in finished.stdout


def test_a_new_folder_must_be_given_a_place(source):
    folder = source / "themis" / "extra"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    try:
        finished = lint_imports(source)
    finally:
        shutil.rmtree(folder)
    assert finished.returncode == 1
    assert "extra" in finished.stdout
