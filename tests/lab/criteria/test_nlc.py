"""NLC, compared with a covariance that is recomputed after every test."""

import math

import numpy as np
import pytest
import torch

from themis.errors import UsageError
from themis_lab.criteria import nlc
from themis_lab.criteria.nlc import NLC


def slow(layers, n):
    """The score of the first `n` tests, entry by entry."""
    total = 0.0
    for values in layers.values():
        x = values[:n].numpy().astype(np.float64)
        width = x.shape[1]
        entries = [
            abs(np.mean((x[:, i] - x[:, i].mean()) * (x[:, j] - x[:, j].mean())))
            for i in range(width)
            for j in range(width)
        ]
        total += sum(entries) / width**2
    return total


def drawn(n=30, widths=(4, 4, 1, 7, 7, 7, 4), seed=0, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(n, width, generator=random) * scale for i, width in enumerate(widths)}


def some(layers, rows):
    return {name: each[rows] for name, each in layers.items()}


def published(batches):
    """The score of the published program: it starts at 1, and a layer takes in a batch only if its norm grows."""
    score, taken = 1.0, {}
    for batch in batches:
        for name, values in batch.items():
            together = torch.cat([*taken.get(name, []), values])
            before = slow({name: torch.cat(taken[name])}, None) if name in taken else 0.0
            gain = slow({name: together}, None) - before
            if gain > 0:
                taken.setdefault(name, []).append(values)
                score += gain
    return score


def test_the_published_program_has_one_more_after_the_first_batch_and_then_depends_on_the_order():
    layers = drawn(100)
    criterion = NLC()
    criterion.update(layers)
    assert published([layers]) == pytest.approx(1 + criterion.score())
    halves = [some(layers, slice(0, 10)), some(layers, slice(10, 100))]
    assert published(halves) != pytest.approx(published(halves[::-1]), rel=1e-3)
    with pytest.raises(UsageError, match="variant must be a known name"):
        NLC(variant="neural-coverage-code")  # it claimed to be that program


def test_agrees_with_the_definition_after_every_test():
    layers = drawn()
    criterion, whole = NLC(), NLC()
    before, raised = 0.0, []
    for n in range(1, 31):
        got = bool(criterion.update(some(layers, slice(n - 1, n))))
        score = slow(layers, n)
        assert criterion.score() == pytest.approx(score, rel=1e-12)
        assert got == (score > before)
        raised.append(got)
        before = score
    assert whole.update(layers).tolist() == raised
    assert whole.score() == pytest.approx(before, rel=1e-12)
    assert 1 < sum(raised) < 29  # both kinds are seen


@pytest.mark.parametrize("chunk", [1, 60, 2**22])
def test_batches_and_chunks_do_not_matter(monkeypatch, chunk):
    monkeypatch.setattr(nlc, "ENTRIES_AT_ONCE", chunk)
    layers = drawn(40)
    alone, parts = NLC(), NLC()
    one_by_one = [bool(alone.update(some(layers, slice(i, i + 1)))) for i in range(40)]
    in_parts = torch.cat([parts.update(some(layers, slice(i, j))) for i, j in ((0, 3), (3, 4), (4, 29), (29, 40))])
    assert in_parts.tolist() == one_by_one
    assert parts.score() == pytest.approx(alone.score(), rel=1e-12)


@pytest.mark.parametrize(
    "stream",
    [
        [[1.5, -2.0]] * 6,  # all the same: never a covariance
        [[float(9 - i), 1.0] for i in range(9)],
        [[0.0, 0.0]] * 7 + [[5.0, 1.0]],  # only the last
        [[0.0, 0.0], [2.0, 2.0]] * 5,
        [[1e8 + i % 2, -1e8 + i % 3] for i in range(12)],
    ],
)
def test_ordered_streams(stream):
    values = torch.tensor(stream, dtype=torch.float64)
    at_once, alone = NLC(), NLC()
    raised = at_once.update(values)
    assert raised.tolist() == [bool(alone.update(values[i : i + 1])) for i in range(len(values))]
    scores = [slow({"layer": values}, n) for n in range(1, len(values) + 1)]
    want = [after > before * (1 + 1e-9) for before, after in zip([0.0, *scores], scores, strict=False)]
    assert raised.tolist() == want
    assert at_once.score() == pytest.approx(scores[-1], rel=1e-9, abs=1e-30)


