"""Targets and data of the zoo, on small folders and, in slow tests, on the real ones."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from zoo_folders import write_drebin, write_imagenet, write_mnist, write_pdf, write_udacity

import themis
from themis.errors import DataError, ModelError, UsageError
from themis_lab.zoo import ZOO, PublishedFigure, data, find_weights, load, loading, verify
from themis_lab.zoo.datasets import FeatureAxes, StandardPdf


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty data folder."""
    monkeypatch.setenv("THEMIS_DATA", str(tmp_path))
    return tmp_path


def save_weights(root, name, random_seed=1):
    """Weights other than the random ones, where the zoo looks for them."""
    entry = ZOO[name]
    path = root / entry.folder / entry.weights.replace("[.-]*", ".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    module = loading.build(entry, random_seed)
    torch.save(module.state_dict(), path)
    return module, path


def test_mnist_is_read(root):
    write_mnist(root, n_train=200, n_test=100)
    seeds, train = data("lenet1-mnist"), data("lenet1-mnist", "train")
    assert (seeds.shape, train.shape) == ((100, 1, 28, 28), (200, 1, 28, 28))
    assert (float(seeds.inputs[:].min()), float(seeds.inputs[:].max())) == (0, 1)


def test_features_of_pdf_files_lie_in_bounds_and_map_back_to_raw_values(root):
    folder, table = write_pdf(root)
    seeds = data("mlp-pdf")
    assert seeds.shape == (30, 135)
    assert seeds.inputs.min() >= 0
    assert seeds.inputs.max() <= 1
    axes = FeatureAxes(torch.from_numpy(table))
    raw = axes.value(axes.place(torch.from_numpy(table)))
    np.testing.assert_allclose(raw.numpy(), table, rtol=1e-9, atol=1e-6)
    contagio = table[:30]
    expected = (table[30:] - contagio.mean(0)) / np.where(contagio.std(0) > 0, contagio.std(0), 1)
    np.testing.assert_allclose(StandardPdf(folder)(seeds.inputs).numpy(), expected, rtol=1e-3, atol=1e-3)
    assert data("mlp-pdf", "train").shape == (30, 135)


def test_no_app_is_in_both_splits(root):
    _, bits = write_drebin(root)
    test, train = data("mlp-drebin"), data("mlp-drebin", "train")
    assert (len(test), len(train)) == (10, 30)
    assert not set(test.seed_id.tolist()) & set(train.seed_id.tolist())
    np.testing.assert_array_equal(test.inputs.numpy(), bits[::4])


def test_every_fifth_block_of_the_drive_is_held_out(root):
    write_udacity(root)
    test, train = data("dave2-udacity"), data("dave2-udacity", "train")
    assert test.shape == (100, 3, 100, 100)
    assert len(train) == 410
    torch.testing.assert_close(test.labels, torch.arange(400, 500) / 1000)
    assert float(test.inputs[0].mean()) == pytest.approx(200 / 255, abs=0.01)


def test_imagenet_has_only_a_test_split(root):
    write_imagenet(root)
    seeds = data("vgg19-imagenet")
    assert seeds.shape == (3, 3, 224, 224)
    assert seeds.labels.tolist() == [0, 10, 20]
    with pytest.raises(DataError, match="only one test picture per class"):
        data("vgg19-imagenet", "train")


def test_weights_are_loaded_from_the_data_folder(root):
    module, path = save_weights(root, "lenet5-mnist")
    assert find_weights("lenet5-mnist") == path
    loaded = load("lenet5-mnist").module.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in module.state_dict().items())


def test_half_precision_weights_become_single_precision(root):
    module, path = save_weights(root, "dave2-udacity")
    torch.save(module.half().state_dict(), path)
    assert load("dave2-udacity").dtype == torch.float32


@pytest.mark.parametrize("file", ["resnet50.pt", "resnet50-11ad3fa6.pth"])
def test_imagenet_weights_are_found_by_the_name_torchvision_gives_them(root, file):
    folder = root / "imagenet_samples" / "weights"
    folder.mkdir(parents=True)
    (folder / "resnet50_other.pt").touch()
    assert find_weights("resnet50-imagenet") is None
    (folder / file).touch()
    assert find_weights("resnet50-imagenet") == folder / file


