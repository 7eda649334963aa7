"""What the zoo knows about a model: how to build it, what it is tested on, and what it should achieve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Generator, Tensor, nn

from themis.target.target import Normalize
from themis.zoo.sets import Read

Preprocess = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, Tensor, Generator], tuple[Tensor, Tensor]]
Metric = Literal["accuracy", "mse"]


@dataclass(frozen=True)
class Stated:
    """A figure that the weights were published or made with, on `rows`, and how far a measured one may be from it."""

    value: float
    tolerance: float
    rows: str


@dataclass(frozen=True)
class Recipe:
    """How an entry is trained: `max_rate` is the peak of a one-cycle schedule."""

    epochs: int
    batch: int
    max_rate: float
    optimiser: Literal["adam", "sgd"] = "adam"
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    augment: Augment | None = None


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    folder: its place under THEMIS_DATA. read: its data there. weights: the pattern of its weights' file there, or what
    finds it elsewhere. source: where those weights come from. normalise: what its target does to raw inputs; fit: makes
    that from the data. n_elements, n_channels: neurons at both granularities; paper_neurons: as in the paper's table.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    folder: str
    read: Read
    weights: str | Callable[[], Path | None]
    source: str
    input_shape: tuple[int, ...]
    n_parameters: int
    n_elements: int
    n_channels: int
    paper_neurons: int | None
    normalise: Normalize | None = None
    fit: Callable[[Path], Preprocess] | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    oracle: str = "auto"
    metric: Metric = "accuracy"
    stated: Stated | None = None
    recipe: Recipe | None = None

    @property
    def is_optional(self) -> bool:
        """Whether it may well have no weights: none could be obtained, or they come with a package of their own."""
        return self.stated is None or callable(self.weights)
