"""Mist over the sea: it hides the upper part of a picture."""

import torch

from themis import Perturbation, Theta


def _mist(inputs, theta, rng, context):
    amount = theta[:, 0].reshape(-1, 1, 1, 1)
    height = torch.linspace(1, 0, inputs.shape[-2], device=inputs.device).reshape(1, 1, -1, 1)
    return inputs + amount * height * (0.8 - inputs)


MIST = Perturbation("mist", (Theta("amount", 0.0, 0.7, identity=0.0, unit="share"),), _mist)
