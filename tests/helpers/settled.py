"""Targets whose oracle has been settled, as a campaign does it."""

from dataclasses import replace

import torch

from themis import Target
from themis.data.seeds import Seeds
from themis.oracle import choose_oracle


def with_settled_oracle(target: Target, seeds: Seeds) -> Target:
    """The target with its oracle settled on the clean outputs of these seeds: the same one for all retrained models."""
    oracle = choose_oracle(target.oracle)
    outputs = []
    with target.opened(), torch.no_grad():
        for first in range(0, len(seeds), 256):
            rows = torch.arange(first, min(first + 256, len(seeds)))
            outputs.append(target.forward(seeds.take(rows).to(target.device)).float())
    clean = torch.cat(outputs)
    labels = None if seeds.labels is None else seeds.labels.to(clean.device)
    return replace(target, oracle=oracle.settle(clean, labels))
