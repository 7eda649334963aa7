"""The type of the tensors that a model gets."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, Target

PICTURES = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class OfBytes(nn.Module):
    """A model that reads bytes itself, as many that were exported for a camera do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(48, 3)
        self.seen = set()

    def forward(self, pictures):
        self.seen.add(pictures.dtype)
        return self.head((pictures.float() / 255).flatten(1))


def as_bytes(pictures):
    return pictures.round().to(torch.uint8)


def test_a_model_gets_the_type_that_preprocess_returns():
    net = OfBytes()
    run = themis.run(
        Target(net, bounds=(0, 255), preprocess=as_bytes), PICTURES, "gaussian", magnitude=1.0, max_tests=64
    )
    assert net.seen == {torch.uint8}
    assert all(fault.replay().is_same for fault in run.faults)


def test_a_function_gets_the_type_that_preprocess_returns():
    seen = set()

    def predict(pictures):
        seen.add(pictures.dtype)
        return pictures.reshape(len(pictures), -1)[:, :3].astype(np.float32)

    box = BlackBox(predict, bounds=(0, 255), preprocess=as_bytes)
    themis.run(box, PICTURES, "gaussian", max_tests=64)
    assert seen == {np.dtype("uint8")}


@pytest.mark.parametrize(
    ("preprocess", "given", "expected"),
    [
        (None, torch.float16, torch.float16),
        (lambda x: x / 255, torch.float16, torch.float16),  # float32, as it was given
        (themis.Normalize(0, 255), torch.float16, torch.float16),
        (lambda x: x.double(), torch.float32, torch.float64),
        (lambda x: x.bfloat16(), torch.float32, torch.bfloat16),
        (lambda x: x.long(), torch.float16, torch.int64),
        (lambda x: [picture.long() for picture in x], torch.float16, torch.int64),
    ],
)
def test_only_the_type_that_preprocess_was_given_is_cast_to_that_of_the_weights(preprocess, given, expected):
    target = Target(OfBytes().to(given), bounds=(0, 255), preprocess=preprocess)
    assert {picture.dtype for picture in target.prepare(PICTURES.float())} == {expected}


def test_a_function_gets_bfloat16_as_float32_since_numpy_has_no_such_type():
    box = BlackBox(lambda x: (x.reshape(len(x), -1), {}), bounds=(0, 255), preprocess=lambda x: x.bfloat16())
    assert box.forward(PICTURES.float()).dtype == torch.float32
