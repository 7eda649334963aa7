"""MindSpore cells as targets."""

import numpy as np
import pytest
import torch

import themis
from themis import ModelError
from themis_integrations.models.mindspore import black_box, check_seen


def test_a_mindspore_cell_whose_layers_are_hidden_is_refused():
    with pytest.raises(ModelError, match=r"got none of its 4 child cells: use activation cells such as nn\.ReLU\(\)"):
        check_seen(0, 4)
    check_seen(2, 4)
    check_seen(0, 0)  # a single cell without children has nothing but its output


@pytest.mark.slow
def test_a_mindspore_cell_is_tested_by_its_activation_cells():
    mindspore = pytest.importorskip("mindspore")
    cell = mindspore.nn.SequentialCell(
        mindspore.nn.Flatten(), mindspore.nn.Dense(16, 8), mindspore.nn.ReLU(), mindspore.nn.Dense(8, 3)
    )
    inputs = torch.rand(30, 1, 4, 4)
    box = black_box(cell, bounds=(0, 1))
    result = themis.run(box, inputs, "gaussian", magnitude=0.9, max_tests=300)
    assert [each.shape for each in result.start.layers] == [(8,), (3,)]
    wanted = cell(mindspore.Tensor(inputs.numpy())).asnumpy()
    assert np.allclose(box.forward(inputs).numpy(), wanted, atol=1e-5)
