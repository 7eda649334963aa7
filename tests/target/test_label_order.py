"""Labels in another order than the outputs, and compiled models."""

import copy

import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, Target, UsageError
from themis.campaign.preflight import check
from themis.cli.check import describe
from themis.settings import Settings

ORDER = [2, 0, 3, 1]  # output k stands for label ORDER[k]
INPUTS = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor(ORDER)[INPUTS.argmax(1)]


def run(target):
    return themis.run(target, (INPUTS, LABELS), "gaussian", max_tests=16)


@pytest.mark.parametrize(
    "target",
    [Target(nn.Identity(), label_order=ORDER), BlackBox(lambda inputs: inputs, label_order=ORDER)],
    ids=["module", "function"],
)
def test_the_order_of_labels_is_an_option(target):
    assert run(target).start.clean_accuracy == 1


def test_the_check_names_the_order_to_pass():
    lines = describe(check(Target(nn.Identity()), (INPUTS, LABELS)), Settings())
    assert any("pass the label of each output: --label-order 2,0,3,1" in line for line in lines)


def test_an_order_that_does_not_fit_is_refused():
    for order in ([0, 0, 1], [1, 2]):
        with pytest.raises(UsageError, match="label_order must hold each label from 0 on once"):
            Target(nn.Identity(), label_order=order)
    with pytest.raises(UsageError, match="must have a label per output, got 3"):
        run(Target(nn.Identity(), label_order=[0, 2, 1]))


class Parts(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.body, self.head = torch.compile(copy.deepcopy(net[:2]), backend="eager"), net[2]

    def forward(self, x):
        return self.head(self.body(x))


def in_place(net):
    net = copy.deepcopy(net)
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    "compiled", [lambda net: torch.compile(net, backend="eager"), in_place, Parts], ids=["wrapped", "in place", "part"]
)
def test_a_compiled_model_is_said_to_be_tested_as_it_was_before(compiled):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    expected = themis.run(net, INPUTS, "gaussian", magnitude=0.5, max_tests=64)
    with pytest.warns(RuntimeWarning, match="compiled with torch.compile, and is tested as it was before"):
        target = Target(compiled(net))
    result = themis.run(target, INPUTS, "gaussian", magnitude=0.5, max_tests=64)
    assert [layer.shape for layer in result.start.layers] == [(8,), (4,)]
    assert [fault.id for fault in result.faults] == [fault.id for fault in expected.faults] != []
