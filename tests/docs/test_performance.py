"""Tables of the documentation are those that benchmarks make from the stored results."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_table_is_made_from_the_results():
    command = [sys.executable, "benchmarks/throughput.py", "--table", "benchmarks/results/throughput.json"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert len(made.splitlines()) == 11
    assert made in (ROOT / "docs" / "performance.md").read_text()


def test_the_table_of_criteria_is_made_from_the_results():
    files = [f"benchmarks/results/criteria_{device}.json" for device in ("gpu", "cpu")]
    command = [sys.executable, "benchmarks/criteria.py", "--table", *files]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert len(made.splitlines()) == 17
    assert made in (ROOT / "docs" / "results.md").read_text()


def test_the_table_of_retraining_is_made_from_the_results():
    files = [f"benchmarks/results/regain_{device}.json" for device in ("gpu", "cpu")]
    command = [sys.executable, "benchmarks/regain.py", "--table", *files]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert len(made.splitlines()) == 17
    assert made in (ROOT / "docs" / "retrain.md").read_text()


def test_the_table_of_campaigns_on_a_cpu_is_made_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    table = importlib.import_module("floor").table_of_cpu_times
    results = json.loads((ROOT / "benchmarks" / "results" / "floor_cpu.json").read_text())["results"]
    assert table(results) in (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("name", ["scale_cpu.json", "scale_stream.json"])
def test_the_tables_of_scaling_are_made_from_the_results(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("scale").tables
    results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["results"]
    assert tables(results).strip() in (ROOT / "docs" / "performance.md").read_text()


def test_the_page_on_scaling_out_is_made_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("scaling").page
    results = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())["results"]
    text = (ROOT / "docs" / "scaling.md").read_text()
    assert page(text, results) == text


def test_the_table_of_attempts_is_that_of_the_stored_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import attempts

    rows = json.loads((ROOT / "benchmarks" / "results" / "attempts.json").read_text())["results"]["rows"]
    assert [row["name"] for row in rows] == [row.name for row in attempts.ATTEMPTS]
    assert attempts.table(rows) in (ROOT / "docs" / "support.md").read_text()