def test_the_score_of_one_test_and_of_no_tests():
    criterion = NLC()
    assert criterion.score() == 0
    assert not criterion.update(torch.randn(1, 5)).any()
    assert criterion.score() == 0
    assert criterion.update(torch.zeros(0, 5)).shape == (0,)


def test_the_score_can_fall():
    criterion = NLC()
    criterion.update(torch.tensor([[0.0, 0.0], [4.0, 4.0]]))
    high = criterion.score()
    assert not criterion.update(torch.tensor([[2.0, 2.0]])).any()
    assert criterion.score() < high


def test_a_constant_neuron_contributes_nothing():
    values = torch.randn(20, 3, dtype=torch.float64)
    values[:, 1] = 0.1
    criterion = NLC()
    for part in values.split(7):
        criterion.update(part)
    m2 = criterion.state["m2/layer"][0]
    assert not m2[1].any()
    assert not m2[:, 1].any()
    assert m2[0, 0] > 0


def test_the_order_does_not_matter():
    layers = drawn(200, scale=30.0)
    criterion, other = NLC(), NLC()
    criterion.update(layers)
    other.update(some(layers, torch.randperm(200, generator=torch.Generator().manual_seed(1))))
    assert other.score() == pytest.approx(criterion.score(), rel=1e-11)


@pytest.mark.parametrize("cut", [1, 17, 49])
def test_merged_halves_equal_the_whole(cut):
    layers = drawn(50)
    whole, one, other = NLC(), NLC(), NLC()
    whole.update(layers)
    one.update(some(layers, slice(0, cut)))
    other.update(some(layers, slice(cut, 50)))
    merged = one.merge(other)
    assert merged.score() == pytest.approx(whole.score(), rel=1e-12)
    more = drawn(5, seed=9)
    assert merged.update(more).tolist() == whole.update(more).tolist()
    assert merged.score() == pytest.approx(whole.score(), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_a_non_finite_test_is_left_out(bad):
    layers = {name: each.double() for name, each in drawn(12).items()}
    spoilt = {name: each.clone() for name, each in layers.items()}
    spoilt["layer3"][[0, 5, 11], 3] = bad
    good = [i for i in range(12) if i not in (0, 5, 11)]
    criterion, want = NLC(), NLC()
    raised = criterion.update(spoilt)
    assert not raised[[0, 5, 11]].any()
    assert raised[good].tolist() == want.update(some(layers, good)).tolist()
    assert criterion.score() == want.score()
    assert int(criterion.state["count"]) == 9


def test_only_bad_tests():
    criterion, other = NLC(), NLC()
    bad, good = torch.full((3, 2), math.nan), torch.randn(4, 2)
    assert not criterion.update(bad).any()
    assert criterion.score() == 0
    assert criterion.merge(criterion).score() == 0
    other.update(good)
    assert criterion.merge(other).score() == other.score()
    assert other.merge(criterion).score() == other.score()
    criterion.update(good)
    assert criterion.score() == other.score()


def test_images_are_read_by_channel():
    images = torch.randn(6, 3, 4, 4)
    criterion, want = NLC(), NLC()
    criterion.update(images)
    want.update(images.mean((2, 3)))
    assert criterion.score() == want.score()


def test_wide_layers_are_rejected():
    with pytest.raises(UsageError, match="channel"):
        NLC(neurons="element").update({"conv": torch.zeros(2, 8, 23, 23)})
    assert not NLC().update({"conv": torch.zeros(2, 8, 23, 23)}).any()
