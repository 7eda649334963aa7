"""`themis suite`: from names and files to a table, JSON and a folder."""

import json
from pathlib import Path

import pytest
import suites

import themis
from themis.cli import main

pytestmark = pytest.mark.xdist_group("suites")

MODEL = ["--model", "tiny_suite:make_net", "--data", "tiny_suite:make_data", "--max-tests", "300"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of a user, with the module of the model and the data."""
    helpers = str(Path(suites.__file__).parent)
    (tmp_path / "tiny_suite.py").write_text(
        f"import sys\nsys.path.append({helpers!r})\nfrom suites import classifier, pictures\n"
        "def make_net():\n    return classifier()\n"
        "def make_other():\n    return classifier(3)\n"
        "def make_data():\n    return pictures(classifier())\n"
    )
    (tmp_path / "own.yaml").write_text("name: own\nlevels: 2\nmembers: [fog, {perturb: gaussian, magnitude: 0.4}]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_and_a_folder_with_runs(here, capsys):
    assert main(["suite", "own.yaml", *MODEL, "--out", "s"]) == 0
    out = capsys.readouterr().out
    assert "Suite own" in out
    assert "fault rate (95%)" in out
    assert "Results in s" in out
    assert [row.split()[0] for row in out.splitlines() if "%.." in row] == ["fog", "gaussian-0.4"]
    assert main(["faults", "s/gaussian-0.4", "--limit", "1"]) == 0
    fault = themis.open_run("s/gaussian-0.4").faults[0]
    assert main(["replay", "s/gaussian-0.4", str(fault.id)]) == 0
    capsys.readouterr()
    before = (here / "s" / "fog" / "summary.json").stat().st_mtime_ns
    assert main(["suite", "own.yaml", *MODEL, "--out", "s", "--quiet"]) == 0  # nothing is left to do
    assert capsys.readouterr().out == ""
    assert (here / "s" / "fog" / "summary.json").stat().st_mtime_ns == before


def test_json_with_mce_and_slices(here, capsys):
    (here / "places.csv").write_text("place\n" + "\n".join("ab"[k % 2] for k in range(120)) + "\n")
    assert main(["suite", "own.yaml", *MODEL, "--out", "a", "--json"]) == 0
    capsys.readouterr()
    words = ["suite", "own.yaml", *MODEL, "--model", "tiny_suite:make_other", "--out", "b", "--metadata", "places.csv"]
    assert main([*words, "--mce-baseline", "a", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = themis.open_suite("b").corruption_errors("a")
    assert result["corruption_errors"]["mce"] == expected.mce > 0
    assert {column["name"] for column in themis.open_suite("b").record["slices"]} == {"class", "place"}
    assert [member["name"] for member in result["members"]] == ["fog", "gaussian-0.4"]


def test_several_perturbations_without_a_suite(here, capsys):
    words = ["--perturb", "fog", "--perturb", "rain(angle=-5:5, depth=0:0.5)", "--out", "s", "--json"]
    assert main(["suite", *MODEL, *words]) == 0
    assert [member["name"] for member in json.loads(capsys.readouterr().out)["members"]] == ["fog", "rain"]


def test_a_printed_suite_can_be_read_again(here, capsys):
    assert main(["suite", "corruptions", "--print-suite"]) == 0
    (here / "printed.yaml").write_text(capsys.readouterr().out)
    assert main(["suite", "printed.yaml", "--print-suite"]) == 0
    assert capsys.readouterr().out == (here / "printed.yaml").read_text()


WRONG = {
    "nothing": ([], "SUITE or --perturb must be given: corruptions: "),
    "an unknown suite": (["wether"], "did you mean 'weather'?"),
    "both": (["noise", "--perturb", "fog"], "must not both be given"),
    "an unknown perturbation": (["--perturb", "fogg"], "did you mean 'fog'?"),
    "a missing file": (["none.yaml"], "none.yaml does not exist"),
    "no model": (["noise", "--model", ""], "--model must be given"),
    "a share of 2": (["noise", "--share", "2"], "share must lie above 0 and up to 1, got 2"),
    "missing metadata": (["noise", "--metadata", "none.csv"], "none.csv does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_refused_in_one_line(here, capsys, name):
    words, message = WRONG[name]
    assert main(["suite", *MODEL, "--out", "s", *words]) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (here / "s" / "suite.json").exists()
