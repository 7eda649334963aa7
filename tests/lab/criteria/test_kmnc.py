"""KMNC, compared with what the public tools compute, one value at a time."""

import math

import numpy as np
import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.kmnc import KMNC, MAX_OUTSIDE

VARIANTS = list(KMNC.variants)


def section(variant, a, low, high, k):
    """The section of one float32 value as computed by a tool; None if it does not count."""
    a, low, high, k = np.float32(a), np.float32(low), np.float32(high), np.float32(k)
    if not np.isfinite(a):
        return None
    unit = (high - low) / k
    if variant == "deepimportance":
        return math.floor((a - low) / unit) if unit > 0 else 0
    if unit == 0:
        return None
    if variant == "mindarmour":
        number = math.floor((a - low) / unit)
        return number if 0 <= number < k else None
    if a < low or a > high:
        return None
    if variant == "neural-coverage":
        number = math.ceil((a - low) / (high - low) * k)
        return number if number >= 1 else None
    return min(int((a - low) / unit), int(k) - 1)


def by_hand(variant, train, tests, k):
    """The score and which tests raised it."""
    low, high = train.numpy().min(0), train.numpy().max(0)
    hit, raised = set(), []
    for row in tests.numpy():
        before = len(hit)
        for neuron, a in enumerate(row):
            number = section(variant, a, low[neuron], high[neuron], k)
            if number is not None:
                hit.add((neuron, number))
        raised.append(len(hit) > before)
    return len(hit) / (k * train.shape[1]), raised


def data(n_train=20, n_tests=60, n=12, seed=0):
    """Training values and tests, some of them out of range, on an end, or not finite; one neuron never fires."""
    rng = torch.Generator().manual_seed(seed)
    train = torch.randn(n_train, n, generator=rng) * torch.arange(1, n + 1)
    train[:, 3] = 0.0
    tests = torch.randn(n_tests, n, generator=rng) * torch.arange(1, n + 1) * 1.3
    tests[::7] = train[torch.arange(len(tests[::7])) % n_train]
    tests[1], tests[2] = train.amax(0), train.amin(0)
    tests[5, 0], tests[6, 1], tests[8, 2] = torch.nan, torch.inf, -torch.inf
    tests[9, 3] = 0.5
    return train, tests


def taken(criterion, tests, size):
    return torch.cat([criterion.update(tests[at : at + size]) for at in range(0, len(tests), size)]).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [1, 7, 100, 1000])
