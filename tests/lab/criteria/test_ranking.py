"""Orders of tests, compared with greedy loops; APFD worked out by hand."""

import numpy as np
import pytest
import torch

from themis.errors import DataError, UsageError
from themis_lab.criteria.covering import Covering
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.nc import NC
from themis_lab.criteria.ranking import apfd, rank
from themis_lab.criteria.topk import TKNP
from themis_lab.criteria.tway import TWay


class Given(Covering):
    """Activations that are the items themselves."""

    name = "given"
    learns = False

    def n_items(self):
        return 1000

    def items(self, readings):
        return readings.values.nan_to_num(-1).long()


class Surprising(Given):
    name = "surprising"
    needs = frozenset({"predicted"})

    def surprise(self, activations, *, predicted=None):
        return activations.max(1).values if predicted is None else predicted


class Other(Criterion):
    name = "other"
    learns = False

    def score(self):
        return 0.0

    def _initial_state(self, readings):
        return {}

    def _update(self, readings):
        return torch.zeros(len(readings), dtype=torch.bool)


def greedy(sets, worth=None):
    """The definition: pick the test that adds most, the first of equal ones; then the rest by worth."""
    worth = [len(each) for each in sets] if worth is None else worth
    order, covered = [], set()
    while True:
        gains = [-1 if t in order else len(each - covered) for t, each in enumerate(sets)]
        if not gains or max(gains) <= 0:
            break
        order.append(gains.index(max(gains)))
        covered |= sets[order[-1]]
    rest = [t for t in range(len(sets)) if t not in order]
    return order + sorted(rest, key=lambda t: -worth[t])


@pytest.mark.parametrize("seed", range(6))
def test_against_loops(seed):
    g = torch.Generator().manual_seed(seed)
    items = torch.randint(-3, 25, (40, 6), generator=g)  # some are missing, some are listed twice
    items[torch.rand(40, generator=g) < 0.2] = -1
    items[30:] = items[:10]
    sets = [{item for item in row if item >= 0} for row in items.tolist()]
    tests = items.float()
    assert rank(Given(), tests, "ctm").tolist() == sorted(range(40), key=lambda t: -len(sets[t]))
    assert rank(Given(), tests).tolist() == greedy(sets)
    worth = tests.max(1).values
    assert rank(Surprising(), tests, "ctm").tolist() == sorted(range(40), key=lambda t: -worth[t])
    assert rank(Surprising(), tests, "cam").tolist() == greedy(sets, worth.tolist())


def test_small_cases_worked_out_by_hand():
    tests = torch.tensor([[1.0, -1.0, -1.0], [1.0, 2.0, 3.0], [4.0, 5.0, -1.0], [2.0, 3.0, 4.0]])
    assert rank(Given(), tests, "ctm").tolist() == [1, 3, 2, 0]
    assert rank(Given(), tests, "cam").tolist() == [1, 2, 3, 0]


def test_nothing_hit_keeps_the_order():
    for by in ("cam", "ctm"):
        assert rank(Given(), torch.full((3, 2), -1.0), by).tolist() == [0, 1, 2]
        assert rank(Given(), torch.zeros(0, 2), by).tolist() == []
        assert rank(Given(), torch.full((1, 2), 5.0), by).tolist() == [0]


def test_nan_surprise_comes_last():
    order = rank(Surprising(), torch.ones(4, 2), "ctm", predicted=torch.tensor([1.0, torch.nan, torch.inf, 2.0]))
    assert order.tolist() == [2, 3, 0, 1]


def test_ranking_does_not_change_the_criterion():
    torch.manual_seed(0)
    tests = {"a": torch.randn(20, 6), "b": torch.randn(20, 5)}
    for c in (NC(0.6), TWay(2)):
        c.update({name: each[:3] for name, each in tests.items()})
        before, n = c.score(), c.tests
        order = rank(c, tests)
        assert sorted(order.tolist()) == list(range(20))
        assert (c.score(), c.tests) == (before, n)
        readings = c.read(tests)
        sets = [{item for item in row if item >= 0} for row in c.items(readings).tolist()]
        assert order.tolist() == greedy(sets)


def test_first_k_by_cam_cover_at_least_as_much_as_by_ctm():
    torch.manual_seed(1)
    tests = torch.randn(30, 12)

    def score(order, k):
        c = NC(0.8)
        c.update(tests[order[:k]])
        return c.score()

    cam, ctm = rank(NC(0.8), tests, "cam"), rank(NC(0.8), tests, "ctm")
    assert all(score(cam, k) >= score(ctm, k) for k in (1, 2, 3, 30))
    assert score(cam, 1) == score(ctm, 1)


def test_apfd_by_hand():
    # Faults at places 1 and 3 of 4: 1 - (1 + 3) / (4 * 2) + 1 / 8.
    order = torch.tensor([2, 0, 1, 3])
    assert apfd(order, torch.tensor([False, True, True, False])) == pytest.approx(0.625)
    # Fault 7 first at place 2, fault 9 at place 1; test 3 shows 7 again.
    assert apfd(order, torch.tensor([7, -1, 9, 7])) == pytest.approx(1 - 3 / 8 + 1 / 8)
    assert apfd(torch.tensor([0]), torch.tensor([True])) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(4))
def test_apfd_against_loops(seed):
    rng = np.random.default_rng(seed)
    n = 25
    order, ids = rng.permutation(n), rng.integers(-1, 6, n)
    for faults in (ids, ids >= 3):
        places = {}
        for place, test in enumerate(order, 1):
            fault = int(faults[test]) if faults.dtype != bool else (int(test) if faults[test] else -1)
            if fault >= 0:
                places.setdefault(fault, place)
        expected = 1 - sum(places.values()) / (n * len(places)) + 1 / (2 * n)
        assert apfd(torch.as_tensor(order), torch.as_tensor(faults)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: rank(NC(), torch.ones(2, 2), "best"), UsageError, "'cam' or 'ctm'"),
        (lambda: rank(Other(), torch.ones(2, 2)), UsageError, "can be ranked by criteria that cover items"),
        (lambda: apfd(torch.arange(3), torch.zeros(3, dtype=torch.bool)), DataError, "must be a fault"),
        (lambda: apfd(torch.arange(3), torch.full((3,), -1)), DataError, "must be a fault"),
        (
            lambda: apfd(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)),
            DataError,
            "each of the tests",
        ),
        (lambda: apfd(torch.arange(2), torch.ones(3, dtype=torch.bool)), DataError, "each of the tests"),
        (lambda: apfd(torch.arange(3), torch.ones(3)), UsageError, "booleans or the numbers"),
    ],
)
def test_invalid_use_is_rejected(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_an_unfitted_criterion_is_rejected():
    class Learning(Given):
        learns = True

    with pytest.raises(UsageError, match="must be fitted"):
        rank(Learning(), torch.ones(2, 2))


def test_patterns_can_be_ranked_and_orders_may_be_lists():
    tests = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    assert rank(TKNP(k=2), tests, "cam").tolist() == [0, 2, 1]
    assert apfd([0, 2, 1], [False, False, True]) == apfd(torch.tensor([0, 2, 1]), torch.tensor([False, False, True]))
