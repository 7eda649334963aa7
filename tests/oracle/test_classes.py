"""Classification: verdicts computed by hand."""

import pytest
import torch

from themis import DataError, ModelError
from themis.oracle import NOT_FINITE, Changed, Top, Wrong, are_probabilities, confidence
from themis.oracle.classes import class_loss

pytestmark = pytest.mark.quick

NAN, INF = float("nan"), float("inf")
CLEAN = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 5.0]])
TESTS = torch.tensor([[2.0, 2.5, 0.0], [0.0, 3.0, 1.0], [NAN, 1.0, 0.0]])


def test_a_changed_answer_is_a_fault():
    verdict = Changed().compare(CLEAN, TESTS, None)
    assert verdict.is_fault.tolist() == [True, False, True]
    assert verdict.outcome.tolist() == [1, 1, NOT_FINITE]
    assert verdict.margin.tolist() == [-0.5, 2.0, -INF]
    assert verdict.value is None


def test_a_wrong_answer_is_one_that_differs_from_the_label():
    verdict = Wrong().compare(CLEAN, CLEAN, torch.tensor([0, 1, 1]))
    assert verdict.is_fault.tolist() == [False, False, True]


def test_among_equal_scores_the_first_class_is_the_answer():
    clean = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    verdict = Changed().compare(clean, torch.full((2, 2), 0.5), None)
    assert verdict.is_fault.tolist() == [False, True]
    assert verdict.margin.tolist() == [0, 0]


def test_seeds_with_a_wrong_clean_answer_are_left_out():
    assert Wrong().check(CLEAN, torch.tensor([0, 1, 1])).tolist() == [True, True, False]
    assert Changed().check(CLEAN, None).all()


def test_a_label_outside_the_highest_scores_is_a_fault():
    outputs = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 4 + [[INF, 0.0, 0.0, 0.0]])
    verdict = Top(2).compare(outputs, outputs, torch.tensor([0, 1, 2, 3, 0]))
    assert verdict.is_fault.tolist() == [False, False, True, True, True]
    assert verdict.outcome.tolist() == [0, 0, 0, 0, NOT_FINITE]
    assert verdict.margin.tolist() == [2.0, 1.0, -1.0, -2.0, -INF]


def test_without_labels_the_clean_answer_must_stay_among_the_highest():
    clean = torch.tensor([[9.0, 0.0, 0.0, 0.0]] * 2)
    outputs = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0]])
    verdict = Top(2).compare(clean, outputs, None)
    assert verdict.is_fault.tolist() == [False, True]
    assert verdict.outcome.tolist() == [1, 2]
    assert Top(2).check(clean, None).all()


def test_top1_equals_wrong_even_for_ties():
    outputs = torch.randint(0, 3, (200, 4), generator=torch.Generator().manual_seed(0)).float()
    labels = torch.arange(200) % 4
    wrong, top = (oracle.compare(outputs, outputs, labels) for oracle in (Wrong(), Top(1)))
    for a, b in zip(wrong[:3], top[:3], strict=True):
        assert torch.equal(a, b)
    assert Top(1).grade(outputs, labels) == Wrong().grade(outputs, labels)


def test_seeds_whose_label_is_not_among_the_highest_are_left_out():
    labels = torch.tensor([2, 0, 1])
    assert Top(2).check(CLEAN, labels).tolist() == [False, False, True]
    assert Top(2).grade(CLEAN, labels) == {"accuracy": pytest.approx(1 / 3)}
    with pytest.raises(
        ModelError, match="'top3' must leave a class out, but the model has 3 scores: use oracle='top2'"
    ):
        Top(3).check(CLEAN, labels)


WRONG_LABELS = {
    "none": (None, "oracle 'wrong' needs labels, got none"),
    "too large": (torch.tensor([0, 1, 3]), r"labels must lie in 0\.\.2 since the model has 3 scores, got 3"),
    "negative": (torch.tensor([0, 1, -1]), r"labels must lie in 0\.\.2"),
    "all wrong": (
        torch.tensor([1, 2, 0]),
        "got 0 of 3, with 3 outputs for labels from 0 to 2: check the preprocessing",
    ),
    "one-hot": (torch.eye(3), r"3 inputs, got shape \[3, 3\]: pass whole numbers, not one-hot rows"),
    "half": (torch.tensor([0.0, 0.5, 1.0]), "labels must be class numbers, .* got 0.5"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_labels_that_do_not_fit_the_outputs_are_refused(name):
    labels, message = WRONG_LABELS[name]
    with pytest.raises(DataError, match=message):
        Wrong().check(CLEAN, labels)


def test_labels_may_be_whole_numbers_of_any_type():
    for labels in (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 1, 2], dtype=torch.uint8)):
        assert Wrong().check(CLEAN, labels).all()
        assert not Wrong().compare(CLEAN, CLEAN, labels).is_fault.any()
        assert Wrong().reference(CLEAN, labels).dtype == torch.int64


@pytest.mark.parametrize("oracle", [Changed(), Wrong(), Top(2)])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 5, 5)])
def test_outputs_that_are_not_scores_are_refused(shape, oracle):
    with pytest.raises(ModelError, match=r"scores \[inputs, classes\]"):
        oracle.settle(torch.zeros(shape), None)


def test_confidence_takes_scores_and_probabilities():
    probabilities = CLEAN.softmax(1)
    torch.testing.assert_close(confidence(CLEAN), probabilities.amax(1))
    torch.testing.assert_close(confidence(probabilities, is_probability=True), probabilities.amax(1))
    assert are_probabilities(probabilities)
    assert not are_probabilities(CLEAN)
    for outputs in (CLEAN, probabilities):
        torch.testing.assert_close(Wrong().settle(outputs, None).confidence(outputs), probabilities.amax(1))


def test_the_loss_is_the_cross_entropy_of_scores_and_of_probabilities():
    labels = torch.tensor([0, 1, 1])
    expected = torch.tensor([-CLEAN[k].log_softmax(0)[label] for k, label in enumerate(labels)])
    torch.testing.assert_close(class_loss(CLEAN, labels), expected)
    torch.testing.assert_close(class_loss(CLEAN.softmax(1), labels, is_probability=True), expected)
    many = torch.randn(1, 300)
    torch.testing.assert_close(class_loss(many, torch.tensor([255])), -many.log_softmax(1)[:, 255])
    assert class_loss(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), is_probability=True).isfinite()
