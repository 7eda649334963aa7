"""One number per input: verdicts computed by hand."""

import pytest
import torch

from themis import DataError, ModelError
from themis.oracle import KEPT, NOT_FINITE, Regression, choose_oracle
from themis.oracle.regression import LARGER, SMALLER

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_an_answer_that_moved_too_far_is_a_fault(shape):
    clean = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]).reshape(shape)
    outputs = torch.tensor([1.25, 1.5, 0.5, 0.75, NAN]).reshape(shape)  # the first is at the tolerance, not over it
    verdict = choose_oracle("regression:0.25").compare(clean, outputs, torch.zeros(5))
    assert verdict.is_fault.tolist() == [False, True, True, False, True]
    assert verdict.outcome.tolist() == [KEPT, LARGER, SMALLER, KEPT, NOT_FINITE]
    assert verdict.margin.tolist() == [0, -0.25, -0.25, 0, -INF]
    assert verdict.value[:4].tolist() == [1.25, 1.5, 0.5, 0.75]
    assert verdict.value[4].isnan()


def test_off_compares_with_the_label_and_leaves_out_seeds_that_are_already_off():
    clean, labels = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([1.0, 1.25, 2.0])
    oracle = choose_oracle("off:0.5")
    assert oracle.check(clean, labels).tolist() == [True, True, False]
    verdict = oracle.compare(clean, torch.tensor([[1.5], [0.5], [2.0]]), labels)
    assert verdict.is_fault.tolist() == [False, True, False]
    assert verdict.outcome.tolist() == [KEPT, SMALLER, KEPT]
    assert verdict.margin.tolist() == [0, -0.25, 0.5]
    assert oracle.grade(clean, labels) == {"error": pytest.approx(1.25 / 3)}
    assert oracle.compare(clean, clean, labels[:, None]).margin.tolist() == [0.5, 0.25, -0.5]


def test_standard_deviations_are_those_of_the_clean_answers():
    clean = torch.tensor([[1.0], [3.0], [1.0], [3.0]])
    settled = choose_oracle("regression:2sd").settle(clean, None)
    assert settled == Regression(2.0, 2.0)
    assert settled.spec() == "regression:2.0"
    assert settled.describe() == (
        "an answer further than 2 (2 standard deviations of the clean answers) from the clean one"
    )
    assert "(1 standard deviation of the clean" in choose_oracle("off:1sd").settle(clean, clean[:, 0]).describe()
    assert choose_oracle("regression") == choose_oracle("regression:2sd")
    assert choose_oracle("off:0.5sd").settle(clean, clean[:, 0]).spec() == "off:0.5"
    assert choose_oracle("regression:7").settle(clean, None).spec() == "regression:7.0"
    assert choose_oracle(settled.spec()).compare(clean, clean + 2, None).is_fault.sum() == 0


def test_answers_and_labels_that_do_not_fit_are_refused():
    oracle, clean = choose_oracle("regression:0.1"), torch.rand(3, 1)
    for call in (oracle.check, oracle.settle):
        with pytest.raises(ModelError, match=r"one number per input, \[inputs\] or \[inputs, 1\], got \[3, 2\]"):
            call(torch.rand(3, 2), None)
    with pytest.raises(
        ModelError, match=r"got 3 equal to 0\.5: pass an absolute tolerance, such as oracle='regression:0"
    ):
        choose_oracle("regression").settle(torch.full((3,), 0.5), None)
    with pytest.raises(DataError, match="oracle 'off' needs labels, got none"):
        choose_oracle("off:0.1").check(clean, None)
    with pytest.raises(DataError, match=r"one number per seed: 3 inputs, got shape \[3, 2\]"):
        oracle.check(clean, torch.rand(3, 2))
    with pytest.raises(DataError, match="labels must be finite, but 1 of 3 are NaN or infinite: drop these seeds"):
        oracle.check(clean, torch.tensor([1.0, NAN, 0.0]))
    with pytest.raises(DataError, match=r"got 0 of 3: .* or use oracle='regression'"):
        choose_oracle("off:0.1").check(clean, torch.full((3,), 9.0))


def test_an_attack_leaves_the_clean_answer_where_the_squared_error_is_flat():
    answers = torch.tensor([[1.0], [3.0], [1.0]], requires_grad=True)
    loss = choose_oracle("regression:1").loss(answers, torch.tensor([1.0, 1.0, 3.0]))
    assert loss.tolist() == [0, 2, 2]
    loss.sum().backward()
    assert answers.grad.squeeze().tolist() == [1, 1, -1]
