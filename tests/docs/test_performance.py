"""Tables of the documentation are those that benchmarks make from the stored results."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "results", "n_lines", "page"),
    [
        ("throughput", ("throughput",), 11, "performance.md"),
        ("throughput", ("throughput_cpu",), 9, "performance.md"),
        ("floor", ("floor_cpu",), 4, "performance.md"),
        ("criteria", ("criteria_gpu", "criteria_cpu"), 17, "results.md"),
        ("regain", ("regain_gpu", "regain_cpu"), 17, "lab/regain.md"),
        ("regain", ("regain_choices",), 12, "lab/regain.md"),
        ("regain", ("regain_choices_gpu",), 14, "results.md"),
        ("reach", ("regain_reach",), 10, "results.md"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_table_is_made_from_the_results(script, results, n_lines, page):
    files = [f"benchmarks/results/{name}.json" for name in results]
    command = [sys.executable, f"benchmarks/{script}.py", "--table", *files]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert len(made.splitlines()) == n_lines
    assert made in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("name", ["scale_cpu.json", "scale_stream.json", "scale_gpu.json"])
def test_the_tables_of_scaling_are_made_from_the_results(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("scale").tables
    results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["results"]
    assert tables(results).strip() in (ROOT / "docs" / "performance.md").read_text()


def test_the_measured_page_on_scaling_is_made_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("scaling").page
    results = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())["results"]
    text = (ROOT / "docs" / "scaling-measured.md").read_text()
    assert page(text, results) == text


def test_the_table_of_attempts_is_that_of_the_stored_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import attempts

    rows = json.loads((ROOT / "benchmarks" / "results" / "attempts.json").read_text())["results"]["rows"]
    assert [row["name"] for row in rows] == [row.name for row in attempts.ATTEMPTS]
    assert attempts.table(rows) in (ROOT / "docs" / "support.md").read_text()
