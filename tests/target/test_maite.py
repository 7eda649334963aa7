"""Models and data sets of MAITE, passed as they are."""

import json

import numpy as np
import pytest
import torch
from maite_cases import BlobDataset, Detector, ImageDataset, LinearClassifier, ObjectTarget
from user_module import go_to

import themis
from themis import DataError
from themis.cli import main

pytest.importorskip("maite")

import maite.protocols.generic as generic
from maite.protocols.object_detection import ObjectDetectionTarget


def run(model, data, perturbation="brightness", **options):
    return themis.run(model, data, perturbation, **{"max_tests": 200, **options})


def test_the_cases_follow_the_protocols():
    assert isinstance(LinearClassifier(), generic.Model)
    assert isinstance(ImageDataset(), generic.Dataset)
    assert isinstance(Detector(), generic.Model)
    assert isinstance(BlobDataset()[0][1], ObjectDetectionTarget.__origin__)


def test_a_classifier_gets_pictures_as_the_data_set_has_them():
    model = LinearClassifier()
    result = run(model, ImageDataset())
    assert model.kinds == {(np.ndarray, np.dtype(np.uint8))}
    assert result.start.bounds == (0, 255)
    assert result.start.clean_accuracy == 1
    assert result.start.classes == ("red", "green", "blue")


def test_tensors_stay_tensors():
    model = LinearClassifier()
    run(model, ImageDataset(convert=torch.as_tensor))
    assert model.kinds == {(torch.Tensor, torch.uint8)}


def test_a_classifier_whose_classes_are_numbered_otherwise_gets_its_own_labels():
    result = run(LinearClassifier(("blue", "red", "green")), ImageDataset())
    assert result.start.clean_accuracy == 1
    assert result.start.classes == ("blue", "red", "green")


def test_labels_without_names_are_numbered_as_the_model_numbers_its_classes():
    data = ImageDataset()
    arrays = torch.from_numpy(data.images).float(), torch.from_numpy(data.targets.argmax(1))
    result = run(themis.BlackBox(LinearClassifier(), bounds=(0, 255)), arrays)
    assert result.start.clean_accuracy == 1
    assert result.start.classes == ("red", "green", "blue")


def test_targets_and_metadata_may_be_given_apart():
    class Fieldwise(ImageDataset):
        def get_input(self, k):
            return self[k][0]

        def get_target(self, k):
            return self[k][1]

        def get_metadata(self, k):
            return {name: value for name, value in self[k][2].items() if name != "weather" or k % 3}

    result = run(LinearClassifier(), Fieldwise())
    assert sum(rate.seeds for rate in result.slices if rate.column == "weather") <= 40  # of 60; the others have none


def test_a_detector_that_finds_nothing_is_refused():
    class Blind(Detector):
        def __call__(self, batch):
            return [ObjectTarget(*(np.zeros(0) for _ in range(3))) for _ in batch]

    with pytest.raises(DataError, match="must find some"):
        run(Blind(), BlobDataset())


def test_metadata_become_slices():
    result = run(LinearClassifier(), ImageDataset())
    names = {rate.column for rate in result.slices}
    assert names == {"class", "weather", "hour_of_day"}  # the id and what is no number or text are left out
    assert [rate.value for rate in result.slices if rate.column == "weather"] == ["fog", "sun"]
    named = run(LinearClassifier(), ImageDataset(), slice_by="weather", max_seeds=20)
    assert {rate.column for rate in named.slices} == {"weather"}


def test_a_module_with_metadata_is_a_model_of_maite():
    class Wrapped(torch.nn.Module):
        metadata = {"id": "wrapped"}  # noqa: RUF012

        def forward(self, batch):
            return [torch.as_tensor(picture).float().mean((1, 2)) for picture in batch]

    result = run(Wrapped(), ImageDataset())
    assert result.start.clean_accuracy == 1
    assert [layer.name for layer in result.start.layers] == ["output"]


def test_a_detector_is_tested_with_boxes_and_its_pictures_move():
    result = run(Detector(), BlobDataset(), "shift")
    assert result.start.task == "detection"
    assert result.start.clean_map == 1
    assert not len(result.faults)
    assert len(run(Detector(), BlobDataset(), "brightness(shift=-0.6:0.6)").faults)


def test_a_detector_whose_classes_are_numbered_otherwise_is_refused():
    with pytest.raises(DataError, match="0 is 'red' in the data and 'green' in the model"):
        run(Detector(("green", "red", "blue")), BlobDataset())


@pytest.mark.parametrize(
    ("target", "message"),
    [(np.array(1), r"one number per class, but that of datum 0 has the shape \[\]"), (np.zeros((2, 3)), r"\[2, 3\]")],
)
def test_a_target_of_another_shape_is_refused(target, message):
    data = ImageDataset()
    data.targets = [target] * len(data)
    with pytest.raises(DataError, match=message):
        run(LinearClassifier(), data)


def test_a_black_box_takes_a_model_of_maite_with_options():
    target = themis.BlackBox(LinearClassifier(), bounds=(0, 255), oracle="changed")
    assert run(target, ImageDataset()).start.task == "changed"


MINE = """
import sys
sys.path.insert(0, {helpers!r})
from maite_cases import ImageDataset, LinearClassifier
MODEL = LinearClassifier()
def plain():
    return __import__("torch").nn.Linear(3, 2)
"""


def test_the_command_line_names_models_and_data_of_maite(tmp_path, monkeypatch, capsys):
    helpers = str(__import__("pathlib").Path(__file__).parents[1] / "helpers")
    folder = go_to(tmp_path, monkeypatch, MINE.format(helpers=helpers))
    source = ["--model", "maite:mine:LinearClassifier", "--data", "maite:mine:ImageDataset(n=40)"]
    assert main(["run", *source, "--perturb", "gaussian", "--max-tests", "300", "--out", "run"]) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["clean_accuracy"] == 1
    assert {rate["column"] for rate in summary["slices"]} == {"class", "weather", "hour_of_day"}
    capsys.readouterr()
    first = themis.open_run(folder / "run", trust=True).faults[0]
    assert main(["replay", "run", str(first.id)]) == 0
    named = ["--model", "maite:mine:MODEL", *source[2:]]
    assert main(["run", *named, "--perturb", "gaussian", "--max-tests", "50", "--out", "named"]) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["--model", "maite:mine:plain", "--data", "digits"], "must be a model of MAITE, but Linear has no metadata"),
        (["--model", "mine:plain", "--data", "maite:mine:MODEL"], "must be a data set of MAITE, but LinearClassifier"),
    ],
)
def test_what_is_not_of_maite_is_refused(tmp_path, monkeypatch, capsys, source, message):
    helpers = str(__import__("pathlib").Path(__file__).parents[1] / "helpers")
    go_to(tmp_path, monkeypatch, MINE.format(helpers=helpers))
    assert main(["run", *source, "--perturb", "gaussian"]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