def test_it_equals_the_computation_of_the_tool(variant, k):
    for seed in range(3):
        train, tests = data(seed=seed)
        criterion = KMNC(k, variant=variant).fit(train.split(6))
        raised = criterion.update(tests)
        score, expected = by_hand(variant, train, tests, k)
        assert criterion.score() == pytest.approx(score, abs=1e-12)
        assert raised.tolist() == expected


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_batches_give_the_same_result_as_single_tests(variant, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr("themis.compute.native.library_for", lambda tensor: None)
    train, tests = data()
    tests = torch.cat([tests, tests[:10], tests.sort(0, descending=True).values, tests[-1:].expand(20, -1), train])
    tests = torch.cat([tests, tests[:31], tests.new_full((1, 12), 0.123)])  # the last alone of its batch
    whole = KMNC(50, variant=variant).fit([train])
    expected = taken(whole, tests, 1)
    for size in (2, 32, len(tests)):
        criterion = whole.fresh()
        assert taken(criterion, tests, size) == expected
        assert all(torch.equal(each, whole.state[name]) for name, each in criterion.state.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_halves_equal_the_whole(variant):
    train, tests = data(n_tests=80)
    whole = KMNC(30, variant=variant).fit([train])
    one, other = whole.fresh(), whole.fresh()
    whole.update(tests)
    one.update(tests[:45])
    other.update(tests[40:])
    for merged in (one.merge(other), other.merge(one)):
        assert merged.score() == whole.score()
        assert all(torch.equal(each, whole.state[name]) for name, each in merged.state.items())


def test_ends_of_the_range():
    train = torch.tensor([[0.0], [8.0]])
    covered = {}
    for variant in VARIANTS:
        for a in (0.0, 8.0, 8.5, -0.5):
            criterion = KMNC(8, variant=variant).fit([train])
            covered[variant, a] = bool(criterion.update(torch.tensor([[a]])))
    assert {key for key, is_covered in covered.items() if is_covered} == {
        *(("deephunter", a) for a in (0.0, 8.0)),
        *(("deepimportance", a) for a in (0.0, 8.0, 8.5, -0.5)),
        ("neural-coverage", 8.0),
        ("mindarmour", 0.0),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_range_that_is_a_point_has_no_sections(variant):
    criterion = KMNC(10, variant=variant).fit([torch.ones(5, 2)])
    criterion.update(torch.tensor([[1.0, 1.0], [2.0, 0.0], [torch.nan, torch.inf]]))
    assert criterion.n_covered() == (2 if variant == "deepimportance" else 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_training_input_and_ranges_that_float32_cannot_hold(variant):
    alone = KMNC(10, variant=variant).fit([torch.randn(1, 4)])
    alone.update(torch.randn(6, 4))
    assert alone.score() <= (0.1 if variant == "deepimportance" else 0)
    huge = KMNC(10, variant=variant).fit([torch.tensor([[-3e38], [3e38]])])
    huge.update(torch.linspace(-3e38, 3e38, 50)[:, None])
    assert huge.score() <= 1
    tiny = KMNC(1000, variant=variant).fit([torch.tensor([[0.0], [1e-43]])])  # its sections have no width
    tiny.update(torch.linspace(0, 1e-43, 50)[:, None])
    assert tiny.score() <= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_non_finite_values_cover_nothing(variant):
    train, _ = data()
    criterion = KMNC(variant=variant).fit([train])
    assert not criterion.update(torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None].expand(3, 12)).any()
    assert criterion.score() == 0


def test_laws_belong_to_the_variant():
    train = torch.tensor([[0.0], [1.0]])
    for variant in VARIANTS:
        criterion = KMNC(4, variant=variant).fit([train])
        criterion.update(torch.linspace(-3, 3, 500)[:, None])
        assert criterion.laws.bounded == (criterion.score() <= 1) == (variant != "deepimportance")
        assert criterion.laws.monotone
        assert "laws" not in criterion.options()
    assert KMNC.laws.bounded
    assert isinstance(KMNC(), Criterion)


def test_sections_far_beyond_the_range_count_once():
    criterion = KMNC(1000, variant="deepimportance").fit([torch.tensor([[0.0, 0.0], [1.0, 1.0]])])
    assert criterion.update(torch.tensor([[1e30, -1e30]])).all()
    assert not criterion.update(torch.tensor([[3e30, -3e30]])).any()
    assert criterion.n_covered() == 2
    assert MAX_OUTSIDE * 2 * 10**9 < 2**63  # keys of a billion neurons


def test_every_section_can_be_hit():
    criterion = KMNC(1000).fit([torch.tensor([[0.0, -5.0], [1.0, 5.0]])])
    share = (torch.arange(1000) + 0.5) / 1000
    assert criterion.update(torch.stack([share, share * 10 - 5], 1)).all()
    assert criterion.score() == 1


def test_wide_values_are_read_in_their_own_precision():
    train, tests = (each.double() for each in data())
    criterion = KMNC(100).fit([train])
    criterion.update(tests)
    low, high = train.amin(0), train.amax(0)
    is_in = (tests >= low) & (tests <= high) & (high > low)
    number = ((tests - low) / ((high - low) / 100)).clamp(max=99).nan_to_num(0).long()
    assert criterion.n_covered() == len({(n, int(number[t, n])) for t, n in is_in.nonzero().tolist()})


def test_layers_and_channels():
    rng = torch.Generator().manual_seed(1)
    train = {"conv": torch.rand(30, 3, 4, 4, generator=rng), "output": torch.rand(30, 2, generator=rng)}
    tests = {"conv": torch.rand(9, 3, 4, 4, generator=rng), "output": torch.rand(9, 2, generator=rng)}
    flat = [torch.cat([each["conv"].mean((2, 3)), each["output"]], 1) for each in (train, tests)]
    layered, alone = KMNC(20).fit([train]), KMNC(20).fit(flat[:1])
    assert torch.equal(layered.update(tests), alone.update(flat[1]))
    assert layered.score() == alone.score() > 0
    assert KMNC(20, neurons="element").fit([train]).n_items() == 20 * 50


@pytest.mark.parametrize("k", [0, -1, 2.5, True, 1 << 25])
def test_an_invalid_k_is_rejected(k):
    with pytest.raises(UsageError, match="k must be a whole number"):
        KMNC(k)
