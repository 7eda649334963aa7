"""Two plans: the paper's evaluation, and a small one that takes seconds, on digits that come with a package."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from themis.data import Seeds
from themis_integrations.data.digits import read_digits
from themis_lab.evaluation.plan import EvaluationPlan

MODELS: dict[str, dict[str, Any]] = {
    "lenet1-mnist": {"row": "MNIST (LeNet-1)"},
    "lenet4-mnist": {"row": "MNIST (LeNet-4)"},
    "lenet5-mnist": {"row": "MNIST (LeNet-5)"},
    "mlp-pdf": {"row": "Contagio (<200,200>)"},
    "mlp-drebin": {"row": "Drebin (<200,10>)"},
    "vgg19-imagenet": {"row": "ImageNet (VGG-19)"},
    "resnet50-imagenet": {"row": "ImageNet (ResNet-50)"},
    "dave2-udacity": {"row": "Udacity (DAVE-2)"},
    "resnet56-cifar10": {"row": "Cifar10 (ResNet56)"},
    "densenet121-cifar10": {"row": "Cifar10 (DenseNet121)"},
    "efficientnet-lite0-imagenet": {"row": "ImageNet (EfficientNet-Lite0, a substitute)"},
}
LARGE_NETS = ("vgg19-imagenet", "resnet50-imagenet", "densenet121-cifar10", "efficientnet-lite0-imagenet")
"""Models with millions of neurons; one neuron per channel is also how the paper counts them on ImageNet."""
PAPER_R: dict[str, dict[str, float]] = {
    "lenet1-mnist": {"cw": 0.79, "fgsm": 0.77, "pgd": 0.72, "gaussian": 0.70},
    "lenet4-mnist": {"cw": 0.72, "fgsm": 0.74, "pgd": 0.77, "gaussian": 0.72},
    "lenet5-mnist": {"cw": 0.71, "fgsm": 0.83, "pgd": 0.71, "gaussian": 0.89},
    "mlp-pdf": {"cw": 0.71, "fgsm": 0.77, "pgd": 0.78, "gaussian": 0.77},
    "mlp-drebin": {"cw": 0.70, "fgsm": 0.81, "pgd": 0.71, "gaussian": 0.82},
    "vgg19-imagenet": {"cw": 0.79, "fgsm": 0.86, "pgd": 0.75, "gaussian": 0.84},
    "resnet50-imagenet": {"cw": 0.71, "fgsm": 0.74, "pgd": 0.78, "gaussian": 0.86},
    "dave2-udacity": {"cw": 0.72, "fgsm": 0.84, "pgd": 0.71, "gaussian": 0.80},
    "resnet56-cifar10": {"cw": 0.86, "fgsm": 0.85, "pgd": 0.80, "gaussian": 0.95},
    "densenet121-cifar10": {"cw": 0.88, "fgsm": 0.78, "pgd": 0.86, "gaussian": 0.91},
}
"""The paper's correlations of Themis, by model and perturbation."""
PAPER_FAULTS, PAPER_TIME = 3.78, 1.271
"""The paper's faults and time until done, relative to the mean of the four baselines."""


def paper_plan() -> EvaluationPlan:
    """The plan for the models of the paper.

    One test of CW costs 304 passes, so its budget in tests is small. It finds a wrong answer of any confidence, its
    magnitude, so that no magnitudes with other error rates can be chosen: only the paper's are used.
    """
    return EvaluationPlan.of(
        {
            "models": MODELS,
            "perturbations": ["cw", "fgsm", "pgd", "gaussian"],
            "exceptions": {
                "cw": {
                    "magnitudes": "paper",
                    "tests": 100,
                    "judge_seeds": 100,
                    "grid_seeds": 20,
                    "questions": "faults",
                },
                "pgd": {"tests": 500, "judge_seeds": 300, "grid_seeds": 100, "questions": "faults"},
                "fgsm": {"questions": "faults,done"},
                **{
                    name: {"neurons": "channel", "seeds": 300, "judge_seeds": 300, "grid_seeds": 100}
                    for name in LARGE_NETS
                },
            },
        }
    )


SMOKE_EPOCHS, SMOKE_BATCH, SMOKE_RATE = 3, 100, 0.1


def smoke_plan() -> EvaluationPlan:
    """A small net under noise and an attack, with tiny budgets."""
    here = f"{__name__}:"
    return EvaluationPlan.of(
        {
            "models": {"digits": {"model": f"{here}make_model", "data": f"{here}make_data"}},
            "perturbations": ["gaussian", "fgsm"],
            "techniques": "paper-preset,scheduled,nc",
            "magnitudes": "0.1,0.2,0.4",
            "campaigns": 1,
            "passes": 300,
            "tests": 100,
            "done_tests": 400,
            "plateau": 3,
            "reference_tests": 800,
            "seed_sets": 2,
            "variants": "paper,sample-50,judge-exact",
            "variant_tests": 200,
            "seeds": 80,
            "judge_seeds": 80,
            "grid_seeds": 40,
            "retrain_inputs": 200,
            "retrain_seeds": 1,
            "epochs": 1,
            "questions": "faults,done,theory,variants,retraining",
            "mutants": 1,
            "planted": 1,
            "map_cells": 20,
            "exceptions": {"fgsm": {"questions": "faults,truth"}},
            "resamples": 50,
        }
    )


def make_model() -> nn.Module:
    """A net with one hidden layer, trained on four fifths of the digits."""
    train = _split()[0]
    assert train.labels is not None  # the digits have labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
        optimiser = torch.optim.SGD(net.parameters(), SMOKE_RATE, momentum=0.9)
        inputs = train.take(torch.arange(len(train)))
        for _ in range(SMOKE_EPOCHS):
            order = torch.randperm(len(train))
            for first in range(0, len(train), SMOKE_BATCH):
                rows = order[first : first + SMOKE_BATCH]
                optimiser.zero_grad()
                F.cross_entropy(net(inputs[rows]), train.labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    return net.eval()


def make_data() -> Seeds:
    """The digits that the net was not trained on."""
    return _split()[1]


@cache
def _split() -> tuple[Seeds, Seeds]:
    digits = read_digits()
    is_held_out = torch.arange(len(digits)) % 5 == 0
    return digits[~is_held_out], digits[is_held_out]
