"""Path coverage and pairs of neurons, compared with loops over the definitions."""

from itertools import combinations, pairwise, product

import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria import DeepPath, NeuronPairs, choose_criterion
from themis_lab.criteria.configurations import PATH_KINDS

inf, nan = float("inf"), float("nan")


def draw(seed, n=40, widths=(3, 4, 2)):
    g = torch.Generator().manual_seed(seed)
    tests = {f"l{k}": torch.randn(n, width, generator=g).mul(2).round().relu() for k, width in enumerate(widths)}
    tests["l1"][:, 3] = 0  # never fires
    tests["l0"][4, 1], tests["l1"][9, 0], tests["l2"][11, 1] = nan, inf, -inf
    return tests


def states(tests, t, threshold):
    """By neuron (layer, number), whether it is on; neurons with a value that is not finite are left out."""
    return {
        (layer, number): value > threshold
        for layer, values in enumerate(tests.values())
        for number, value in enumerate(values[t].tolist())
        if abs(value) < inf
    }


def paths(widths, length):
    for first in range(len(widths) - length + 1):
        layers = range(first, first + length)
        yield from (
            tuple(zip(layers, numbers, strict=True)) for numbers in product(*(range(widths[k]) for k in layers))
        )


def pairs(widths):
    for layer, width in enumerate(widths):
        yield from combinations([(layer, number) for number in range(width)], 2)
    for layer, (a, b) in enumerate(pairwise(widths)):
        yield from (((layer, i), (layer + 1, j)) for i in range(a) for j in range(b))


def configurations(kind, n):
    return [
        config
        for config in product((False, True), repeat=n)
        if kind == "fsp" or (kind == "oap" and config[-1]) or all(config)
    ]


CASES = [
    *((DeepPath(kind, length), kind, list(paths((3, 4, 2), length))) for kind in PATH_KINDS for length in (2, 3)),
    (DeepPath("oap", threshold=1.0), "oap", list(paths((3, 4, 2), 2))),
    (NeuronPairs(), "fsp", list(pairs((3, 4, 2)))),
    (NeuronPairs(threshold=1.0), "fsp", list(pairs((3, 4, 2)))),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("criterion", "kind", "sets"), CASES, ids=lambda value: str(value)[:30])
def test_reference(criterion, kind, sets, seed, monkeypatch):
    tests = draw(seed)
    rows = []
    for t in range(40):
        known = states(tests, t, criterion.threshold)
        rows.append(
            {
                (members, config)
                for members in sets
                for config in configurations(kind, len(members))
                if all(member in known for member in members) and tuple(known[member] for member in members) == config
            }
        )
    expected = set().union(*rows)
    n_items = len(sets) * len(configurations(kind, len(sets[0])))
    c, halves, alone = criterion.fresh(), criterion.fresh(), criterion.fresh()
    raised = c.update(tests).tolist()
    assert 0 < len(expected) < n_items
    assert c.n_items() == n_items
    assert c.score() == pytest.approx(len(expected) / n_items)
    before = set()
    for row, is_raised in zip(rows, raised, strict=True):
        assert is_raised == bool(row - before)
        before |= row
    items = c.items(c.read(tests))
    assert [int((row >= 0).sum()) for row in items] == [len(row) for row in rows]
    monkeypatch.setattr("themis_lab.criteria.tway.COMPARED_AT_ONCE", 5)
    assert halves.update(tests).tolist() == raised
    assert [bool(alone.update({name: v[t : t + 1] for name, v in tests.items()})) for t in range(40)] == raised
    assert c.score() == halves.score() == alone.score()


def test_a_small_case_worked_out_by_hand():
    tests = {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([[2.0]]), "c": torch.tensor([[0.0]])}
    expected = {"sap": (1, 3), "oap": (2, 6), "fsp": (3, 12)}  # of a1-b, a2-b and b-c
    for kind, (covered, n_items) in expected.items():
        c = DeepPath(kind)
        c.update(tests)
        assert (c.n_covered(), c.n_items()) == (covered, n_items)
    c = NeuronPairs()
    c.update(tests)
    assert (c.n_covered(), c.n_items()) == (4, 16)  # the same and a1-a2
    assert DeepPath("fsp", 3).update(tests).tolist() == [True]


def test_wide_layers_are_sampled_at_even_distances():
    values = torch.zeros(1, 101)
    values[0, ::50] = 1
    c = NeuronPairs(max_neurons=3)
    c.update({"wide": values, "narrow": torch.ones(1, 2)})
    assert c.n_items() == 4 * (3 + 1 + 6)
    wide = DeepPath()
    wide.update({"wide": torch.rand(2, 500), "other": torch.rand(2, 300)})
    assert wide.n_items() == 200 * 200


def test_specifications_are_read_and_written():
    assert str(choose_criterion("path(kind=fsp, length=3)")) == "path(kind=fsp, length=3)"
    assert str(choose_criterion("pairs")) == "pairs"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeepPath("all"), "path: kind must be one of sap, oap, fsp, got 'all'"),
        (lambda: DeepPath(length=1), "path: length must be 2 to 5, got 1"),
        (lambda: DeepPath(length=4).update(draw(0)), "length must be at most the number of layers, got 4 for 3"),
        (lambda: NeuronPairs(max_neurons=1), "pairs: max_neurons must be a whole number of at least 2, got 1"),
        (
            lambda: DeepPath("fsp", 5, max_neurons=60).update({str(k): torch.rand(1, 60) for k in range(5)}),
            r"path: there must be at most 2\^28 configurations, got",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
