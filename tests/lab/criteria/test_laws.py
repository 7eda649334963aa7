"""Every criterion obeys the laws that it declares, and violates those that it does not."""

from itertools import pairwise

import cases
import pytest
import torch
from cases import cut, draw, joined, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from themis.errors import UsageError
from themis_lab.criteria import CRITERIA
from themis_lab.criteria.covering import Covering

CASES = cases.cases()
ALL = pytest.mark.parametrize("case", CASES, ids=str)
FEW = settings(max_examples=8)


@st.composite
def streams(draw_):
    """Tests, some of them equal, and how they are split into batches."""
    n = draw_(st.integers(1, 24))
    batch = draw(
        draw_(st.integers(0, 10_000)), n, scale=draw_(st.sampled_from([0.3, 1.0, 3.0])), is_broken=draw_(st.booleans())
    )
    order = draw_(st.lists(st.integers(0, n - 1), min_size=1, max_size=30))
    sizes = draw_(st.lists(st.integers(1, 9), max_size=6))
    return rows(batch, torch.tensor(order)), sizes


_made = {}


def made(case):
    """A fitted criterion that has seen no tests; each one is fitted only once."""
    if case not in _made:
        _made[case] = case.make()
    return _made[case].fresh()


def size(batch):
    return len(batch.activations["output"])


def after(criterion, *batches):
    for batch in batches:
        criterion.update(batch)
    return criterion


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def test_every_criterion_has_a_case():
    assert set(CRITERIA) <= set(cases.SETTINGS), "a criterion has no case: add one to cases.py"


@ALL
def test_before_the_first_test(case):
    c = made(case)
    assert c.score() == 0
    assert c.update(rows(draw(0, 2), slice(0))).shape == (0,)
    assert c.score() == 0


@ALL
@FEW
@given(streams())
def test_raised_is_the_same_as_for_single_tests(case, stream):
    batch, sizes = stream
    whole, pieces, alone = made(case), made(case), made(case)
    raised, scores = [], [0.0]
    for t in range(size(batch)):
        raised += alone.update(rows(batch, slice(t, t + 1))).tolist()
        scores.append(alone.score())
    assert raised == [now > before for before, now in pairwise(scores)]
    assert whole.update(batch).tolist() == raised
    assert [is_raised for piece in cut(batch, sizes) for is_raised in pieces.update(piece).tolist()] == raised
    assert whole.score() == close(alone.score())
    assert pieces.score() == close(alone.score())
    assert whole.tests == size(batch)


@ALL
@FEW
@given(streams())
def test_bounded(case, stream):
    c = made(case)
    after(c, stream[0])
    assert c.score() >= 0
    assert c.score() <= 1 or not c.laws.bounded


@ALL
@FEW
@given(streams())
def test_monotone(case, stream):
    batch, sizes = stream
    c, before = made(case), 0.0
    for piece in cut(batch, sizes):
        after(c, piece)
        assert c.score() >= before or not c.laws.monotone
        before = c.score()
    assert c.tests == size(batch)


@ALL
@FEW
@given(streams(), st.randoms(use_true_random=False))
def test_order_free(case, stream, random):
    batch, _ = stream
    order = list(range(size(batch)))
    random.shuffle(order)
    one, other = made(case), made(case)
    after(one, batch)
    after(other, rows(batch, torch.tensor(order)))
    assert other.score() == close(one.score()) or not one.laws.order_free


@ALL
@FEW
@given(streams(), st.integers(0, 30))
def test_mergeable(case, stream, at):
    batch, _ = stream
    parts = [rows(batch, slice(0, at)), rows(batch, slice(at, None))]
    whole, one, other = made(case), made(case), made(case)
    after(whole, batch)
    after(one, parts[0])
    after(other, parts[1])
    if not whole.laws.mergeable:
        with pytest.raises(UsageError, match="cannot be merged"):
            one.merge(other)
        return
    untouched = made(case)
    assert untouched.merge(whole).score() == whole.merge(untouched).score() == whole.score()
    scores = one.score(), other.score()
    merged = one.merge(other)
    assert merged.score() == close(whole.score())
    assert merged.tests == whole.tests
    after(merged, batch)
    assert (one.score(), other.score()) == scores  # merging does not change its operands


