"""`themis perturbations`: the list, and the contact sheet."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from themis.cli import main
from themis.perturb import PERTURBATIONS
from themis.report.sheet import strengthened


def test_everything_is_listed_with_its_ranges(capsys):
    assert main(["perturbations"]) == 0
    text = capsys.readouterr().out
    for name, each in PERTURBATIONS.items():
        assert f"  {name} " in text
        for theta in each.theta:
            assert f"{theta.name}: {theta.low:g} to {theta.high:g} ({theta.unit}), weakest at" in text


def test_the_list_can_be_restricted_to_a_family_or_to_names(capsys):
    assert main(["perturbations", "--family", "noise"]) == 0
    text = capsys.readouterr().out
    assert "gaussian" in text
    assert "rain" not in text
    assert main(["perturbations", "rain(angle=-3:3) + gaussian"]) == 0
    assert "angle: -3 to 3" in capsys.readouterr().out


def test_the_list_can_be_printed_as_json(capsys):
    assert main(["perturbations", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == list(PERTURBATIONS)
    assert listed[0]["theta"][0]["name"] == PERTURBATIONS[listed[0]["name"]].theta[0].name


def test_a_sheet_is_a_picture_with_one_row_per_perturbation(tmp_path, capsys):
    out = tmp_path / "sheet.png"
    assert main(["perturbations", "rain", "gaussian_blur", "fgsm", "--sheet", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Drew 2 perturbations" in text
    assert "Not drawn, because they need a model or other inputs: fgsm" in text
    with Image.open(out) as picture:
        assert picture.width > 800
        assert picture.height > 350
        assert np.asarray(picture.convert("L")).std() > 20, "it shows something"


def test_a_sheet_can_be_drawn_on_pictures_of_the_user(tmp_path):
    pixels = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)).numpy()
    np.save(tmp_path / "mine.npy", pixels)
    words = ["--data", f"npy:{tmp_path / 'mine.npy'}", "--index", "1", "--sheet", str(tmp_path / "sheet.png")]
    assert main(["perturbations", "fog", *words]) == 0
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def test_signals_are_drawn_as_curves_on_heartbeats_or_on_data(tmp_path, capsys):
    np.save(tmp_path / "mine.npy", np.random.default_rng(0).random((2, 3, 90), np.float32))
    for words in ([], ["--data", f"npy:{tmp_path / 'mine.npy'}"]):
        out = tmp_path / f"{len(words)}.png"
        assert main(["perturbations", "drift", "low_pass", *words, "--sheet", str(out)]) == 0
        assert "Drew 2 perturbations" in capsys.readouterr().out
        with Image.open(out) as picture:
            assert np.asarray(picture.convert("L")).std() > 5


def test_strength_runs_from_the_identity_to_the_far_end():
    rain = PERTURBATIONS["rain"]
    none, full = (strengthened(rain, share) for share in (0.0, 1.0))
    for theta in rain.theta:
        assert none[theta.name] == pytest.approx(theta.identity)
        assert full[theta.name] in (pytest.approx(theta.low), pytest.approx(theta.high))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rian"], "did you mean 'rain'"),
        (["--family", "wether"], "did you mean 'weather'"),
        (["rain", "--sheet", "out.docx"], "must end in .png"),
        (["rain", "--sheet", "out.png", "--data", "digits", "--index", "99999"], "--index must lie in"),
        (["fgsm", "--sheet", "out.png"], "cannot draw fgsm on an input"),
        (["rain", "--sheet", "nowhere/out.png"], "must be in an existing folder"),
        (["rain", "--sheet", "out.png", "--bounds", "1,0"], "bounds"),
        (["rain", "--family", "camera"], "none of the named perturbations is in family 'camera'"),
    ],
)
def test_wrong_use_is_reported_in_one_line(words, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["perturbations", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
