"""Suites on published files, in small folders of the same format, against a count by hand."""

import json

import numpy as np
import pytest
import torch
from corrupted_files import CLEAN, darkened, pictures, write_cifar_c, write_imagenet_c
from torch import nn

import themis
from themis import DataError, UsageError
from themis.cli import main
from themis.suites.result import PUBLISHED_ERRORS, has_same_seeds


class Brightest(nn.Module):
    """Answers the channel that is brightest."""

    def forward(self, x):
        return x.mean((2, 3)) * 40


def clean_data():
    pixels, labels = pictures()
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels)


def count_by_hand():
    pixels, labels = pictures()
    return [float((darkened(pixels, k).mean((1, 2)).argmax(1) != labels).mean()) for k in range(1, 6)]


@pytest.fixture
def suite(tmp_path):
    source = f"cifar10c:{write_cifar_c(tmp_path / 'files')}"
    return themis.run_suite(Brightest(), clean_data(), source, out=tmp_path / "suite")


def test_errors_are_those_counted_by_hand(suite, tmp_path):
    expected = count_by_hand()
    assert 0 < expected[-1] < 1
    assert suite.errors == {"snow": expected, "fog": expected}
    assert suite.clean_error == 0
    assert suite.state == "ended"
    assert suite.tests == 0, "nothing is searched"
    assert "Not in the folder, and left out: gaussian_noise" in suite.record["notes"][0]
    low, high = suite.rows[0].error_interval
    assert 0 <= low < np.mean(expected) < high <= 1


def test_imagenet_c_gives_the_same_errors(tmp_path):
    inputs, labels = clean_data()
    order = torch.sort(labels, stable=True).indices  # by class folder
    source = f"imagenetc:{write_imagenet_c(tmp_path / 'files')}"
    suite = themis.run_suite(Brightest(), (inputs[order], labels[order]), source, out=tmp_path / "suite")
    assert suite.errors == {"fog": count_by_hand()}


def test_mce_is_relative_to_the_published_errors_of_alexnet(suite):
    published = json.loads(PUBLISHED_ERRORS.read_text())
    found = suite.corruption_errors("alexnet")
    ratios = [sum(count_by_hand()) / sum(published[name]) for name in ("fog", "snow")]
    assert found.mce == pytest.approx(np.mean(ratios))
    assert found.by_member == pytest.approx({"fog": ratios[0], "snow": ratios[1]})
    assert found.mce_interval[0] < found.mce < found.mce_interval[1]


def test_the_published_means_are_those_of_the_errors_by_severity():
    errors = json.loads(PUBLISHED_ERRORS.read_text())
    assert len(errors) == 16
    means = {name: np.mean(levels) for name, levels in errors.items() if name != "clean"}
    known = {"gaussian_noise": 0.886428, "brightness": 0.564592, "elastic_transform": 0.646056, "pixelate": 0.71784}
    assert {name: means[name] for name in known} == pytest.approx(known, abs=1e-6)


def test_a_suite_grades_what_is_left(suite, tmp_path):
    write_cifar_c(tmp_path / "files", ["fog", "snow"])
    record = json.loads((tmp_path / "suite/suite.json").read_text())
    del record["grades"]["fog"]
    (tmp_path / "suite/suite.json").write_text(json.dumps(record))
    again = themis.run_suite(Brightest(), clean_data(), f"cifar10c:{tmp_path / 'files'}", out=tmp_path / "suite")
    assert again.errors == suite.errors
    with pytest.raises(UsageError, match="holds another suite"):
        themis.run_suite(
            Brightest(), clean_data(), f"cifar10c:{tmp_path / 'files'}", out=tmp_path / "suite", level_seeds=5
        )


def test_two_models_are_compared_on_the_same_pictures(suite, tmp_path):
    other = themis.run_suite(Brightest(), clean_data(), f"cifar10c:{tmp_path / 'files'}", out=tmp_path / "other")
    assert suite.corruption_errors(other).mce == 1
    assert has_same_seeds(suite, other)


def test_other_pictures_than_those_that_were_corrupted_are_refused(tmp_path):
    source, (inputs, labels) = f"cifar10c:{write_cifar_c(tmp_path / 'files')}", clean_data()
    with pytest.raises(DataError, match="at five severities, got 60 pictures"):
        themis.run_suite(Brightest(), (inputs[:7], labels[:7]), source, out=tmp_path / "few")
    with pytest.raises(DataError, match="must have the labels of the clean pictures"):
        themis.run_suite(Brightest(), (inputs.flip(0), labels.flip(0)), source, out=tmp_path / "turned")
    with pytest.raises(UsageError, match="decide must be left out for published files"):
        themis.run_suite(Brightest(), (inputs, labels), source, out=tmp_path / "claim", decide="mean_error<=0.5")
    with pytest.raises(DataError, match="must hold corruptions such as gaussian_noise"):
        themis.run_suite(Brightest(), (inputs, labels), f"cifar10c:{tmp_path}", out=tmp_path / "none")


def test_the_command_prints_the_errors_and_mce(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_cifar_c(tmp_path / "files")
    inputs, labels = clean_data()
    np.savez("clean.npz", inputs=inputs.numpy(), labels=labels.numpy())
    (tmp_path / "brightest.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n        return x.mean((2, 3)) * 40\n"
    )
    command = "suite cifar10c:files --model brightest:Net --data npz:clean.npz --out graded --mce-baseline alexnet"
    assert main(command.split()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mCE" in printed
    assert "against the published errors of AlexNet" in printed
    assert (tmp_path / "graded/report.html").is_file()
    assert main(["resume", "graded"]) == 0
    assert themis.open_suite("graded").errors["fog"] == count_by_hand()
    assert themis.open_suite("graded").grades.clean.seeds == CLEAN
