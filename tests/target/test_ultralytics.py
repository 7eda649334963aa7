"""Models of Ultralytics, which are passed as they are."""

import pytest
import torch
from torch import nn

import themis
from themis import Target, UsageError
from themis.target.detections import Detections

PICTURES = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """Returns what the model of a task returns: a tensor, and what it was made from."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 16, 16)

    def forward(self, pictures):
        features = torch.relu(self.conv(pictures))
        boxes = torch.cat([16 + features[:, :4], features[:, 4:].sigmoid()], 1)
        return boxes.flatten(2), {"feats": [features]}


class Classifier(Inner):
    def forward(self, pictures):
        logits = self.conv(pictures).mean((2, 3))
        return logits.softmax(1), logits


class Wrapper(nn.Module):
    """Has the attributes of `YOLO`, whose `train`, and so `eval`, starts a training."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def train(self, mode=True):
        raise AssertionError("a training was started")


def yolo(inner, name):
    """An object as `YOLO(...)` makes it; its classes are recognised by their names and modules."""
    kind = type(name, (type(inner),), {"__module__": "ultralytics.nn.tasks"})
    inner.__class__ = kind
    return type("YOLO", (type("Model", (Wrapper,), {"__module__": "ultralytics.engine.model"}),), {})(inner)


def test_a_detector_is_tested_as_it_is():
    model = yolo(Inner(), "DetectionModel")
    target = Target(model)
    assert (target.module, target.output) == (model.model, Detections("yolo"))
    result = themis.run(model, PICTURES, "gaussian", max_tests=16)
    assert result.start.oracle.startswith("detection")
    assert Target(model, output=0).output == 0


def test_a_classifier_answers_with_its_logits():
    model = yolo(Classifier(), "ClassificationModel")
    target = Target(model)
    assert torch.equal(target.forward(PICTURES), model.model(PICTURES)[1])
    assert themis.run(model, PICTURES, "gaussian", max_tests=16).start.oracle == "changed"


def test_other_tasks_are_refused_with_what_to_write():
    model = yolo(Inner(), "PoseModel")
    with pytest.raises(UsageError, match=r"got a PoseModel: pass Target\(yolo\.model, output=function\)"):
        themis.run(model, PICTURES, "gaussian", max_tests=16)
    assert Target(model, output=0).module is model.model


def test_the_rows_of_an_end_to_end_model_are_read():
    rows = torch.tensor([[[10, 10, 30, 20, 0.9, 2], [40, 5, 60, 45, 0.7, 0]]])
    read = Detections("yolo", max_detections=2).read((rows, {"one2one": {}}), (60, 80), (1, 3, 60, 80))
    assert torch.equal(read, rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "oracle"), [("yolov8n", "detection"), ("yolo26n", "detection"), ("yolo11n-cls", "changed")]
)
def test_real_models_are_tested_as_they_are(name, oracle, monkeypatch, tmp_path):
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    ultralytics = pytest.importorskip("ultralytics")
    model = ultralytics.YOLO(f"{name}.yaml")
    result = themis.run(model, PICTURES, "gaussian", max_tests=16)
    assert result.start.oracle.startswith(oracle)
    assert len(result.start.layers) > 20
