"""Binary decisions and several labels: verdicts computed by hand."""

import pytest
import torch

from themis import DataError, ModelError
from themis.oracle import KEPT_ANSWER, NOT_FINITE, Multilabel, Threshold

NAN, INF = float("nan"), float("inf")
UP = torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)).item()  # just under a half


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_decision_that_flips_is_a_fault(shape):
    clean = torch.tensor([0.75, 0.75, 0.25, 0.25, 0.25]).reshape(shape)
    outputs = torch.tensor([0.5, UP, 0.25, 0.5, NAN]).reshape(shape)  # a score at the threshold is a 1
    verdict = Threshold(0.5).compare(clean, outputs, None)
    assert verdict.is_fault.tolist() == [False, True, False, True, True]
    assert verdict.outcome.tolist() == [1, 0, 0, 1, NOT_FINITE]
    assert verdict.margin.tolist() == pytest.approx([0, UP - 0.5, 0.25, 0, -INF])
    assert verdict.value[:4].tolist() == outputs.reshape(-1)[:4].tolist()
    assert verdict.value[4].isnan()


def test_the_default_threshold_is_even_chances():
    chances, logits = torch.tensor([0.0, 0.2, 1.0]), torch.tensor([[-3.0], [0.2], [1.0]])
    assert Threshold().settle(chances, None) == Threshold(0.5, is_probability=True)
    assert Threshold().settle(logits, None) == Threshold(0.0)
    assert Threshold(0.9).settle(logits, None) == Threshold(0.9)
    assert Threshold(0.9).settle(chances, None).describe() == "a decision that flips at probability 0.9"
    assert Threshold().settle(logits, None).spec() == "threshold:0.0"
    assert Multilabel().settle(chances[None], None) == Multilabel(0.5, is_probability=True)
    assert Multilabel().settle(logits, None) == Multilabel(0.0)


def test_labels_leave_out_seeds_that_are_decided_wrongly():
    clean, oracle = torch.tensor([-1.0, 1.0, 2.0]), Threshold(0.0)
    for labels in (torch.tensor([0, 0, 1]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([[0], [0], [1]])):
        assert oracle.check(clean, labels).tolist() == [True, False, True]
        assert oracle.grade(clean, labels) == {"accuracy": pytest.approx(2 / 3)}
    assert oracle.check(clean, None).all()


def test_binary_outputs_and_labels_that_do_not_fit_are_refused():
    oracle, clean = Threshold(0.5), torch.rand(3)
    with pytest.raises(ModelError, match=r"\[inputs\] or \[inputs, 1\], got \[3, 2\]: pass output="):
        oracle.check(torch.rand(3, 2), None)
    with pytest.raises(DataError, match=r"0 or 1, one per seed: 3 inputs, got shape \[3\] with values 0 to 2"):
        oracle.check(clean, torch.tensor([0, 1, 2]))
    with pytest.raises(DataError, match=r"got shape \[2\]"):
        oracle.check(clean, torch.tensor([0, 1]))
    with pytest.raises(DataError, match="got 0 of 3"):
        oracle.check(clean, 1 - (clean >= 0.5).long())


def test_a_decision_has_a_confidence_and_a_loss():
    score = torch.tensor([0.0, 2.0, -2.0])
    oracle = Threshold(0.0)
    torch.testing.assert_close(oracle.confidence(score[:, None]), torch.tensor([0.0, 2.0, 2.0]).sigmoid())
    chance = score.sigmoid()
    as_chance = Threshold(0.5, is_probability=True)
    torch.testing.assert_close(as_chance.confidence(chance), oracle.confidence(score))
    kept = torch.tensor([1, 1, 0])
    expected = -torch.stack([chance[0], chance[1], 1 - chance[2]]).log()
    torch.testing.assert_close(oracle.loss(score[:, None], kept), expected)
    torch.testing.assert_close(as_chance.loss(chance, kept), expected)


def test_the_label_that_flipped_furthest_is_the_outcome():
    clean = torch.tensor([[0.9, 0.1, 0.9]]).expand(5, 3)
    outputs = torch.tensor(
        [
            [0.6, 0.4, 0.9],  # nothing flips
            [0.4, 0.1, 0.9],  # the first label is lost by 0.1
            [0.4, 0.8, 0.2],  # and so is the third by 0.3; the second is gained by 0.3, and comes first
            [0.9, 0.5, 0.9],  # gained at the threshold
            [0.9, INF, 0.9],
        ]
    )
    verdict = Multilabel(0.5).compare(clean, outputs, None)
    assert verdict.is_fault.tolist() == [False, True, True, True, True]
    assert verdict.outcome.tolist() == [KEPT_ANSWER, 0, 1, 1, NOT_FINITE]
    torch.testing.assert_close(verdict.margin, torch.tensor([0.1, -0.1, -0.3, 0.0, -INF]))


def test_only_labels_that_the_clean_answer_has_right_can_be_faults():
    clean = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
    labels = torch.tensor([[1, 1, 1], [0, 0, 0]])
    oracle = Multilabel(0.0)
    assert oracle.check(clean, labels).tolist() == [True, False]
    assert oracle.grade(clean, labels) == {"accuracy": pytest.approx(2 / 6)}
    assert oracle.reference(clean, labels).tolist() == [[1, -1, 1], [-1, -1, -1]]
    mended, broken = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, -2.0]])
    for outputs, is_fault, outcome, margin in ((mended, False, KEPT_ANSWER, 1), (broken, True, 2, -2)):
        verdict = oracle.compare(clean[:1], outputs, labels[:1])
        assert (verdict.is_fault.item(), verdict.outcome.item(), verdict.margin.item()) == (is_fault, outcome, margin)
    loss = oracle.loss(torch.tensor([[2.0, 5.0, -1.0]]), torch.tensor([[1, -1, 1]]))
    expected = -(torch.tensor([2.0, -1.0]).sigmoid().log().sum()) / 3
    torch.testing.assert_close(loss, expected[None])


def test_outputs_and_labels_of_another_shape_are_refused():
    oracle = Multilabel(0.5)
    with pytest.raises(ModelError, match=r"scores \[inputs, labels\], got \[3, 4, 4\]: pass output="):
        oracle.check(torch.rand(3, 4, 4), None)
    with pytest.raises(DataError, match=r"0 or 1 for each of the 4 scores, \[3, 4\], got shape \[3\]"):
        oracle.check(torch.rand(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(DataError, match="with values 0 to 2"):
        oracle.check(torch.rand(3, 4), torch.tensor([[0, 1, 2, 0]] * 3))


def test_a_single_label_may_be_flat():
    outputs, oracle = torch.tensor([[0.9], [0.2], [0.7]]), Multilabel(0.5)
    for labels in (torch.tensor([1, 0, 0]), torch.tensor([[1], [0], [0]])):
        assert oracle.check(outputs, labels).tolist() == [True, True, False]
        assert oracle.grade(outputs, labels) == {"accuracy": pytest.approx(2 / 3)}
