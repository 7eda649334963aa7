"""Handles of a run: in memory, from its folder, or from an open folder, they give the same model, seeds and replays."""

from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.errors import DataError, UsageError
from themis.perturb.names import PERTURBATIONS
from themis.runs.replay import LiveRun, Replayer, as_run, live_handle
from themis.runs.store.reader import Reader


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run and its folder."""
    out = tmp_path_factory.mktemp("handles") / "run"
    return themis.run(net(), data(), "gaussian", out=out, magnitude=0.5, max_tests=400, random_seed=3), out


@pytest.fixture
def handles(stored):
    run, out = stored
    opened = themis.open_run(out, net(), data())
    assert isinstance(run.handle, LiveRun)
    assert isinstance(opened.handle, Replayer)
    with closing(Reader(out)) as reader:
        yield [run.handle, opened.handle, Replayer(reader, themis.Target(net()), data())]


def test_all_handles_know_the_seeds_and_the_random_seed(handles):
    for handle in handles:
        assert handle.seeds.seed_id.tolist() == list(range(30))
        assert handle.random_seed == 3


def test_all_handles_replay_a_fault_to_the_bit(stored, handles):
    fault = stored[0].faults[0]
    first, *others = (handle.replay(fault) for handle in handles)
    assert first.is_same
    for replay in others:
        assert replay.is_same
        assert torch.equal(replay.inputs, first.inputs)
        assert torch.equal(replay.outputs, first.outputs)


def test_all_handles_open_a_calculator_with_the_clean_outputs(handles):
    requested = np.array([2, 7])
    for handle in handles:
        with handle.opened(requested) as calculator:
            rows = [calculator.seeds.seed_id.tolist().index(id) for id in requested]
            expected = net()(data()[requested])
            torch.testing.assert_close(calculator.clean.outputs[rows], expected)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def test_the_handle_of_a_run_is_the_one_of_its_faults(stored):
    run, out = stored
    assert run.handle is run.faults.handle is live_handle(as_run(run))
    with pytest.raises(UsageError, match="does not record how to create its data"):
        assert as_run(str(out)).handle.seeds


def test_a_run_of_another_process_has_no_live_handle(stored):
    with pytest.raises(UsageError, match="must have been made by this process"):
        live_handle(themis.open_run(stored[1]))


def test_seeds_that_the_data_does_not_have_are_refused(handles):
    with pytest.raises(DataError, match="the data must hold the fault's seed 99, but it has 30 other seeds"):
        handles[2].opened(np.array([99])).__enter__()


@pytest.mark.parametrize(
    ("perturbation", "reason"),
    [(PERTURBATIONS["brightness"], "got 'brightness' with"), ("gausian", "did you mean 'gaussian'")],
)
def test_another_perturbation_is_refused_with_the_reason(stored, perturbation, reason):
    run = themis.open_run(stored[1], net(), data(), perturbation=perturbation)
    with pytest.raises(UsageError, match=rf"the run's perturbation is 'gaussian' with theta .*, .*{reason}"):
        run.faults[0].replay()
