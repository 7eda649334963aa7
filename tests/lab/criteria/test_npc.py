"""NPC, compared with loops over the definitions; contributions worked out by hand."""

import math

import nets
import pytest
import torch
from torch import nn

from themis import BlackBox, Target
from themis.errors import DataError, ModelError, UsageError
from themis_lab.criteria.npc import NPC, clusters, contributions, critical
from themis_lab.criteria.readings import Batch

WIDTHS = {"a": 6, "b": 4}


def path_of(row, alpha):
    """The smallest set of neurons that holds the share of the positive sum."""
    total = math.fsum(max(v, 0) for v in row)
    chosen, held = set(), 0.0
    for k in sorted(range(len(row)), key=lambda k: -row[k]):
        if row[k] <= 0 or held >= alpha * total:
            break
        chosen.add(k)
        held += row[k]
    return chosen


def jaccard(one, other):
    return 1.0 if not one | other else len(one & other) / len(one | other)


def reference(c, tests, predicted):
    """What each test covers: (path, part, bucket), from the learnt paths."""
    starts, n = {}, 0
    for name, width in WIDTHS.items():
        starts[name], n = n, n + width
    rows = []
    for t, label in enumerate(predicted.tolist()):
        found = set()
        layers = {name: values[t].tolist() for name, values in tests.items()}
        for p in [p for p in (c.learnt["table"][label].tolist() if label < len(c.learnt["table"]) else []) if p >= 0]:
            abstract = {k for k, is_on in enumerate(c.learnt["paths"][p].tolist()) if is_on}
            mine = {name: {starts[name] + k for k in path_of(row, c.alpha)} for name, row in layers.items()}
            known = {name: all(map(math.isfinite, row)) for name, row in layers.items()}
            theirs = {name: {k for k in abstract if 0 <= k - starts[name] < WIDTHS[name]} for name in WIDTHS}
            if c.variant == "path":
                if all(known.values()):
                    found.add((p, 0, jaccard(set().union(*mine.values()), abstract)))
            else:
                found |= {(p, part, jaccard(mine[n], theirs[n])) for part, n in enumerate(WIDTHS) if known[n]}
        rows.append({(p, part, max(math.ceil(round(j * c.buckets, 9)), 1)) for p, part, j in found})
    return rows


def draw(n, seed):
    g = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(n, width, generator=g).mul(3).round() for name, width in WIDTHS.items()}
    return values, torch.randint(3, (n,), generator=g)


def fitted(seed=0, n=50, **options):
    train, classes = draw(n, 100 + seed)
    batches = [
        Batch({name: each[at] for name, each in train.items()}, predicted=classes[at])
        for at in torch.arange(n).split(7)
    ]
    return NPC(**{"paths": 2, "buckets": 7, "beta": 0.6} | options).fit(batches), train, classes


@pytest.mark.parametrize("variant", ["path", "layer"])
@pytest.mark.parametrize("seed", range(3))
def test_reference(variant, seed):
    c, _, _ = fitted(seed, variant=variant)
    tests, predicted = draw(40, seed)
    tests["a"][3], tests["b"][3] = 0.0, -1.0  # nothing is critical
    tests["a"][5, 0], tests["b"][6, 1] = torch.nan, torch.inf
    predicted[7] = 9  # no training input has this class
    rows = reference(c, tests, predicted)
    whole, alone, before = c.fresh(), c.fresh(), set()
    expected = []
    for row in rows:
        expected.append(bool(row - before))
        before |= row
    assert whole.update(tests, predicted=predicted).tolist() == expected
    assert whole.n_covered() == len(before)
    parts = 2 if variant == "layer" else 1
    assert whole.score() == pytest.approx(len(before) / (len(c.learnt["paths"]) * parts * 7))
    assert 0 < whole.score() <= 1
    for t in range(40):
        raised = alone.update({name: each[t : t + 1] for name, each in tests.items()}, predicted=predicted[t : t + 1])
        assert raised.tolist() == [expected[t]]
    assert rows[7] == set()


