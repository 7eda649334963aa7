"""The pytest plugin on real campaigns: passing tests, failing tests and their messages, in separate sessions."""

import json
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from projects import FIXTURE, MINE, SEVERAL, WEAK, found_in, run_folder

import themis
from themis_integrations.pytest_plugin.robustness import ARGUMENTS

pytestmark = pytest.mark.xdist_group("gates")

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]


# What it costs


def test_a_session_without_robustness_tests_imports_only_the_plugin(tmp_path):
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
    assert not {"torch", "numpy", "themis.campaign.loop", "themis_integrations.pytest_plugin.robustness"} & with_it
    plugin = {"themis_integrations", "themis_integrations.pytest_plugin", "themis_integrations.pytest_plugin.plugin"}
    assert with_it - without == plugin | {"themis", "themis.version"}


def test_the_plugin_is_found_by_its_entry_point_and_can_be_disabled(pytester):
    pytester.makepyfile("def test_nothing(robustness):\n    pass\n")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    left_out = pytester.runpytest_inprocess("-p", "no:themis")
    left_out.stdout.fnmatch_lines(["*fixture 'robustness' not found*"])
    left_out.assert_outcomes(errors=1)
    refused = pytester.runpytest_inprocess("-p", "no:themis", "--themis-max-tests", "9")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR


# Passing and failing


def test_a_claim_is_the_gate_of_a_campaign_that_decides_it(project):
    project.makepyfile(
        FIXTURE
        + """
    def test_holds(robustness):
        run = robustness(NET, DIGITS, "gaussian", magnitude=0.9, decide="fault_rate<=0.8")
        assert run.counts.faults > 0  # no fault is the rule only without a claim
        assert run.decision.verdict == "holds"

    def test_does_not_hold(robustness):
        robustness(NET, DIGITS, "gaussian", magnitude=0.9, decide="fault_rate<=0.01")
    """
    )
    result = project.runpytest_inprocess("-v", "-s")
    result.assert_outcomes(passed=1, failed=1)
    assert "decide: fault_rate<=0.01 does not hold (certain at 95%)" in found_in(result)


def test_a_robust_model_passes_and_the_fixture_returns_its_run(project):
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


def test_a_failure_is_also_reported_in_a_ci_job(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_weak=WEAK)
    text = found_in(project.runpytest_inprocess())
    assert len(set(re.findall(r"--themis-replay (\S+)", text))) == 3
    assert "Traceback" not in text


def test_a_constant_model_fails_with_and_without_limits_unless_it_is_allowed(project):
    project.makepyfile(
        test_constant="""
        import pytest
        from torch import nn
        from world import DIGITS

        NET = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))
        nn.init.zeros_(NET[3].weight)

        @pytest.mark.filterwarnings("ignore:all 167 clean answers")
        @pytest.mark.parametrize("limits", [{}, {"max_fault_rate": 1.0}, {"allow_constant": True}])
        def test_it(robustness, limits):
            robustness(NET, DIGITS[0], "gaussian", max_tests=100, **limits)
        """
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=2, passed=1)
    assert found_in(result).count("but all 167 clean answers are the same, so that it says nothing") >= 2


def test_a_fault_is_replayed_by_its_own_test(project):
    project.makepyfile(test_weak=WEAK + "\n    def test_other(robustness):\n        robustness(NET, DIGITS, 'shot')\n")
    first = found_in(project.runpytest_inprocess("-k", "noise"))
    command = re.search(r"--themis-replay (\S+)", first)[1]
    result = project.runpytest_inprocess("--themis-replay", command)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["still a fault: now answered as * as recorded", "fault *: seed *"])
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


def test_a_fault_of_a_second_campaign_can_be_replayed(project):
    project.makepyfile(test_some=SEVERAL)
    first = found_in(project.runpytest_inprocess("-k", "twice"))
    result = project.runpytest_inprocess("--themis-replay", re.search(r"--themis-replay (\S+)", first)[1], "-rA")
    result.assert_outcomes(failed=1, skipped=3)
    result.stdout.fnmatch_lines(["still a fault: now answered as * as recorded"])


def test_without_a_gate_one_fault_fails_the_test(project):
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
    result.stdout.fnmatch_lines(["faults: * none allowed", "PASSED*1e-07*", "FAILED*0.8*"])


def test_new_faults_compared_with_a_baseline_fail_the_test(project):
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
    result.stdout.fnmatch_lines(["max_new_faults: * new faults compared with *", "PASSED*1.0*", "FAILED*0.0*"])


def test_a_run_that_records_its_origin_can_be_replayed_from_the_shell(project, capsys):
    from themis.cli import main

    (project.path / "mine.py").write_text(MINE)
    project.makepyfile(
        """
    import os
    from themis.runs.source import Origin

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


def test_the_fixture_takes_every_argument_of_run():
    takes = signature(themis.run).parameters.values()
    named = {parameter.name for parameter in takes if parameter.kind is parameter.KEYWORD_ONLY}
    assert named == set(ARGUMENTS)
