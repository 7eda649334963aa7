"""The intervals of grades at levels: on simulated suites whose true errors are known, and on a model."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from suites import classifier, pictures

import themis
from themis.data.seeds import read_seeds
from themis.measure.calculator import Calculator
from themis.measure.sweep import sweep
from themis.oracle import choose_oracle
from themis.perturb import choose_perturbation
from themis.suites.definition import Level, SuiteMember
from themis.suites.diff import SuiteDiff
from themis.suites.folder import pack, unpack
from themis.suites.grades import grade_member, graded_rows
from themis.suites.result import SuiteRun

HARD = {"fog": (0.05, 0.1, 0.2), "snow": (0.02, 0.15, 0.5), "blur": (0.1, 0.1, 0.3)}
BASE = {"fog": (0.1, 0.2, 0.3), "snow": (0.1, 0.3, 0.5), "blur": (0.1, 0.2, 0.4)}
CLEAN, BASE_CLEAN = 0.03, 0.06
DEPENDENT = 0.7
"""The share of tests whose outcome is that of their seed, rather than their own."""


class Graded(SuiteRun):
    """A suite of which only the grades are known."""

    def __init__(self, wrong, clean, graded="same"):
        self.path = Path("simulated")
        grades = {name: [self.grade(row) for row in rows] for name, rows in wrong.items()}
        environment = {"data_sha256": "data"}
        self.record = {"environment": environment, "grades": grades, "clean": self.grade(clean), "graded": graded}

    @staticmethod
    def grade(row):
        counts = {"level": "a level", "seeds": len(row), "errors": int(row.sum()), "error": float(row.mean())}
        return {**counts, "passes": 0, "score": 1 - counts["error"], "score_name": "accuracy", "wrong": pack(row)}


def draw_suite(rng, errors, clean, seed_luck, graded="same"):
    """Answers of a model to seeds, the less lucky of which it answers wrongly at all levels and under all members."""

    def draw(rate):
        own = rng.random(len(seed_luck)) > DEPENDENT
        return (np.where(own, rng.random(len(seed_luck)), seed_luck) < rate).astype(np.int64)

    return Graded({name: [draw(rate) for rate in rates] for name, rates in errors.items()}, draw(clean), graded)


def truths():
    mean = np.mean([np.mean(rates) for rates in HARD.values()])
    return {
        "mean error": mean,
        "mCE": np.mean([sum(HARD[name]) / sum(BASE[name]) for name in HARD]),
    }


def check_intervals(n_seeds, n_suites):
    """Intervals of many simulated suites contain the truth, and are not much wider than the estimates scatter."""
    rng, truth = np.random.default_rng(n_seeds), truths()
    level, member, found = [], [], {}
    for _ in range(n_suites):
        luck = rng.random(n_seeds)
        suite = draw_suite(rng, HARD, CLEAN, luck)
        grades, mean = suite.grades, suite.mean_error
        estimates = {"mean error": (mean.value, mean.low, mean.high)}
        baselines = {
            "same seeds": draw_suite(rng, BASE, BASE_CLEAN, luck),
            "other seeds": draw_suite(rng, BASE, BASE_CLEAN, rng.random(n_seeds), "others"),
            "numbers": {name: list(rates) for name, rates in BASE.items()},
        }
        for name, other in baselines.items():
            ratios = suite.corruption_errors(other)
            estimates[f"mCE, {name}"] = (ratios.mce, *ratios.mce_interval)
        for name, estimate in estimates.items():
            found.setdefault(name, []).append(estimate)
        for name, errors in grades.level_errors.items():
            level += [e.low <= rate <= e.high for e, rate in zip(errors, HARD[name], strict=True)]
            member.append(grades.member_errors[name].low <= np.mean(HARD[name]) <= grades.member_errors[name].high)
    assert np.mean(level) >= 0.95
    assert np.mean(member) >= 0.94
    assert len(found) == 4
    for name, estimates in found.items():
        value, low, high = np.array(estimates).T
        true = truth[name.partition(",")[0]]
        assert ((low <= value) & (value <= high)).all()
        assert np.mean((low <= true) & (true <= high)) >= 0.93, name
        assert (high - low).mean() < 1.8 * 2 * 1.96 * value.std(), name


def test_intervals_of_simulated_suites_contain_the_truth():
    check_intervals(200, 40)


@pytest.mark.slow
@pytest.mark.parametrize("n_seeds", [100, 1000])
def test_intervals_of_many_simulated_suites_contain_the_truth(n_seeds):
    check_intervals(n_seeds, 500)


def test_a_suite_without_errors_has_an_interval_that_is_not_empty():
    suite = draw_suite(np.random.default_rng(0), {"fog": (0.0, 0.0)}, 0.0, np.full(50, 0.5))
    assert suite.mean_error.value == 0
    assert suite.mean_error.high == pytest.approx(1 - 0.025 ** (1 / 50), abs=1e-6)
    assert suite.corruption_errors({"fog": 0.5}).mce_interval == pytest.approx((0, 2 * suite.mean_error.high))


def compare(before, after):
    return SuiteDiff(before, after, {name: SimpleNamespace() for name in HARD}, ())


@pytest.mark.parametrize("is_paired", [True, False])
def test_the_differences_of_two_suites_hold_together(is_paired):
    """At most one of twenty pairs of models without a difference has one under any perturbation."""
    rng, called, held, width = np.random.default_rng(1), [], [], []
    for _ in range(60):
        luck = rng.random(300)
        before = draw_suite(rng, HARD, CLEAN, luck)
        others = (luck, "same") if is_paired else (rng.random(300), "others")
        found = compare(before, draw_suite(rng, HARD, CLEAN, *others))
        called.append(any(gap.sign for gap in found.error_differences.values()))
        *_, gap = found.mean_errors
        width.append(gap.high - gap.low)
        *_, worse = compare(before, draw_suite(rng, BASE, BASE_CLEAN, *others)).mean_errors
        truth = np.mean([np.mean(BASE[name]) - np.mean(HARD[name]) for name in HARD])
        held.append(worse.low <= truth <= worse.high)
    assert np.mean(called) <= 0.05
    assert np.mean(held) >= 0.94
    assert np.mean(width) < (0.06 if is_paired else 0.11)


def test_the_error_of_graded_samples_of_a_real_data_set_holds_that_of_all_of_it():
    net = classifier()
    data = pictures(net, 1500)
    member = SuiteMember("gaussian", choose_perturbation("gaussian(sigma=0:0.4)"), levels=(Level(0.5), Level(1.0)))
    target = themis.Target(net)
    with target.opened():
        calculator = Calculator.trace(target, read_seeds(data), member.perturbation, choose_oracle(target.oracle))
        sweep(calculator)
        every = [grade.error for grade in grade_member(calculator, member, np.arange(1500), 0)]
        held = []
        for random_seed in range(20):
            grades = grade_member(calculator, member, graded_rows(1500, 100, random_seed), random_seed)
            clean = np.zeros(100, dtype=np.int64)
            suite = Graded({"gaussian": [grade.wrong for grade in grades]}, clean)
            held += [e.low <= t <= e.high for e, t in zip(suite.grades.level_errors["gaussian"], every, strict=True)]
    assert np.mean(held) >= 0.95
    assert min(every) > 0.1


def test_flags_survive_their_text():
    for n in (1, 7, 8, 9, 1000):
        flags = np.random.default_rng(n).integers(0, 2, n)
        assert (unpack(pack(flags), n) == flags).all()
    with pytest.raises(ValueError, match="a bit for each"):
        unpack(pack(flags), 990)
