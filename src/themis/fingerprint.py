"""Hashes of a model and of data: whether a run is gone on with, or a fault replayed, on what was tested."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from themis.data.seeds import Seeds


def hash_model(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, by name."""
    return _hash(module.state_dict().items())


def hash_seeds(seeds: Seeds) -> str:
    """SHA-256 of inputs, labels and seed ids."""
    labels = torch.empty(0) if seeds.labels is None else seeds.labels
    return _hash([("inputs", seeds.inputs), ("labels", labels), ("seed_id", seeds.seed_id)])


def hash_file(path: Path) -> str:
    """SHA-256 of a file, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(tensors: Iterable[tuple[str, object]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        if isinstance(tensor, Tensor):  # a state dict may hold other things
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
