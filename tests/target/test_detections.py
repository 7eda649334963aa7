"""Detections in what models return: every form becomes the same tensor."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import DataError, ModelError, UsageError
from themis.oracle.boxes import overlap
from themis.target.detections import Detections, suppress

PICTURE = (60, 80)
EXPECTED = [[[10, 10, 30, 20, 0.9, 2], [40, 5, 60, 45, 0.7, 0]], [[0, 0, 8, 8, 0.6, 1]]]
"""Two pictures with two objects and with one."""


def logit(chance):
    return torch.tensor(chance).logit().item()


def torchvision_result():
    return [
        {
            "boxes": torch.tensor([row[:4] for row in rows]).float(),
            "labels": torch.tensor([int(row[5]) for row in rows]),
            "scores": torch.tensor([row[4] for row in rows]),
        }
        for rows in EXPECTED
    ]


def centred(row):
    left, top, right, bottom = row[:4]
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]


def yolo_result():
    tensor = torch.zeros(2, 4 + 3, 8)
    for k, rows in enumerate(EXPECTED):
        for j, row in enumerate(rows):
            for anchor, (shift, score) in enumerate(((0, row[4]), (0.5, row[4] - 0.1))):  # the second repeats the first
                tensor[k, :4, 2 * j + anchor] = torch.tensor(centred(row)) + torch.tensor([shift, 0, 0, 0])
                tensor[k, 4 + int(row[5]), 2 * j + anchor] = score
    return tensor, ["feature maps"]


def yolov5_result():
    tensor = torch.zeros(2, 8, 5 + 3)
    yolo = yolo_result()[0]
    tensor[..., :4], tensor[..., 4] = yolo[:, :4].movedim(1, 2), 0.95
    tensor[..., 5:] = yolo[:, 4:].movedim(1, 2) / 0.95
    return tensor


def detr_result(name="pred_logits", sigmoid=False):
    boxes, logits = torch.full((2, 4, 4), 0.5), torch.full((2, 4, 3 if sigmoid else 4), -9.0)
    if not sigmoid:
        logits[..., 3] = 9.0  # no object
    for k, rows in enumerate(EXPECTED):
        for j, row in enumerate(rows):
            boxes[k, j] = torch.tensor(centred(row)) / torch.tensor([80, 60, 80, 60])
            logits[k, j] = -99.0
            logits[k, j, int(row[5])] = logit(row[4])
            if not sigmoid:
                logits[k, j, 3] = 0.0
    return {name: logits, "pred_boxes": boxes}


class RTDetrObjectDetectionOutput(SimpleNamespace):
    """Named as in transformers, where each class has a score of its own."""


def ultralytics_results():
    tensors = [torch.tensor(rows).float() for rows in EXPECTED]
    return [SimpleNamespace(boxes=SimpleNamespace(xyxy=t[:, :4], conf=t[:, 4], cls=t[:, 5])) for t in tensors]


def stacked_rows():
    rows = torch.zeros(2, 3, 6)
    for k, picture in enumerate(EXPECTED):
        rows[k, 1 : 1 + len(picture)] = torch.tensor(picture).flip(0)
    return rows


FORMS = {
    "torchvision": (torchvision_result(), "auto"),
    "yolo": (yolo_result(), "yolo"),
    "yolov5": (yolov5_result(), "yolov5"),
    "detr": (detr_result(), "auto"),
    "detr of transformers": (SimpleNamespace(**detr_result("logits")), "detr"),
    "rt-detr": (RTDetrObjectDetectionOutput(**detr_result("logits", sigmoid=True)), "auto"),
    "ultralytics": (ultralytics_results(), "auto"),
    "rows": ([torch.tensor(rows).float() for rows in EXPECTED], "auto"),
    "arrays": ([np.array(rows) for rows in EXPECTED], "rows"),
    "stacked rows": (stacked_rows(), "auto"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_detections(name):
    result, form = FORMS[name]
    detections = Detections(form, max_detections=4).read(result, PICTURE, (2, 3, *PICTURE))
    assert detections.shape == (2, 4, 6)
    for rows, expected in zip(detections, EXPECTED, strict=True):
        assert rows[: len(expected)].tolist() == [pytest.approx(row, abs=1e-4) for row in expected]
        assert rows[len(expected) :].tolist() == [[0, 0, 0, 0, 0, -1]] * (4 - len(expected))


def test_boxes_refer_to_the_raw_input_if_the_model_gets_another_size():
    detections = Detections().read(torchvision_result(), PICTURE, (2, 3, 120, 80))
    assert detections[1, 0, :4].tolist() == [0, 0, 8, 16]
    assert Detections().read(detr_result(), PICTURE, (2, 3, 120, 80))[1, 0, :4].tolist() == pytest.approx([0, 0, 8, 16])


def test_options_choose_which_detections_remain():
    read = Detections(max_detections=1, min_score=0.65, first_class=1).read
    detections = read(torchvision_result(), PICTURE, (2, 3, *PICTURE))
    assert detections[:, 0, 4:].tolist() == [[pytest.approx(0.9), 1], [0, -1]]


def test_scores_that_are_not_numbers_reach_the_oracle():
    tensor = yolo_result()[0]
    tensor[1, 4:, 5] = torch.nan
    assert Detections("yolo").read(tensor, PICTURE, (2, 3, *PICTURE)).isnan().any(2).sum(1).tolist() == [0, 1]


def test_suppression_is_that_of_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(3, 60, 2, generator=generator) * 20
    boxes = torch.cat([corner, corner + 5 + torch.rand(3, 60, 2, generator=generator) * 5], 2)
    scores = torch.rand(3, 60, generator=generator).sort(1, descending=True).values
    classes = torch.randint(0, 2, (3, 60), generator=generator)
    is_kept = suppress(boxes, scores, classes, 0.4)
    for k in range(3):
        overlaps, kept = overlap(boxes[k], boxes[k]), []
        for j in range(60):
            if all(classes[k, i] != classes[k, j] or overlaps[i, j] <= 0.4 for i in kept):
                kept.append(j)
        assert is_kept[k].nonzero()[:, 0].tolist() == kept
    assert is_kept.float().mean() < 0.7


WRONG = {
    "unknown form": (lambda: Detections("yolo9"), UsageError, "must be one of auto, torchvision, yolo"),
    "no detections": (lambda: Detections(max_detections=0), UsageError, "max_detections must be at least 1"),
    "scores": (lambda: Detections(min_score=1.5), UsageError, "min_score must lie in 0..1"),
    "a tensor": (
        lambda: Detections().read(torch.zeros(2, 84, 50), PICTURE, (2, 3, *PICTURE)),
        ModelError,
        r"got a tensor \[2, 84, 50\]: for YOLO pass output='yolo'",
    ),
    "not yolo": (
        lambda: Detections("yolo").read(torch.zeros(2, 84), PICTURE, (2, 3, *PICTURE)),
        ModelError,
        r"\[inputs, 4 \+ classes, anchors\], got a tensor \[2, 84\]",
    ),
    "not detr": (
        lambda: Detections("detr").read({"logits": torch.zeros(2, 3)}, PICTURE, (2, 3, *PICTURE)),
        ModelError,
        "'pred_boxes'.*got a dict with 'logits'",
    ),
    "not rows": (
        lambda: Detections("rows").read([torch.zeros(2, 5)], PICTURE, (2, 3, *PICTURE)),
        ModelError,
        "got .2, 5.",
    ),
    "an output": (lambda: themis.BlackBox(len, output="scores"), UsageError, "Detections or one of torchvision, yolo"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_explained(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


class ListDetector(nn.Module):
    """Takes a list of pictures, as torchvision's detectors do: brightness decides the score of one box.

    The second stage runs on as many proposals as there are bright corners.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(1, 4), nn.ReLU())

    def forward(self, pictures):
        assert isinstance(pictures, list)
        maps = self.first(torch.stack(pictures))
        corners = torch.stack(pictures)[:, 0, ::5, ::5].reshape(-1, 1)
        self.second(corners[corners[:, 0] > 0.5][:, :1])
        size = pictures[0].shape[-1]
        return [
            {
                "boxes": picture.new_tensor([[0, 0, size / 2, size / 2]]),
                "scores": picture.mean().reshape(1) + 0 * features.mean().sigmoid(),  # once for each picture
                "labels": torch.tensor([1]),
            }
            for picture, features in zip(pictures, maps, strict=True)
        ]


