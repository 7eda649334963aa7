"""Models with seeds for searching, training and judging, and a file of them for machines without the data folder."""

from __future__ import annotations

import lzma
import pickle
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from searching.rows import TARGET, _pack, _seeds
from themis.data.groups import seed_hashes
from themis.data.seeds import Seeds, read_seeds
from themis.retraining.grading import settled_oracle
from themis.runs.parts import Parts, choose_part
from themis.runs.source import Origin
from themis.target.target import Target

SEEDS = {"dave2-udacity": (900, 450), "resnet56-cifar10": (3_000, 1_500)}
"""Maximum numbers of test seeds and training inputs."""
DEFAULT_SEEDS = (4_000, 2_000)
SHARES = (0.4, 0.0, 0.6)
"""Shares of the test seeds for searching and judging. Clean training inputs come from the training data."""

FILTERS = [
    {"id": lzma.FILTER_DELTA, "dist": 1},
    {"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0},
]
"""Stores differences between neighbouring pixels, which halves the size of pictures."""


@dataclass(frozen=True)
class ModelWithData:
    """A model, test seeds, and training inputs that are not among the test seeds."""

    target: Target
    test: Seeds
    train: Seeds

    def with_settled_oracle(self, oracle: str | None, seeds: Seeds) -> Target:
        """The target with its oracle, or another one, settled on the clean outputs of seeds."""
        target = self.target if oracle is None else replace(self.target, oracle=oracle)
        return replace(target, oracle=settled_oracle(target, seeds))

    def parts(self, share: float, stretch: int | None = None, searched: int | None = None) -> Parts:
        """A share of the search, train and judge seeds; with `stretch`, so many consecutive seeds stay together.

        searched: about how many of the test seeds are searched; by default a fixed share.
        """
        if stretch is None:
            shares = SHARES if searched is None else (searched / len(self.test), 0.0, 1 - searched / len(self.test))
            part = choose_part(seed_hashes(self.test), shares, 0)
        else:
            number = np.unique(self.test.seed_id.numpy() // stretch, return_inverse=True)[1]
            part = np.where(number % 3 == 0, 0, 2).astype(np.uint8)
        search, judge = (torch.from_numpy(np.flatnonzero(part == k)) for k in (0, 2))
        parts = (self.test[search], self.train, self.test[judge])
        return Parts(*(read_seeds(seeds, max(1, round(len(seeds) * share))) for seeds in parts))


def load_model(model: str, device: str) -> ModelWithData:
    """A model of the zoo with its data."""
    n_test, n_train = SEEDS.get(model, DEFAULT_SEEDS)
    origin = Origin(zoo=model, device=device)
    target, test = origin.target(), read_seeds(origin.read(), n_test)
    train = read_seeds(origin.read_train(), n_train + n_test)
    if not isinstance(target, Target):
        raise SystemExit(f"{model} must be a PyTorch model to be retrained")
    is_new = ~np.isin(seed_hashes(train), seed_hashes(test))  # tables repeat rows
    train = read_seeds(train[torch.from_numpy(np.flatnonzero(is_new))], n_train)
    return ModelWithData(target, test.in_memory(), train.in_memory())


def write_pack(path: Path, models: dict[str, ModelWithData]) -> None:
    """Write models to one file; pictures are stored as bytes if their values are multiples of 1/255."""
    packed = {}
    for model, loaded in models.items():
        target = {name: getattr(loaded.target, name) for name in TARGET}
        packed[model] = {
            "target": target,
            **{name: _shrink(_pack(getattr(loaded, name))) for name in ("test", "train")},
        }
    with lzma.open(path, "wb", filters=FILTERS) as file:
        pickle.dump(packed, file)


@cache
def _read(path: str) -> dict[str, dict[str, Any]]:
    with lzma.open(path, "rb") as file:
        packed: dict[str, dict[str, Any]] = pickle.load(file)
        return packed


def read_pack(path: str, model: str, device: str) -> ModelWithData:
    """A model from a packed file."""
    packed = _read(path)
    if model not in packed:
        raise SystemExit(f"{path} must hold {model}, but it has {', '.join(packed)}: pack it too")
    target = Target(**packed[model]["target"])
    target.module.to(torch.device(device))
    return ModelWithData(target, *(_seeds(*_grow(packed[model][name])) for name in ("test", "train")))


def _shrink(columns: tuple[Any, ...]) -> tuple[Any, ...]:
    """Colours as differences from green, and lines as differences from the line above: a quarter less to store."""
    pixels, *others = columns
    if not _is_coloured(pixels):
        return columns
    pixels = pixels.clone()
    pixels[:, ::2] -= pixels[:, 1:2]
    pixels[:, :, 1:] -= pixels[:, :, :-1].clone()
    return (pixels, *others)


def _grow(columns: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inverse of `_shrink`."""
    pixels, *others = columns
    if not _is_coloured(pixels):
        return columns
    pixels = pixels.cumsum(2, dtype=torch.uint8)
    pixels[:, ::2] += pixels[:, 1:2]
    return (pixels, *others)


def _is_coloured(pixels: Tensor) -> bool:
    return pixels.dtype == torch.uint8 and pixels.ndim == 4 and pixels.shape[1] == 3
