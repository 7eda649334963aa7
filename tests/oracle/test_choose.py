"""Oracles chosen by name, by the outputs, or as the user's own function."""

import numpy as np
import pytest
import torch

import themis
from themis import ModelError, UsageError
from themis.oracle import KEPT_ANSWER, NOT_FINITE, ORACLES, Changed, Compare, Oracle, Wrong, choose_oracle
from themis.runs.display.text import opening


def far(clean_outputs, outputs, labels):
    return (outputs - clean_outputs).abs().amax(1) > 1


NAMES = [
    *ORACLES,
    "auto",
    "top1",
    "top10",
    "threshold:-2",
    "multilabel:0.25",
    "regression:0.1",
    "regression:1.5sd",
    "off:3sd",
    "regression:0.1,20.0",
    "euclidean:0.5",
    "euclidean",
    "regression",
    "segmentation:0.3",
    "keypoints:2.5",
    "keypoints:33.3%",
    "detection:0.75,score=0.25",
    f"{__name__}:far",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_oracle_can_be_recreated_from_its_name(name):
    oracle = choose_oracle(name)
    assert choose_oracle(oracle.spec()) == oracle
    assert choose_oracle(oracle) is oracle
    assert themis.Target(torch.nn.Linear(1, 1), oracle=name).oracle == name


WRONG = {
    "wron": "did you mean 'wrong'?",
    "regresion:0.1": "did you mean 'regression'?",
    "wrong:3": "'wrong' takes no argument, got 'wrong:3': write wrong",
    "auto:3": "takes no argument",
    "top5:2": "takes no argument",
    "top0": "did you mean 'top5'?",
    "threshold:half": "must be followed by a number, got 'threshold:half': write threshold:0.5",
    "threshold:nan": "must be followed by a number",
    "regression:-1": "'regression' must be followed by a number above 0, got 'regression:-1': write regression:0.1",
    "regression:sd": "or regression:2sd for standard deviations",
    "off:0sd": "a number above 0",
    "segmentation:1": "a number between 0 and 1, got 'segmentation:1': write segmentation:0.1",
    "keypoints:0": "a number above 0, got 'keypoints:0': write keypoints:5 for pixels, or keypoints:10%",
    "nowhere:function": "No module named 'nowhere'",
    f"{__name__}:fra": "did you mean 'far'?",
    f"{__name__}:NAMES": "Compare needs a function .*, got list",
    "": "must be a known name or module:function, got ''",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_explained(name):
    with pytest.raises(UsageError, match=WRONG[name]):
        choose_oracle(name)
    with pytest.raises(UsageError, match=WRONG[name]):
        themis.Target(torch.nn.Linear(1, 1), oracle=name)


def test_a_bare_function_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"got function: wrap it as Compare\(function\)"):
        choose_oracle(far)


BITS, SEVERAL = torch.tensor([0, 1, 1]), torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]])
AUTO = {
    "classes": ((3, 4), None, "changed"),
    "classes, labels": ((3, 4), torch.tensor([0, 1, 3]), "wrong"),
    "classes, one-hot labels": ((3, 3), torch.eye(3), "wrong"),  # which refuses them
    "several labels": ((3, 3), SEVERAL, "multilabel"),
    "binary": ((3, 1), BITS, "threshold"),
    "binary, flat": ((3,), BITS.float(), "threshold"),
    "two numbers, labels": ((3, 2), torch.tensor([[0.5, 1.5], [2.0, -1.0], [0.0, 0.3]]), "regression"),
    "counts, labels": ((3, 2), torch.tensor([[3, 1], [2, 0], [0, 7]]), "regression"),
    "soft labels": ((3, 2), torch.tensor([[0.3, 0.7], [0.9, 0.1], [0.5, 0.5]]), "wrong"),  # which refuses them
    "a number": ((3, 1), None, "regression"),
    "a number, flat": ((3,), None, "regression"),
    "a number, labels": ((3, 1), torch.rand(3), "regression"),
    "a count": ((3,), torch.tensor([0, 1, 7]), "regression"),
    "maps": ((3, 2, 4, 4), None, "segmentation"),
    "maps, labels": ((3, 2, 4, 4), torch.zeros(3, 4, 4), "segmentation"),
    "points, labels": ((3, 4, 2), torch.zeros(3, 4, 3), "keypoints"),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_infers_the_task_from_outputs_and_labels(name):
    shape, labels, expected = AUTO[name]
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert choose_oracle("auto").settle(outputs, labels).spec().partition(":")[0] == expected


def test_the_opening_line_says_what_to_do_if_outputs_are_numbers():
    numbers = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([6.0, 9.0])
    net = torch.nn.Linear(2, 2)
    torch.nn.init.eye_(net.weight)
    run = themis.run(themis.Target(net, bounds=(-99, 99)), numbers, "gaussian", max_tests=10)
    assert "(oracle changed, chosen from the outputs and labels; if the outputs are numbers, name" in opening(run.start)
    run = themis.run(themis.Target(net, bounds=(-99, 99), oracle="regression"), numbers, "gaussian", max_tests=10)
    assert "(by output; 10% of the standard deviation of the clean answers)" in run.start.fault


def test_auto_refuses_class_numbers_instead_of_scores():
    numbers = torch.tensor([3.0, 0.0, 7.0])
    with pytest.raises(ModelError, match=r"one whole number per input.*return the scores of all classes, or name"):
        choose_oracle("auto").settle(numbers, torch.tensor([3, 1, 7]))
    assert choose_oracle("auto").settle(numbers, torch.rand(3)).spec().startswith("regression")
    oracle = choose_oracle("off:0.5").settle(numbers, torch.tensor([3, 1, 7]))
    assert oracle.check(numbers, torch.tensor([3, 1, 7])).tolist() == [True, False, True]


@pytest.mark.parametrize("shape", [(3, 4, 4), (3, 4, 2), (3, 1, 4, 4), (3, 2, 4, 4, 4)])
def test_auto_refuses_outputs_of_unknown_shape(shape):
    with pytest.raises(
        ModelError, match=r"for the task to be known, .* output='yolo' for boxes .* or your own comparison"
    ):
        choose_oracle("auto").settle(torch.zeros(shape), None)


def test_a_function_decides_what_a_fault_is():
    clean, outputs = torch.zeros(4, 2), torch.tensor([[0, 1.0], [0, 1.5], [2, 0], [float("nan"), 0]])
    oracle = Compare(far)
    assert oracle.spec() == f"{__name__}:far"
    verdict = oracle.compare(clean, outputs, None)
    assert verdict.is_fault.tolist() == [False, True, True, True]
    assert verdict.outcome.tolist() == [KEPT_ANSWER, 0, 0, NOT_FINITE]
    assert verdict.margin.tolist() == [1, -1, -1, -float("inf")]
    assert oracle.check(clean, None).all()
    assert oracle.confidence(outputs).isnan().all()


def test_a_function_may_return_outcomes_and_margins():
    def by_column(clean_outputs, outputs, labels):
        gap = (outputs - clean_outputs).abs()
        return (gap.amax(1) > 1).numpy(), gap.argmax(1).tolist(), 1 - gap.amax(1)

    verdict = Compare(by_column, "mine").compare(torch.zeros(2, 2), torch.tensor([[0, 1.5], [0.5, 0]]), None)
    assert verdict.is_fault.tolist() == [True, False]
    assert verdict.outcome.tolist() == [1, KEPT_ANSWER]
    assert verdict.margin.tolist() == [-0.5, 0.5]
    assert Compare(by_column, "mine").spec() == "mine"
    assert Compare(lambda *_: None).spec().endswith("<lambda>")


BAD = {
    "nothing": (lambda c, o, y: None, "got NoneType"),
    "numbers": (lambda c, o, y: o[:, 0], "got torch.float32"),
    "one for all": (lambda c, o, y: True, r"got torch.bool \[\]"),
    "text": (lambda c, o, y: "yes", "got str"),
    "two values": (lambda c, o, y: (o[:, 0] > 0, o), r"got torch.bool \[3\], torch.float32 \[3, 2\]"),
    "a table": (lambda c, o, y: o > 0, r"must return a bool tensor \[3\], .* got torch.bool \[3, 2\]"),
    "negative outcome": (
        lambda c, o, y: (o[:, 0] > 0, np.full(3, -1), o[:, 0]),
        r"outcomes of at least 0 and margins, got torch.bool",
    ),
    "raises": (lambda c, o, y: 1 / 0, "raised ZeroDivisionError on outputs .*: division by zero"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_result_of_a_function_is_explained(name):
    function, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        Compare(function, "mine").compare(torch.zeros(3, 2), torch.ones(3, 2), None)


def test_clean_outputs_that_are_faults_themselves_are_left_out():
    def not_small(clean_outputs, outputs, labels):
        return outputs[:, 0] > 1

    clean = torch.tensor([[0.0], [2.0]])
    assert Compare(not_small).check(clean, None).tolist() == [True, False]
    with pytest.raises(UsageError, match="must accept some clean outputs, but it calls all 2 faults"):
        Compare(not_small).check(clean + 2, None)


def test_an_attack_needs_a_loss():
    net, data = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.rand(8, 4)
    with pytest.raises(UsageError, match="an attack needs a loss to maximise, but oracle 'mine' has none"):
        themis.run(themis.Target(net, oracle=Compare(far, "mine")), data, "fgsm", max_tests=10)


def test_a_custom_oracle_is_used_as_it_is():
    class Careful(Wrong):
        def spec(self):
            return "careful"

    target = themis.Target(torch.nn.Linear(4, 3), oracle=Careful())
    assert isinstance(target.oracle, Oracle)
    assert choose_oracle(target.oracle).settle(torch.rand(3, 3), None).spec() == "careful"
    assert Changed() == Changed()
