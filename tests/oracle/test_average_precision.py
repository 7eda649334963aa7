"""Average precision: by hand, and as pycocotools computes it."""

import contextlib
import io

import pytest
import torch

from themis.oracle.boxes import average_precision, by_score


def boxes(n, generator):
    corner = torch.rand(n, 2, generator=generator) * 80
    return torch.cat([corner, corner + 5 + torch.rand(n, 2, generator=generator) * 30], 1)


def random_pictures(random_seed, n_pictures=40, n_classes=4, n_objects=7):
    """Labels, some of them crowds, and detections: objects that were found more or less well, and others."""
    generator = torch.Generator().manual_seed(random_seed)
    labels = torch.zeros(n_pictures, n_objects, 5)
    labels[..., :4] = boxes(n_pictures * n_objects, generator).view(n_pictures, n_objects, 4)
    labels[..., 4] = torch.randint(-1, n_classes, labels.shape[:2], generator=generator)
    is_crowd = (torch.rand(labels.shape[:2], generator=generator) < 0.1) & (labels[..., 4] >= 0)
    labels[..., 4] = torch.where(is_crowd, -2 - labels[..., 4], labels[..., 4])
    detections = torch.zeros(n_pictures, n_objects + 5, 6)
    moved = labels[..., :4] + torch.randn(labels[..., :4].shape, generator=generator)
    detections[:, :n_objects, :4] = torch.cat([moved[..., :2], torch.maximum(moved[..., 2:], moved[..., :2] + 1)], 2)
    detections[:, n_objects:, :4] = boxes(n_pictures * 5, generator).view(n_pictures, 5, 4)
    detections[..., 4] = (torch.rand(detections.shape[:2], generator=generator) * 20).round() / 20  # with ties
    detections[..., 5] = torch.randint(0, n_classes, detections.shape[:2], generator=generator)
    detections[:, :n_objects, 4] = detections[:, :n_objects, 4].clamp_min(0.4)
    is_right = torch.rand(labels.shape[:2], generator=generator) < 0.8
    right = torch.where(labels[..., 4] < -1, -2 - labels[..., 4], labels[..., 4])
    detections[:, :n_objects, 5] = torch.where(is_right & (right >= 0), right, detections[:, :n_objects, 5])
    return by_score(detections), labels


def coco_figures(detections, labels):
    """AP, AP50 and AP75 by pycocotools."""
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")

    def row(picture, box, number, **others):
        left, top, right, bottom = box.double().tolist()
        size = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
        return {"image_id": picture, "category_id": number, **size, **others}

    annotations = []
    for picture, objects in enumerate(labels):
        for item in objects:
            number, is_crowd = int(item[4]), int(item[4] < -1)
            if number != -1:
                annotations.append(row(picture, item[:4], -2 - number if is_crowd else number, iscrowd=is_crowd))
    for k, annotation in enumerate(annotations):
        annotation["id"] = k + 1
    results = [
        row(picture, item[:4], int(item[5]), score=float(item[4]))
        for picture, items in enumerate(detections)
        for item in items
        if item[4] > 0
    ]
    truth = coco.COCO()
    truth.dataset = {
        "images": [{"id": k, "width": 200, "height": 200} for k in range(len(labels))],
        "categories": [{"id": k, "name": str(k)} for k in range(4)],
        "annotations": annotations,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        found = truth.loadRes(results)
        run = evaluation.COCOeval(truth, found, "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return run.stats[:3].tolist()


@pytest.mark.parametrize("random_seed", range(3))
def test_it_is_that_of_pycocotools(random_seed):
    detections, labels = random_pictures(random_seed)
    precision = average_precision(detections, labels)
    expected = coco_figures(detections, labels)
    assert [precision.mean(), precision[:, 0].mean(), precision[:, 5].mean()] == pytest.approx(expected, abs=1e-9)
    assert 0.1 < precision.mean() < precision[:, 0].mean() < 0.95


def test_figures_by_hand():
    labels = torch.tensor([[[0, 0, 10, 10, 0], [20, 0, 30, 10, 0]]]).float()
    found = torch.tensor([[[0, 0, 10, 10, 0.9, 0], [50, 0, 60, 10, 0.8, 0], [20, 0, 30, 10, 0.7, 0]]])
    precision = average_precision(found, labels)
    # Recalls 0 to 0.5, which are 51 of 101, have precision 1; the other 50 have 2/3.
    assert precision.tolist() == [pytest.approx([(51 + 50 * 2 / 3) / 101] * 10)]
    shifted = found + torch.tensor([2, 0, 2, 0, 0, 0])  # an IoU of 8 / 12, which is enough for 0.5 to 0.65
    assert average_precision(shifted, labels).mean() == pytest.approx(0.4 * precision.mean())


def test_without_objects_there_is_none():
    empty = torch.full((2, 1, 5), -1.0)
    assert average_precision(torch.zeros(2, 3, 6), empty).shape == (0, 10)
    assert average_precision(torch.zeros(2, 0, 6), torch.zeros(2, 0, 5)).shape == (0, 10)


def test_objects_of_a_class_that_was_never_found_count():
    labels = torch.tensor([[[0, 0, 10, 10, 0], [20, 0, 30, 10, 3]]]).float()
    precision = average_precision(torch.tensor([[[0, 0, 10, 10, 0.9, 0]]]), labels)
    assert precision.tolist() == [[1] * 10, [0] * 10]
