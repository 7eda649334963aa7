"""A suite that decides a claim about a mean error: on few seeds, and rarely wrong however often it looks."""

import json
from itertools import pairwise

import numpy as np
import pytest
from suites import small_suite
from user_module import go_to

from themis import UsageError
from themis.cli import main
from themis.report.gates.gates import Gates, check_suite_gates
from themis.settings import FAILS, HOLDS, UNDECIDED
from themis.suites.grades import LevelGrade, SuiteGrades
from themis.suites.result import looks, verdict

GRADED = [
    {"perturb": "gaussian", "magnitude": 0.4, "levels": [{"sigma": 0.1}, {"sigma": 0.4}]},
    {"perturb": "fog", "levels": [{"density": 1.8, "patchiness": 0.3, "scale": 0.5}]},
]


def test_a_claim_that_is_far_off_is_decided_by_a_part_of_the_seeds(tmp_path):
    whole = small_suite(tmp_path / "whole", members=GRADED, max_tests=10)
    failed = small_suite(tmp_path / "failed", members=GRADED, decide="mean_error<=0.01")
    assert (failed.decision.verdict, failed.decision.seeds, failed.decision.looks) == (FAILS, 60, 2)
    assert failed.decision.figure.low > 0.01
    assert failed.tests == 0
    assert failed.passes == failed.record["passes"] + 3 * 60
    held = small_suite(tmp_path / "held", members=GRADED, decide="mean_error<=0.99")
    assert held.decision.verdict == HOLDS
    close = small_suite(tmp_path / "close", members=GRADED, decide=f"mean_error<={whole.mean_error.value:.6f}")
    assert (close.decision.verdict, close.decision.seeds) == (UNDECIDED, 120)
    assert close.mean_error.value == whole.mean_error.value
    assert close.mean_error.low < whole.mean_error.low, "two looks share the 5%"
    assert close.passes == close.record["passes"] + 3 * (60 + 120)


def test_the_mean_corruption_error_is_decided_against_a_baseline(tmp_path):
    numbers = {"gaussian-0.4": [0.9, 0.9], "fog": 0.9}
    suite = small_suite(tmp_path / "own", members=GRADED, decide="mce<=0.99", baseline=numbers)
    errors = suite.corruption_errors(numbers)
    assert (suite.decision.figure.value, suite.decision.figure.low) == (errors.mce, errors.mce_interval[0])
    for options in ({"decide": "mce<=1"}, {"decide": "mean_error<=1", "baseline": numbers}):
        with pytest.raises(UsageError, match="a baseline is for a claim about mce"):
            small_suite(tmp_path / "none", members=GRADED, **options)


def test_the_verdict_is_a_gate(tmp_path):
    failed = small_suite(tmp_path / "failed", members=GRADED, decide="mean_error<=0.01")
    results = check_suite_gates(failed, Gates())
    assert results.has_failed
    assert not results.is_undecided
    assert results.failed_lines[0].startswith("FAILED  all decide: mean_error<=0.01 does not hold (certain at 95%): ")
    held = small_suite(tmp_path / "held", members=GRADED, decide="mean_error<=0.99")
    assert check_suite_gates(held, Gates()).sentence == "The gate passed."


@pytest.mark.parametrize(("limit", "code"), [(0.01, 1), (0.999, 0)])
def test_the_command_returns_the_verdict(tmp_path, monkeypatch, capsys, limit, code):
    go_to(tmp_path, monkeypatch, "from suites import classifier, pictures\ndata = pictures(classifier())\n")
    (tmp_path / "own.yaml").write_text(json.dumps({"members": GRADED}))
    words = ["--model", "suites:classifier", "--data", "mine:data", "--decide", f"mean_error<={limit}", "--out", "out"]
    assert main(["suite", "own.yaml", *words, "--junit", "gates.xml"]) == code
    assert f"mean_error<={limit}" in capsys.readouterr().out
    assert main(["gate", "out"]) == code
    assert 'name="decide"' in (tmp_path / "gates.xml").read_text()
    assert main(["report", "out"]) == 0


@pytest.mark.parametrize("claim", ["mce<0.8", "fault_rate<=0.1", "mean_error<=0", "mean_error<=-1", "mce<=x"])
def test_other_claims_are_refused(tmp_path, claim):
    with pytest.raises(UsageError, match="decide must be mce<=X or mean_error<=X"):
        small_suite(tmp_path / "suite", members=GRADED, decide=claim)


def test_a_suite_without_levels_is_refused(tmp_path):
    with pytest.raises(UsageError, match="needs members that are graded at levels"):
        small_suite(tmp_path / "suite", members=[{"perturb": "fog"}], decide="mean_error<=0.1")


@pytest.mark.parametrize("n", [1, 49, 100, 130, 1000])
def test_the_last_look_is_at_all_seeds(n):
    counts = looks(n)
    assert counts[-1] == n
    assert all(later >= 2 * earlier for earlier, later in pairwise(counts))
    assert counts[0] >= min(n, 50)


@pytest.mark.parametrize("excess", [0.001, -0.001])
def test_wrong_verdicts_are_rare_in_simulated_suites(excess):
    """Three members at five levels; seeds differ in how easily they break, and the limit lies beside the true mean."""
    rng, wrong, n_suites, n_levels = np.random.default_rng(0), 0, 200, 15
    chances = np.linspace(0, 0.6, n_levels)  # of a seed of average difficulty, whose mean difficulty is 0.5
    limit = chances.mean() * 0.5 + excess
    is_true = HOLDS if excess > 0 else FAILS
    for _ in range(n_suites):
        answers = rng.random((400, n_levels)) < chances * rng.beta(0.5, 0.5, 400)[:, None]
        counts = looks(400)
        for n in counts:
            grades = [LevelGrade("", n, int(level.sum()), None, n, level) for level in answers[:n].T.astype(np.int64)]
            figure = SuiteGrades({"own": grades}, None, 0.025 / len(counts)).mean_error
            if (found := verdict(figure, limit)) != UNDECIDED:
                wrong += found != is_true
                break
    assert wrong / n_suites <= 0.05
