"""One number per input: verdicts computed by hand."""

import pytest
import torch

from themis import DataError, ModelError, UsageError
from themis.oracle import KEPT_ANSWER, NOT_FINITE, Regression, choose_oracle
from themis.oracle.regression import LARGER, SMALLER
from themis.runs.fault import name_outcome

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_an_answer_that_moved_too_far_is_a_fault(shape):
    clean = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]).reshape(shape)
    outputs = torch.tensor([1.25, 1.5, 0.5, 0.75, NAN]).reshape(shape)  # the first is at the tolerance, not over it
    verdict = choose_oracle("regression:0.25").compare(clean, outputs, torch.zeros(5))
    assert verdict.is_fault.tolist() == [False, True, True, False, True]
    assert verdict.outcome.tolist() == [KEPT_ANSWER, LARGER, SMALLER, KEPT_ANSWER, NOT_FINITE]
    assert verdict.margin.tolist() == [0, -0.25, -0.25, 0, -INF]
    assert verdict.value[:4].tolist() == [1.25, 1.5, 0.5, 0.75]
    assert verdict.value[4].isnan()


def test_off_compares_with_the_label_and_leaves_out_seeds_that_are_already_off():
    clean, labels = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([1.0, 1.25, 2.0])
    oracle = choose_oracle("off:0.5")
    assert oracle.check(clean, labels).tolist() == [True, True, False]
    verdict = oracle.compare(clean, torch.tensor([[1.5], [0.5], [2.0]]), labels)
    assert verdict.is_fault.tolist() == [False, True, False]
    assert verdict.outcome.tolist() == [KEPT_ANSWER, SMALLER, KEPT_ANSWER]
    assert verdict.margin.tolist() == [0, -0.25, 0.5]
    assert oracle.grade(clean, labels) == {"error": pytest.approx(1.25 / 3)}
    assert oracle.compare(clean, clean, labels[:, None]).margin.tolist() == [0.5, 0.25, -0.5]


def test_standard_deviations_are_those_of_the_clean_answers():
    clean = torch.tensor([[1.0], [3.0], [1.0], [3.0]])
    settled = choose_oracle("regression:2sd").settle(clean, None)
    assert settled == Regression(2.0, 2.0, basis="2 times the standard deviation of the clean answers")
    assert settled.spec() == "regression:2.0"
    assert settled.describe() == (
        "an answer further than 2 (2 times the standard deviation of the clean answers) from the clean one"
    )
    assert (
        "(1 times the standard deviation of the clean" in choose_oracle("off:1sd").settle(clean, clean[:, 0]).describe()
    )
    assert choose_oracle("off:0.5sd").settle(clean, clean[:, 0]).spec() == "off:0.5"
    assert choose_oracle("regression:7").settle(clean, None).spec() == "regression:7.0"
    assert choose_oracle(settled.spec()).compare(clean, clean + 2, None).is_fault.sum() == 0


def test_answers_and_labels_that_do_not_fit_are_refused():
    oracle, clean = choose_oracle("regression:0.1"), torch.rand(3, 1)
    for call in (oracle.check, oracle.settle):
        with pytest.raises(ModelError, match=r"numbers, \[inputs\] or \[inputs, k\], got \[3, 2, 2\]"):
            call(torch.rand(3, 2, 2), None)
    with pytest.raises(
        ModelError, match=r"got 3 equal to 0\.5: pass an absolute tolerance, such as oracle='regression:0"
    ):
        choose_oracle("regression").settle(torch.full((3,), 0.5), None)
    with pytest.raises(DataError, match="oracle 'off' needs labels, got none"):
        choose_oracle("off:0.1").check(clean, None)
    with pytest.raises(DataError, match=r"one number per seed: 3 inputs, got shape \[3, 2\]"):
        oracle.check(clean, torch.rand(3, 2))
    with pytest.raises(DataError, match="labels must be finite, but 1 of 3 are not: drop these seeds"):
        oracle.check(clean, torch.tensor([1.0, NAN, 0.0]))
    with pytest.raises(DataError, match=r"got 0 of 3: .* or use oracle='regression'"):
        choose_oracle("off:0.1").check(clean, torch.full((3,), 9.0))


