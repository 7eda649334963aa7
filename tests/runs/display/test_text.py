"""The summary as text: how much of what is within reach was found."""

from dataclasses import replace

import pytest

from themis.judge.coverage import Coverage
from themis.judge.estimate import Estimate
from themis.runs.display.text import left_to_find, round_line
from themis.runs.run import Round

pytestmark = pytest.mark.quick
COVERED = Coverage(1.0, 1.0, {}, 10, 0, 0, 5000, 0)
ROUND = Round(
    4, 5000, 0, 5000, 900, 412, 150, COVERED, 2.0,
    reachable_faults=Estimate(520, 470, 610), reachable_seeds=Estimate(160, 152, 190), forecast_faults_tests=7421,
)  # fmt: skip


def test_what_is_left_to_find_is_what_more_tests_would_add():
    text = "about 108 distinct faults (95%: 58 to 198) with four times the tests"
    assert left_to_find(ROUND) == text


def test_without_a_fault_the_upper_limit_is_stated():
    clean = replace(ROUND, faults=0, distinct_faults=0, failing_seeds=0, reachable_faults=Estimate(0, 0, 7))
    assert left_to_find(clean) == "at most 7 distinct faults (95%) with four times the tests"


def test_a_line_of_progress_says_what_is_within_reach():
    assert round_line(ROUND) == "100.0%, 412 distinct faults of about 520, 5,000 tests, 2,500/s"
    assert round_line(replace(ROUND, reachable_faults=None)) == "100.0%, 412 distinct faults, 5,000 tests, 2,500/s"


def test_a_forecast_beyond_the_budget_gives_way_to_what_the_budget_has_left():
    open_ = replace(ROUND, coverage=replace(COVERED, forecast=190_000))
    assert round_line(open_).endswith("2,500/s, about 190,000 to the coverage goal")
    assert round_line(open_, max_tests=500_000).endswith("2,500/s, about 190,000 to the coverage goal")
    assert round_line(open_, max_tests=6500).endswith("2,500/s, 1,500 left in the budget")
    assert round_line(open_, max_tests=5000).endswith("2,500/s")