def test_missing_weights_are_replaced_by_fixed_random_ones_with_a_warning(root):
    with pytest.warns(RuntimeWarning, match="lenet1-mnist has random weights"):
        one = load("lenet1-mnist")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    with pytest.warns(RuntimeWarning, match="random weights"):
        two = load("lenet1-mnist")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.module.conv1.weight, two.module.conv1.weight)
    assert one.oracle == "changed"


def test_weights_of_another_net_are_refused(root):
    _, path = save_weights(root, "lenet1-mnist")
    with pytest.raises(ModelError, match="must match the model"):
        load("lenet5-mnist", path)


def test_a_missing_weights_file_is_refused(root):
    with pytest.raises(DataError, match=r"nowhere.pt is not a file"):
        load("lenet5-mnist", "nowhere.pt")


def test_an_unknown_name_suggests_the_nearest_one():
    for call in (load, data, verify, find_weights):
        with pytest.raises(UsageError, match="no model 'lenet5-mnits': did you mean 'lenet5-mnist'"):
            call("lenet5-mnits")


def test_without_a_data_folder(monkeypatch):
    monkeypatch.delenv("THEMIS_DATA", raising=False)
    with pytest.raises(UsageError, match="set THEMIS_DATA"):
        data("lenet5-mnist")
    with pytest.warns(RuntimeWarning, match="random weights"):
        assert load("lenet5-mnist").module is not None


def test_a_missing_file_is_named(root):
    with pytest.raises(DataError, match="mnist is not a regular file"):
        data("lenet5-mnist")
    write_mnist(root, 10, 10)
    (root / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="must have labels, but there are none in"):
        data("lenet5-mnist")


def test_verify_measures_the_accuracy(root, monkeypatch):
    write_mnist(root, n_train=10, n_test=250)
    module, _ = save_weights(root, "lenet1-mnist")
    seeds = data("lenet1-mnist")
    with torch.no_grad():
        right = float((module(seeds.inputs[:]).argmax(1) == seeds.labels).float().mean())
    figure = verify("lenet1-mnist")
    assert figure.measured == pytest.approx(right)
    assert figure.n_inputs == 250
    assert figure.agrees is False
    near = replace(ZOO["lenet1-mnist"], stated=PublishedFigure(right + 0.0009, 0.001, "digits"))
    assert replace(figure, entry=near).agrees is True
    assert replace(figure, entry=replace(near, stated=None)).agrees is None


def test_verify_measures_the_mean_squared_error_of_angles(root):
    write_udacity(root)
    module, _ = save_weights(root, "dave2-udacity")
    with torch.no_grad():
        for each in module.parameters():
            each.zero_()
    torch.save(module.state_dict(), find_weights("dave2-udacity"))
    angles = torch.arange(400, 500, dtype=torch.float64) / 1000
    assert verify("dave2-udacity").measured == pytest.approx(float(angles.square().mean()))


def test_a_campaign_runs_on_an_entry_of_the_zoo(root):
    write_drebin(root)
    save_weights(root, "mlp-drebin")
    target = load("mlp-drebin", neurons="channel", oracle="changed")
    result = themis.run(target, data("mlp-drebin"), "gaussian", magnitude=0.5, max_tests=200)
    assert result.rounds[-1].tests == 200


def test_an_angle_is_tested_by_regression(root):
    write_udacity(root, n=501)
    save_weights(root, "dave2-udacity")
    result = themis.run(load("dave2-udacity"), data("dave2-udacity"), "gaussian", max_tests=40, max_seeds=10)
    assert result.rounds[-1].tests == 40


HAS_DATA = bool(os.environ.get("THEMIS_DATA"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_DATA, reason="needs THEMIS_DATA")
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.stated is not None])
def test_every_entry_reaches_its_published_figure(name):
    if find_weights(name) is None:
        pytest.skip("no weights file")
    assert verify(name).agrees
