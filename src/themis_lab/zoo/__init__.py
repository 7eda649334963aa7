"""The models of the paper: how to build them, their data and weights under THEMIS_DATA, and their published accuracy.

`load(name)` returns the target of an entry, `data(name)` reads its test data, `verify(name)` measures its accuracy.
`mutate(model, operator)` returns a mutated copy of any model.
"""

from themis_lab.zoo.dave import Dave2, dave2
from themis_lab.zoo.densenet import CifarDenseNet, densenet121
from themis_lab.zoo.efficientnet import efficientnet_lite0
from themis_lab.zoo.entry import Entry, PublishedFigure, TrainingRecipe
from themis_lab.zoo.lenet import LeNet, lenet1, lenet4, lenet5
from themis_lab.zoo.loading import MeasuredFigure, choose_entry, data, find_weights, load, verify
from themis_lab.zoo.mlp import mlp, mlp_drebin, mlp_pdf
from themis_lab.zoo.mutants import Mutant, MutantSet, find_killed, make_mutants
from themis_lab.zoo.mutation import MUTATIONS, mutate
from themis_lab.zoo.resnet import CifarResNet, ImageNetResNet, resnet50, resnet56
from themis_lab.zoo.table import ZOO
from themis_lab.zoo.vgg import VGG, vgg19

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