def test_a_model_that_takes_a_list_of_pictures_is_tested():
    pictures = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.45
    pictures[:, :, ::5, ::5] = 1.0
    target = themis.Target(ListDetector(), preprocess=list)
    run = themis.run(target, pictures, "brightness", max_tests=300, round_size=100)
    assert run.start.oracle.startswith("detection:")
    assert [layer.name for layer in run.start.layers] == ["first.1"]  # without proposals and detections
    assert {fault.answer for fault in run.faults} == {4}  # class 1 is lost
    assert all(fault.replay().is_same for fault in run.faults.most_telling(3))
    attack = themis.run(target, pictures, "fgsm", magnitude=0.3, max_tests=100, round_size=100)
    assert len(attack.faults) > 50


def test_a_function_may_return_detections():
    def predict(pictures):
        return [np.array([[1.0, 1, 4, 4, picture.mean(), 2]]) for picture in pictures]

    pictures = torch.rand(10, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.45
    run = themis.run(themis.BlackBox(predict, output="rows"), pictures, "brightness", max_tests=200, round_size=100)
    assert {fault.answer for fault in run.faults} == {8}
    with pytest.raises(DataError, match=r"a detector needs pictures"):
        themis.run(themis.BlackBox(predict, output="rows"), torch.rand(4, 5), "gaussian", max_tests=100)
