"""TKNC and TKNP, compared with sorted lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from themis.errors import UsageError
from themis_lab.criteria.covering import add_keys, has_keys
from themis_lab.criteria.topk import TKNC, TKNP, mix_bits, most_active


def ranked(row, k):
    """Neurons of the k largest, the first of equal ones first."""
    finite = [(-a, neuron) for neuron, a in enumerate(row) if math.isfinite(a)]
    return [neuron for _, neuron in sorted(finite)[:k]]


def layers(n_tests=40, seed=0, is_finite=False):
    """Values of three layers, one narrower than k, with many ties; neurons of the last never fire."""
    rng = torch.Generator().manual_seed(seed)
    found = {
        "a": torch.randn(n_tests, 20, generator=rng).relu(),
        "b": torch.randint(0, 4, (n_tests, 3), generator=rng).float(),
        "c": torch.zeros(n_tests, 9),
    }
    if not is_finite:
        found["a"][1, 0], found["a"][2, 5], found["a"][3] = torch.nan, torch.inf, -torch.inf
    return found


def rows(tests, at):
    return {name: each[at] for name, each in tests.items()}


def tknc_by_hand(variant, k, tests):
    hit, raised = set(), []
    for t in range(len(tests["a"])):
        before = len(hit)
        for name, each in tests.items():
            for rank, neuron in enumerate(ranked(each[t].tolist(), k)):
                hit.add((name, neuron, rank if variant == "deephunter" else 0))
        raised.append(len(hit) > before)
    n = sum(each.shape[1] for each in tests.values())
    return len(hit) / (n * (k if variant == "deephunter" else 1)), raised


def tknp_by_hand(variant, by, k, tests):
    seen, raised = set(), []
    for t in range(len(tests["a"])):
        before, shown = len(seen), {}
        for name, each in tests.items():
            if all(math.isfinite(a) for a in each[t].tolist()):
                pattern = ranked(each[t].tolist(), k)
                shown[name] = tuple(pattern if variant == "neural-coverage" else sorted(pattern))
        if by == "layer":
            seen |= set(shown.items())
        elif len(shown) == len(tests):
            seen.add(tuple(shown.values()))
        raised.append(len(seen) > before)
    return len(seen), raised


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, math.nan, math.inf, -math.inf]), min_size=6, max_size=6),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 9),
)
def test_the_first_of_equal_neurons_ranks_first(values, k):
    found = most_active(torch.tensor(values), k)
    expected = [(ranked(row, k) + [-1] * 9)[: min(k, 6)] for row in values]
    assert found.tolist() == expected
    assert most_active(torch.tensor(values, dtype=torch.float64), k).tolist() == expected


def test_wide_layers_with_many_ties():
    values = torch.randint(0, 50, (4, 5000), generator=torch.Generator().manual_seed(0)).float()
    assert most_active(values, 130).tolist() == [ranked(row, 130) for row in values.tolist()]


@pytest.mark.parametrize("variant", TKNC.variants)
@pytest.mark.parametrize("k", [1, 3, 10])
def test_tknc_equals_the_computation_of_the_tool(variant, k):
    for seed in range(3):
        tests = layers(seed=seed)
        criterion = TKNC(k, variant=variant)
        raised = criterion.update(tests)
        score, expected = tknc_by_hand(variant, k, tests)
        assert criterion.score() == pytest.approx(score, abs=1e-12)
        assert raised.tolist() == expected
        assert criterion.score() <= 1


@pytest.mark.parametrize("variant", TKNP.variants)
@pytest.mark.parametrize("by", ["layer", "network"])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_tknp_equals_the_computation_of_the_tool(variant, by, k):
    for seed in range(3):
        tests = layers(seed=seed)
        criterion = TKNP(k, by, variant=variant)
        raised = criterion.update(tests)
        assert (criterion.score(), raised.tolist()) == tknp_by_hand(variant, by, k, tests)


def every(k):
    yield from (TKNC(k, variant=variant) for variant in TKNC.variants)
    yield from (TKNP(k, by, variant=variant) for variant in TKNP.variants for by in ("layer", "network"))


def test_batches_give_the_same_result_as_single_tests():
    tests = layers()
    order = [*range(40), *range(9), *range(39, -1, -1), *[7] * 20]
    tests = rows(tests, order)
    tests["a"][:, -1].clamp_(max=-1)
    tests["a"] = torch.cat([tests["a"], torch.arange(20.0)[None]])  # the last one raises alone
    tests["b"], tests["c"] = (torch.cat([tests[name], tests[name][-1:]]) for name in "bc")
    for whole in every(4):
        expected = [bool(whole.update(rows(tests, [t]))) for t in range(len(order) + 1)]
        assert expected[-1]
        for size in (7, 64, 110):
            criterion = whole.fresh()
            parts = [criterion.update(rows(tests, slice(at, at + size))) for at in range(0, len(order) + 1, size)]
            assert torch.cat(parts).tolist() == expected
            assert all(torch.equal(each, whole.state[name]) for name, each in criterion.state.items())


def test_merged_halves_equal_the_whole():
    tests = layers(60)
    for whole in every(5):
        one, other = whole.fresh(), whole.fresh()
        whole.update(tests)
        one.update(rows(tests, slice(0, 40)))
        other.update(rows(tests, slice(30, 60)))
        for merged in (one.merge(other), other.merge(one)):
            assert merged.score() == whole.score() > 0
            assert all(torch.equal(each, whole.state[name]) for name, each in merged.state.items())


def test_the_order_of_tests_does_not_matter():
    tests = layers(50)
    for one in every(5):
        other = one.fresh()
        one.update(tests)
        other.update(rows(tests, torch.randperm(50, generator=torch.Generator().manual_seed(0))))
        assert one.score() == other.score()


def test_non_finite_values_cover_nothing():
    for criterion in every(3):
        assert not criterion.update(torch.full((2, 4), torch.nan)).any()
        assert criterion.score() == 0
        assert criterion.update(torch.tensor([[1.0, torch.nan, 2.0, torch.inf]])).any() == isinstance(criterion, TKNC)


def test_a_layer_with_k_neurons_or_fewer_is_covered_by_one_test():
    criterion = TKNC(10)
    criterion.update(torch.randn(1, 10))
    assert criterion.score() == 1
    narrow = TKNC(10, variant="deephunter")
    narrow.update(torch.randn(500, 2, generator=torch.Generator().manual_seed(0)))
    assert narrow.score() == 2 * 2 / 20  # two ranks of ten


def test_orders_are_distinguished_only_if_the_tool_distinguishes_them():
    tests = torch.tensor([[3.0, 2.0, 1.0, 0.0], [2.0, 3.0, 1.0, 0.0], [3.0, 2.0, 0.0, 1.0]])
    assert TKNP(2).update(tests).tolist() == [True, True, False]
    assert TKNP(2, variant="deepgauge").update(tests).tolist() == [True, False, False]


def test_the_same_neurons_of_two_layers_are_two_patterns():
    one = torch.tensor([[3.0, 2.0, 1.0]])
    layered, network = TKNP(2), TKNP(2, "network")
    layered.update({"a": one, "b": one})
    network.update({"a": one, "b": one})
    assert (layered.score(), network.score()) == (2, 1)
    network.update({"a": one, "b": one.flip(1)})
    network.update({"a": one.flip(1), "b": one})
    assert network.score() == 3


def test_hashes_are_well_distributed():
    words = mix_bits(torch.arange(200_000))
    assert len(words.unique()) == 200_000
    ones = (words[:, None] >> torch.arange(64) & 1).double().mean(0)
    assert ((ones - 0.5).abs() < 0.01).all()


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_keys_are_a_set(mine, theirs):
    keys, other = (torch.tensor(sorted(each), dtype=torch.int64) for each in (mine, theirs))
    is_known = has_keys(keys, other)
    assert is_known.tolist() == [each in mine for each in sorted(theirs)]
    assert add_keys(keys, other[~is_known]).tolist() == sorted(mine | theirs)


@pytest.mark.parametrize("kind", [TKNC, TKNP])
def test_invalid_options_are_rejected(kind):
    with pytest.raises(UsageError, match="k must be a whole number"):
        kind(0)
    with pytest.raises(UsageError, match="by must be"):
        TKNP(3, "test")