def test_blocks_give_the_same_result_as_the_whole(monkeypatch):
    c, _, _ = fitted()
    tests, predicted = draw(30, 1)
    items = c.items(c.read(Batch(tests, predicted=predicted)))
    monkeypatch.setattr("themis_lab.criteria.npc.COMPARED_NEURONS", 50)
    assert torch.equal(items, c.items(c.read(Batch(tests, predicted=predicted))))


def test_abstract_paths_have_the_neurons_shared_by_most_of_a_cluster():
    c, train, classes = fitted(paths=3)
    for label in range(3):
        own = [
            path_of(a.tolist(), 0.8) | {6 + k for k in path_of(b.tolist(), 0.8)}
            for a, b, answer in zip(train["a"], train["b"], classes.tolist(), strict=True)
            if answer == label
        ]
        marks = torch.tensor([[k in path for k in range(10)] for path in own])
        cluster = clusters(marks, 3)
        for k in range(3):
            some = [path for path, number in zip(own, cluster.tolist(), strict=True) if number == k]
            expected = [sum(k in path for path in some) / len(some) >= 0.6 - 1e-9 for k in range(10)]
            assert c.learnt["paths"][c.learnt["table"][label, k]].tolist() == expected


def test_two_kinds_of_decisions_are_two_paths():
    one, other = torch.tensor([[5.0, 5, 0, 0]]), torch.tensor([[0.0, 0, 5, 5]])
    train = torch.cat([one.expand(5, 4), other.expand(5, 4)])
    c = NPC(paths=4).fit([Batch(train, predicted=torch.zeros(10, dtype=torch.int64))])
    assert sorted(c.learnt["paths"].tolist()) == [[False, False, True, True], [True, True, False, False]]
    assert c.update(one, predicted=torch.tensor([0])).tolist() == [True]
    assert c.n_covered() == 2  # identical to one of them, and different from the other
    assert c.update(other, predicted=torch.tensor([0])).tolist() == [True]
    assert c.n_covered() == 4
    assert c.update(train, predicted=torch.zeros(10, dtype=torch.int64)).any().item() is False


def test_one_training_input_in_a_class():
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    c = NPC(buckets=4).fit([Batch(train, predicted=torch.tensor([0, 2, 2]))])
    assert c.learnt["table"].tolist() == [[0, -1, -1, -1], [-1] * 4, [1, -1, -1, -1]]
    assert c.n_items() == 8
    assert c.update(train[:1], predicted=torch.tensor([0])).tolist() == [True]
    assert c.update(train[:1], predicted=torch.tensor([1])).tolist() == [False]


def test_only_correctly_classified_training_inputs_count():
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    predicted, labels = torch.tensor([0, 0]), torch.tensor([0, 1])
    c = NPC().fit([Batch(train, predicted=predicted, labels=labels)])
    assert c.learnt["paths"].tolist() == [[True, False]]
    with pytest.raises(DataError, match="correctly classified"):
        NPC().fit([Batch(train, predicted=predicted, labels=labels + 1)])


def test_the_first_inputs_of_a_class_are_clustered():
    c, train, classes = fitted(max_paths=3)
    keep = torch.cat([(classes == label).nonzero()[:3, 0] for label in range(3)]).sort().values
    few = NPC(paths=2, buckets=7, beta=0.6).fit(
        [Batch({name: each[keep] for name, each in train.items()}, predicted=classes[keep])]
    )
    assert torch.equal(c.learnt["paths"], few.learnt["paths"])


def test_fit_does_not_depend_on_the_batches():
    c, train, classes = fitted()
    whole = NPC(paths=2, buckets=7, beta=0.6).fit([Batch(train, predicted=classes)])
    assert all(torch.equal(each, whole.learnt[name]) for name, each in c.learnt.items())