def test_the_default_tolerance_is_the_typical_error_of_the_model():
    labels = torch.tensor([20.0, 30.0, 40.0, 50.0, 60.0])
    clean = labels + torch.tensor([1.0, -12.0, 12.0, -30.0, 9.0])
    oracle = choose_oracle("regression").settle(clean[:, None], labels)
    assert oracle.spec() == "regression:12.0"  # 2 standard deviations would be 39
    said = "an answer further than 12 (the model's median clean error, in the unit of the labels) from the clean one"
    assert oracle.describe() == said
    assert choose_oracle("auto").settle(clean, labels) == oracle
    off = choose_oracle("off").settle(clean, labels)
    assert off.tolerance == 36
    assert "36 (3 times the model's median clean error" in off.describe()
    spread = labels.double().std(unbiased=False).item()
    nearly_perfect = choose_oracle("regression").settle(labels + 1e-4, labels)
    assert nearly_perfect.tolerance == pytest.approx(0.05 * spread)
    assert "(5% of the standard deviation of the labels, in the unit" in nearly_perfect.describe()
    unlabelled = choose_oracle("regression").settle(labels, None)
    assert unlabelled.tolerance == pytest.approx(0.1 * spread)
    assert "(10% of the standard deviation of the clean answers)" in unlabelled.describe()


def test_one_of_several_numbers_that_moved_too_far_is_a_fault():
    clean = torch.tensor([[1.0, 100.0]] * 5)
    outputs = torch.tensor([[1.25, 100.25], [1.5, 100.0], [1.0, 99.0], [0.0, 100.5], [NAN, 100.0]])
    verdict = choose_oracle("regression:0.25").compare(clean, outputs, None)
    assert verdict.is_fault.tolist() == [False, True, True, True, True]
    assert verdict.outcome.tolist() == [KEPT_ANSWER, 3, 4, 2, NOT_FINITE]
    assert verdict.margin.tolist() == [0, -0.25, -0.75, -0.75, -INF]
    assert [name_outcome("regression", outcome, None) for outcome in (1, 3, 4)] == [
        "larger",
        "output 0 larger",
        "output 1 smaller",
    ]
    assert name_outcome("regression", 4, ["age", "income"]) == "income smaller"
    own = choose_oracle("regression:0.25,2").compare(clean, outputs, None)
    assert own.outcome.tolist() == [KEPT_ANSWER, 3, KEPT_ANSWER, 2, NOT_FINITE]
    euclidean = choose_oracle("euclidean:1").compare(clean, outputs, None)
    assert euclidean.is_fault.tolist() == [False, False, False, True, True]
    assert euclidean.margin[3].item() == pytest.approx(1 - 1.25**0.5)
    assert "at a Euclidean distance of more than 1 from the clean one" in choose_oracle("euclidean:1").describe()
    off = choose_oracle("off:0.25")
    assert off.check(clean, outputs[:4].repeat(2, 1)[:5]).tolist() == [True, False, False, False, True]


def test_each_of_several_numbers_has_its_own_default_tolerance():
    labels = torch.stack([torch.linspace(0, 1, 9), torch.linspace(0, 1000, 9)], 1)
    clean = labels + torch.tensor([0.25, -125.0])
    oracle = choose_oracle("auto").settle(clean, labels)
    assert oracle.spec() == "regression:0.25,125.0"
    assert "further than 0.25, 125 (by output; the model's median clean error, in the unit" in oracle.describe()
    assert choose_oracle(oracle.spec()).compare(clean, clean + torch.tensor([0.1, 130]), None).outcome[0] == 5
    assert choose_oracle("euclidean").settle(clean, labels).tolerance == pytest.approx((0.25**2 + 125**2) ** 0.5)
    assert oracle.grade(clean, labels)["error"] == pytest.approx((0.25 + 125) / 2)
    with pytest.raises(UsageError, match=r"one for each of the model's 2 numbers, got 3: write regression:0\.1"):
        choose_oracle("regression:1,2,3").check(clean, None)
    with pytest.raises(DataError, match=r"2 numbers per seed: 9 inputs, got shape \[9, 3\]"):
        choose_oracle("regression:1").check(clean, torch.rand(9, 3))
    with pytest.raises(DataError, match="for a regression, as many numbers per seed as the model has outputs"):
        choose_oracle("auto").settle(clean, torch.rand(9, 3)).check(clean, torch.rand(9, 3))


def test_an_attack_leaves_the_clean_answer_where_the_squared_error_is_flat():
    answers = torch.tensor([[1.0], [3.0], [1.0]], requires_grad=True)
    loss = choose_oracle("regression:1").loss(answers, torch.tensor([1.0, 1.0, 3.0]))
    assert loss.tolist() == [0, 2, 2]
    loss.sum().backward()
    assert answers.grad.squeeze().tolist() == [1, 1, -1]
