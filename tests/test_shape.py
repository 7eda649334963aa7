"""The shape of the code grows no worse: no import cycles, few functions with many parameters, no huge class."""

import importlib.util
from pathlib import Path

import pytest

MAY_BE_WIDE = {
    # What users call has one keyword per thing that they may pass.
    "themis.campaign.api.run",
    "themis.campaign.api.resume",
    "themis.suites.api.run_suite",
    "themis.suites.api.resume_suite",
    "themis.retraining.api.retrain",
    "themis.perturb.names.disturb",
    "themis_lab.comparison.api.compare",
    "themis_lab.contest.api.contest_run",
    # These have the arguments of a function in C.
    "themis.compute.native.__init__",
}
"""Functions that may have more parameters than `tools/shape.py` calls many."""


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


def test_no_further_function_has_many_parameters(shape):
    wide = {name.partition(" ")[0] for name in shape.wide_functions()}
    assert wide == MAY_BE_WIDE


def test_the_largest_class_does_not_grow(shape):
    name, n_methods, _ = shape.largest_class()
    assert n_methods <= 26, name