def test_merged_halves_equal_the_whole():
    c, _, _ = fitted()
    tests, predicted = draw(20, 5)
    halves = [c.fresh(), c.fresh()]
    c.update(tests, predicted=predicted)
    for at, half in zip((slice(0, 8), slice(8, 20)), halves, strict=True):
        half.update({name: each[at] for name, each in tests.items()}, predicted=predicted[at])
    assert halves[0].merge(halves[1]).score() == c.score()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 1.0])
def test_critical(alpha):
    torch.manual_seed(0)
    rows = torch.cat([torch.randn(30, 7), torch.randint(-2, 3, (30, 7)).float(), torch.zeros(1, 7)])
    for row, found in zip(rows.tolist(), critical(rows, alpha).tolist(), strict=True):
        assert {k for k, is_on in enumerate(found) if is_on} == path_of(row, alpha)


def test_contributions_by_hand():
    # relu([a, -a, a + b]) are 2, 0, 3; the second score is the third neuron and wins.
    batch = contributions(Target(nets.Hand(), bounds=(-5, 5)), torch.tensor([[2.0, 1.0], [-1.0, -3.0]]))
    assert isinstance(batch.activations, dict)
    assert {name: each.tolist() for name, each in batch.activations.items()} == {"relu": [[0, 0, 3], [0, 0, 0]]}
    assert batch.predicted.tolist() == [1, 0]


def test_contributions_conserve_the_score_without_biases():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5, bias=False), nn.ReLU()
    )
    net.append(nn.Linear(5, 3, bias=False))
    inputs = torch.rand(4, 1, 6, 6)
    batch = contributions(Target(net), inputs, labels=torch.zeros(4))
    best = net(inputs).max(1).values
    shapes = {name: tuple(each.shape) for name, each in batch.activations.items()}
    assert shapes == {"1": (4, 3, 4, 4), "4": (4, 5)}
    for each in batch.activations.values():
        assert torch.allclose(each.flatten(1).sum(1), best, atol=1e-6)
    assert not any(each.grad is not None for each in net.parameters())
    assert batch.labels is not None


class Doubling(nn.Module):
    """Overwrites an activation."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        y = nn.functional.gelu(self.a(x))
        y *= 2
        return self.b(y)


def test_contributions_of_activations_that_are_overwritten():
    torch.manual_seed(0)
    net, inputs = Doubling(), torch.rand(3, 4)
    found = contributions(Target(net), inputs).activations["gelu()"]
    hidden = nn.functional.gelu(net.a(inputs))
    assert torch.allclose(found, hidden * 2 * net.b.weight[net(inputs).argmax(1)], atol=1e-6)
    with pytest.raises(ModelError, match="differentiated"):
        contributions(Target(nets.InPlace()), inputs)


def test_fitted_and_updated_with_contributions():
    torch.manual_seed(0)
    target = Target(nets.Conv())
    c = NPC(paths=2).fit(contributions(target, torch.rand(20, 1, 8, 8)) for _ in range(2))
    tests = torch.rand(5, 1, 8, 8)
    raised = c.update(contributions(target, tests))
    assert raised[0]
    assert 0 < c.score() < 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NPC(alpha=0.0), "alpha must be above 0"),
        (lambda: NPC(beta=1.5), "beta must be above 0"),
        (lambda: NPC(paths=0), "paths must be a whole number of at least 1"),
        (lambda: NPC(buckets=0), "buckets must be a whole number of at least 1"),
        (lambda: NPC().fit([torch.ones(2, 3)]), "predicted="),
        (lambda: NPC().prepare(Target(nets.Hand()), torch.ones(1, 2), None), "contributions\\(target, inputs\\)"),
        (lambda: contributions(BlackBox(lambda x: x), torch.ones(2, 3)), "has none"),
        (lambda: contributions(Target(nn.Flatten(0)), torch.ones(2, 1)), "one score per class"),
    ],
)
def test_invalid_use_is_rejected(make, words):
    with pytest.raises(UsageError, match=words):
        make()
