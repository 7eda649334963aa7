"""A model against its reference: verdicts computed by hand."""

import pytest
import torch

from themis import ModelError
from themis.oracle import NOT_FINITE, Disagreement

pytestmark = pytest.mark.quick

NAN, INF = float("nan"), float("inf")


def outputs(*pairs):
    return torch.tensor([[*own, *other] for own, other in pairs])


def test_a_fault_is_an_answer_that_differs_from_the_reference_whatever_the_clean_answer_was():
    tests = outputs(([2.0, 1.0, 0.0], [5.0, 1.0, 0.0]), ([0.0, 3.0, 1.0], [2.0, 1.0, 0.0]), ([0, 0, 1.0], [0, 0, 4.0]))
    verdict = Disagreement().compare(tests[:1].expand(3, -1), tests, None)
    assert verdict.is_fault.tolist() == [False, True, False]
    assert verdict.outcome.tolist() == [0, 1, 2]
    assert verdict.value.tolist() == [0, 0, 2]  # the answers of the reference


def test_the_margin_is_the_smaller_of_both_and_negative_if_they_disagree():
    tests = outputs(
        ([2.0, 1.0, 0.0], [5.0, 2.0, 0.0]), ([0.0, 3.0, 1.0], [2.0, 1.5, 0.0]), ([1.0, 1.0, 0], [1.0, 0, 0])
    )
    verdict = Disagreement().compare(tests, tests, None)
    assert verdict.margin.tolist() == [1.0, -0.5, 0.0]


def test_the_margins_of_probabilities_and_of_scores_are_in_one_unit():
    scores = torch.tensor([[1.0, 3.0, 0.5], [4.0, 0.0, 0.0]])
    mixed = torch.cat([scores, scores.softmax(1)], 1)
    both = torch.cat([scores, scores], 1)
    torch.testing.assert_close(
        Disagreement().compare(mixed, mixed, None).margin, Disagreement().compare(both, both, None).margin
    )


def test_one_model_that_breaks_down_is_a_fault_and_two_are_none():
    fine = [2.0, 0.0]
    tests = outputs(([NAN, 0.0], fine), (fine, [INF, 0.0]), ([NAN, 0.0], [0.0, INF]), (fine, fine))
    verdict = Disagreement().compare(tests, tests, None)
    assert verdict.is_fault.tolist() == [True, True, False, False]
    assert verdict.outcome.tolist() == [NOT_FINITE, 0, NOT_FINITE, 0]
    assert verdict.margin.tolist() == [-INF, -INF, 0.0, 2.0]


def test_seeds_on_which_they_disagree_are_left_out():
    clean = outputs(([1.0, 0.0], [0.0, 1.0]), ([1.0, 0.0], [3.0, 1.0]))
    assert Disagreement().check(clean, torch.tensor([0, 1])).tolist() == [False, True]
    with pytest.raises(ModelError, match=r"must agree on some clean inputs, got 0 of 1: check that both number"):
        Disagreement().check(clean[:1], None)


def test_an_attack_drives_them_apart():
    tests = outputs(([1.0, 0.0], [1.0, 0.0]), ([1.0, 0.5], [1.0, -0.5]))
    same, apart = Disagreement().loss(tests, torch.tensor([0, 0])).tolist()
    assert same == 0 < apart
