"""`themis suite`: from names and files to a table, JSON and a folder."""

import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import suites

import themis
from themis.cli import main
from themis_integrations.browser.server import serve

pytestmark = pytest.mark.xdist_group("suites")

MODEL = ["--model", "tiny_suite:make_net", "--data", "tiny_suite:make_data", "--max-tests", "300"]


def write_project(folder):
    """The module of the model and the data, and a suite."""
    helpers = str(Path(suites.__file__).parent)
    (folder / "tiny_suite.py").write_text(
        f"import sys\nsys.path.append({helpers!r})\nfrom suites import classifier, pictures\n"
        "def make_net():\n    return classifier()\n"
        "def make_other():\n    return classifier(3)\n"
        "def make_data():\n    return pictures(classifier())\n"
    )
    (folder / "own.yaml").write_text("name: own\nlevels: 2\nmembers: [fog, {perturb: gaussian, magnitude: 0.4}]\n")


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_and_a_folder_with_runs(here, capsys):
    assert main(["suite", "own.yaml", *MODEL, "--out", "s", "--no-report"]) == 0
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
    assert main(["suite", "own.yaml", *MODEL, "--out", "s", "--quiet", "--no-report"]) == 0  # nothing is left
    assert capsys.readouterr().out == ""
    assert (here / "s" / "fog" / "summary.json").stat().st_mtime_ns == before


def test_every_member_is_tracked(here):
    pytest.importorskip("tensorboard")
    words = ["suite", "own.yaml", *MODEL, "--out", "s", "--no-report", "--quiet", "--track"]
    assert main([*words, "nothing"]) == 2
    assert main([*words, "tensorboard"]) == 0
    for member in ("fog", "gaussian-0.4"):
        assert list((here / "s" / member / "track/tensorboard").glob("events*"))
    assert main(["resume", "s", "--max-tests", "340", "--no-report", "--quiet", "--track", "tensorboard:events"]) == 0
    assert list((here / "events").glob("*/events*"))


