"""The shape of the code does not grow worse: imports without cycles, few functions with many parameters."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def shape():
    path = Path(__file__).parents[1] / "tools" / "shape.py"
    spec = importlib.util.spec_from_file_location("shape_tool", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_modules_do_not_import_each_other(shape):
    assert shape.cycles() == []


def test_a_cycle_is_found_in_functions_too(shape, monkeypatch, tmp_path):
    package = tmp_path / "themis"
    package.mkdir()
    (package / "one.py").write_text("from themis.two import b\n")
    (package / "two.py").write_text("def late():\n    from themis.one import a\n")
    (package / "three.py").write_text("from themis.two import b\n")
    monkeypatch.setattr(shape, "SOURCE", tmp_path)
    assert shape.cycles() == [["themis.one", "themis.two"]]
