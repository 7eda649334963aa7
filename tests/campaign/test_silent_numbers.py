"""Conditions under which figures would be wrong without a word: they are handled, or refused."""

import ctypes

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import themis
from themis import BlackBox, DataError, ModelError, Perturbation, Target, Theta
from themis.compute.native import CompiledFold, library
from themis.measure.distance import ssim

OPTIONS = {"magnitude": 0.3, "max_tests": 640, "coverage": None}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.fixture(scope="module")
def inputs():
    return torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def assert_same(first, second):
    for name, column in first.faults.columns.items():
        assert np.array_equal(column, second.faults.columns[name], equal_nan=column.dtype.kind == "f"), name
    assert first.fault_rate == second.fault_rate
    assert first.judged == second.judged


def test_the_default_dtype_changes_nothing(net, inputs):
    expected = themis.run(net, inputs, "gaussian", **OPTIONS)
    assert len(expected.faults) > 20
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(expected, themis.run(net, inputs, "gaussian", **OPTIONS))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(library() is None, reason="not compiled on this machine")
def test_buffers_of_another_type_or_shape_never_reach_the_compiled_functions():
    rows, single = torch.zeros(2, dtype=torch.int64), torch.zeros(3)
    arguments = [torch.zeros(2, 3), torch.zeros(4, 3), rows, 2, single.clone(), single.clone(), single.clone()]

    def fold(activations, clean, rows, n_tests, *sums):
        CompiledFold(library(), 1, n_tests, *sums).add(activations, clean, rows, 0, slice(0, 0))

    fold(*arguments)
    wrong = {
        0: torch.zeros(3, 2).T,
        1: torch.zeros(4, 3).double(),
        2: rows.int(),
        3: 3,
        4: torch.zeros(2),
        5: torch.zeros(2),
        6: single.double(),
    }
    for position, argument in wrong.items():
        with pytest.raises((TypeError, ctypes.ArgumentError), match=r"must|expected"):
            fold(*arguments[:position], argument, *arguments[position + 1 :])


class OverwritesItsInput(nn.Module):
    """Answers as the net does, and leaves nothing of its input."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        scores = self.net(x.clone())
        x.data.zero_()
        return scores


def overwrite(x):
    kept = x.clone()
    x.zero_()
    return kept


def predict_and_overwrite(net):
    def predict(array):
        with torch.no_grad():
            scores = net(torch.from_numpy(array.copy())).numpy()
        array[:] = 0
        return scores

    return predict


def test_a_model_that_overwrites_its_input_falsifies_nothing(net, inputs, tmp_path):
    expected = themis.run(net, inputs, "gaussian", **OPTIONS)
    for target in (Target(OverwritesItsInput(net)), Target(net, preprocess=overwrite)):
        run = themis.run(target, inputs, "gaussian", out=tmp_path / str(id(target)), **OPTIONS)
        columns = run.faults.columns
        for name in ("id", "theta", "distance", "linf", "ssim"):
            assert np.array_equal(columns[name], expected.faults.columns[name]), name
        fault = next(iter(run.faults))
        replayed = fault.replay()
        clean, disturbed = inputs[fault.seed_id][None], replayed.inputs[None]
        assert fault.distance == pytest.approx(float((disturbed - clean).norm()), rel=1e-5)
        assert fault.ssim == pytest.approx(float(ssim(clean, disturbed, (0, 1))), abs=1e-5)


def test_a_function_that_overwrites_its_array_falsifies_nothing(net, inputs):
    with torch.no_grad():
        plain = BlackBox(lambda array: net(torch.from_numpy(array)).numpy())
        expected = themis.run(plain, inputs, "gaussian", **OPTIONS)
    run = themis.run(BlackBox(predict_and_overwrite(net)), inputs, "gaussian", **OPTIONS)
    for name in ("id", "distance", "linf", "ssim"):
        assert np.array_equal(run.faults.columns[name], expected.faults.columns[name]), name


class DropsAtRandom(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return F.dropout(self.net(x), 0.1)


def test_a_model_that_answers_at_random_is_refused(net, inputs):
    with pytest.raises(ModelError, match=r"same output for the same input.*functional dropout"):
        themis.run(DropsAtRandom(net), inputs, "gaussian", **OPTIONS)
    generator = np.random.default_rng(0)
    with pytest.raises(ModelError, match="same output for the same input"):
        themis.run(BlackBox(lambda array: generator.random((len(array), 3))), inputs, "gaussian", **OPTIONS)


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, k):
        return torch.full((1, 8, 8), k / 50) * torch.rand(1), 0


def test_data_that_differs_from_read_to_read_is_refused(net):
    with pytest.raises(DataError, match=r"same input every time, but item 1 differs .*random augmentation"):
        themis.run(net, Augmented(), "gaussian", **OPTIONS)


def test_inputs_outside_the_bounds_by_rounding_are_clamped(net, inputs):
    rounded = inputs.clone()
    rounded[0, 0, 0, 0], rounded[1, 0, 0, 0] = 1 + 5e-7, -5e-7
    run = themis.run(net, rounded, "gaussian", **OPTIONS)
    assert run.rounds[-1].tests == 640
    rounded[1, 0, 0, 0] = -5e-6
    with pytest.raises(DataError, match="inputs must lie in bounds"):
        themis.run(net, rounded, "gaussian", **OPTIONS)


def test_inputs_that_are_not_finite_are_an_error_of_the_perturbation_and_no_faults(net, inputs):
    def spoil(inputs, theta, rng, context):
        return torch.where(theta[:, :, None, None] > 0.9, torch.nan, inputs)

    mine = Perturbation("mine", (Theta("by", 0, 1),), spoil, is_random=False)
    with pytest.raises(
        ModelError, match=r"'mine' must return finite inputs, but it returned a NaN: correct its function"
    ):
        themis.run(net, inputs, mine, max_tests=640)
