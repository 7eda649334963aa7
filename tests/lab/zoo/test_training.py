"""Training by the recipes."""

from dataclasses import replace

import pytest
import torch
from zoo_folders import write_drebin, write_mnist, write_udacity

from themis.data import read_seeds
from themis.errors import DataError, UsageError
from themis_lab.zoo import ZOO
from themis_lab.zoo.loading import train
from themis_lab.zoo.table import mirror_and_light, shift_and_mirror


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("THEMIS_DATA", str(tmp_path))
    return tmp_path


def test_lenet1_learns_digits_in_a_few_epochs(root):
    write_mnist(root, n_train=3000, n_test=500)
    lines = []
    module, figure = train("lenet1-mnist", epochs=3, log=lines.append)
    assert figure.measured > 0.8
    assert not module.training
    assert [line.partition(":")[0] for line in lines[1:]] == ["epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3"]


def test_the_same_seed_gives_the_same_weights(root):
    write_mnist(root, n_train=256, n_test=50)
    one, two, other = (train("lenet1-mnist", epochs=1, random_seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(one.conv1.weight, two.conv1.weight)
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_dave2_learns_angles(root):
    write_udacity(root)
    _, figure = train("dave2-udacity", epochs=3)
    assert figure.measured < 0.2  # the mean square of the angles


def test_a_net_with_batch_normalisation_is_trained_on_augmented_pictures(root, monkeypatch):
    seeds = read_seeds((torch.rand(130, 3, 32, 32), torch.arange(130) % 10))
    entry = replace(ZOO["resnet56-cifar10"], read=lambda folder, split: seeds)
    monkeypatch.setitem(ZOO, entry.name, entry)
    module, figure = train(entry.name, epochs=1)
    assert int(module.bn1.num_batches_tracked) == 1
    assert figure.n_inputs == 130


def test_an_unavailable_device_is_refused(root):
    write_mnist(root, n_train=128, n_test=10)
    with pytest.raises(UsageError, match="device must be available, but 'gpu' is not"):
        train("lenet1-mnist", device="gpu")


def test_training_that_cannot_run_is_refused(root):
    with pytest.raises(UsageError, match="no training data for vgg19-imagenet"):
        train("vgg19-imagenet")
    with pytest.raises(UsageError, match="epochs must be 1 or more, got 0"):
        train("lenet1-mnist", epochs=0)
    write_drebin(root, n=20)
    with pytest.raises(DataError, match="at least one batch of 128 inputs, got 15"):
        train("mlp-drebin")


def test_every_entry_with_a_train_split_has_a_recipe():
    assert {name for name, entry in ZOO.items() if entry.recipe is None} == {
        "vgg19-imagenet",
        "resnet50-imagenet",
        "efficientnet-lite0-imagenet",
    }


def test_pictures_are_shifted_and_mirrored():
    picture = torch.arange(1, 65.0).view(1, 1, 8, 8).expand(200, 3, 8, 8)
    moved, labels = shift_and_mirror(picture, torch.arange(200), torch.Generator().manual_seed(0))
    assert moved.shape == picture.shape
    assert torch.equal(labels, torch.arange(200))
    middle = moved[:, 0, 4, 4]  # of the padded picture, at most 4 away: always a pixel or the border
    assert len(middle.unique()) > 20
    is_whole = [bool((each == picture[0]).all() or (each == picture[0].flip(2)).all()) for each in moved]
    assert any(is_whole)


def test_the_angle_of_a_mirrored_road_is_negated():
    road = torch.rand(100, 3, 4, 4)
    seen, angles = mirror_and_light(road, torch.ones(100), torch.Generator().manual_seed(0))
    assert set(angles.tolist()) == {-1, 1}
    assert seen.min() >= 0
    assert seen.max() <= 1
    for k in range(100):
        turned = road[k] if angles[k] > 0 else road[k].flip(2)
        light = (seen[k] / turned)[seen[k] < 1]
        assert light.max() - light.min() < 1e-5
