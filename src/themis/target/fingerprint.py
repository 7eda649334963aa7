"""Hashes of models and data, to check that a run is resumed, or a fault replayed, on what was tested."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from themis.data.rows import blocks
from themis.data.seeds import Seeds
from themis.progress import advance, step
from themis.reading import open_regular


def hash_model(module: nn.Module, version: str = "") -> str:
    """Return the SHA-256 of all named parameters and buffers, and of `version` if there is one."""
    of_weights = _hash(module.state_dict().items())
    return hash_text(of_weights + version) if version else of_weights


def hash_text(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_seeds(seeds: Seeds) -> str:
    """Return the SHA-256 of inputs, labels and seed ids; inputs are read in steps."""
    digest = hashlib.sha256()
    digest.update(f"inputs {torch.float32} {list(seeds.shape)};".encode())
    with step("hashing the inputs"):
        for first, block in blocks(seeds.inputs):
            digest.update(_bytes(block))
            advance(first, len(seeds), "inputs")
    # Labels come after the inputs, since some readers learn the labels while reading inputs.
    labels = torch.empty(0) if seeds.labels is None else seeds.labels
    others = [] if seeds.others is None else [(f"input {key}", value) for key, value in seeds.others.tensors.items()]
    return _hash([("labels", labels), ("seed_id", seeds.seed_id), *others], digest)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors."""
    return _hash(sorted(tensors.items()))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as sha256sum prints it."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(tensors: Iterable[tuple[str, object]], digest: hashlib._Hash | None = None) -> str:
    digest = digest or hashlib.sha256()
    for name, tensor in tensors:
        if isinstance(tensor, Tensor):  # a state dict may hold other objects
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
