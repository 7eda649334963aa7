"""The saved progress of a campaign: read back as it was counted, and refused if it is incomplete."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

import themis
from themis.errors import StoreError
from themis.runs.estimates import parse_progress, read_progress
from themis.runs.store.reader import Reader


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A campaign and its folder."""
    out = tmp_path_factory.mktemp("checkpoint") / "run"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    data = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return themis.run(net, data, "gaussian", magnitude=0.5, max_tests=300, out=out), out


def test_the_progress_is_what_the_campaign_has_counted(finished):
    run, out = finished
    with closing(Reader(out)) as reader:
        progress = read_progress(reader)
    last = run.rounds[-1]
    assert (progress.tests, progress.rounds) == (last.tests, len(run.rounds))
    assert progress.counts["faults"] == last.faults > 0
    assert progress.counts["uniform_tests"] == progress.uniform_tests_by_seed.sum()
    assert progress.uniform_times_seen.sum() == progress.uniform_faults_by_seed.sum()
    assert sum(moments.count for moments in progress.moments.values()) == last.tests
    assert {moments.totals.shape for moments in progress.moments.values()} == {(run.start.n_neurons,)}
    assert (progress.kinds, progress.near_ties) == (run.kinds, run.near_ties)
    assert 0 < progress.seconds.total <= run.seconds.total


@pytest.mark.parametrize("name", ["/tally/near_ties", "/tally/uniform_tests_by_seed", "/moments/search/sums"])
def test_a_missing_array_is_named(finished, name):
    with closing(Reader(finished[1])) as reader:
        checkpoint = reader.checkpoint()
    arrays = {key: array for key, array in checkpoint.arrays.items() if key != name}
    with pytest.raises(StoreError, match=f"damaged: its array '{name}' is missing; restore the run folder from a copy"):
        parse_progress(replace(checkpoint, arrays=arrays))


@pytest.mark.parametrize("name", ["tally", "seconds", "chunk"])
def test_a_missing_value_is_named(finished, name):
    with closing(Reader(finished[1])) as reader:
        checkpoint = reader.checkpoint()
    values = {key: value for key, value in checkpoint.values.items() if key != name}
    with pytest.raises(StoreError, match=f"damaged: its values must have '{name}', which is missing"):
        parse_progress(replace(checkpoint, values=values))


def test_arrays_that_do_not_belong_together_are_refused(finished):
    with closing(Reader(finished[1])) as reader:
        checkpoint = reader.checkpoint()
    for name, message in (
        ("/tally/uniform_faults_by_seed", "its counts by seed are of different seeds"),
        ("/moments/uniform/shift", "the moments of its uniform stream are of different neurons"),
    ):
        arrays = {**checkpoint.arrays, name: checkpoint.arrays[name][:-1]}
        with pytest.raises(StoreError, match=message):
            parse_progress(replace(checkpoint, arrays=arrays))
