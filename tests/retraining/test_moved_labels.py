"""Retraining under geometry: what a model learns from and is graded by are the labels of the moved pictures."""

import numpy as np
import pytest
import torch
from pixel_nets import PixelNet, scenes

import themis
from themis.data.seeds import read_seeds
from themis.measure.tests import Tests
from themis.perturb import choose_perturbation
from themis.retraining.batches import Disturber
from themis.retraining.examine import Exam, _grade_old, exam_tests, examine
from themis.retraining.grading import calculator, grade, losses
from themis.retraining.material import of_tests
from themis.retraining.recipe import Recipe
from themis.retraining.tune import tune
from themis.target.ledger import Ledger

ROTATE = choose_perturbation("rotate")
ATTACKED = choose_perturbation("rotate + fgsm(radius=0:0.000001)")


@pytest.fixture
def case():
    pictures, labels = scenes(8)
    target = themis.Target(PixelNet(), oracle="segmentation:0.01")
    seeds = read_seeds((pictures, labels))
    with target.opened(), torch.no_grad():
        oracle = themis.oracle.choose_oracle(target.oracle).settle(target.forward(pictures), labels)
    return target, seeds, oracle


def draws(perturbation, n):
    low, high = (np.array([getattr(theta, end) for theta in perturbation.theta], np.float32) for end in ("low", "high"))
    share = np.random.default_rng(0).random((n, len(low)), dtype=np.float32)
    return (low + share * (high - low)).astype(np.float32), np.arange(n)


@pytest.mark.parametrize("perturbation", [ROTATE, ATTACKED], ids=["plain", "attack"])
def test_material_and_fresh_inputs_have_the_labels_of_the_moved_pictures(case, perturbation):
    target, seeds, oracle = case
    rows, (theta, noise_seed) = np.arange(8), draws(perturbation, 8)
    material = of_tests(Tests(rows, rows, theta, noise_seed, rows.astype(str)), seeds, perturbation, target)
    disturber = Disturber(target, [(seeds, torch.arange(len(seeds)))], oracle)
    fresh = disturber(perturbation, *map(torch.from_numpy, (rows, theta, noise_seed)))
    for inputs, labels in ((material.disturbed, material.disturbed_labels), fresh):
        with target.opened(), torch.no_grad():
            outputs = target.forward(inputs)
        assert grade(oracle, outputs, labels).tolist() == [1] * 8
        assert grade(oracle, outputs, seeds.labels).mean() < 0.9
        assert (labels == 255).any()
        assert torch.equal(labels, material.disturbed_labels)
        assert losses(oracle, outputs, labels).isfinite().all()


def test_a_perfect_model_is_graded_1_in_an_examination_and_keeps_that_grade(case):
    target, seeds, _ = case
    reading = examine(target, seeds, ROTATE, Exam(draws=3, passes=400), ledger=Ledger())
    assert reading.clean.mean() == reading.disturbed.mean() == 1
    assert reading.distinct is not None
    assert reading.distinct.sum() == 0
    with target.opened():
        bench = calculator(target, seeds, ROTATE)
        tests = exam_tests(ROTATE, seeds, 1, 0)
        inputs, _, motion = bench.run_chunk(tests, 8)
        rows = torch.from_numpy(tests.seed)
        moved = bench.clean.oracle.move_labels(seeds.labels[rows], motion)
        assert _grade_old(bench, inputs, moved, None).tolist() == [1] * 8
        assert _grade_old(bench, inputs, seeds.labels[rows], None).mean() < 0.9


def test_a_perfect_model_is_scored_1_while_it_is_trained_and_keeps_its_loss(case):
    target, seeds, _ = case
    rows, (theta, noise_seed) = np.arange(32) % 8, draws(ROTATE, 32)
    material = of_tests(Tests(rows, rows, theta, noise_seed, rows.astype(str)), seeds, ROTATE, target)
    tuned = tune(target, material, ROTATE, Recipe(epochs=2, batches=3, mix=1.0))
    assert [epoch.disturbed for epoch in tuned.history] == [1, 1, 1]
    assert tuned.history[-1].loss < tuned.history[0].loss
