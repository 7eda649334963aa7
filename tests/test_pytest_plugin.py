"""The pytest plugin, in sessions of its own on real campaigns."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
WORLD = """
    import torch
    from torch import nn

    kept = torch.load({path!r})
    DIGITS = kept["inputs"], kept["labels"]
    NET = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))
    NET.load_state_dict(kept["weights"])
"""
MINE = "from world import DIGITS, NET\ndef make_net():\n    return NET\ndef make_data():\n    return DIGITS\n"
FIXTURE = """
    import pytest
    from world import DIGITS, NET
"""
WEAK = (
    FIXTURE
    + """
    def test_noise(robustness):
        robustness(NET, DIGITS, "gaussian", magnitude=0.8, max_fault_rate=0.05, max_tests=400)
"""
)


SEVERAL = FIXTURE + (
    """
    @pytest.mark.parametrize("perturbation", ["gaussian", "shot", "a/../b"])
    def test_it(robustness, perturbation):
        name = perturbation if "/" not in perturbation else "speckle"
        robustness(NET, DIGITS, name, max_fault_rate=1.0, max_tests=100)

    @pytest.mark.xdist_group("alone")
    def test_twice(robustness):
        robustness(NET, DIGITS, "gaussian", max_fault_rate=1.0, max_tests=100)
        robustness(NET, DIGITS, "gaussian", magnitude=0.8, max_fault_rate=0.01, max_tests=100)
    """
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A net trained for real on real digits, and some of them, in a file."""
    from themis.data.readers import read_digits

    path = tmp_path_factory.mktemp("world") / "world.pt"
    digits = read_digits()[torch.arange(0, 5000, 10)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(digits.inputs), digits.labels).backward()
        optimiser.step()
    held = {"inputs": digits.inputs[::3].clone(), "labels": digits.labels[::3].clone(), "weights": net.state_dict()}
    torch.save(held, path)
    warm(net, digits, path.parent / "run")
    return path


def warm(net, digits, folder):
    """Import what campaigns need in this process, so that the sessions inside it find it there."""
    import themis
    import themis.testing.robustness
    from themis.gates import Gates, check_gates
    from themis.report.page import write_report

    run = themis.run(net, digits, "gaussian", out=folder, max_tests=100)
    check_gates(run, Gates.of(max_fault_rate=1.0), folder=folder)
    write_report(folder)


@pytest.fixture
def project(pytester, kept, monkeypatch):
    """A user's project with a model, and a way to run its tests in this process."""
    for name in ("PYTEST_XDIST_WORKER", "CI", "BUILD_NUMBER"):  # where either is set, pytest says all of it twice
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    pytester.makepyfile(world=WORLD.format(path=str(kept)))
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    return pytester


def found_in(result):
    """What a session printed."""
    return result.stdout.str()


def run_folder(text):
    return Path(re.search(r"^run: (.+)$", text, re.M)[1])


# What it costs


def test_a_session_that_does_not_use_it_imports_nothing(tmp_path):
    (tmp_path / "test_plain.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_unconfigure():\n    print('MODULES', *sorted(sys.modules), file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    seen = []
    for more in (["-p", "themis"], []):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-v", "-p", "no:cacheprovider", *more],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert "1 passed" in done.stdout
        seen.append(set(re.search(r"^MODULES (.*)$", done.stderr, re.M)[1].split()))
    with_it, without = seen
    assert not {"torch", "numpy", "themis.campaign", "themis.testing"} & with_it
    assert with_it - without == {"themis", "themis.version", "themis.pytest_plugin"}


def test_it_is_found_by_its_entry_point_and_can_be_left_out(pytester):
    pytester.makepyfile("def test_nothing(robustness):\n    pass\n")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    left_out = pytester.runpytest_inprocess("-p", "no:themis")
    left_out.stdout.fnmatch_lines(["*fixture 'robustness' not found*"])
    left_out.assert_outcomes(errors=1)
    refused = pytester.runpytest_inprocess("-p", "no:themis", "--themis-max-tests", "9")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR


# Passing and failing


def test_a_model_that_holds_passes_and_gives_its_run(project):
    project.makepyfile(
        FIXTURE
        + """
    def test_noise(robustness):
        run = robustness(NET, DIGITS, "gaussian", magnitude=0.01, max_fault_rate=0.2, max_tests=400)
        assert run.rounds[-1].tests == 400 or run.stop_reason == "coverage"
        assert run.fault_rate.high <= 0.2
        print("TESTS", run.rounds[-1].tests)
    """
    )
    result = project.runpytest_inprocess("-v", "-s")
    result.assert_outcomes(passed=1)
    assert "fault rate" in found_in(result)
    assert "Stopped because" in found_in(result)
    assert "report.html" not in found_in(result)


def test_a_model_that_breaks_fails_with_its_most_telling_faults(project):
    project.makepyfile(test_weak=WEAK)
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    text = found_in(result)
    faults = re.findall(
        r"^  fault (\d+): seed \d+, \d answered as \d \(\d+\.\d%\); sigma 0\.\d+, SSIM \d\.\d{3}, L2 [\d.]+$",
        text,
        re.M,
    )
    assert len(faults) == 3
    replays = re.findall(r"^    replay: pytest (\S+) --themis-replay (\S+)$", text, re.M)
    folder = run_folder(text)
    assert replays == [("test_weak.py::test_noise", f"{folder}:{id}") for id in faults]
    report = Path(re.search(r"^report: (.+)$", text, re.M)[1])
    assert report == folder / "report.html"
    assert "<html" in report.read_text()
    assert "max_fault_rate" in re.search(r"^FAILED .*$", text, re.M)[0]
    assert "Traceback" not in text
    assert "robustness.py" not in text


def test_a_failure_is_told_in_a_ci_job_too(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_weak=WEAK)
    text = found_in(project.runpytest_inprocess())
    assert len(set(re.findall(r"--themis-replay (\S+)", text))) == 3
    assert "Traceback" not in text


def test_a_fault_is_replayed_by_its_own_test(project):
    project.makepyfile(test_weak=WEAK + "\n    def test_other(robustness):\n        robustness(NET, DIGITS, 'shot')\n")
    first = found_in(project.runpytest_inprocess("-k", "noise"))
    command = re.search(r"--themis-replay (\S+)", first)[1]
    result = project.runpytest_inprocess("--themis-replay", command)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["still a fault: now answered as * as it was recorded", "fault *: seed *"])
    right = re.search(rf"fault {command.rpartition(':')[2]}: seed \d+, (\d)", first)[1]
    with (project.path / "world.py").open("a") as file:
        file.write(f"\nNET[3].bias.data[{right}] += 1000\n")
    mended = project.runpytest_inprocess("--themis-replay", command, "-rs", "-k", "noise")
    mended.assert_outcomes(skipped=1, deselected=1)
    mended.stdout.fnmatch_lines(["*no longer a fault*"])
    assert "model" in found_in(mended)
    for wrong, said in ((f"{run_folder(first)}:999999", "must name a fault of the run"), ("nothing", "RUN:FAULT")):
        result = project.runpytest_inprocess("--themis-replay", wrong, "-k", "noise")
        result.assert_outcomes(failed=1)
        assert said in found_in(result)


