"""A small evaluation on digits that come with a package: every part of it, in seconds."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from themis.data import Seeds
from themis.data.datasets import read_digits
from themis_lab.evaluation.plan import EvaluationPlan

EPOCHS, BATCH, RATE = 3, 100, 0.1


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
        optimiser = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
        inputs = train.take(torch.arange(len(train)))
        for _ in range(EPOCHS):
            order = torch.randperm(len(train))
            for first in range(0, len(train), BATCH):
                rows = order[first : first + BATCH]
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
