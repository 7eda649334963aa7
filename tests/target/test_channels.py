"""Models that expect the channels of a picture last."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, Target, UsageError
from themis.data.seeds import from_reader, read_seeds
from themis.target.traits import has_channels_last

FIRST = torch.rand(20, 3, 8, 6, generator=torch.Generator().manual_seed(0))
LAST = FIRST.movedim(1, -1)


class Net(nn.Module):
    """A convolution whose inputs and activations have the channels first or last."""

    def __init__(self, is_last):
        super().__init__()
        torch.manual_seed(0)
        self.is_last, self.conv, self.head = is_last, nn.Conv2d(3, 4, 3), nn.Linear(96, 3)

    def forward(self, x):
        x = self.conv(x.movedim(-1, 1) if self.is_last else x)
        x = torch.relu(x.movedim(1, -1) if self.is_last else x)
        return self.head((x.movedim(-1, 1) if self.is_last else x).flatten(1))


def function(inputs):
    assert inputs.shape[1:] == (8, 6, 3)
    return inputs.mean((1, 2))


def run(target, data, **options):
    return themis.run(target, data, "rotate", **{"max_tests": 64, **options})


@pytest.mark.parametrize("neurons", ["element", "channel"])
@pytest.mark.parametrize("data", [FIRST, LAST, LAST.numpy()], ids=["first", "last", "array"])
def test_a_model_with_channels_last_is_tested_like_one_with_channels_first(data, neurons):
    expected = run(Target(Net(False), neurons=neurons, preprocess=themis.Normalize([0.1, 0.2, 0.3], 1)), FIRST)
    target = Target(Net(True), neurons=neurons, preprocess=themis.Normalize([0.1, 0.2, 0.3], 1), channels="last")
    result = run(target, data)
    assert [fault.id for fault in result.faults] == [fault.id for fault in expected.faults] != []
    assert [layer.n_neurons for layer in result.start.layers] == [layer.n_neurons for layer in expected.start.layers]
    assert result.faults[0].replay().inputs.shape == (3, 8, 6)


def test_a_function_gets_the_channels_last(tmp_path):
    box = BlackBox(function, channels="last")
    result = run(box, LAST, out=tmp_path / "run")
    assert themis.open_run(tmp_path / "run", box, LAST).faults[0].replay().is_same
    assert themis.resume(tmp_path / "run", box, FIRST, max_tests=80).rounds[-1].tests == 80
    assert result.rounds[-1].tests == 64


def test_rows_that_are_read_when_needed_are_turned_around():
    seeds = from_reader(lambda k: LAST[k].numpy(), (8, 6, 3), 20, np.arange(20) % 2)[torch.arange(3, 9)]
    turned = seeds.with_channels_first()
    assert turned.shape == (6, 3, 8, 6)
    assert torch.equal(turned.take(torch.tensor([2, 0])), FIRST[[5, 3]])
    assert turned.labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert torch.equal(read_seeds(LAST).with_channels_first().inputs, FIRST)


def test_the_remedy_names_the_option():
    with pytest.raises(UsageError, match=r"permute them, and .* pass --channels last \(channels='last'\)"):
        run(Net(True), LAST)
    with pytest.raises(UsageError, match="channels must be 'auto', 'first' or 'last', got 'end'"):
        Target(Net(True), channels="end")


@pytest.mark.parametrize(
    ("shape", "expected", "is_last"),
    [
        ((8, 6, 3), None, True),
        ((3, 8, 6), None, False),
        ((50, 2), None, True),
        ((2, 50), None, False),
        ((8, 8, 16), (None, 8, 8, 16), True),
        ((16, 8, 8), (None, 8, 8, 16), False),
        ((4, 4, 3), (None, None, None, 3), True),
        ((2, 50), (None, 2, 50), True),
    ],
)
def test_the_place_of_the_channels_is_told_by_the_shape(shape, expected, is_last):
    assert has_channels_last(shape, expected) == is_last
