"""What imports what among the modules that read, show and analyse runs."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "shape.py"


def test_no_module_of_runs_imports_itself_through_others():
    spec = importlib.util.spec_from_file_location("shape", TOOL)
    shape = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shape)
    assert [group for group in shape.cycles() if any(name.startswith("themis.runs.") for name in group)] == []
