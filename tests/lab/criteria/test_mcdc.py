"""MC/DC, compared with loops over the definitions."""

from itertools import pairwise

import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria.mcdc import MCDC, MCDC_KINDS
from themis_lab.criteria.readings import Batch

inf, nan = float("inf"), float("nan")


def covered(kind, tests, clean, ratio=2.0):
    """Pairs (layer, i, j) that each test covers."""

    def sign_changes(a, b):
        return (a > 0) != (b > 0)

    def value_changes(a, b):
        if sign_changes(a, b) or a == b:
            return False
        return max(abs(a), abs(b)) >= ratio * min(abs(a), abs(b))

    def is_known(a, b):
        return all(abs(each) < inf for each in (a, b))

    rows = []
    for t in range(len(next(iter(tests.values())))):
        found = set()
        for k, (one, two) in enumerate(pairwise(tests)):
            first = list(zip(tests[one][t].tolist(), clean[one][t].tolist(), strict=True))
            second = list(zip(tests[two][t].tolist(), clean[two][t].tolist(), strict=True))
            if not all(is_known(*each) for each in first):
                continue
            for i, pair in enumerate(first):
                others = [sign_changes(*each) for at, each in enumerate(first) if at != i]
                changes = sign_changes if kind[0] == "s" else value_changes
                if not changes(*pair) or any(others):
                    continue
                for j, decision in enumerate(second):
                    changes = sign_changes if kind[1] == "s" else value_changes
                    if is_known(*decision) and changes(*decision):
                        found.add((k, i, j))
        rows.append(found)
    return rows


def draw(seed, n=60, widths=(3, 4, 2)):
    """Clean inputs, and tests in which few neurons differ."""
    g = torch.Generator().manual_seed(seed)
    clean = {f"l{k}": torch.randn(n, width, generator=g).mul(2).round().div(2).relu() for k, width in enumerate(widths)}
    clean["l2"] -= 0.5  # scores may be negative
    tests = {}
    for name, values in clean.items():
        is_other = torch.rand(values.shape, generator=g) < 0.35
        factor = torch.tensor([-1.0, 0.0, 0.5, 1.5, 2.0, 4.0])[torch.randint(6, values.shape, generator=g)]
        other = torch.where(values == 0, torch.rand(values.shape, generator=g) - 0.5, values * factor)
        tests[name] = torch.where(is_other, other, values)
    return tests, clean


