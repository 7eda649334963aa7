"""The marker, budgets, errors, folders and workers of the pytest plugin, in separate sessions."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from projects import FIXTURE, MINE, SEVERAL, WEAK, found_in

from themis_integrations.pytest_plugin.robustness import is_stale, write_note

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.xdist_group("gates")
ROOT = Path(__file__).parents[3]


# The marker


def test_a_marked_test_returns_the_target_and_the_data(project):
    project.makepyfile(
        FIXTURE
        + """
    pytestmark = pytest.mark.robustness("gaussian", max_fault_rate=0.2, magnitude=0.8)

    @pytest.mark.robustness(magnitude=0.01)
    def test_nearest_wins():
        return NET, DIGITS

    def test_of_the_module():
        return NET, DIGITS

    def test_as_defaults_of_the_fixture(robustness):
        run = robustness(NET, DIGITS, magnitude=0.02)
        assert run.start.perturbation == "gaussian"
        assert run.start.theta[0].high == pytest.approx(0.02)

    def test_nothing():
        pass

    class TestMethods:
        @pytest.mark.robustness(magnitude=0.01)
        def test_method(self, tmp_path):
            return NET, DIGITS
    """
    )
    result = project.runpytest_inprocess("--themis-max-tests=200", "-rA")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines_random(
        ["FAILED*test_of_the_module*", "FAILED*test_nothing*", "themis: *must return (target, data)*"]
    )


def test_robustness_tests_can_be_deselected_and_skipped(project):
    project.makepyfile(WEAK + "    def test_plain():\n        pass\n")
    project.runpytest_inprocess("-m", "not robustness").assert_outcomes(passed=1, deselected=1)
    project.runpytest_inprocess("--themis-skip").assert_outcomes(passed=1, skipped=1)


def test_a_unittest_method_with_the_marker_is_refused(project):
    project.makepyfile(
        """
    import unittest
    import pytest

    class TestOld(unittest.TestCase):
        @pytest.mark.robustness("gaussian")
        def test_it(self):
            return 1, 2
    """
    )
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "plain test" in result.stderr.str()


# What is wrong


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("robustness(NET, DIGITS, 'gausian')", "did you mean 'gaussian'?"),
        ("robustness(NET, DIGITS)", "must name its perturbation"),
        ("robustness(NET, DIGITS, 'gaussian', max_test=3)", "did you mean 'max_tests'?"),
        ("robustness(NET, DIGITS, 'gaussian', max_tests=-3)", "max_tests must be positive"),
        ("robustness(NET, DIGITS, 'gaussian', max_fault_rate=5)", "max_fault_rate must"),
        ("robustness(NET, DIGITS, 'gaussian', fail_under={'covrage': 0.9})", "coverage"),
        ("robustness(NET, DIGITS, 'gaussian', max_new_faults=0)", "baseline"),
        ("robustness('net', DIGITS, 'gaussian')", "target must be"),
    ],
)
def test_a_usage_error_is_one_line(project, call, said):
    project.makepyfile(f"from world import DIGITS, NET\ndef test_it(robustness):\n    {call}\n")
    result = project.runpytest_inprocess("--themis-report", "kept")
    result.assert_outcomes(failed=1)
    text = found_in(result)
    [line] = [line for line in text.splitlines() if line.startswith("themis: ")]
    assert said in line
    assert "Traceback" not in text
    assert not list((project.path / "kept").glob("*"))


def test_a_model_that_raises_says_where(project):
    project.makepyfile(
        FIXTURE
        + """
    import torch

    class Tired(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.passes = NET, 0

        def forward(self, x):
            self.passes += 1
            if self.passes > 12:
                raise RuntimeError("had enough")
            return self.net(x)

    def test_it(robustness):
        robustness(Tired(), DIGITS, "gaussian", magnitude=0.8, max_tests=5000)
    """
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["themis: the model raised RuntimeError*had enough*", "  at *test_*.py:* in forward"])
    result.stdout.fnmatch_lines(["  results up to this error: */report.html"])


@pytest.mark.parametrize("flag", ["--themis-max-tests=0", "--themis-max-seconds=nan", "--themis-random-seed=x"])
def test_a_wrong_budget_is_refused_at_once(pytester, flag):
    result = pytester.runpytest_inprocess(flag)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "must be a" in result.stderr.str()


def test_a_wrong_ini_value_is_refused_at_once(pytester):
    pytester.makeini("[pytest]\nthemis_max_tests = many\n")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "themis_max_tests in" in result.stderr.str()


# Budgets


def test_the_command_line_overrides_the_test_and_the_test_the_ini_file(project):
    project.makeini("[pytest]\nthemis_max_tests = 150\nthemis_random_seed = 7\n")
    project.makepyfile(
        FIXTURE
        + """
    @pytest.mark.parametrize("options", [{}, {"max_tests": 250, "random_seed": 3}])
    def test_it(robustness, options):
        run = robustness(NET, DIGITS, "gaussian", coverage=None, max_fault_rate=1.0, **options)
        settings = run.start.settings
        print("RAN", run.rounds[-1].tests, settings.random_seed, settings.max_seconds)
    """
    )
    lines = re.findall(r"RAN .*", found_in(project.runpytest_inprocess("-s")))
    assert lines == ["RAN 150 7 None", "RAN 250 3 None"]
    flags = ("--themis-max-tests=100", "--themis-random-seed=5", "--themis-max-seconds=500")
    lines = re.findall(r"RAN .*", found_in(project.runpytest_inprocess("-s", *flags)))
    assert lines == ["RAN 100 5 500.0"] * 2


# Folders, workers, JUnit


def test_every_test_has_its_own_folder_also_with_workers(project):
    project.makepyfile(test_some=SEVERAL)
    kept, junit = project.path / "kept", project.path / "junit.xml"
    (kept / "test_some.py-test_twice").mkdir(parents=True)
    (kept / "test_some.py-test_twice" / "mine.txt").write_text("not to be removed")
    flags = ("--themis-report", "kept", f"--junitxml={junit}")
    seen = []
    for session in (project.runpytest_subprocess, project.runpytest_inprocess):
        result = session(*flags, *(["-n", "2", "--dist", "loadgroup"] if not seen else []))
        result.assert_outcomes(passed=3, failed=1)
        folders = {note.parent.name: json.loads(note.read_text()) for note in kept.glob("*/pytest.json")}
        assert set(folders) == {
            "test_some.py-test_it-gaussian",
            "test_some.py-test_it-shot",
            "test_some.py-test_it-a-..-b",
            "test_some.py-test_twice-2",
            "test_some.py-test_twice-3",
        }
        assert len({note["session"] for note in folders.values()}) == 1
        assert all((kept / name / "report.html").exists() for name in folders)
        assert "replay: pytest test_some.py::test_twice --themis-replay" in found_in(result)
        seen.append(folders["test_some.py-test_it-shot"]["session"])
    assert seen[0] != seen[1]
    assert (kept / "test_some.py-test_twice" / "mine.txt").exists()
    assert found_in(result).count("Stopped because") >= 4
    cases = {case.get("name"): case for case in ElementTree.parse(junit).getroot().iter("testcase")}
    properties = {each.get("name"): each.get("value") for each in cases["test_it[gaussian]"].iter("property")}
    assert 0 <= float(properties["themis_fault_rate"]) <= float(properties["themis_fault_rate_high"]) <= 1
    assert 0 <= float(properties["themis_coverage"]) <= 1
    assert Path(properties["themis_report"]).is_file()
    twice = {each.get("name"): each.get("value") for each in cases["test_twice"].iter("property")}
    assert int(twice["themis_faults_2"]) > int(twice["themis_faults"])
    assert "The most telling faults" in cases["test_twice"].find("failure").text


# Documents


def test_the_blocks_of_the_document_run(project, monkeypatch):
    text = (ROOT / "docs" / "pytest.md").read_text()
    blocks = re.findall(r"```python\n# (test_\w+\.py)\n(.*?)```", text, re.S)
    assert len(blocks) >= 2
    for name, block in blocks:
        (project.path / name).write_text(block)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    (project.path / "mine.py").write_text(MINE)
    result = project.runpytest_inprocess("--themis-max-tests=300")
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) >= 4
    assert not {"failed", "errors"} & set(outcomes)


@pytest.mark.parametrize("name", ["notes.txt", "tensors/mine.pt", "exports/faults.csv"])
def test_a_folder_of_an_earlier_session_is_replaced_only_if_it_has_no_other_files(tmp_path, name):
    folder, link = tmp_path / "test_it", tmp_path / "link"
    (folder / "tensors").mkdir(parents=True)
    link.symlink_to(folder)
    for file in ("run.sqlite", "report.html", "tensors/000001.safetensors"):
        (folder / file).touch()
    write_note(folder, {"test": "test_it", "call": 1, "session": "before"})
    assert is_stale(folder, "now")
    assert not is_stale(folder, "before")
    assert not is_stale(link, "now")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    assert not is_stale(folder, "now")
