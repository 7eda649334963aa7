"""The size of a report with ten thousand faults, and with a thousand pictures of noise."""

import json

import pytest
import torch
from wavering import ENDLESS, Wavering, embedded, pictures

import themis
from themis.report.page import MAX_PICTURE_BYTES, read_view, render, write_report
from themis_integrations.data.digits import read_digits


@pytest.mark.slow
def test_ten_thousand_faults_stay_under_twenty_megabytes(tmp_path):
    digits = read_digits()[torch.arange(0, 5000, 5)].inputs
    options = {"magnitude": 3.0, "policy": "corners", "max_tests": 17_000, "max_stored": 10_000, **ENDLESS}
    run = themis.run(Wavering(784, 10), digits, "gaussian", out=tmp_path / "run", **options)
    assert len(run.faults) > 10_000
    large = write_report(tmp_path / "run", most_pictures=10_000)
    assert large.stat().st_size < 20e6
    view = json.loads(embedded(large.read_text()))
    assert view["faults"]["n_listed"] == len(run.faults)
    assert len(view["inputs"]["disturbed"]) > 1000
    usual = render(read_view(tmp_path / "run"))
    assert len(usual.encode()) < 5e6  # a thousand pictures, and all rows


def test_a_thousand_colour_pictures_of_noise_stay_under_five_megabytes(tmp_path):
    run = themis.run(
        *(Wavering(3 * 32 * 32), pictures(600, (3, 32, 32)), "gaussian"),
        **{"magnitude": 3.0, "policy": "random", "max_tests": 4000, "out": tmp_path / "run", **ENDLESS},
    )
    assert len(run.faults) > 1000
    path = write_report(tmp_path / "run")
    assert path.stat().st_size < 5e6
    inputs = json.loads(embedded(path.read_text()))["inputs"]
    size = sum(map(len, [*inputs["clean"].values(), *inputs["disturbed"].values()]))
    assert MAX_PICTURE_BYTES < size < MAX_PICTURE_BYTES + 20_000  # the most telling have theirs
