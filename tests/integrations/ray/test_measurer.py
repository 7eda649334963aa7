"""Tests that run in workers have the same results as tests that run here, whatever their order, number and deaths."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from in_process_pool import InProcessPool
from interruptions import StopAt, assert_same_end
from torch import nn

import themis
from themis import Against, BlackBox, Target, UsageError
from themis.campaign import api as campaign_api
from themis.campaign import loop
from themis.measure import chunk
from themis.measure.calculator import Limits
from themis.runs.store.reader import Reader
from themis.search import choose_policy
from themis.settings import Settings
from themis.suites import api as suites_api
from themis_integrations import RayExecutor
from themis_integrations.ray.measurer import ChunkWorker, RemoteMeasurer

ENDLESS = {"tolerance": 1e-12, "plateau": None}


class SmallConv(nn.Module):
    """Picture to classes, with several layers; some inputs give no finite answer."""

    def __init__(self, has_nans=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten())
        self.last, self.has_nans = nn.Linear(6 * 16, 3), has_nans
        for layer in (self.net[0], self.net[2], self.last):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        outputs = self.last(self.net(x - 0.5))
        if self.has_nans:
            is_bright = x.mean((1, 2, 3)) > 0.535
            outputs = outputs.masked_fill(is_bright[:, None], float("nan"))
        return outputs


PICTURES = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1)).mul(0.9)
PICTURES = PICTURES[PICTURES.mean((1, 2, 3)) < 0.5]

CASES = {
    "scheduled": {"perturbation": "gaussian", "magnitude": 0.3},
    "relative scale, few kept": {"scale": "relative", "clean_memory_gib": 1e-5, "magnitude": 0.3},
    "paper": {"policy": "paper", "magnitude": 0.2},
    "attack within passes": {"perturbation": "fgsm", "magnitude": 0.1, "max_passes": 500},
    "no finite answers": {"perturbation": "brightness", "model": SmallConv(has_nans=True), "max_passes": 250},
    "against a reference": {"perturbation": "brightness", "model": Against(SmallConv(), SmallConv(has_nans=True))},
    "too dissimilar": {"perturbation": "gaussian", "magnitude": 0.6, "min_ssim": 0.3},
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of 8, so that a portion of tests has several."""
    monkeypatch.setattr(chunk, "MAX_CHUNK", 8)


@dataclass(frozen=True)
class InProcess:
    """An executor whose workers are in this process."""

    n_workers: int
    pools: list[InProcessPool]

    @property
    def threads(self):
        return torch.get_num_threads()

    def with_threads(self, threads):
        return self

    def check(self, target, policy, settings):
        pass

    @contextmanager
    def measurers(self, tested, plan):
        def make_measurer(calculator):
            limits = Limits.of(plan.settings, calculator.device, calculator.chunk)
            case = (tested.target, tested.seeds, plan.perturbation, calculator.layers, limits)
            self.pools.append(InProcessPool(lambda: ChunkWorker(*case), self.n_workers, random_seed=self.n_workers))
            return RemoteMeasurer(calculator, self.pools[-1])

        yield make_measurer


@pytest.fixture
def in_workers(monkeypatch):
    """Campaigns run in workers of this process; returns a function that sets their number, and lists their pools."""

    def use(n_workers):
        executor = InProcess(n_workers, [])
        for module in (campaign_api, suites_api):
            monkeypatch.setattr(module, "choose_executor", lambda *_: executor)
        return executor.pools

    return use


def _run(out=None, *, perturbation="gaussian", model=None, **options):
    options = {"max_tests": 120, "round_size": 60, "random_seed": 3, **ENDLESS, **options}
    return themis.run(model or SmallConv(), PICTURES, perturbation, out=out, **options)


def _state(out):
    """All arrays of the last checkpoint, which has the moments."""
    reader = Reader(out)
    try:
        return reader.checkpoint().arrays
    finally:
        reader.close()


@pytest.mark.parametrize("case", CASES)
def test_workers_change_no_result(case, in_workers, tmp_path):
    local = _run(tmp_path / "local", **CASES[case])
    assert len(local.faults) > 2
    n_workers = 1 + len(case) % 3
    pools = in_workers(n_workers)
    remote = _run(tmp_path / "remote", **CASES[case])
    assert_same_end(local, remote)
    assert pools[0].n_lost > 0
    assert pools[0].n_hastened > 0  # uniform tests were started before their turn
    arrays = _state(tmp_path / "remote")
    for name, array in _state(tmp_path / "local").items():
        if name.endswith(("/sums", "/squares")):  # workers add them up in another order
            np.testing.assert_allclose(array, arrays[name], rtol=1e-12, atol=1e-12, err_msg=name)
        elif "seconds" not in name:
            np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def test_no_test_is_started_in_vain(in_workers):
    pools = in_workers(2)
    _run(max_tests=1200, round_size=240, magnitude=0.3)  # later rounds propose uniform and searched tests together
    assert pools[0].n_hastened > 0
    assert pools[0].n_discarded == 0


