"""IDC, compared with a slow reference, and its edge cases."""

import sys

import nets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from torch import nn

from themis import BlackBox, Target
from themis.errors import DataError, MissingExtraError, UsageError
from themis_lab.criteria.idc import IDC
from themis_lab.criteria.relevances import relevance

RELEVANCE = torch.tensor([3.0, -1.0, 5.0, 0.0, 5.0, 2.0])


def traces(seed, n=120):
    """Activations of six neurons: two, three and four humps, one that never fires, and two without shape."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(n, 6)) * 0.2
    found[:, 0] += 3 * rng.integers(2, size=n)
    found[:, 2] += 4 * rng.integers(3, size=n)
    found[:, 4] += 5 * rng.integers(4, size=n)
    found[:, 3] = 0
    return torch.from_numpy(found.astype("float32"))


class Reference:
    """The definition, a neuron and a test at a time."""

    def __init__(self, training, values, m):
        self.neurons = sorted(range(len(values)), key=lambda k: (-values[k], k))[:m]
        self.centroids = []
        for neuron in self.neurons:
            column = np.sort(training[:, neuron].double().numpy())[:, None]
            found = {}
            for k in range(2, min(4, len(np.unique(column))) + 1):
                means = KMeans(k, n_init=10, random_state=0).fit(column)
                found[silhouette_score(column, means.labels_)] = means.cluster_centers_[:, 0]
            self.centroids.append(sorted(found[max(found)]) if found else [column[0, 0]])
        self.n = int(np.prod([len(each) for each in self.centroids]))
        self.seen = set()

    def update(self, tests):
        raised = []
        for test in tests.double().numpy():
            values = test[self.neurons]
            shown = tuple(
                min(range(len(near)), key=lambda k, v=value, c=near: (abs(v - c[k]), k))
                for value, near in zip(values, self.centroids, strict=True)
            )
            raised.append(bool(np.isfinite(values).all()) and shown not in self.seen)
            if raised[-1]:
                self.seen.add(shown)
        return raised


@pytest.fixture(scope="module")
def fitted():
    return IDC(4, RELEVANCE).fit(traces(0).split(50))


@pytest.mark.parametrize("m", [1, 4, 6])
def test_reference(m):
    training, tests = traces(0), traces(1, 300)
    tests[5, 4], tests[6, 0], tests[7, 1] = torch.nan, torch.inf, -torch.inf
    expected = Reference(training, RELEVANCE.tolist(), m)
    criterion = IDC(m, RELEVANCE).fit(training.split(33))
    assert criterion.learnt["neurons"].tolist() == expected.neurons
    for row, centroids in zip(criterion.learnt["centroids"], expected.centroids, strict=True):
        assert row[: len(centroids)].tolist() == pytest.approx(centroids)
    assert criterion.n_items() == expected.n
    assert criterion.update(tests).tolist() == expected.update(tests)
    assert criterion.score() == len(expected.seen) / expected.n
    assert criterion.score_reachable() == len(expected.seen) / min(expected.n, 300)
    assert 0 < criterion.score() <= 1


def test_separate_clusters_are_found(fitted):
    # 4 and 2 are equally relevant, the lower comes first; 5 has no humps.
    assert fitted.learnt["neurons"].tolist() == [2, 4, 0, 5]
    assert fitted.learnt["n_clusters"].tolist()[:3] == [3, 4, 2]
    assert torch.allclose(fitted.learnt["centroids"][1], torch.tensor([0, 5, 10, 15.0]).double(), atol=0.1)


@settings(max_examples=30)
@given(
    st.integers(0, 99), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from(["as", "twice", "sorted"])
)
def test_batches_equal_single_tests(fitted, seed, sizes, order):
    tests = traces(seed, 60)
    if order == "twice":
        tests = tests.repeat(2, 1)
    elif order == "sorted":
        tests = tests[tests.sum(1).argsort(descending=True)]
    tests[4, 2] = torch.nan
    one, many = fitted.fresh(), fitted.fresh()
    raised = torch.cat([one.update(each[None]) for each in tests])
    start, found = 0, []
    while start < len(tests):
        size = sizes[start % len(sizes)]
        found.append(many.update(tests[start : start + size]))
        start += size
    assert torch.cat(found).equal(raised)
    assert many.state["keys"].equal(one.state["keys"])
    assert many.state["keys"].diff().gt(0).all()
    assert int(raised.sum()) == many.n_covered()


def test_halves_merge_to_the_whole_in_any_order(fitted):
    tests = traces(3, 200)
    first, second, whole = fitted.fresh(), fitted.fresh(), fitted.fresh()
    first.update(tests[:70])
    second.update(tests[70:])
    whole.update(tests.flip(0))
    for merged in (first.merge(second), second.merge(first)):
        assert merged.state["keys"].equal(whole.state["keys"])
        assert merged.score() == whole.score()
        assert merged.score_reachable() == whole.score_reachable()
    assert first.merge(fitted.fresh()).score() == first.score()


def test_a_tie_goes_to_the_lower_centroid():
    training = torch.tensor([[0.0], [0.0], [4.0], [4.0]])
    criterion = IDC(1, torch.ones(1)).fit([training])
    assert criterion.learnt["centroids"].tolist() == [[0, 4]]
    tests = torch.tensor([[2.0], [1.0], [2.5], [4.0], [-100.0]])
    assert criterion.items(criterion.read(tests)).squeeze(1).tolist() == [0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("column", "n_clusters"),
    [([1.0], 1), ([1.0, 1.0, 1.0], 1), ([1.0, 2.0], 2), ([0.0, 0.0, 0.0, 7.0], 2), ([0.0, 1.0, 10.0], 2)],
)
def test_few_training_inputs(column, n_clusters):
    criterion = IDC(1, torch.ones(1)).fit([torch.tensor(column)[:, None]])
    assert criterion.n_items() == n_clusters
    assert criterion.update(torch.tensor(column)[:, None]).tolist()[0] is True  # a test equal to a training input
    assert criterion.score() == 1


def test_a_non_finite_test_covers_nothing(fitted):
    criterion = fitted.fresh()
    assert not criterion.update(torch.full((3, 6), torch.nan)).any()
    assert not criterion.update(torch.full((3, 6), torch.inf)).any()
    assert criterion.score() == criterion.score_reachable() == 0
    tests = traces(5, 1)
    tests[:, 1] = torch.nan  # not one of the four
    assert criterion.update(tests).tolist() == [True]


def test_more_tuples_than_bits_fit_in_memory():
    torch.manual_seed(0)
    training = 5.0 * torch.randint(4, (200, 30)) + torch.rand(200, 30) * 0.1
    criterion = IDC(30, torch.ones(30)).fit([training])
    assert criterion.n_items() > 2**50
    assert criterion.update(training).all()
    assert criterion.score_reachable() == 1
    assert 0 < criterion.score() < 1e-12
    with pytest.raises(UsageError, match="smaller m"):
        IDC(32, torch.ones(32)).fit([5.0 * torch.randint(4, (200, 32)) + torch.rand(200, 32) * 0.1])


def test_many_training_inputs_are_thinned_by_quantiles():
    training = traces(0, 3000)
    few = IDC(3, RELEVANCE, max_traces=500, silhouette_sample=200).fit(training.split(256))
    again = IDC(3, RELEVANCE, max_traces=500, silhouette_sample=200).fit([training.flip(0)])
    assert few.learnt["centroids"].equal(again.learnt["centroids"])  # the order does not matter
    whole = IDC(3, RELEVANCE).fit([training])
    assert few.learnt["n_clusters"].tolist() == whole.learnt["n_clusters"].tolist() == [3, 4, 2]
    assert torch.allclose(few.learnt["centroids"], whole.learnt["centroids"], atol=0.05)


def test_all_neurons_are_used_if_there_are_fewer_than_m():
    with pytest.warns(RuntimeWarning, match="6 neurons, fewer than m=12"):
        criterion = IDC(relevance=RELEVANCE).fit([traces(0)])
    assert criterion.learnt["neurons"].tolist() == [2, 4, 0, 5, 3, 1]


def test_prepare_computes_the_relevance():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 8), nn.ReLU(), nn.Linear(8, 3))
    target, inputs, hidden = Target(net), torch.rand(40, 1, 8, 8), {}
    labels = net(inputs).argmax(1)
    layers = {each.name: each for each in target.find_layers(inputs[0])}
    with torch.no_grad():
        hidden["output"] = target.forward(inputs, lambda name, value: hidden.update({name: value.clone()}), layers)
    activations = {name: hidden[name] for name in layers}
    for layer, neurons, width in ((None, "channel", 8), ("1", "channel", 5), ("1", "element", 180)):
        criterion = IDC(3, layers=layer, neurons=neurons)
        with pytest.raises(UsageError, match="prepare"):
            criterion.fit([activations])
        criterion.prepare(target, inputs, labels)
        assert criterion.relevance.values.shape == (width,)
        assert criterion.relevance.layer == (layer or "4")
        criterion.fit([activations])
        expected = criterion.relevance.values.argsort(descending=True)[:3]
        assert criterion.learnt["neurons"].tolist() == expected.tolist()
        criterion.update(activations)
        assert 0 < criterion.score() <= 1
    given = IDC(3, RELEVANCE)
    given.prepare(target, inputs, labels)
    assert given.relevance is RELEVANCE
    assert criterion.options()["m"] == 3
    assert "relevance" not in criterion.options()


def test_invalid_use_is_rejected(monkeypatch):
    for wrong in ({"m": 0}, {"max_clusters": 1}, {"silhouette_sample": 2}, {"max_traces": 1}, {"variant": "original"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            IDC(**wrong)
    with pytest.raises(DataError, match="6 neurons"):
        IDC(2, torch.ones(5)).fit([traces(0)])
    with pytest.raises(DataError, match="finite"):
        IDC(2, RELEVANCE * torch.nan).fit([traces(0)])
    found = relevance(Target(nets.Hand(), bounds=(0, 1)), torch.rand(4, 2), None)
    with pytest.raises(UsageError, match="'last', got 'relu'"):
        IDC(2, found).fit([{"last": torch.rand(9, 3)}])
    with pytest.raises(UsageError, match="gradients"):
        IDC(2).prepare(BlackBox(lambda x: x), torch.rand(3, 2), None)
    criterion = IDC(2, RELEVANCE)
    with pytest.raises(DataError, match="finite"):
        criterion.fit([traces(0), traces(1) * torch.nan])
    with pytest.raises(UsageError, match="fitted"):
        criterion.update(traces(0))
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(MissingExtraError, match="scikit-learn"):
        criterion.fit([traces(0)])
