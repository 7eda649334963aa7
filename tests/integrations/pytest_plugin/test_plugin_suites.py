"""The pytest plugin on suites: the gates hold under every perturbation."""

import pytest
from projects import FIXTURE, found_in, run_folder

pytestmark = pytest.mark.xdist_group("gates")

pytest_plugins = ["pytester"]

TESTS = (
    FIXTURE
    + """
    def test_weak(robustness):
        members = ["fog", {"perturb": "gaussian", "magnitude": 0.8}]
        robustness.suite(NET, DIGITS, members, max_fault_rate=0.2, max_tests=300)

    def test_fine(robustness):
        suite = robustness.suite(NET, DIGITS, ["brightness(shift=0:0.001)"], max_fault_rate=1.0, max_tests=60)
        assert suite.tests == 60

    def test_no_fault_is_allowed(robustness):
        robustness.suite(NET, DIGITS, [{"perturb": "gaussian", "magnitude": 0.8}], max_tests=60)

    def test_misspelt(robustness):
        robustness.suite(NET, DIGITS, "wether", max_fault_rate=1.0)

    @pytest.mark.robustness("fog", magnitude=0.5, max_fault_rate=1.0, max_tests=60)
    def test_marked(robustness):
        suite = robustness.suite(NET, DIGITS, [{"perturb": "gaussian", "magnitude": 0.8}])
        assert suite.tests == 60
"""
)


def test_a_suite_is_tested_member_by_member(project):
    project.makepyfile(test_suites=TESTS)
    result = project.runpytest("-p", "no:xdist")
    result.assert_outcomes(passed=2, failed=3)
    text = found_in(result)
    assert "FAILED  gaussian-0.8 max_fault_rate" in text
    assert "did you mean 'weather'?" in text
    assert "none allowed" in text
    folder = run_folder(text)
    assert (folder / "report.html").is_file()
    assert (folder / "gaussian-0.8" / "report.html").is_file()
