"""t-way combination coverage, compared with a count in loops."""

from itertools import combinations

import numpy as np
import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria.tway import TWay


def shown(layers, t, max_neurons=None):
    """The configurations that occur, by set of neurons, in plain loops."""
    found = {}
    for name, values in layers.items():
        n = values.shape[1]
        chosen = (
            range(n)
            if not max_neurons or n <= max_neurons
            else [k * (n - 1) // (max_neurons - 1) for k in range(max_neurons)]
        )
        for neurons in combinations(chosen, t):
            found[name, neurons] = set()
            for row in values.tolist():
                if all(np.isfinite(row[k]) for k in neurons):
                    found[name, neurons].add(tuple(row[k] > 0 for k in neurons))
    return found


def draw(n, widths=(5, 1, 4), seed=0):
    torch.manual_seed(seed)
    return {f"l{k}": torch.randn(n, width).relu() for k, width in enumerate(widths)}


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_reference(t, seed):
    tests = draw(9, seed=seed)
    tests["l0"][2, 1], tests["l2"][3, 0] = torch.nan, torch.inf
    c = TWay(t)
    c.update(tests)
    sets = shown(tests, t)
    assert len(sets) == c.n_sets()
    assert c.n_covered() == sum(map(len, sets.values()))
    assert c.score() == pytest.approx(sum(map(len, sets.values())) / (2**t * len(sets)))
    assert c.sparse() == pytest.approx(np.mean([len(each) == 2**t for each in sets.values()]))
    for p in (0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
        assert c.completeness(p) == pytest.approx(np.mean([len(each) >= p * 2**t for each in sets.values()]))


@pytest.mark.parametrize("t", [2, 3])
def test_raised_is_the_same_as_for_single_tests(t, monkeypatch):
    tests = draw(40)
    order = torch.cat([torch.arange(20), torch.arange(20), torch.arange(39, 19, -1)])
    tests = {name: each[order] for name, each in tests.items()}
    expected, before = [], 0
    for n in range(1, len(order) + 1):
        now = sum(map(len, shown({name: each[:n] for name, each in tests.items()}, t).values()))
        expected.append(now > before)
        before = now
    whole, blocks = TWay(t), TWay(t)
    assert whole.update(tests).tolist() == expected
    assert expected[20:40] == [False] * 20
    monkeypatch.setattr("themis_lab.criteria.tway.COMPARED_AT_ONCE", 40)  # a few tests at a time
    assert blocks.update(tests).tolist() == expected
    assert blocks.score() == whole.score()


@pytest.mark.parametrize(("t", "max_neurons"), [(2, None), (2, 4), (3, None), (3, 3)])
def test_spans_of_equal_layers(t, max_neurons, monkeypatch):
    tests = draw(7, (4, 4, 1, 4, 6, 6, 2, 2), seed=3)
    tests["l4"][2, 0], tests["l5"][3, 5] = -torch.inf, torch.nan
    sets = shown(tests, t, max_neurons)
    whole, parts, alone = (TWay(t, max_neurons) for _ in range(3))
    raised = whole.update(tests)
    assert whole.n_covered() == sum(map(len, sets.values()))
    assert raised.tolist() == [
        bool(alone.update({name: each[k : k + 1] for name, each in tests.items()})) for k in range(7)
    ]
    monkeypatch.setattr("themis_lab.criteria.tway.MATRIX_CELLS", 1)  # a layer at a time
    assert parts.update(tests).equal(raised)
    assert parts.state["bits"].equal(whole.state["bits"])
    items = whole.items(whole.read(tests))
    assert len(items[items >= 0].unique()) == whole.n_covered()
    assert items.shape == (7, len(sets))
    assert not whole.update(tests).any()


def test_full_coverage_by_hand():
    c = TWay()
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    seen = []
    for row in rows:
        assert c.update(row[None]).tolist() == [True]
        seen.append((c.score(), c.sparse(), c.completeness(0.5)))
    assert seen == [(0.25, 0, 0), (0.5, 0, 1), (0.75, 0, 1), (1.0, 1, 1)]


def test_never_firing_neuron_leaves_half_of_its_configurations():
    c = TWay()
    c.update(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert c.score() == 0.5
    assert c.sparse() == 0.0


def test_wide_layers_are_sampled():
    tests = draw(6, (30,))
    c = TWay(2, max_neurons=4)
    c.update(tests)
    sets = shown(tests, 2, 4)
    assert c.n_sets() == 6
    assert sorted({k for _, neurons in sets for k in neurons}) == [0, 9, 19, 29]
    assert c.n_covered() == sum(map(len, sets.values()))
    wide = draw(2, (300,))
    for t, n_sets in ((2, 200 * 199 // 2), (3, 50 * 49 * 48 // 6)):
        c = TWay(t)
        c.update(wide)
        assert c.n_sets() == n_sets


def test_layers_that_are_too_narrow_have_no_sets():
    c = TWay(3)
    assert c.update(torch.ones(2, 2)).tolist() == [False, False]
    assert c.n_sets() == 0
    assert c.score() == c.sparse() == 0


def test_merged_halves_equal_the_whole():
    tests, c = draw(12), TWay()
    halves = [c.fresh(), c.fresh()]
    c.update(tests)
    for k, half in enumerate(halves):
        half.update({name: each[6 * k : 6 * k + 6] for name, each in tests.items()})
    merged = halves[0].merge(halves[1])
    assert (merged.score(), merged.sparse(), merged.tests) == (c.score(), c.sparse(), 12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TWay(4), "t must be 2 or 3"),
        (lambda: TWay(3, max_neurons=2), "max_neurons must be at least t"),
        (lambda: TWay().completeness(0.0), "p must be above 0"),
        (lambda: TWay(max_neurons=20_000).update(torch.ones(1, 20_000)), "at most 2\\^28"),
    ],
)
def test_invalid_use_is_rejected(make, words):
    with pytest.raises(UsageError, match=words):
        make()
