"""The models of the paper: how to build them, their data and weights under THEMIS_DATA, and their published accuracy.

`load(name)` returns the target of an entry, `data(name)` reads its test data, `verify(name)` measures its accuracy.
`mutate(model, operator)` returns a mutated copy of any model.
"""

from themis.zoo.dave import Dave2, dave2
from themis.zoo.densenet import CifarDenseNet, densenet121
from themis.zoo.efficientnet import efficientnet_lite0
from themis.zoo.entry import Entry, PublishedFigure, TrainingRecipe
from themis.zoo.lenet import LeNet, lenet1, lenet4, lenet5
from themis.zoo.loading import MeasuredFigure, choose_entry, data, find_weights, load, verify
from themis.zoo.mlp import mlp, mlp_drebin, mlp_pdf
from themis.zoo.mutants import Mutant, MutantSet, find_killed, make_mutants
from themis.zoo.mutation import MUTATIONS, mutate
from themis.zoo.resnet import CifarResNet, ImageNetResNet, resnet50, resnet56
from themis.zoo.table import ZOO
from themis.zoo.vgg import VGG, vgg19

__all__ = [
    "MUTATIONS",
    "VGG",
    "ZOO",
    "CifarDenseNet",
    "CifarResNet",
    "Dave2",
    "Entry",
    "ImageNetResNet",
    "LeNet",
    "MeasuredFigure",
    "Mutant",
    "MutantSet",
    "PublishedFigure",
    "TrainingRecipe",
    "choose_entry",
    "data",
    "dave2",
    "densenet121",
    "efficientnet_lite0",
    "find_killed",
    "find_weights",
    "lenet1",
    "lenet4",
    "lenet5",
    "load",
    "make_mutants",
    "mlp",
    "mlp_drebin",
    "mlp_pdf",
    "mutate",
    "resnet50",
    "resnet56",
    "verify",
    "vgg19",
]
