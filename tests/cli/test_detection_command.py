"""A detector of the user's own on a folder in COCO's format, from the command line."""

import json
from pathlib import Path

import pytest
from blobs import CLASSES, blobs
from PIL import Image
from user_module import go_to

from themis.cli import main

HELPERS = Path(__file__).parents[1] / "helpers"
MINE = f"""
import sys
sys.path.insert(0, {str(HELPERS)!r})
from blobs import BlobDetector

class Mine(BlobDetector):
    def find(self, picture):
        return super().find(picture * 0.75)

    def forward(self, pictures):
        results = super().forward(pictures)
        return [{{**result, "labels": result["labels"] + 1}} for result in results]  # 0 is the background
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project with a model in `mine.py` and data in `coco`, whose categories are numbered from 1."""
    pictures, labels = blobs(5)
    (tmp_path / "coco" / "images").mkdir(parents=True)
    annotations = []
    for k, (picture, rows) in enumerate(zip(pictures, labels, strict=True)):
        pixels = (picture * 255).byte().movedim(0, -1).numpy()
        Image.fromarray(pixels).save(tmp_path / "coco" / "images" / f"{k}.png")
        for left, top, right, bottom, number in rows.tolist():
            if number >= 0:
                box = [left, top, right - left, bottom - top]
                annotations.append({"image_id": k, "category_id": int(number) + 1, "bbox": box})
    content = {
        "images": [{"id": k, "file_name": f"{k}.png"} for k in range(len(pictures))],
        "annotations": annotations,
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(CLASSES)],
    }
    (tmp_path / "coco" / "instances.json").write_text(json.dumps(content))
    return go_to(tmp_path, monkeypatch, MINE)


def test_a_coco_folder_is_tested_listed_and_replayed(folder, capsys):
    source = ["--model", "mine:Mine", "--data", "coco:coco", "--perturb", "brightness", "--max-tests", "200"]
    assert main(["run", *source, "--out", "run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "5 of 5 seeds to test (clean mAP 1)" in printed
    assert "a fault is an object that is lost, moved (IoU below 0.5), taken for another class or spurious" in printed
    assert json.loads((folder / "run" / "summary.json").read_text())["clean_map"] == 1
    assert main(["faults", "run", "--limit", "1"]) == 0
    listed = capsys.readouterr().out
    assert any(f"{name} lost" in listed or f"spurious {name}" in listed for name in CLASSES)
    id = listed.splitlines()[2].split()[0]
    assert main(["replay", "run", id]) == 0
    assert " lost, now " in capsys.readouterr().out
    assert main(["check", *source[:6]]) == 0
    assert "labels      boxes, maps or points; mAP 1 on clean inputs" in capsys.readouterr().out


def test_classes_that_are_numbered_otherwise_are_named(folder, capsys):
    source = ["--model", "mine:Mine", "--data", "coco:coco?numbers=index", "--perturb", "brightness"]
    assert main(["run", *source, "--max-tests", "100"]) != 0
    assert "where its boxes fit, the classes differ, such as class" in capsys.readouterr().err