@pytest.mark.parametrize("kind", MCDC_KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_reference(kind, seed, monkeypatch):
    tests, clean = draw(seed)
    tests["l0"][4, 1], clean["l1"][9, 0], tests["l2"][11, 1], tests["l1"][20, 2] = nan, inf, nan, -inf
    rows = covered(kind, tests, clean)
    expected = set().union(*rows)
    assert len(expected) > 4
    c, blocks, alone = MCDC(kind), MCDC(kind), MCDC(kind)
    raised = c.update(tests, clean=clean)
    assert c.n_covered() == len(expected)
    assert c.score() == pytest.approx(len(expected) / (3 * 4 + 4 * 2))
    before: set[tuple[int, int, int]] = set()
    for row, is_raised in zip(rows, raised.tolist(), strict=True):
        assert is_raised == bool(row - before)
        before |= row
    monkeypatch.setattr("themis_lab.criteria.mcdc.ITEMS_AT_ONCE", 30)
    assert blocks.update(tests, clean=clean).tolist() == raised.tolist()
    one_by_one = [
        bool(
            alone.update({n: v[t : t + 1] for n, v in tests.items()}, clean={n: v[t : t + 1] for n, v in clean.items()})
        )
        for t in range(60)
    ]
    assert one_by_one == raised.tolist()
    assert c.score() == blocks.score() == alone.score() <= 1


def test_items_are_the_pairs():
    tests, clean = draw(1)
    c = MCDC("vs")
    items = c.items(c.read(Batch(tests, clean)))
    for row, expected in zip(items.tolist(), covered("vs", tests, clean), strict=True):
        numbers = {i * 4 + j if k == 0 else 12 + i * 2 + j for k, i, j in expected}
        assert {item for item in row if item >= 0} == numbers


@pytest.mark.parametrize(
    ("kind", "test", "clean", "n"),
    [
        ("ss", ([1.0, 0.0], [0.0, 3.0]), ([0.0, 0.0], [1.0, 3.0]), 1),
        ("ss", ([1.0, 1.0], [0.0, 3.0]), ([0.0, 0.0], [1.0, 3.0]), 0),  # two conditions change
        ("ss", ([1.0, 0.0], [1.0, 3.0]), ([0.0, 0.0], [1.0, 3.0]), 0),  # no decision changes
        ("ss", ([1.0, 9.0], [0.0, 0.0]), ([0.0, 1.0], [1.0, 3.0]), 2),  # another's value may change
        ("sv", ([1.0, 0.0], [0.0, 6.0]), ([0.0, 0.0], [1.0, 3.0]), 1),  # exactly twice
        ("sv", ([1.0, 0.0], [1.0, 5.9]), ([0.0, 0.0], [1.0, 3.0]), 0),
        ("sv", ([1.0, 0.0], [1.0, -2.0]), ([0.0, 0.0], [1.0, 0.0]), 1),  # both are not above 0
        ("sv", ([1.0, 0.0], [1.0, 0.0]), ([0.0, 0.0], [1.0, 0.0]), 0),  # 0 to 0 is no change
        ("vs", ([2.0, 4.0], [0.0, 3.0]), ([1.0, 1.0], [1.0, 3.0]), 2),  # both are conditions
        ("vs", ([2.0, 4.0], [0.0, 3.0]), ([1.0, 0.0], [1.0, 3.0]), 0),  # a sign changes
        ("vv", ([2.0, 1.0], [0.5, 3.0]), ([1.0, 1.0], [1.0, 3.0]), 1),
    ],
)
def test_small_cases_worked_out_by_hand(kind, test, clean, n):
    tests, before = ({"a": torch.tensor([one]), "b": torch.tensor([two])} for one, two in (test, clean))
    c = MCDC(kind)
    assert c.update(tests, clean=before).tolist() == [n > 0]
    assert c.n_covered() == n
    assert c.score() == n / 4


@pytest.mark.parametrize("kind", MCDC_KINDS)
def test_layers_of_equal_width_and_of_one_neuron(kind):
    tests, clean = draw(8, n=80, widths=(3, 3, 3, 1, 5, 1))
    rows = covered(kind, tests, clean)
    c = MCDC(kind)
    raised, before = c.update(tests, clean=clean), set()
    for row, is_raised in zip(rows, raised.tolist(), strict=True):
        assert is_raised == bool(row - before)
        before |= row
    assert c.n_covered() == len(before) > 4
    starts = [0, 9, 18, 21, 26]  # the first pair of each layer
    items = c.items(c.read(Batch(tests, clean=clean)))
    n_next = (3, 3, 1, 5, 1)
    for row, named in zip(rows, items.tolist(), strict=True):
        assert sorted(starts[k] + i * n_next[k] + j for k, i, j in row) == sorted(each for each in named if each >= 0)


def test_same_input_covers_nothing():
    tests, _ = draw(0)
    for kind in MCDC_KINDS:
        c = MCDC(kind)
        assert not c.update(tests, clean=tests).any()
        assert c.score() == 0


def test_descending_and_repeated_stream():
    tests, clean = draw(5)
    order = torch.cat([torch.arange(59, -1, -1), torch.arange(60)])
    c = MCDC("vv")
    raised = c.update({n: v[order] for n, v in tests.items()}, clean={n: v[order] for n, v in clean.items()})
    assert raised[:60].any()
    assert not raised[60:].any()


def test_merged_halves_equal_the_whole():
    tests, clean = draw(2)
    c = MCDC()
    halves = [c.fresh(), c.fresh()]
    c.update(tests, clean=clean)
    for at, half in zip((slice(0, 25), slice(25, 60)), halves, strict=True):
        half.update({n: v[at] for n, v in tests.items()}, clean={n: v[at] for n, v in clean.items()})
    assert halves[0].merge(halves[1]).score() == c.score() > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MCDC("xy"), "kind must be one of"),
        (lambda: MCDC(ratio=1.0), "ratio must be above 1"),
        (lambda: MCDC().update(torch.ones(2, 3), clean=torch.ones(2, 3)), "pairs a layer with the next"),
        (lambda: MCDC().update({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}), "pass clean"),
        (lambda: wide("ss", 100_000), "2\\^33 pairs"),
        (lambda: wide("vs", 20_000), "2\\^27 pairs"),
    ],
)
def test_invalid_use_is_rejected(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def wide(kind, n):
    tests = {"a": torch.ones(1, n), "b": torch.ones(1, n)}
    MCDC(kind).update(tests, clean=tests)
