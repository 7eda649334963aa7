"""Faults as folders of pictures, for people and for FiftyOne."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pictures import make_data, make_net

import themis
from themis.cli import main
from themis.runs.store.reader import Reader

CLASSES = ["cat", "=dog", "owl"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A run of which some faults were kept."""
    out = tmp_path_factory.mktemp("runs") / "first"
    options = {"magnitude": 0.2, "max_tests": 600, "max_stored": 20, "classes": CLASSES}
    return out, themis.run(make_net(), make_data(), "gaussian", out=out, **options)


def export(found, target, *arguments):
    assert main(["faults", str(found[0]), "--export", str(target), *arguments]) == 0


def test_a_folder_has_both_pictures_of_each_fault_and_a_table(found, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("themis_integrations.exports.FAULTS_AT_ONCE", 3)
    export(found, f"pictures:{tmp_path / 'pictures'}", "--sort", "distance")
    assert f"Wrote the pictures of 20 of {len(found[1].faults)} faults" in capsys.readouterr().out
    with (tmp_path / "pictures" / "faults.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert [float(row["distance"]) for row in rows] == sorted(float(row["distance"]) for row in rows)
    faults, kept = {fault.id: fault for fault in found[1].faults}, Reader(found[0])
    for row in rows:
        fault = faults[int(row["id"])]
        tensors = kept.tensors([fault.id])[fault.id]
        for name, inputs in (("picture", tensors.inputs), ("clean_picture", tensors.clean_inputs)):
            pixels = np.asarray(Image.open(tmp_path / "pictures" / row[name]))
            assert np.array_equal(pixels, (inputs[0, 0] * 255).round().byte().numpy())
        assert row["answer_name"].removeprefix("'") == CLASSES[fault.answer]
        assert row["label_name"].removeprefix("'") == CLASSES[fault.label]
        assert float(row["theta_sigma"]) == pytest.approx(fault.theta["sigma"])


def test_filters_and_limits_choose_the_faults(found, tmp_path, capsys):
    answer = found[1].faults[0].answer
    n = sum(fault.answer == answer for fault in found[1].faults)
    export(found, f"pictures:{tmp_path / 'some'}", "--answer", str(answer), "--limit", "3")
    assert f"Wrote the pictures of 3 of {n:,} faults" in " ".join(capsys.readouterr().out.split())
    assert len(list((tmp_path / "some" / "faults").iterdir())) == 3


def test_fiftyone_gets_a_label_per_picture(found, tmp_path):
    export(found, f"fiftyone:{tmp_path / 'set'}")
    content = json.loads((tmp_path / "set" / "labels.json").read_text())
    stems = {path.stem for path in (tmp_path / "set" / "data").iterdir()}
    assert stems == set(content["labels"])
    assert len(stems) == 20
    assert set(content["classes"]) <= set(CLASSES)
    faults = {fault.id: fault for fault in found[1].faults}
    for id, label in content["labels"].items():
        fault, attributes = faults[int(id)], label["attributes"]
        assert label["label"] == CLASSES[fault.answer]
        assert label["confidence"] == pytest.approx(fault.confidence)
        assert attributes["label_name"] == CLASSES[fault.label]
        assert attributes["theta_sigma"] == pytest.approx(fault.theta["sigma"])
        assert not {"id", "label", "confidence", "tags"} & set(attributes)  # fields of a label itself
        assert None not in attributes.values()


@pytest.mark.filterwarnings("ignore")
def test_the_importer_of_fiftyone_reads_it(found, tmp_path):
    importers = pytest.importorskip("fiftyone.utils.data.importers", exc_type=Exception)
    export(found, f"fiftyone:{tmp_path / 'set'}")
    importer = importers.FiftyOneImageClassificationDatasetImporter(str(tmp_path / "set"))
    importer.setup()
    samples = list(importer)
    assert len(samples) == 20
    for path, _, label in samples:
        assert Image.open(path).size == (6, 6)
        assert label.label in CLASSES
        assert label.theta_sigma > 0


def test_a_folder_that_holds_something_is_refused(found, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    for kind in ("pictures", "fiftyone"):
        assert main(["faults", str(found[0]), "--export", f"{kind}:{tmp_path / 'full'}"]) != 0
        assert "--export needs a new or empty folder" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_inputs_that_are_no_pictures_are_refused(tmp_path, capsys):
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    themis.run(net, torch.rand(50, 5), "gaussian", magnitude=0.5, max_tests=300, out=tmp_path / "run")
    assert main(["faults", str(tmp_path / "run"), "--export", f"pictures:{tmp_path / 'pictures'}"]) != 0
    assert "a folder of pictures needs pictures" in " ".join(capsys.readouterr().err.split())
