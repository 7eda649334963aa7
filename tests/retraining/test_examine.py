"""Examining uses the same tests for every model, counts all judge seeds and refuses those that were trained on."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.data.seeds import read_seeds
from themis.errors import DataError
from themis.oracle import Multilabel, Regression, Segmentation, Threshold, Top, Wrong
from themis.perturb import choose_perturbation
from themis.retraining.changes import (
    Shift,
    changes,
    combine,
    describe_faults,
    normal_interval,
    paired,
    t_interval,
)
from themis.retraining.examine import Exam, exam_tests, examine
from themis.retraining.grading import errors, grade, settled_oracle
from themis.target.ledger import Ledger, remember

pytestmark = pytest.mark.xdist_group("examine")

NOISE = choose_perturbation("gaussian", 0.8)


def settled(target, seeds):
    return replace(target, oracle=settled_oracle(target, seeds))


@pytest.fixture(scope="module")
def case(trained):
    module, held_out = trained
    judge = held_out[torch.arange(0, 1000, 4)]
    return settled(themis.Target(module), judge), judge


@pytest.fixture(scope="module")
def reading(case):
    target, judge = case
    return examine(target, judge, NOISE, Exam(draws=4, passes=900, random_seed=3), ledger=Ledger())


def test_all_judge_seeds_count_and_the_clean_score_is_the_accuracy(case, reading):
    target, judge = case
    with target.opened(), torch.no_grad():
        is_right = target.forward(judge.inputs).argmax(1) == judge.labels
    assert np.array_equal(reading.clean, is_right.double().numpy())
    assert len(reading.disturbed) == len(judge) == len(reading.seed_id)
    assert reading.disturbed.mean() < reading.clean.mean() - 0.05
    assert set(np.unique(reading.disturbed * 4)) <= {0.0, 1.0, 2.0, 3.0, 4.0}


def test_the_disturbed_score_agrees_with_tests_run_by_hand(case, reading):
    target, judge = case
    tests = exam_tests(NOISE, judge, 4, 3)
    from themis.perturb import Context, perturb

    inputs = judge.inputs[torch.from_numpy(tests.seed)]
    made = perturb(
        NOISE, inputs, torch.from_numpy(tests.theta), torch.from_numpy(tests.noise_seed), Context(target.bounds)
    )
    with target.opened(), torch.no_grad():
        is_right = target.forward(made).argmax(1) == judge.labels[torch.from_numpy(tests.seed)]
    by_hand = is_right.double().view(4, len(judge)).mean(0).numpy()
    assert np.abs(by_hand - reading.disturbed).mean() < 0.01  # near-ties alone may fall otherwise


def test_the_tests_of_a_seed_depend_only_on_the_seed_and_the_random_seed(case):
    _, judge = case
    whole, part = exam_tests(NOISE, judge, 2, 0), exam_tests(NOISE, judge[torch.arange(5, 9)], 2, 0)
    at = np.concatenate([np.arange(5, 9), len(judge) + np.arange(5, 9)])
    assert np.array_equal(whole.theta[at], part.theta)
    assert np.array_equal(whole.noise_seed[at], part.noise_seed)
    assert len(np.unique(whole.noise_seed)) == len(whole)
    assert not np.isin(exam_tests(NOISE, judge, 2, 1).noise_seed, whole.noise_seed).any()


def test_examining_the_same_model_twice_gives_the_same_reading_and_mends_no_fault(case, reading):
    target, judge = case
    again = examine(target, judge, NOISE, Exam(draws=4, passes=900, random_seed=3), ledger=Ledger(), before=reading)
    assert np.array_equal(again.disturbed, reading.disturbed)
    assert again.distinct.sum() == reading.distinct.sum() > 50
    assert again.mended.max() == 0
    row = changes(reading, [again])
    assert (row.disturbed.difference, row.distinct_faults.difference, row.mended[0]) == (0, 0, 0)
    assert row.words.startswith("0.0% of ")


def test_the_counts_of_a_campaign_agree_with_its_columns(reading):
    counts = reading.as_dict()
    assert counts["distinct_faults"] == reading.distinct.sum()
    assert counts["failing_seeds"] == (reading.distinct > 0).sum()
    assert reading.held.sum() == reading.clean.sum() - counts["failing_seeds"]
    assert len(reading.old_labels) == len(reading.old_inputs) > 0.9 * counts["distinct_faults"]


def test_seeds_that_were_trained_on_are_refused_by_the_ledger_and_by_that_of_the_module(case):
    target, judge = case
    with pytest.raises(DataError, match="judge seeds must be seeds that the weights were not trained on, but 3 of"):
        examine(target, judge, NOISE, Exam(draws=1, passes=0), ledger=Ledger.of(judge[torch.arange(3)]))
    module = copy.deepcopy(target.module)
    remember(module, Ledger.of(judge[torch.arange(2)]))
    with pytest.raises(DataError, match="2 of 250"):
        examine(replace(target, module=module), judge, NOISE, Exam(draws=1, passes=0), ledger=Ledger())


def test_without_passes_no_campaign_is_run_and_labels_are_required(case):
    target, judge = case
    plain = examine(target, judge, NOISE, Exam(draws=1, passes=0), ledger=Ledger())
    assert (plain.distinct, plain.old_inputs, plain.mended) == (None, None, None)
    with pytest.raises(DataError, match="must have labels"):
        examine(target, read_seeds(judge.inputs), NOISE, Exam(draws=1, passes=0), ledger=Ledger())


def test_old_attacks_are_tested_unchanged_on_the_new_model(case):
    target, judge = case
    few, attack = judge[torch.arange(0, 250, 5)], choose_perturbation("fgsm", 0.2)
    before = examine(target, few, attack, Exam(draws=1, passes=200), ledger=Ledger())
    blind = replace(target, module=copy.deepcopy(target.module))
    with torch.no_grad():
        last = [each for each in blind.module.modules() if isinstance(each, nn.Linear)][-1]
        last.weight.zero_()
        last.bias.copy_(torch.arange(10.0) == int(few.labels[0]))  # always the same answer
    after = examine(blind, few, attack, Exam(draws=1, passes=0), ledger=Ledger(), before=before)
    share = float((before.old_labels == few.labels[0]).double().mean())
    assert after.mended.mean() == pytest.approx(share)
    assert after.clean.mean() == float((few.labels == few.labels[0]).double().mean())


class Slope(nn.Module):
    """A number an input: its mean, off by `shift`."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, inputs):
        return inputs.flatten(1).mean(1) + self.shift