def test_several_perturbations_without_a_suite(here, capsys):
    words = ["--perturb", "fog", "--perturb", "rain(angle=-5:5, depth=0:0.5)", "--out", "s", "--json"]
    assert main(["suite", *MODEL, *words, "--no-report", "--max-tests", "40"]) == 0
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
    "a missing file": (["none.yaml"], "none.yaml is not: No such file or directory"),
    "no model": (["noise", "--model", ""], "--model must be given"),
    "a share of 2": (["noise", "--share", "2"], "share must lie above 0 and up to 1, got 2"),
    "a missing table": (["noise", "--slice-by", "none.csv:place"], "none.csv is not: No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_refused_in_one_line(here, capsys, name):
    words, message = WRONG[name]
    assert main(["suite", *MODEL, "--out", "s", *words]) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (here / "s" / "suite.json").exists()


OTHER = ["suite", "own.yaml", *MODEL, "--model", "tiny_suite:make_other", "--out", "b", "--no-report"]
OTHER += ["--slice-by", "class,places.csv:place"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the suites of two versions of a model, started from the command line."""
    folder = tmp_path_factory.mktemp("two")
    write_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["suite", "own.yaml", *MODEL, "--out", "a", "--quiet"]) == 0
        (folder / "places.csv").write_text("place\n" + "\n".join("ab"[k % 2] for k in range(120)) + "\n")
        assert main([*OTHER, "--quiet"]) == 0
    return folder


@pytest.fixture
def there(two, monkeypatch):
    monkeypatch.chdir(two)
    return two


def test_json_with_mce_and_slices(there, capsys):
    assert main([*OTHER, "--mce-baseline", "a", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = themis.open_suite("b").corruption_errors("a")
    assert result["corruption_errors"]["mce"] == expected.mce > 0
    assert {rate["column"] for member in result["members"] for rate in member["slices"]} == {"class", "place"}
    assert [member["name"] for member in result["members"]] == ["fog", "gaussian-0.4"]


def test_a_folder_of_suites_names_them(there, capsys):
    for suite, changed in (("a", 1), ("b", 2)):
        os.utime(there / suite / "suite.json", (changed, changed))
    named = r"but \. is a folder of suites: name one of them \(b, a\)"
    for open_folder in (themis.open_suite, themis.resume_suite):
        with pytest.raises(themis.UsageError, match=rf"a suite must be a folder with suite\.json, {named}"):
            open_folder(".")
    for words in ([*OTHER, "--mce-baseline", "."], ["gate", "a", "--baseline", ".", "--max-new-faults", "0"]):
        assert main([*words, "--quiet"]) == 2
        assert re.search(named, capsys.readouterr().err)


def test_gates_hold_for_every_member(there, capsys):
    words = ["gate", "a", "--max-fault-rate", "0.001", "--fail-under", "clean_accuracy=0.5", "--junit", "gates.xml"]
    assert main([*words, "--markdown", "gates.md"]) == 1
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith(("passed", "FAILED"))]
    assert rows[:2] == [["FAILED", "fog", "max_fault_rate:"], ["FAILED", "gaussian-0.4", "max_fault_rate:"]]
    assert rows[2:] == [["passed", name, "clean_accuracy:"] for name in ("fog", "gaussian-0.4")]
    assert out.endswith("Gates failed under 2 of 2 perturbations: fog, gaussian-0.4.\n")
    suites = ElementTree.parse("gates.xml").getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["themis a/fog", "themis a/gaussian-0.4"]
    assert all(suite.get("tests") == "3" for suite in suites)
    assert "❌ failed | gaussian-0.4 | max" in (there / "gates.md").read_text()
    assert main(["gate", "a", "--max-fault-rate", "1", "--quiet"]) == 0
    assert main(["gate", "a", "--max-fault-rate", "1", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["members"]) == {"fog", "gaussian-0.4"}


def test_new_faults_are_those_of_the_same_perturbation(there, capsys):
    assert main(["gate", "b", "--max-new-faults", "0", "--baseline", "a", "--json"]) == 1
    members = json.loads(capsys.readouterr().out)["members"]
    new = {name: member["gates"][-1]["value"] for name, member in members.items()}
    diff = themis.diff("a/gaussian-0.4", "b/gaussian-0.4", kind="versions")
    assert new["gaussian-0.4"] == len(diff.new) > 0
    assert main(["gate", "b", "--max-new-faults", "0", "--baseline", "a/fog"]) == 2
    assert "the baseline of a suite must be the folder of a suite" in capsys.readouterr().err


def test_two_suites_are_compared_member_by_member(there, capsys):
    assert main(["diff", "a", "b", "--tests", "100", "--out", "diff.md", "--force"]) == 0
    out = capsys.readouterr().out
    assert "Mean error under corruption" in out
    assert re.search(
        r"Mean error .* after \(difference [+-]\d+\.\d\d points, 95%: [+-].* to [+-].*\)", out.replace("\n", " ")
    )
    assert "hold together with 95%" in out.replace("\n", " ")
    assert "gaussian-0.4" in (there / "diff.md").read_text()
    assert "difference (95%)" in (there / "diff.md").read_text()
    assert main(["diff", "a", "b", "--tests", "100", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["members"]) == {"fog", "gaussian-0.4"}
    first, second = (themis.open_suite(name) for name in ("a", "b"))
    for name, gap in result["error_differences"].items():
        assert gap["value"] == pytest.approx(np.mean(second.errors[name]) - np.mean(first.errors[name]))
        assert gap["low"] <= gap["value"] <= gap["high"]
    assert {each["paired"]["comparisons"] for each in result["members"].values()} == {2}
    assert themis.diff("a", "b", tests=100).as_dict() == result
    assert main(["diff", "a", "b/fog"]) == 2
    assert "a is a suite" in capsys.readouterr().err


def test_a_suite_resumes_with_a_larger_budget(there, capsys):
    shutil.copytree("a", "longer")
    assert main(["resume", "longer", "--max-tests", "400", "--json", "--no-report"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 400
    assert main(["resume", "longer", "--plateau", "3"]) == 2
    assert "with more --max-tests or --max-seconds only" in capsys.readouterr().err


def test_the_page_links_to_those_of_its_members(there, capsys):
    page = (there / "a" / "report.html").read_text()
    view = json.loads(re.search(r'<script type="application/json" id="view">(.*?)</script>', page, re.S)[1])
    assert view["reports"] == {name: f"{name}/report.html" for name in ("fog", "gaussian-0.4")}
    assert all((there / "a" / path).is_file() for path in view["reports"].values())
    assert [len(row["errors"]) for row in view["levels"]] == [2, 2]
    assert [{rate["column"] for rate in member["slices"]} for member in view["members"]] == [{"class"}] * 2
    assert not (there / "b" / "report.html").exists()
    assert main(["report", "b", "--mce-baseline", "a"]) == 0
    written = (there / "b" / "report.html").read_text()
    assert "corruption_errors" in written
    assert "mce" in written
    (there / "b" / "report.html").write_text("mine")
    assert main(["report", "b"]) == 2
    (there / "b" / "report.html").unlink()


@pytest.mark.parametrize("command", ["faults", "groups", "shrink", "replay"])
def test_commands_on_runs_say_what_to_name_instead_of_a_suite(there, capsys, command):
    assert main([command, "a", *(["1"] if command == "replay" else [])]) == 2
    said = capsys.readouterr().err
    assert "a is a suite: name the folder of one of its perturbations (" in said
    assert all(str(Path("a", name)) in said for name in themis.open_suite("a"))


def test_a_suite_can_be_watched(there):
    with serve("a") as server:
        page, view = server.respond("/", ""), server.respond("/view.json", "")
        assert page.status == 200
        assert b"Suite" in page.body
        shown = json.loads(view.body)
        assert (shown["state"], shown["reports"]) == ("ended", {})
        tag = view.headers["ETag"]
        assert server.respond("/view.json", tag).status == 304


def test_retraining_on_a_suite_needs_a_split(there, capsys):
    assert main(["retrain", "a"]) == 2
    assert "--split" in capsys.readouterr().err


def test_code_that_a_changed_suite_names_does_not_run(there, capsys):
    shutil.copytree("a", "forged")
    record = json.loads(Path("forged/suite.json").read_text())
    for change in ({"origin": {**record["origin"], "model": "tiny_suite:make_other"}}, {"perturbation": "evil:RUN"}):
        Path("forged/suite.json").write_text(json.dumps({**record, **change}))
        assert main(["resume", "forged", "--max-tests", "310"]) == 2
        assert "forged must be trusted before code that it names runs" in capsys.readouterr().err


def test_no_link_is_followed(there, capsys):
    shutil.copytree("a", "linked")
    shutil.rmtree("linked/fog")
    Path("linked/fog").symlink_to(there / "a" / "fog")
    assert main(["resume", "linked", "--max-tests", "310"]) == 2
    assert "must not be a symbolic link" in capsys.readouterr().err
    assert [row.state for row in themis.open_suite("linked").rows] == ["waiting", "ended"]
    Path("elsewhere").mkdir()
    (Path("elsewhere") / "suite.json").symlink_to(there / "a" / "suite.json")
    assert main(["suite", "own.yaml", *MODEL, "--out", "elsewhere"]) == 2
    assert "contains other files" in capsys.readouterr().err


def test_a_gate_on_mce(there, capsys):
    mce = themis.open_suite("b").corruption_errors("a").mce
    words = ["gate", "b", "--mce-baseline", "a", "--junit", "mce.xml"]
    assert main([*words, "--max-mce", str(mce + 0.01)]) == 0
    assert "passed all max_mce" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--max-mce", str(mce - 0.01), "--quiet"]) == 1
    assert "FAILED  all max_mce" in capsys.readouterr().err
    assert next(suite.get("name") for suite in ElementTree.parse("mce.xml").getroot()) == "themis b"
    for wrong in (
        ["gate", "b", "--max-mce", "1"],
        ["gate", "b/fog", *words[2:]],
        [*words[:3], "none", "--max-mce", "1"],
    ):
        assert main(wrong) == 2
        assert "mce" in capsys.readouterr().err
