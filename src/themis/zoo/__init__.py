"""The models of the paper: how they are built, their data and weights under THEMIS_DATA, what they should achieve.

`load(name)` makes the target of an entry, `data(name)` reads its test data, `verify(name)` measures its figure.
"""

from themis.zoo.dave import Dave2, dave2
from themis.zoo.densenet import CifarDenseNet, densenet121
from themis.zoo.efficientnet import efficientnet_lite0
from themis.zoo.entry import Entry, Recipe, Stated
from themis.zoo.lenet import LeNet, lenet1, lenet4, lenet5
from themis.zoo.loading import Figure, choose_entry, data, find_weights, load, verify
from themis.zoo.mlp import mlp, mlp_drebin, mlp_pdf
from themis.zoo.resnet import CifarResNet, ImageNetResNet, resnet50, resnet56
from themis.zoo.table import ZOO
from themis.zoo.vgg import VGG, vgg19

__all__ = [
    "VGG",
    "ZOO",
    "CifarDenseNet",
    "CifarResNet",
    "Dave2",
    "Entry",
    "Figure",
    "ImageNetResNet",
    "LeNet",
    "Recipe",
    "Stated",
    "choose_entry",
    "data",
    "dave2",
    "densenet121",
    "efficientnet_lite0",
    "find_weights",
    "lenet1",
    "lenet4",
    "lenet5",
    "load",
    "mlp",
    "mlp_drebin",
    "mlp_pdf",
    "resnet50",
    "resnet56",
    "verify",
    "vgg19",
]