def violations():
    """Streams that are likely to violate a law: extreme values, one test many times before or after others."""
    for seed in range(30):
        batch = draw(seed, 24, scale=(1.0, 6.0)[seed % 2])
        yield batch
        yield rows(batch, torch.tensor([0] * 12 + list(range(24))))
        yield rows(batch, torch.tensor([*range(24)] + [0] * 24))
        if seed % 10 == 0:
            yield joined(draw(seed, 44, scale=0.1), draw(seed + 1, 52, scale=6.0))


@ALL
def test_a_law_that_is_not_declared_is_broken(case):
    laws = made(case).laws
    missing = {law for law in ("bounded", "monotone", "order_free") if not getattr(laws, law)}
    broken = set()
    for batch in violations():
        if missing <= broken:
            break
        c, scores = made(case), []
        for piece in cut(batch, [1] * (size(batch) - 1)):
            scores.append(after(c, piece).score())
        if max(scores) > 1:
            broken.add("bounded")
        if any(now < before for before, now in pairwise(scores)):
            broken.add("monotone")
        backwards = after(made(case), rows(batch, torch.arange(size(batch) - 1, -1, -1)))
        if backwards.score() != close(scores[-1]):
            broken.add("order_free")
    assert missing <= broken
    assert laws.mergeable or not laws.order_free, "what does not depend on the order can be merged"


@ALL
@FEW
@given(streams())
def test_inputs_are_not_modified(case, stream):
    batch, _ = stream
    before = {name: each.clone() for name, each in batch.activations.items()}
    clean = {name: each.clone() for name, each in batch.clean.items()}
    learnt = {name: each.clone() for name, each in made(case).learnt.items()}
    c = made(case)
    c.update(batch)
    for given_, kept in ((batch.activations, before), (batch.clean, clean), (c.learnt, learnt)):
        for name, each in given_.items():
            assert torch.equal(each.nan_to_num(), kept[name].nan_to_num())


@ALL
@FEW
@given(streams(), st.integers(1, 30))
def test_fresh_and_restored_criteria_are_independent(case, stream, at):
    batch, _ = stream
    first, second = rows(batch, slice(0, at)), rows(batch, slice(at, None))
    c = made(case)
    after(c, first)
    score, state = c.score(), {name: each.clone() for name, each in c.state.items()}
    other = c.fresh()
    assert (other.score(), other.tests, other.state) == (0, 0, {})
    other.update(batch)
    assert c.score() == score
    assert all(torch.equal(each.nan_to_num(), state[name].nan_to_num()) for name, each in c.state.items())
    restored = made(case)
    restored.restore(c.state, c.tests, c.layout)
    assert restored.score() == score
    assert restored.update(second).tolist() == c.update(second).tolist()
    assert (restored.score(), restored.tests) == (c.score(), c.tests)


@ALL
@FEW
@given(streams())
def test_covering_counts_its_items_once(case, stream):
    batch, _ = stream
    c = made(case)
    if not isinstance(c, Covering):
        assert not hasattr(c, "items")
        return
    after(c, batch)
    items = c.items(c.read(batch))
    assert items.dtype == torch.int64
    assert c.n_covered() == len(items[items >= 0].unique())
    assert not c.update(batch).any()


@ALL
def test_the_test_data_can_raise_the_score(case):
    """A criterion that no drawn test raises would obey every law."""
    c = made(case)
    raised = torch.cat([c.update(draw(seed, 30)) for seed in range(10)])
    assert raised.any()
    assert c.score() > 0
