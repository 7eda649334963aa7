"""Runs of layers."""

import pytest
import torch

from themis.criteria import runs
from themis.criteria.readings import Layout


def layout(*widths):
    return Layout(tuple(f"layer{i}" for i in range(len(widths))), widths)


def test_neighbours_of_one_width_are_one_run():
    given = layout(2, 2, 3, 2, 2, 2)
    found = runs.runs(given)
    assert [(each.start, len(each), each.width) for each in found] == [(0, 2, 2), (4, 1, 3), (7, 3, 2)]
    assert sum((each.names for each in found), ()) == given.names
    values = torch.arange(26).view(2, 13)
    for run in found:
        for k, name in enumerate(run.names):
            assert torch.equal(run.of(values)[:, k], values[:, given.slices()[name]])


@pytest.mark.parametrize(("most", "sizes"), [(1, [1, 1, 1, 1, 1]), (4, [2, 1, 1, 1]), (6, [3, 2]), (100, [3, 2])])
def test_runs_are_not_too_long(monkeypatch, most, sizes):
    monkeypatch.setattr(runs, "NEURONS", most)
    found = runs.runs(layout(2, 2, 2, 3, 3))
    assert [len(each) for each in found] == sizes
    assert [each.start for each in found] == [sum(len(e) * e.width for e in found[:k]) for k in range(len(found))]
