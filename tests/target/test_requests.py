"""How a black box is called: batches, threads, retries, a rate limit and a cache."""

import pickle
import threading
import time

import numpy as np
import pytest
import torch

import themis
from themis import BlackBox, ModelError, UsageError
from themis.target import requests

WEIGHTS = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
DATA = torch.rand(20, 8, generator=torch.Generator().manual_seed(0))


class Counting:
    """A linear model that records the size of each call, and raises in the first `n_failures` calls."""

    def __init__(self, n_failures=0):
        self.sizes, self.n_failures, self.lock = [], n_failures, threading.Lock()

    def __call__(self, inputs):
        with self.lock:
            self.sizes.append(len(inputs))
            fails = len(self.sizes) <= self.n_failures
        if fails:
            raise ConnectionError("busy")
        return inputs @ WEIGHTS


def run(target, **options):
    return themis.run(target, DATA, "gaussian", **{"magnitude": 0.5, "max_tests": 30, **options})


def test_exactly_the_inputs_that_are_counted_are_sent():
    model = Counting()
    result = run(BlackBox(model))
    assert sum(model.sizes) == result.rounds[-1].passes == result.requests["inputs"] == 5 + 20 + 4 + 2 + 30
    assert result.requests == {"inputs": 61, "calls": len(model.sizes), "repeated": 0}
    assert result.summary()["requests"] == result.requests
    before = len(model.sizes)
    assert result.faults[0].replay().is_same
    assert model.sizes[before:] == [1]


@pytest.mark.parametrize(("of_box", "of_campaign", "most"), [(4, None, 4), (None, 6, 6), (8, 6, 6), (2, 6, 2)])
def test_the_batch_size_limits_calls_and_changes_nothing_else(of_box, of_campaign, most):
    model = Counting()
    result = run(BlackBox(model, batch_size=of_box), batch_size=of_campaign)
    assert max(model.sizes) == most
    assert [fault.id for fault in result.faults] == [fault.id for fault in run(BlackBox(Counting())).faults]


def test_as_many_calls_as_workers_are_made_at_the_same_time():
    all_called, threads = threading.Barrier(5), {"alone": set(), "together": set()}

    def alone(inputs):
        threads["alone"].add(threading.get_ident())
        return inputs @ WEIGHTS

    def together(inputs):
        threads["together"].add(threading.get_ident())
        all_called.wait(60)  # no call returns before five are being made
        return inputs @ WEIGHTS

    expected = BlackBox(alone, batch_size=2).forward(DATA)
    assert torch.equal(BlackBox(together, batch_size=2, workers=5).forward(DATA), expected)
    assert {name: len(each) for name, each in threads.items()} == {"alone": 1, "together": 5}


def test_a_call_that_fails_is_repeated_and_the_waits_grow(monkeypatch):
    waits = []
    monkeypatch.setattr(requests.time, "sleep", waits.append)
    box = BlackBox(Counting(n_failures=3), retries=3)
    box.forward(DATA)
    assert [wait for wait in waits if wait] == [0.5, 1.0, 2.0]
    assert box.requests.sent == {"inputs": 80, "calls": 4, "repeated": 3}
    with pytest.raises(ModelError, match="the model raised ConnectionError on inputs"):
        BlackBox(Counting(n_failures=3), retries=2).forward(DATA)


def test_the_rate_is_kept_by_all_workers():
    box = BlackBox(Counting(), batch_size=2, workers=10, rate=100)
    started = time.monotonic()
    box.forward(DATA)
    assert time.monotonic() - started >= 0.09


def test_a_black_box_can_be_pickled_after_its_first_call():
    box = BlackBox(np.sin)
    outputs = box.forward(DATA)
    assert torch.equal(pickle.loads(pickle.dumps(box)).forward(DATA), outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"workers": 1.5}, "workers must be a whole number of at least 1, got 1.5"),
        ({"retries": -1}, "retries must be a whole number of at least 0, got -1"),
        ({"rate": 0}, "rate must be a positive number, got 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        BlackBox(np.sin, **options)
