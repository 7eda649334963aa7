"""Every example runs as it stands."""

import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LONG = ("detector", "retrain_digits", "test_robustness")
"""They train models for some ten seconds."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG)) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_runs(path, tmp_path):
    done = subprocess.run([warm_python(), str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Stopped because" in done.stdout


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"classifier", "regression", "table", "onnx_file", "black_box"}
