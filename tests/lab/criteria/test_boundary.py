"""NBC and SNAC, compared with what the public tools compute, one value at a time."""

import numpy as np
import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria import covering
from themis_lab.criteria.boundary import NBC, SNAC

KINDS = [(kind, variant) for kind in (NBC, SNAC) for variant in kind.variants]


def by_hand(kind, variant, sigma, train, tests):
    """The score and which tests raised it."""
    train = train.numpy()
    further = sigma * (train.std(0, ddof=1) if len(train) > 1 else np.zeros(train.shape[1]))
    low, high = train.min(0) - further, train.max(0) + further
    hit, raised = set(), []
    for row in tests.numpy():
        before = len(hit)
        for neuron, a in enumerate(row):
            if not np.isfinite(a):
                continue
            is_up = a >= high[neuron] if variant == "dnn-tip" else a > high[neuron]
            is_down = a <= low[neuron] if variant == "dnn-tip" else a < low[neuron]
            if variant == "mindarmour":
                hit |= {neuron} if is_up or is_down else set()
                continue
            hit |= {("up", neuron)} if is_up else set()
            hit |= {("down", neuron)} if is_down and kind is NBC else set()
        raised.append(len(hit) > before)
    sides = 2 if kind is NBC and variant != "mindarmour" else 1
    return len(hit) / (sides * train.shape[1]), raised


def data(seed=0, n_train=30, n_tests=50, n=15):
    rng = torch.Generator().manual_seed(seed)
    train = torch.randn(n_train, n, generator=rng).double()
    train[:, 4] = 0.0  # never fires
    tests = torch.randn(n_tests, n, generator=rng).double() * 1.6
    tests[0], tests[1] = train.amax(0), train.amin(0)
    tests[2:5] = train[:1].expand(3, -1)
    tests[5, 0], tests[6, 1], tests[7, 2] = torch.nan, torch.inf, -torch.inf
    return train, torch.cat([tests, tests[:9], tests.sort(0, descending=True).values])


@pytest.mark.parametrize(("kind", "variant"), KINDS)
@pytest.mark.parametrize("sigma", [0, 0.5, 2])
def test_it_equals_the_computation_of_the_tool(kind, variant, sigma):
    for seed in range(3):
        train, tests = data(seed)
        criterion = kind(sigma, variant=variant).fit(train.split(7))
        raised = criterion.update(tests)
        score, expected = by_hand(kind, variant, sigma, train, tests)
        assert criterion.score() == pytest.approx(score, abs=1e-12)
        assert raised.tolist() == expected
        assert criterion.score() <= 1


@pytest.mark.parametrize(("kind", "variant"), KINDS)
def test_batches_give_the_same_result_as_single_tests(kind, variant):
    train, tests = data()
    tests = torch.cat([tests, tests[-1:].expand(20, -1), torch.full((1, 15), 9.0)])
    whole = kind(0.3, variant=variant).fit([train])
    expected = [bool(whole.update(test[None])) for test in tests]
    for size in (3, len(tests)):
        criterion = whole.fresh()
        assert torch.cat([criterion.update(part) for part in tests.split(size)]).tolist() == expected
        assert torch.equal(criterion.state["covered"], whole.state["covered"])


@pytest.mark.parametrize(("kind", "variant"), KINDS)
@pytest.mark.parametrize("chunk", [1, 300, 700])
def test_chunks_of_neurons_give_the_same_result_as_all_at_once(kind, variant, chunk, monkeypatch):
    train, tests = data()
    whole = kind(variant=variant).fit([train])
    part = whole.fresh()
    expected = whole.update(tests)
    monkeypatch.setattr(covering, "NEURON_VALUES", chunk)
    assert torch.equal(part.update(tests), expected)
    assert torch.equal(part.state["covered"], whole.state["covered"])
    hits = whole.hits(whole.read(tests))
    assert torch.equal(hits.any(0), whole.state["covered"])


@pytest.mark.parametrize(("kind", "variant"), KINDS)
def test_merged_halves_equal_the_whole(kind, variant):
    train, tests = data()
    whole = kind(variant=variant).fit([train])
    one, other = whole.fresh(), whole.fresh()
    whole.update(tests)
    one.update(tests[:30])
    other.update(tests[25:])
    assert one.merge(other).score() == other.merge(one).score() == whole.score()


@pytest.mark.parametrize(("kind", "variant"), KINDS)
def test_training_inputs_cross_no_boundary_unless_it_is_inclusive(kind, variant):
    train, _ = data()
    criterion = kind(variant=variant).fit([train])
    criterion.update(train)
    assert criterion.score() == (1 if variant == "dnn-tip" else 0)


@pytest.mark.parametrize(("kind", "variant"), KINDS)
@pytest.mark.parametrize("sigma", [0, 1])
def test_one_training_input_has_no_spread(kind, variant, sigma):
    criterion = kind(sigma, variant=variant).fit([torch.ones(1, 3)])
    assert torch.equal(criterion.learnt["low"], torch.ones(3))
    criterion.update(torch.tensor([[2.0, 0.0, 1.0]]))
    crossed = {"deepgauge": (1 / 3, 1 / 3), "mindarmour": (2 / 3, None), "dnn-tip": (4 / 6, 2 / 3)}
    assert criterion.score() == pytest.approx(crossed[variant][kind is SNAC])


@pytest.mark.parametrize(("kind", "variant"), KINDS)
def test_non_finite_values_cover_nothing(kind, variant):
    criterion = kind(variant=variant).fit([torch.randn(9, 2)])
    assert not criterion.update(torch.tensor([[torch.nan, torch.inf], [-torch.inf, torch.nan]])).any()
    assert criterion.score() == 0


def test_the_standard_deviation_is_that_of_all_batches_together():
    rng = torch.Generator().manual_seed(3)
    train = torch.randn(64, 5, generator=rng) * 0.01 + 100
    for sizes in ([64], [1] * 64, [1, 30, 33]):
        criterion = NBC(1.0).fit(train.split(sizes))
        torch.testing.assert_close(criterion.learnt["high"], train.amax(0) + train.std(0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("sigma", [-1, float("nan"), float("inf")])
def test_an_invalid_sigma_is_rejected(sigma):
    with pytest.raises(UsageError, match="sigma must be a number of at least 0"):
        SNAC(sigma)