def test_a_fault_of_a_second_campaign_is_replayed_too(project):
    project.makepyfile(test_some=SEVERAL)
    first = found_in(project.runpytest_inprocess("-k", "twice"))
    result = project.runpytest_inprocess("--themis-replay", re.search(r"--themis-replay (\S+)", first)[1], "-rA")
    result.assert_outcomes(failed=1, skipped=3)
    result.stdout.fnmatch_lines(["still a fault: now answered as * as it was recorded"])


def test_without_a_gate_one_fault_fails(project):
    project.makepyfile(
        FIXTURE
        + """
    @pytest.mark.parametrize("magnitude", [1e-7, 0.8])
    def test_noise(robustness, magnitude):
        robustness(NET, DIGITS, "gaussian", magnitude=magnitude, max_tests=200)
    """
    )
    result = project.runpytest_inprocess("-rA")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["faults: * where none is allowed", "PASSED*1e-07*", "FAILED*0.8*"])


def test_new_faults_against_a_baseline_fail(project):
    project.makepyfile(
        FIXTURE
        + """
    import copy
    import themis

    @pytest.mark.parametrize("scale", [1.0, 0.0])
    def test_no_worse_than_before(robustness, scale):
        before = themis.run(NET, DIGITS, "gaussian", magnitude=0.3, max_tests=300)
        after = copy.deepcopy(NET)
        after[1].weight.data[:, 200:400] *= scale
        robustness(after, DIGITS, "gaussian", magnitude=0.3, max_tests=300, max_new_faults=0, baseline=before)
    """
    )
    result = project.runpytest_inprocess("-rA")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["max_new_faults: * new faults against *", "PASSED*1.0*", "FAILED*0.0*"])


def test_a_run_that_knows_its_origin_is_replayed_from_the_shell(project, capsys):
    from themis.cli import main

    (project.path / "mine.py").write_text(MINE)
    project.makepyfile(
        """
    import os
    from themis.origin import Origin

    def test_it(robustness):
        origin = Origin(model="mine:make_net", data="mine:make_data", folder=os.getcwd())
        robustness(origin.target(), origin.read(), "gaussian", magnitude=0.8, max_tests=100, origin=origin)
    """
    )
    text = found_in(project.runpytest_inprocess())
    folder, id = re.search(r"^    replay: themis replay (\S+) (\d+)$", text, re.M).groups()
    capsys.readouterr()
    assert main(["replay", folder, id]) == 0
    assert "1 of 1 reproduced" in capsys.readouterr().out


def test_an_interrupted_campaign_ends_the_session(project):
    project.makepyfile(
        FIXTURE
        + """
    import themis

    class Stop(themis.Callback):
        is_pressed = False

        def on_round(self, round):
            if not self.is_pressed:
                self.is_pressed = True
                raise KeyboardInterrupt

    def test_it(robustness):
        robustness(NET, DIGITS, "gaussian", max_fault_rate=1.0, out="kept", callbacks=[Stop()], coverage=None)

    def test_never():
        open("reached", "w")
    """
    )
    with pytest.raises(KeyboardInterrupt):
        project.runpytest_inprocess()
    assert json.loads((project.path / "kept" / "summary.json").read_text())["stop_reason"] == "user"
    assert not (project.path / "reached").exists()


# The marker


def test_a_marked_test_returns_what_is_tested(project):
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


def test_robustness_tests_can_be_left_out(project):
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
    result.stdout.fnmatch_lines(["  what was found until then: */report.html"])


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


def test_the_command_line_wins_over_the_test_and_the_test_over_the_ini_file(project):
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


def test_every_test_has_a_folder_of_its_own_with_workers_too(project):
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
