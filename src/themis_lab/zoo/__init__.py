"""The models of the paper: how to build them, their data and weights under THEMIS_DATA, and their published accuracy.

`load(name)` returns the target of an entry, `data(name)` reads its test data, `verify(name)` measures its accuracy.
`mutate(model, operator)` returns a mutated copy of any model.
"""

from themis_lab.zoo.loading import MeasuredFigure, choose_entry, data, find_weights, load, verify
from themis_lab.zoo.mutation import MUTATIONS, Mutant, MutantSet, find_killed, make_mutants, mutate
from themis_lab.zoo.nets import (
    dave2,
    densenet121,
    efficientnet_lite0,
    lenet1,
    lenet4,
    lenet5,
    mlp,
    mlp_drebin,
    mlp_pdf,
    resnet50,
    resnet56,
    vgg19,
)
from themis_lab.zoo.table import ZOO, Entry, PublishedFigure, TrainingRecipe

__all__ = [
    "MUTATIONS",
    "ZOO",
    "Entry",
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