@pytest.mark.parametrize("n_workers", [1, 2, 5])
@pytest.mark.parametrize("max_passes", [None, 1500])
def test_tests_that_are_proposed_ahead_are_the_same_in_workers(n_workers, max_passes, in_workers, monkeypatch):
    monkeypatch.setattr(loop, "AHEAD_FROM", 200)
    options = {"max_tests": 1500, "max_passes": max_passes, "round_size": 240, "magnitude": 0.3}
    local = _run(**options)
    pools = in_workers(n_workers)
    assert_same_end(local, _run(**options))
    assert pools[0].n_discarded == 0 or max_passes


def test_the_next_tests_are_known_while_others_run(in_workers, monkeypatch):
    monkeypatch.setattr(loop, "AHEAD_FROM", 200)
    known, measure = [], RemoteMeasurer.measure

    def watch(self, *values):
        measurement = measure(self, *values)
        known.append(sum(len(each.chunk.tests) for each in self._started.values() if each.chunk.stream == "search"))
        return measurement

    monkeypatch.setattr(RemoteMeasurer, "measure", watch)
    in_workers(2)
    _run(max_tests=1500, round_size=240, magnitude=0.3)
    assert min(known[80:-20]) > 0


def test_a_run_changes_its_executor_when_it_is_resumed(in_workers, tmp_path):
    whole = _run(tmp_path / "whole", max_tests=180)
    _run(tmp_path / "run", max_tests=180, callbacks=[StopAt(1)])
    in_workers(2)
    themis.resume(tmp_path / "run", SmallConv(), PICTURES, callbacks=[StopAt(2)])
    resumed = themis.resume(tmp_path / "run", SmallConv(), PICTURES)
    assert_same_end(whole, resumed)


def test_the_members_of_a_suite_run_in_workers(in_workers, tmp_path):
    members = [
        {"perturb": "gaussian", "magnitude": 0.3, "levels": [0.2, 0.6, 1]},
        {"perturb": "brightness", "levels": [0.5]},
        {"perturb": "fgsm", "magnitude": 0.1},
    ]
    options = {"max_tests": 240, "random_seed": 3, "share": 0.6, "round_size": 60, **ENDLESS}

    def run(out):
        data = (PICTURES, PICTURES.flatten(1).argmax(1) % 3)
        return themis.run_suite(SmallConv(), data, {"members": members}, out=out, **options)

    local = run(tmp_path / "local")
    pools = in_workers(2)
    remote = run(tmp_path / "remote")
    assert len(pools) == 1
    assert pools[0].n_lost > 0
    assert remote.errors == local.errors
    assert remote.clean_error == local.clean_error
    for member in local:
        assert local[member].rounds[-1].tests > 0
        assert_same_end(local[member], remote[member])


def test_a_worker_that_runs_out_of_memory_halves_the_chunks_of_all(in_workers, monkeypatch):
    class Full(SmallConv):
        limit = 8

        def forward(self, x):
            if len(x) > self.limit:
                raise MemoryError
            return super().forward(x)

    model, n_tests = Full(), []

    class Shrink(themis.Callback):
        def on_round(self, round):
            n_tests.append(round.tests)
            model.limit = 4

    in_workers(2)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        run = _run(model=model, callbacks=[Shrink()])
    assert n_tests == [60, 120]
    assert set(run.faults.columns["chunk"]) == {8, 4}


@pytest.mark.parametrize(
    ("executor", "target", "options", "message"),
    [
        (RayExecutor(), Target(SmallConv()), {"criterion": "kmnc"}, "a criterion must see every activation in order"),
        (RayExecutor(gpus_per_worker=1), Target(SmallConv()), {}, "gpus_per_worker must be 0 for a CPU model"),
        (RayExecutor(), BlackBox(lambda x: x.mean((2, 3)), bounds=(0, 1)), {}, "to send several requests at once"),
    ],
)
def test_campaigns_that_workers_cannot_run_are_refused(executor, target, options, message):
    with pytest.raises(UsageError, match=message):
        executor.check(target, choose_policy("scheduled"), Settings.of(**options))
