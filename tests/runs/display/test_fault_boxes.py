"""Boxes of a detector in pictures of faults: in figures, notebooks and reports."""

import numpy as np
import torch
from blobs import CLASSES, BlobDetector, blobs

import themis
from themis.cli import main
from themis.report.page import read_view
from themis.runs.display.fault import answered_boxes, answers, pictures, with_boxes
from themis_lab.cli.demo import draw_faults


class DimBlobDetector(BlobDetector):
    """Finds only what is bright."""

    def find(self, picture):
        return super().find(picture * 0.75)


def test_outlines_are_drawn_in_the_colour_of_the_class_and_scaled_with_the_picture():
    pixels = np.zeros((20, 30), np.uint8)
    drawn = with_boxes(pixels, torch.tensor([[2.0, 4, 12, 10, 0.9, 1]]), (40, 60))
    assert drawn.shape == (20, 30, 3)
    is_drawn = drawn.any(2)
    rows, columns = np.nonzero(is_drawn)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (2, 5, 1, 6)
    assert not is_drawn[3:5, 2:6].any()
    assert drawn[2, 1].tolist() == [0x3C, 0xB4, 0x4B]


def test_only_answers_of_detectors_are_drawn():
    rows = torch.tensor([[0.0, 0, 5, 5, 0.4, 0], [0, 0, 5, 5, 0.2, 0], [0, 0, 0, 0, 0, -1]])
    clean, disturbed = answered_boxes(rows, rows[1:], "detection:0.5,score=0.3")
    assert (len(clean), len(disturbed)) == (1, 0)
    assert answered_boxes(rows, rows, "wrong") is None


def test_faults_are_shown_with_boxes_and_in_words(tmp_path, capsys):
    data, options = blobs(6), {"max_tests": 200, "round_size": 100, "classes": CLASSES}
    run = themis.run(DimBlobDetector(), data, "brightness", out=tmp_path / "run", **options)
    [fault] = run.faults.most_telling(1)
    assert fault.outcome in {f"{name} lost" for name in CLASSES}
    assert answers(fault) == ("as expected", fault.outcome)
    assert fault.outcome in fault._repr_html_()
    assert len(fault.replay().boxes[0]) > len(fault.replay().boxes[1])
    stored = themis.open_run(tmp_path / "run").faults.by_id(fault.id)
    for drawn, kept in zip(pictures(fault.shown()), pictures(stored.shown()), strict=True):
        np.testing.assert_array_equal(drawn, kept)
    assert draw_faults(run, tmp_path / "faults.png", n=2)[0].id == fault.id
    assert (tmp_path / "faults.png").stat().st_size > 10_000
    view = read_view(tmp_path / "run")
    assert view.outcomes[fault.answer] == fault.outcome
    assert view.clean.map == run.start.clean_map == 1
    assert view.inputs.kind == "pictures"
    assert main(["faults", str(tmp_path / "run"), "--limit", "2", "--export", str(tmp_path / "listed.png")]) == 0
    assert main(["faults", str(tmp_path / "run"), "--limit", "2"]) == 0
    assert fault.outcome in capsys.readouterr().out
    assert f"{fault.outcome}" in " ".join(group["text"] for group in view.groups)