def test_regression_uses_the_same_tolerance_for_both_models_and_reports_errors():
    inputs = torch.rand(200, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = inputs.flatten(1).mean(1)
    seeds = read_seeds((inputs, labels))
    target = settled(themis.Target(Slope(), oracle="regression:2sd"), seeds)
    noise = choose_perturbation("gaussian", 0.5)
    before = examine(target, seeds, noise, Exam(draws=3, passes=400), ledger=Ledger())
    off = examine(replace(target, module=Slope(0.05)), seeds, noise, Exam(draws=3, passes=400), ledger=Ledger())
    assert before.clean.mean() == 1
    assert before.clean_error.max() < 1e-6
    assert off.clean_error.mean() == pytest.approx(0.05, abs=1e-5)
    row = changes(before, [off])
    assert row.clean_error.difference == pytest.approx(0.05, abs=1e-5)
    assert row.disturbed_error.before > 0.01
    assert target.oracle.tolerance is not None  # one for both models


def test_grades_of_other_tasks():
    labels = torch.tensor([0, 1, 1])
    scores = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [torch.nan, 1.0, 0.0]])
    assert grade(Wrong(), scores, labels).tolist() == [1, 0, 0]
    assert grade(Top(2), scores, labels).tolist() == [1, 1, 0]
    assert grade(Threshold(0.0), torch.tensor([-1.0, 1.0, -1.0]), labels).tolist() == [1, 1, 0]
    several = torch.tensor([[1, 0], [1, 1]])
    assert grade(Multilabel(0.0), torch.tensor([[1.0, 1.0], [1.0, 1.0]]), several).tolist() == [0.5, 1]
    near = Regression(0.1, None)
    assert grade(near, torch.tensor([0.05, 1.2, torch.inf]), labels.float()).tolist() == [1, 0, 0]
    assert errors(near, torch.tensor([0.5, 1.0, 1.0]), labels.float()).tolist() == [0.5, 0, 0]
    assert errors(Wrong(), scores, labels) is None


