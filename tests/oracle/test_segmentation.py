"""One class per pixel: mean IoU computed by hand."""

import pytest
import torch
import torch.nn.functional as F

from themis import DataError, ModelError
from themis.oracle import KEPT_ANSWER, NOT_FINITE, Segmentation


def scores(*maps, n_classes=3):
    """Scores whose highest class is that of each pixel."""
    return F.one_hot(torch.tensor(maps), n_classes).movedim(-1, 1).float()


HALVES = [[0, 0], [1, 1]]


def test_the_mean_iou_with_the_clean_answer_is_compared():
    clean = scores(HALVES, HALVES, HALVES, HALVES)
    outputs = scores(HALVES, [[0, 0], [1, 0]], [[0, 0], [1, 2]], [[1, 1], [0, 0]])
    outputs[3, 0, 0, 0] = float("nan")
    verdict = Segmentation(0.4).compare(clean, outputs, None)
    # One pixel of class 1 lost to class 0: IoU 2/3 and 1/2. Lost to class 2: 1, 1/2 and 0.
    assert verdict.is_fault.tolist() == [False, True, True, True]
    assert verdict.outcome.tolist() == [KEPT_ANSWER, 1, 1, NOT_FINITE]
    assert verdict.value[:3].tolist() == pytest.approx([1, 7 / 12, 1 / 2])
    assert verdict.margin.tolist() == pytest.approx([0.4, 0.4 - 5 / 12, 0.4 - 1 / 2, -float("inf")])


def test_a_drop_by_exactly_the_tolerance_is_not_a_fault():
    verdict = Segmentation(0.5).compare(scores(HALVES), scores([[0, 0], [1, 2]]), None)
    assert (verdict.is_fault.item(), verdict.outcome.item(), verdict.margin.item()) == (False, KEPT_ANSWER, 0)


def test_the_drop_is_from_the_clean_mean_iou_with_the_labels():
    labels = torch.tensor([[[0, 0], [1, 255]], [[2, 2], [2, 2]], [[255, 255], [255, 255]]])
    clean = scores([[0, 0], [0, 1]], HALVES, HALVES)  # of the first: 2/3 and 0; the ignored pixel does not count
    oracle = Segmentation(0.2)
    assert oracle.check(clean, labels).tolist() == [True, False, False]
    first = oracle.compare(clean, clean, labels)
    assert first.value[0].item() == pytest.approx(1 / 3)
    assert oracle.grade(clean[:2], labels[:2]) == {"iou": pytest.approx(1 / 6)}
    better, worse = scores(HALVES), scores([[0, 2], [2, 2]])  # 1 and 1; 1/2, 0 and 0
    assert not oracle.compare(clean[:1], better, labels[:1]).is_fault.item()
    verdict = Segmentation(0.1).compare(clean[:1], worse, labels[:1])
    assert verdict.margin.item() == pytest.approx(0.1 - (1 / 3 - 1 / 6))
    assert verdict.outcome.item() == 0


def test_maps_that_do_not_fit_are_refused():
    oracle = Segmentation()
    for shape in ((3, 4), (3, 1, 2, 2)):
        with pytest.raises(ModelError, match=r"scores \[inputs, classes, height, width\]"):
            oracle.settle(torch.zeros(shape), None)
    with pytest.raises(DataError, match=r"one class per pixel, \[1, 2, 2\], got shape \[1, 4, 4\]"):
        oracle.check(scores(HALVES), torch.zeros(1, 4, 4))
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2 .* got 3"):
        oracle.check(scores(HALVES), torch.full((1, 2, 2), 3))
    with pytest.raises(DataError, match="got 0 of 1"):
        oracle.check(scores(HALVES), torch.full((1, 2, 2), 2))


def test_the_loss_is_the_mean_over_pixels_that_count():
    outputs, labels = torch.randn(2, 3, 2, 2), torch.tensor([HALVES, [[2, 2], [255, 0]]])
    reference = Segmentation().reference(outputs, labels)
    by_pixel = F.cross_entropy(outputs, labels, reduction="none", ignore_index=255)
    torch.testing.assert_close(Segmentation().loss(outputs, reference), by_pixel.mean((1, 2)))
    chances = outputs.softmax(1)
    assert Segmentation().settle(chances, None).is_probability
    torch.testing.assert_close(Segmentation(is_probability=True).loss(chances, reference), by_pixel.mean((1, 2)))


def test_class_255_counts_if_the_model_has_that_many_classes():
    labels = torch.full((1, 2, 2), 255)
    clean = scores([[255, 255], [255, 0]], n_classes=256)
    assert Segmentation().check(clean, labels).all()
    assert Segmentation().grade(clean, labels) == {"iou": pytest.approx(3 / 8)}
