"""Gates on the command line: exit codes, messages and files, of `themis gate`, `run` and `resume`."""

import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import averaging_nets
import pytest
from junit_schema import complaints

from themis.cli import main

MODULE = f"""{Path(averaging_nets.__file__).read_text()}

def data():
    (dark, no), (bright, _) = seeds(80), seeds(40)
    return torch.cat([dark, bright[20:] + 0.8]), torch.cat([no, torch.ones(20, dtype=torch.long)])

class WornOut(Mean):
    left = 20

    def forward(self, x):
        type(self).left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().forward(x)
"""
BASE = ["run", "--data", "gated:data", "--perturb", "brightness", "--no-report"]
SHORT = ["--max-tests", "400", "--tolerance", "1e-9", "--policy", "random"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, and runs of two versions of it."""
    home = tmp_path_factory.mktemp("gated")
    (home / "gated.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.syspath_prepend(str(home))
        sys.modules.pop("gated", None)
        for out, over in (("main", 0.5), ("new", 0.45)):
            assert main([*BASE, *SHORT, "--quiet", "--model", f"gated:Mean(over={over})", "--out", out]) == 0
    return home


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    return home


def told(capsys, *words):
    """Exit code, and the lines on stdout, with those that continue them, and on stderr."""
    code = main([*map(str, words)])
    printed = capsys.readouterr()
    return code, re.sub(r"\n {8}(?=\S)", " ", printed.out).splitlines(), printed.err.splitlines()


def test_the_exit_code_is_0_if_all_gates_pass_and_1_if_one_fails(here, capsys):
    code, out, err = told(capsys, "gate", "new", "--fail-under", "coverage=0", "--max-fault-rate", "0.9")
    assert (code, err) == (0, [])
    assert [line.split(":")[0] for line in out] == ["passed  campaign", "passed  coverage", "passed  max_fault_rate"]
    code, out, err = told(capsys, "gate", "new", "--max-fault-rate", "0.9", "--fail-under", "coverage=1")
    assert (code, err) == (1, [])
    assert out[1].startswith("FAILED  coverage: ")
    assert out[1].endswith("raise the budget with --max-tests or --max-seconds, or lower the limit")
    code, out, err = told(capsys, "gate", "new", "--max-fault-rate", "0", "--fail-under", "coverage=0", "--quiet")
    assert (code, out, len(err)) == (1, [], 1)
    assert err[0].startswith("FAILED  max_fault_rate: ")


def test_the_gates_of_a_run_fit_into_a_terminal(here, capsys):
    main(["gate", "new", "--max-fault-rate", "0", "--fail-under", "coverage=1", "--fail-under", "clean_accuracy=1"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if not line.startswith(" " * 8)} == {"passed", "FAILED"}


def test_a_constant_model_fails_a_limit_on_its_fault_rate_unless_it_is_allowed(here, capsys, tmp_path):
    run = [*BASE, *SHORT, "--model", "gated:Mean(over=99.0)", "--quiet", "--max-fault-rate", "0.9", "--out"]
    code, out, err = told(capsys, *run, tmp_path / "constant")
    assert (code, out) == (1, [])
    assert err[0].startswith("themis run: all 100 clean answers are the same, so that a low fault rate says nothing")
    assert err[1].startswith("FAILED  max_fault_rate: ")
    assert "but all 100 clean answers are the same, so that it says nothing; check the weights" in err[1]
    assert told(capsys, "gate", tmp_path / "constant", "--max-fault-rate", "0.9", "--quiet")[0] == 1
    code, out, _ = told(capsys, "gate", tmp_path / "constant", "--max-fault-rate", "0.9", "--allow-constant")
    assert (code, out[-1][:6]) == (0, "passed")
    (tmp_path / "c.yaml").write_text("max_fault_rate: 0.9\nallow_constant: true\n")
    words = [*BASE, *SHORT, "--model", "gated:Mean(over=99.0)", "--config", tmp_path / "c.yaml", "--quiet", "--out"]
    assert told(capsys, *words, tmp_path / "allowed")[0] == 0
    suite = [
        "suite",
        "--perturb",
        "brightness",
        "--perturb",
        "contrast",
        "--data",
        "gated:data",
        "--model",
        "gated:Mean(over=99.0)",
        "--quiet",
    ]
    suite += ["--max-tests", "200", "--max-fault-rate", "0.9", "--no-report", "--out", tmp_path / "suite"]
    code, _, err = told(capsys, *suite)
    assert (code, sum("FAILED  brightness max_fault_rate" in line for line in err)) == (1, 1)
    assert told(capsys, "gate", tmp_path / "suite", "--max-fault-rate", "0.9", "--allow-constant")[0] == 0


def test_every_limit_counts_no_matter_how_it_is_given(here, capsys):
    words = ["gate", "new", "--fail-under", "coverage=0", "--fail-under", "clean_accuracy=1,coverage_all=0", "--json"]
    code, out, _ = told(capsys, *words)
    found = json.loads("\n".join(out))
    assert code == 0
    assert [each["gate"] for each in found["gates"]] == ["campaign", "coverage", "clean_accuracy", "coverage_all"]
    assert (found["has_failed"], found["run"]) == (False, "new")


def test_new_faults_are_found_by_comparison_with_a_baseline(here, capsys, tmp_path):
    junit, page = tmp_path / "gates.xml", tmp_path / "page.md"
    words = ["--max-new-faults", "0", "--baseline", "main", "--junit", junit, "--markdown", page]
    code, out, _ = told(capsys, "gate", "new", *words)
    assert code == 1
    assert "new faults compared with main (0 fixed, " in out[1]
    assert "replay them: themis replay new " in out[1]
    assert complaints(junit) == []
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("failures"), suite.get("name")) == ("1", "themis new")
    assert "## Two versions of a model" in page.read_text()
    code, out, _ = told(capsys, "gate", "main", "--max-new-faults", "0", "--baseline", "main")
    assert code == 0
    assert "0 new faults compared with main" in out[1]


def test_missing_and_damaged_runs_and_baselines_are_reported(here, capsys, tmp_path):
    code, _, [line] = told(capsys, "gate", "new", "--max-new-faults", "0", "--baseline", "nowhere")
    assert (code, line.partition(":")[0]) == (2, "themis gate")
    assert "a run must be a folder with run.sqlite, but nowhere is not one: check the path" in line
    assert told(capsys, "gate", "nowhere", "--max-fault-rate", "1")[0] == 2
    shutil.copytree("new", tmp_path / "spoilt")
    (tmp_path / "spoilt/summary.json").write_text("{")
    code, _, [line] = told(capsys, "gate", tmp_path / "spoilt", "--max-fault-rate", "1")
    assert (code, "is damaged" in line) == (3, True)
    (tmp_path / "spoilt/run.sqlite").write_bytes(b"no database" * 99)
    code, _, [line] = told(capsys, "gate", tmp_path / "spoilt", "--max-fault-rate", "1")
    assert (code, "cannot be read" in line) == (3, True)
    code, _, [line] = told(capsys, "gate", "new", "--max-new-faults", "0", "--baseline", tmp_path / "spoilt")
    assert (code, "cannot be read" in line) == (3, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "a gate must be given, such as --max-fault-rate 0.05"),
        (["--max-fault-rate", "5"], "write 0.05 for 5%"),
        (["--fail-under", "covrage=1"], "did you mean 'coverage'?"),
        (["--max-new-faults", "0"], "baseline is missing: add it"),
        (["--baseline-weights", "w.pt", "--max-fault-rate", "1"], "--baseline must be given with"),
        (["--max-fault-rate", "1", "--junit", "no/gates.xml"], "create it first"),
        (["--fail-under", "clean_iou=0.5"], "the task is not a segmentation"),
    ],
)
def test_wrong_use_exits_with_2(here, capsys, words, says):
    code, _, [line] = told(capsys, "gate", "new", *words)
    assert (code, says in line) == (2, True), line


def test_run_checks_gates_at_its_end_and_rejects_impossible_ones_at_its_start(here, capsys, tmp_path):
    run = [*BASE, *SHORT, "--model", "gated:Mean(over=0.45)"]
    more = ["--max-fault-rate", "0", "--max-new-faults", "0", "--baseline", "main", "--out", tmp_path / "run"]
    code, out, err = told(capsys, *run, *more, "--junit", tmp_path / "g.xml")
    assert (code, err) == (1, [])
    assert f"Results in {tmp_path / 'run'}" in out
    assert [line.split(":")[0] for line in out[-3:]] == [
        "passed  campaign",
        "FAILED  max_fault_rate",
        "FAILED  max_new_faults",
    ]
    assert f"themis replay {tmp_path / 'run'} " in out[-1]
    assert ElementTree.parse(tmp_path / "g.xml").getroot()[0].get("tests") == "3"
    code, out, _ = told(capsys, *run, "--max-fault-rate", "0.9", "--json", "--out", tmp_path / "json")
    found = json.loads("\n".join(out))
    assert (code, found["gates"]["has_failed"], found["tests"]) == (0, False, 400)
    for words in (
        ["--max-fault-rate", "0.5", "--uniform-share", "0"],
        ["--max-new-faults", "0", "--baseline", "nowhere"],
        ["--max-new-faults", "0", "--baseline", "main", "--perturb", "contrast"],
        ["--fail-under", "nothing=1"],
    ):
        code, out, [line] = told(capsys, *run, *words, "--out", tmp_path / "never")
        assert (code, out) == (2, []), line
        assert not (tmp_path / "never").exists()


def test_resume_checks_gates_at_its_end(here, capsys, tmp_path):
    shutil.copytree("new", tmp_path / "more")
    words = ["resume", tmp_path / "more", "--max-tests", "500", "--no-report", "--quiet"]
    assert told(capsys, *words, "--max-fault-rate", "0.9") == (0, [], [])
    code, out, [line] = told(capsys, *words, "--fail-under", "coverage_all=1")
    assert (code, out, line.startswith("FAILED  coverage_all: ")) == (1, [], True)


def test_an_interrupted_run_exits_with_130_and_its_folder_fails_the_gates(here, capsys, tmp_path):
    words = [*BASE, *SHORT, "--model", "gated:WornOut", "--max-tests", "100000", "--quiet"]
    code, _, _ = told(
        capsys, *words, "--max-fault-rate", "0.9", "--out", tmp_path / "cut", "--junit", tmp_path / "x.xml"
    )
    assert code == 130
    assert not (tmp_path / "x.xml").exists()
    code, out, _ = told(capsys, "gate", tmp_path / "cut", "--max-fault-rate", "1")
    assert code == 1
    assert out[0].startswith("FAILED  campaign: ")
    assert f"resume it with themis resume {tmp_path / 'cut'}" in out[0]


def test_gates_can_be_set_in_a_config_file(here, capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("fail_under: [coverage=0, clean_accuracy=1]\nmax_fault_rate: 0.9\n")
    words = [*BASE, *SHORT, "--model", "gated:Mean", "--config", tmp_path / "c.yaml", "--out", tmp_path / "run"]
    code, out, _ = told(capsys, *words)
    assert code == 0
    assert len([line for line in out if line.startswith("passed  ")]) == 4
