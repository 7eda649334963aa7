"""What a fault is."""

import pytest
import torch

from themis import DataError, ModelError, UsageError
from themis.oracle import NOT_FINITE, Changed, Wrong, are_probabilities, choose_oracle, confidence

CLEAN = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 5.0]])
TESTS = torch.tensor([[2.0, 2.5, 0.0], [0.0, 3.0, 1.0], [float("nan"), 1.0, 0.0]])


def test_a_changed_answer_is_a_fault():
    verdict = Changed().compare(CLEAN, TESTS, None)
    assert verdict.is_fault.tolist() == [True, False, True]
    assert verdict.outcome.tolist() == [1, 1, NOT_FINITE]
    assert verdict.margin.tolist() == [-0.5, 2.0, -float("inf")]


def test_a_wrong_answer_is_one_that_differs_from_the_label():
    verdict = Wrong().compare(CLEAN, CLEAN, torch.tensor([0, 1, 1]))
    assert verdict.is_fault.tolist() == [False, False, True]


def test_seeds_answered_wrongly_at_once_are_left_out():
    assert Wrong().check(CLEAN, torch.tensor([0, 1, 1])).tolist() == [True, True, False]
    assert Changed().check(CLEAN, None).all()


def test_labels_that_do_not_fit_the_outputs_are_refused():
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2 since the model gives 3 scores, got 3"):
        Wrong().check(CLEAN, torch.tensor([0, 1, 3]))
    with pytest.raises(DataError, match="got 0 of 3"):
        Wrong().check(CLEAN, torch.tensor([1, 2, 0]))
    with pytest.raises(DataError, match="needs labels"):
        Wrong().check(CLEAN, None)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 5, 5)])
def test_outputs_that_are_no_scores_are_refused(shape):
    with pytest.raises(ModelError, match=r"scores \[inputs, classes\]"):
        Changed().check(torch.zeros(shape), None)


def test_auto_follows_the_labels():
    assert isinstance(choose_oracle("auto", True), Wrong)
    assert isinstance(choose_oracle("auto", False), Changed)
    with pytest.raises(UsageError, match="did you mean 'wrong'"):
        choose_oracle("wron", True)


def test_confidence_takes_scores_and_probabilities():
    probabilities = CLEAN.softmax(1)
    torch.testing.assert_close(confidence(CLEAN), probabilities.amax(1))
    torch.testing.assert_close(confidence(probabilities, is_probability=True), probabilities.amax(1))
    assert are_probabilities(probabilities)
    assert not are_probabilities(CLEAN)
