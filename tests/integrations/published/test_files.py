"""Published corruptions: CIFAR-10-C and ImageNet-C, in small folders of the same format."""

import re

import numpy as np
import pytest
import torch
from corrupted_files import CLEAN, darkened, pictures, write_cifar_c, write_imagenet_c

from themis import DataError, UsageError
from themis.data.readers import read_data


@pytest.mark.parametrize("reader", ["cifar10c", "cifar100c"])
def test_a_severity_is_a_fifth_of_the_file(tmp_path, reader):
    write_cifar_c(tmp_path)
    pixels, labels = pictures()
    seeds = read_data(f"{reader}:{tmp_path}?corruption=fog&severity=3")
    assert seeds.shape == (CLEAN, 3, 8, 8)
    assert seeds.labels.tolist() == labels.tolist()
    expected = torch.from_numpy(darkened(pixels, 3)).permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(seeds.take(torch.arange(CLEAN)), expected)


def test_all_severities_are_read_in_order_without_one(tmp_path):
    cifar = read_data(f"cifar10c:{write_cifar_c(tmp_path / 'cifar')}?corruption=fog")
    imagenet = read_data(f"imagenetc:{write_imagenet_c(tmp_path / 'imagenet')}?corruption=fog")
    for seeds in (cifar, imagenet):
        assert seeds.shape == (5 * CLEAN, 3, 8, 8)
        levels = seeds.take(torch.arange(5 * CLEAN))[:, 1].mean((1, 2)).view(5, CLEAN).mean(1)
        assert bool((levels.diff() > 0.05).all())


def test_imagenet_c_is_numbered_by_the_names_of_its_class_folders(tmp_path):
    seeds = read_data(f"imagenetc:{write_imagenet_c(tmp_path)}?corruption=fog&severity=1")
    assert seeds.classes == ("n00", "n01", "n02")
    assert seeds.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "has several corruptions: choose one, as in ?corruption=fog"),
        ("?corruption=fogg", "must have corruption 'fogg': did you mean 'fog'"),
        ("?corruption=fog&severity=6", "severity must be a whole number from 1 to 5, got '6'"),
    ],
)
def test_what_is_not_there_is_refused_in_words(tmp_path, query, message):
    write_cifar_c(tmp_path)
    with pytest.raises((DataError, UsageError), match=re.escape(message)):
        read_data(f"cifar10c:{tmp_path}{query}")


def test_files_that_do_not_fit_are_refused(tmp_path):
    write_cifar_c(tmp_path)
    np.save(tmp_path / "snow.npy", np.zeros((7, 8, 8, 3), np.uint8))
    with pytest.raises(DataError, match="five severities one after the other"):
        read_data(f"cifar10c:{tmp_path}?corruption=snow")
    np.save(tmp_path / "labels.npy", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="must have 60 labels"):
        read_data(f"cifar10c:{tmp_path}?corruption=fog")
    write_imagenet_c(tmp_path / "imagenet")
    next((tmp_path / "imagenet/fog/4/n01").iterdir()).unlink()
    with pytest.raises(DataError, match="the same classes and pictures at each severity"):
        read_data(f"imagenetc:{tmp_path / 'imagenet'}?corruption=fog")