def test_a_segmentation_is_graded_by_its_overlap_with_the_label_map():
    labels = torch.tensor([[[0, 0], [1, 1]], [[0, 0], [1, 255]]])
    right = torch.nn.functional.one_hot(labels.clamp(max=1), 2).movedim(-1, 1).float()
    wrong = right.flip(1)
    half = right.clone()
    half[:, :, 0] = half[:, :, 1]  # all is class 1
    assert grade(Segmentation(), right, labels).tolist() == [1, 1]
    assert grade(Segmentation(), wrong, labels).tolist() == [0, 0]
    assert grade(Segmentation(), half, labels)[0] == pytest.approx(0.25)  # class 0: none; class 1: 2 of 4
    assert grade(Segmentation(), torch.full_like(right, torch.nan), labels).tolist() == [0, 0]


def test_changes_over_several_random_seeds_have_both_intervals_and_the_spread(reading):
    better = np.clip(reading.disturbed + 0.25, 0, 1)
    runs = [replace(reading, disturbed=better), replace(reading, disturbed=np.clip(reading.disturbed + 0.5, 0, 1))]
    row = changes(reading, runs)
    means = [each.disturbed.mean() for each in runs]
    assert row.n_runs == 2
    assert (row.disturbed.least, row.disturbed.most) == pytest.approx((means[0], means[1]))
    assert row.disturbed.over_seeds.low < row.disturbed.difference < row.disturbed.over_seeds.high
    assert row.disturbed.over_runs == t_interval(np.array(means) - reading.disturbed.mean())
    assert row.clean.over_seeds is row.clean.over_runs is row.clean.combined is None  # nothing varied
    assert changes(reading, [runs[0]]).disturbed.over_runs is None


def test_intervals_contain_the_true_value_as_often_as_stated():
    generator = np.random.default_rng(0)
    hits = {"normal": 0, "t": 0}
    for _ in range(400):
        wide, few = normal_interval(generator.normal(1, 2, 300)), t_interval(generator.normal(1, 2, 4))
        hits["normal"] += wide.low <= 1 <= wide.high
        hits["t"] += few.low <= 1 <= few.high
    assert all(0.92 <= n / 400 <= 0.98 for n in hits.values())


def test_equal_trainings_do_not_yield_an_interval_of_zero_width(reading):
    generator = np.random.default_rng(0)
    better = replace(reading, disturbed=np.clip(reading.disturbed + generator.random(len(reading.disturbed)), 0, 1))
    shift = changes(reading, [better, better]).disturbed
    assert shift.over_runs is None
    assert shift.combined == shift.over_seeds
    assert shift.combined.low < shift.difference < shift.combined.high
    assert t_interval(np.array([0.0599, 0.0599])) is None
    assert normal_interval(np.zeros(200)) is None
    assert combine(None, None) is None


@pytest.mark.parametrize("n_runs", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05])
def test_the_combined_interval_contains_the_true_gain(n_runs, spread):
    """Judge seeds and trainings both vary, and so does each seed under each training; the true gain is 0.06."""
    generator = np.random.default_rng(1)
    hits = {"combined": 0, "over_seeds": 0}
    for _ in range(400):
        seeds, runs = generator.normal(0, 0.4, 300), generator.normal(0, spread, (n_runs, 1))
        gains = 0.06 + seeds + runs + generator.normal(0, 0.2, (n_runs, 300))
        shift = paired(np.zeros(300), gains)
        for name in hits:
            estimate = getattr(shift, name)
            hits[name] += estimate.low <= 0.06 <= estimate.high
    assert hits["combined"] / 400 >= 0.94
    if spread == 0.05:
        assert hits["over_seeds"] / 400 < 0.9  # judge seeds alone promise too much if trainings vary


def _count(before, after):
    return Shift(before, after, after, after, None, None, None)


def test_faults_that_move_elsewhere_are_said_to():
    moved = ": the faults have moved elsewhere."
    assert not describe_faults((0.8, 0.8, 0.8), 100, _count(100, 30)).endswith(moved)
    assert describe_faults((0.8, 0.8, 0.8), 100, _count(100, 97)).endswith(moved)
    few_mended = describe_faults((0.1, 0.1, 0.1), 100, _count(100, 97))
    assert few_mended == (
        "10.0% of 100 old faults are now answered correctly, and a new campaign finds 97 distinct faults after 100 "
        "before."
    )
    assert describe_faults((0.8, 0.8, 0.8), 3, _count(3, 3)) == ""
    assert describe_faults(None, 100, _count(100, 97)) == ""
